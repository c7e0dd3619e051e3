"""Workers of the ray backend on a GPU, where Ray itself is not installed: a stand-in calls them.

    python benchmarks/ray_gpu_check.py [--device cuda] [--rounds 4] [METHOD ...]

Two workers share the device, each with its shard and its captured rounds. What is printed for every
method is the largest relative difference of any tensor from the sequential CPU backend, in float64,
after some rounds and deployment; before the last one a shard is moved to a third worker, as after a
loss. The time is that of the round before, of both workers one after the other.
"""

import argparse
import pickle
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import worlds
from idiolect.core import tree
from idiolect.engine.architecture import Architecture
from idiolect.engine.backend import Backend, Ray
from idiolect.engine.ray_backend import cluster
from idiolect.engine.rounds import SeededRun, Simulation
from idiolect.methods import METHODS
from test_laws import ended, made


class Ref:
    """What a call will have given: here it has already, pickled as on its way."""

    def __init__(self, value: Any) -> None:
        self.bytes = pickle.dumps(value)

    @property
    def value(self) -> Any:
        return pickle.loads(self.bytes)


class Actor:
    """Calls an object's methods as an actor's are called."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.lost = False

    def __getattr__(self, name: str) -> Any:
        def remote(*arguments: Any) -> Ref:
            if self.lost:
                raise Lost
            told = [one.value if isinstance(one, Ref) else one for one in arguments]
            return Ref(getattr(self.inner, name)(*told))

        return SimpleNamespace(remote=remote)


class Lost(Exception):
    """Of a worker."""


class Failed(Exception):
    """Of a task: errors come as they are here."""


def ray() -> Any:
    """Make the part of Ray's interface that the cluster uses."""
    errors = SimpleNamespace(
        RayActorError=Lost,
        WorkerCrashedError=Lost,
        ObjectLostError=Lost,
        OutOfMemoryError=Lost,
        RayTaskError=Failed,
    )
    return SimpleNamespace(
        exceptions=errors,
        is_initialized=lambda: True,
        get_runtime_context=lambda: SimpleNamespace(get_job_id=lambda: "here"),
        cluster_resources=lambda: {"CPU": 64, "GPU": 64},
        remote=lambda **_: lambda kind: SimpleNamespace(remote=lambda *a: Actor(kind(*a))),
        wait=lambda refs, num_returns, timeout: (refs, []),
        get=lambda ref: ref.value,
        put=Ref,
        kill=lambda actor: None,
    )


def apart(left: Any, right: Any) -> float:
    pairs = zip(tree.leaves(left), tree.leaves(right), strict=True)
    return max(
        (float((a.cpu() - b.cpu()).norm() / (a.norm().cpu() + 1e-30)) for a, b in pairs),
        default=0.0,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("methods", nargs="*", default=list(METHODS))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int, default=4)
    options = parser.parse_args()
    torch.set_default_dtype(torch.float64)
    standin = ray()
    cluster.required = lambda: standin
    cuda = options.device == "cuda"
    workers = Ray(workers=2, gpus=0.5 if cuda else 0.0)
    backends = [
        Backend("sequential", "cpu"),
        Backend("ray", options.device, 64, ray=workers),
    ]
    world = worlds.with_public((7, 4, 5, 9, 3, 0))
    print("| method | ms a round | difference |\n|---|---|---|")
    for name in options.methods:
        ends, seconds = [], 0.0
        for backend in backends:
            simulation = Simulation(
                made(name),
                [SeededRun(0, world.train_data)],
                {"main": Architecture(worlds.Normed)},
                backend=backend,
            )
            for round in range(options.rounds):
                last = round == options.rounds - 1
                if backend.kind == "ray" and last:
                    job: Any = simulation._job
                    job.cluster.lost(job.cluster.at(1))
                start = time.perf_counter()
                simulation.advance()
                seconds = seconds if last else time.perf_counter() - start
            ends.append(ended(simulation, [world.test_data], options.rounds))
        print(f"| {name} | {1e3 * seconds:.1f} | {apart(*ends):.0e} |", flush=True)


if __name__ == "__main__":
    main()
