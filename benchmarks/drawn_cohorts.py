"""Time rounds of cohorts that are drawn among clients of unequal length, on CUDA.

    PYTHONPATH=src python benchmarks/drawn_cohorts.py [--json FILE] [--seconds 40] [--cpu]

Two workloads: the referee's `synthetic` (10 of 100 clients, logistic regression, five seeds side by
side) and PFLlib's CNN on images of Fashion-MNIST's size (10 of 100 clients of 20 to 3,000 rows).
Each as before, with blocks of another form in every round, and with blocks that suit every cohort.
Seconds of the first two rounds together and the median of the later ones, then the difference from
the sequential backend after five rounds in double precision. `--cpu` does all of it in small.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from idiolect.bench.workloads import CLASSES, MNIST, Workload, federation, simulation
from idiolect.engine.backend import Backend
from idiolect.engine.local_group import LocalGroup
from idiolect.engine.rounds import Simulation
from idiolect.experiment.build import build_job, build_shared
from idiolect.experiment.referee.challenger import find_challenger
from idiolect.experiment.referee.suite import load_suite
from idiolect.methods import FedAvg
from idiolect.models import MODELS
from long_rounds import apart

Make = Callable[[str], Simulation]  # of a kind of backend

_BEFORE, _ROUNDS = 3, 24  # later rounds that are timed, of what was before and is now


def synthetic(device: str, small: bool, kind: str) -> Simulation:
    """Make the referee's problem, with all its seeds."""
    suite = load_suite("small" if small else "whole")
    problem = next(one for one in suite.first if one.name == "synthetic")
    experiment = problem.experiment(find_challenger("fedavg", suite), device)
    held = build_shared(experiment, None, {})
    job = build_job(experiment, experiment.methods[0], held, experiment.seeds)
    runs = job.simulation(None).runs
    network = job.architectures
    backend = Backend(kind, device)
    return Simulation(job.method, runs, network, cohort=job.cohort, backend=backend)


def cnn(device: str, small: bool, kind: str) -> Simulation:
    """Make clients of which the longest has a hundred times the rows of the shortest."""
    lengths = np.random.default_rng(0).lognormal(5.3, 1.0, 100).clip(20, 3000)
    shrunk = 1 if not small else 60 if device == "cpu" else 15  # long enough for several pieces
    sizes = tuple(int(size) for size in lengths / shrunk + 1)
    build = partial(MODELS["mcmahan-cnn"], MNIST, CLASSES, hidden=16 if small else 512)
    work = Workload("", build, MNIST, sizes, FedAvg(batch=10, lr=0.005), cohort=10)
    return simulation(work, federation(sizes, MNIST), Backend(kind, device))


def timed(make: Make, rounds: int, end: float) -> dict[str, Any]:
    """Return what the first two rounds and a later one take."""
    sim, took = drawn(make, "vectorised"), list[float]()
    for _ in range(2 + rounds):
        began = time.perf_counter()
        sim.advance()
        if sim.device.type == "cuda":
            torch.cuda.synchronize()
        took.append(time.perf_counter() - began)
        if time.perf_counter() > end and len(took) > 3:
            break
    return {
        "first two": round(sum(took[:2]), 3),
        "a round": round(statistics.median(took[2:]), 5),
        "worst": round(max(took[2:]), 5),
        "timed": len(took) - 2,
        "blocks": len(sim.groups[0]._active["step"]),
        "padding": round(sim.padding(), 3),
    }


def drawn(make: Make, kind: str) -> Simulation:
    """Make a simulation with the blocks of CUDA, also on a CPU, where nothing is replayed."""
    sim = make(kind)
    for group in sim.groups:
        group._replays = kind == "vectorised"
    return sim


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__)
    ask.add_argument("--json", type=Path, help="also write the figures here")
    ask.add_argument("--seconds", type=float, default=40)
    ask.add_argument("--cpu", action="store_true", help="all of it in small")
    given = ask.parse_args()
    device = "cpu" if given.cpu else "cuda"
    began, found = time.perf_counter(), dict[str, Any]()

    def tell(name: str, value: Any) -> None:
        found[name] = value
        print(f"{name}: {value} ({time.perf_counter() - began:.1f} s)", flush=True)
        if given.json:
            given.json.write_text(json.dumps(found, indent=1) + "\n")

    for name, build in {"synthetic": synthetic, "cnn": cnn}.items():
        make = partial(build, device, given.cpu)
        end = began + given.seconds
        tell(f"{name}, now", timed(make, _ROUNDS, end))
        tell(f"{name}, apart in float64", apart(partial(drawn, partial(build, device, True)), 5))
        if time.perf_counter() < end:
            with mock.patch.object(LocalGroup, "_slots", lambda *_: None):
                tell(f"{name}, before", timed(make, _BEFORE, end))


if __name__ == "__main__":
    main()
