"""The same rounds in one process, on one worker of a Ray cluster and on several, interleaved.

    python benchmarks/ray_workers.py [--workers 1 2] [--gpus 0.5] [--model dnn] [--clients 40]
    python benchmarks/ray_workers.py --kill [--method ditto]

Read the ratios: each side's best round of several counts, after two that warm up. It needs as many
idle cores, or GPUs, as workers; on a busy machine the processor time on the longest path (the first
process and the busiest worker, mean over the rounds) says what there is to gain. The last column is
how far the servers' states are from the single process after all rounds.

`--kill` is about two workers: bytes that a round sends and receives (as pickled; what all clients
are sent goes to the object store once, from which each machine takes it), and a round in the middle
of which one of them is killed: its seconds beside those before and after, and whether servers
and personal states then equal those of the same rounds undisturbed, bit by bit.
"""

import argparse
import json
import os
import platform
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from idiolect.bench.workloads import federation
from idiolect.core import tree
from idiolect.engine.architecture import Architecture, bound
from idiolect.engine.backend import Backend, Ray
from idiolect.engine.ray_backend.cluster import Cluster, required
from idiolect.engine.ray_backend.ray_group import RayJob
from idiolect.engine.rounds import SeededRun, Simulation
from idiolect.methods import METHODS
from idiolect.models import MODELS

SHAPES = {"mlr": (1, 28, 28), "dnn": (1, 28, 28), "lenet5": (3, 32, 32)}


def simulations(options: argparse.Namespace) -> dict[str, Simulation]:
    shape = SHAPES[options.model]
    world = federation([options.examples] * options.clients, shape)
    build = bound(MODELS[options.model], shape, 10, (), {})
    method = METHODS[options.method](batch=options.batch, lr=0.01)
    device = "cuda" if options.gpus else "cpu"
    width = options.width or None
    backends = {"one process": Backend("vectorised", device, width, kernels="first")}
    for workers in options.workers:
        ray = Ray(workers=workers, cpus=1, gpus=options.gpus)
        backends[f"ray, {workers}"] = Backend("ray", device, width, ray=ray, kernels="first")
    return {
        name: Simulation(
            method, [SeededRun(0, world.train_data)], {"main": Architecture(build)}, backend=backend
        )
        for name, backend in backends.items()
    }


class Bytes:
    """Counts what goes through Ray: to the store, in calls and in answers."""

    def __init__(self, ray: Any) -> None:
        self._ray = ray
        self.count = Counter[str]()

    def note(self, what: str, *values: Any) -> None:
        for value in values:
            if not isinstance(value, self._ray.ObjectRef):
                self.count[what] += len(self._ray.cloudpickle.dumps(value))

    @contextmanager
    def watched(self) -> Iterator[None]:
        put, call, answer = Cluster.put, RayJob.call, Cluster.answer

        def noted_put(cluster: Cluster, value: Any) -> Any:
            self.note("once", value)
            return put(cluster, value)

        def noted_call(job: RayJob, worker: Any, name: str, *given: Any) -> Any:
            self.note("calls", *given)
            return call(job, worker, name, *given)

        def noted_answer(cluster: Cluster, asked: Any) -> Any:
            found = answer(cluster, asked)
            self.note("answers", found.value)
            return found

        with (
            mock.patch.object(Cluster, "put", noted_put),
            mock.patch.object(RayJob, "call", noted_call),
            mock.patch.object(Cluster, "answer", noted_answer),
        ):
            yield


