"""The same rounds in one process, on one worker of a Ray cluster and on several, interleaved.

    python benchmarks/ray_workers.py [--workers 1 2] [--gpus 0.5] [--model dnn] [--clients 40]

Read the ratios: each side's best round of several counts, after two that warm up. It needs as many
idle cores, or GPUs, as workers; on a busy machine the processor time on the longest path (the first
process and the busiest worker, mean over the rounds) says what there is to gain. The last column is
how far the servers' states are from the single process after all rounds.
"""

import argparse
import json
import os
import platform
import time
from pathlib import Path

import torch

from idiolect.bench.workloads import federation
from idiolect.core import tree
from idiolect.engine.architecture import Architecture, bound
from idiolect.engine.backend import Backend, Ray
from idiolect.engine.ray_backend.cluster import required
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
    options = parser.parse_args()
    torch.set_num_threads(1)
    ray = required()
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
