"""What TF32 and bfloat16 cost in accuracy and gain in speed."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from idiolect.bench.clock import interleaved, on_cuda
from idiolect.bench.random_images import CLASSES, MNIST, federation
from idiolect.bench.sides import backends, simulation
from idiolect.bench.workloads import WORKLOADS, Workload
from idiolect.data import Federation, federate, load
from idiolect.engine.architecture import Architecture
from idiolect.engine.backend import Backend
from idiolect.engine.rounds import SeededRun, Simulation
from idiolect.methods import FedPer
from idiolect.models import LeNet5

_ROUNDS = {"cpu": 15, "cuda": 40}
_SEEDS = {"cpu": 2, "cuda": 5}


def compared(device: str, budget: float) -> dict[str, Any]:
    """Train real digits and time a few workloads in every precision the device has."""
    known = ("fp32", "tf32", "bf16") if device == "cuda" else ("fp32", "bf16")
    seeds, rounds = range(_SEEDS[device]), _ROUNDS[device]
    digits = load("embedded")
    federations = [federate(digits, "persfl-ds1", seed=seed, imbalance=0.6) for seed in seeds]
    found = {name: _accuracy(federations, rounds, device, name) for name in known}
    return {
        "about": f"FedPer, LeNet-5, embedded digits DS-1, {rounds} rounds, {len(seeds)} seeds",
        "accuracy": {name: own.tolist() for name, own in found.items()},
        "change": {name: float(np.mean(own - found["fp32"])) for name, own in found.items()},
        "ms": {name: _milliseconds(name, known, device, budget) for name in _timed(device)},
    }


def _timed(device: str) -> tuple[str, ...]:
    return ("dnn-20", "lenet5-20", "pfl-cifar10") if device == "cuda" else ("dnn-20", "lenet5-20")


def _accuracy(
    federations: list[Federation], rounds: int, device: str, precision: str
) -> np.ndarray:
    """Return each seed's mean test accuracy of the personal models, in percent."""
    sim = Simulation(
        FedPer(batch=20, lr=0.05, epochs=1),
        [SeededRun(seed, federation.train_data) for seed, federation in enumerate(federations)],
        {"all": Architecture(partial(LeNet5, MNIST, CLASSES))},
        backend=Backend("vectorised", device, precision=precision),
    )
    for _ in range(rounds):
        sim.advance()
    verdicts = sim.judge([federation.test_data for federation in federations])
    return np.array([100 * verdict.scores["personal"]["accuracy"].mean() for verdict in verdicts])


def _advance(work: Workload, fed: Federation, backend: Backend) -> Callable[[], object]:
    return simulation(work, fed, backend).advance


def _milliseconds(
    name: str, known: tuple[str, ...], device: str, budget: float
) -> dict[str, float]:
    work = WORKLOADS[name]
    fed = federation(work.sizes, work.shape)
    best = {one: list(backends(device, one).values())[-1] for one in known}
    if device == "cuda":
        took = {
            one: on_cuda(partial(_advance, work, fed, own), budget / 5) for one, own in best.items()
        }
    else:
        sides = {one: simulation(work, fed, own).advance for one, own in best.items()}
        took = interleaved(sides, budget)
    return {one: own.seconds * 1e3 for one, own in took.items()}