def killed(ray: Any, options: argparse.Namespace, before: int = 5, after: int = 15) -> dict:
    """Kill one of two workers in the middle of a round."""
    options.workers = [2]
    whole, cut = (simulations(options)["ray, 2"] for _ in range(2))
    took: list[float] = []
    counted = Bytes(ray)
    for number in range(before + 1 + after):
        with counted.watched() if number == 2 else nullcontext():
            whole.advance()

    def advance() -> None:
        start = time.perf_counter()
        cut.advance()
        took.append(round(time.perf_counter() - start, 4))

    for _ in range(before):
        advance()
    usual = min(took[2:])
    pid = cut._job.cluster.about()[-1]["pid"]
    killer = threading.Timer(usual / 2, os.kill, (pid, signal.SIGKILL))
    killer.start()
    for _ in range(1 + after):
        advance()
    pairs = zip(tree.leaves(whole.tree), tree.leaves(cut.tree), strict=True)
    equal = all(torch.equal(a, b) for a, b in pairs)
    return {
        "bytes of a round": dict(counted.count),
        "parameters": sum(leaf.numel() for leaf in tree.leaves(whole.states)),
        "seconds of rounds before": took[2:before],
        "killed after": usual / 2,
        "seconds of that round": took[before],
        "and of those after": took[before + 1 :],
        "ratio": took[before] / usual,
        "equal, bit by bit": equal,
        "remarks": cut.remarks(),
    }


def worked(simulation: Simulation) -> list[float]:
    """Processor seconds so far: of this process, and of each worker."""
    job = simulation._job
    others = [] if job is None else job.cluster.about()
    return [time.process_time(), *(about["cpu_seconds"] for about in others)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--gpus", type=float, default=0.0, help="of each worker")
    parser.add_argument("--model", choices=SHAPES, default="dnn")
    parser.add_argument("--method", choices=METHODS, default="fedavg")
    parser.add_argument("--clients", type=int, default=40)
    parser.add_argument("--examples", type=int, default=600)
    parser.add_argument("--batch", type=int, default=20)
    parser.add_argument("--width", type=int, default=0, help="0: measured")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--kill", action="store_true", help="one of two workers in mid-round")
    options = parser.parse_args()
    torch.set_num_threads(1)
    ray = required()
    if options.kill:
        ray.init(num_cpus=3, log_to_driver=False, include_dashboard=False)
        found = killed(ray, options)
        print(json.dumps(found, indent=1))
        if options.json:
            options.json.write_text(json.dumps(found, indent=1) + "\n")
        return
    ray.init(num_cpus=sum(options.workers), log_to_driver=False, include_dashboard=False)
    sides = simulations(options)
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    longest: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(2 + options.rounds):
        for name, simulation in sides.items():
            before, start = worked(simulation), time.perf_counter()
            simulation.advance()
            tree.leaves(simulation.states)[0].sum().item()  # a GPU is done when it answers
            seconds[name].append(time.perf_counter() - start)
            here, *there = (b - a for a, b in zip(before, worked(simulation), strict=True))
            longest[name].append(here + max(there, default=0.0))
    best = {name: min(own[2:]) for name, own in seconds.items()}
    first = next(iter(sides.values())).states
    found = []
    path = {name: sum(own[2:]) / options.rounds for name, own in longest.items()}
    print("| where | ms a round | ratio | CPU ms, longest path | ratio | apart |")
    print("|---|---|---|---|---|---|")
    for name, simulation in sides.items():
        pairs = zip(tree.leaves(first), tree.leaves(simulation.states), strict=True)
        apart = max(float((a.cpu() - b.cpu()).norm() / a.norm().cpu()) for a, b in pairs)
        columns = [
            f"{1e3 * own[name]:.0f} | {own['one process'] / own[name]:.2f}×" for own in (best, path)
        ]
        print(f"| {name} | {' | '.join(columns)} | {apart:.0e} |")
        found.append(
            {"where": name, "seconds": seconds[name], "cpu": longest[name], "apart": apart}
        )
    if options.json:
        about = {"torch": torch.__version__, "ray": ray.__version__, "cores": os.cpu_count()}
        about |= {"machine": platform.machine(), "load": os.getloadavg()}
        settings = {k: str(v) if isinstance(v, Path) else v for k, v in vars(options).items()}
        options.json.write_text(json.dumps({**about, **settings, "sides": found}, indent=1))


if __name__ == "__main__":
    main()
