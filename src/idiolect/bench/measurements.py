"""What the benchmark measures: seconds and memory, agreement, growth, padding, precision."""

import ctypes
import gc
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch

from idiolect.bench.workloads import (
    CIFAR,
    CLASSES,
    MNIST,
    WORKLOADS,
    Workload,
    fastest,
    federation,
    like_cifar10,
    simulation,
)
from idiolect.core import tree
from idiolect.core.method import Method
from idiolect.data import Dataset, Federation, federate, load
from idiolect.engine.architecture import Architecture
from idiolect.engine.backend import Backend
from idiolect.engine.batch_plan import narrowed
from idiolect.engine.block_runner import cut_blocks
from idiolect.engine.rounds import SeededRun, Simulation
from idiolect.errors import IdiolectError
from idiolect.kernels import autotune
from idiolect.methods import FedAvg, FedPer, PersFL
from idiolect.models.feedforward import DNN, MLR, LeNet5

# Seconds and memory of several sides that do the same work.

_LEAST, _MOST = 3, 40  # timed turns of each side; on a GPU each may be several
_TOGETHER = 0.05  # seconds of short turns that are timed together on a GPU
_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")

Side = Callable[[], object]  # one turn
Make = Callable[[], Side]  # puts its data on the device


class Measured(NamedTuple):
    """What one side took for a turn."""

    seconds: float  # the best turn on a CPU, whose other work disturbs; the median on CUDA
    turns: int
    peak_mib: float | None  # on a CPU above what stood before; on CUDA of everything
    first: float  # seconds to the end of the first turn: data, plans, choosing and compiling


def timed(
    makes: Iterable[tuple[str, Make]], device: str, budget: float, share: int
) -> dict[str, Measured]:
    """Time sides by name: on a CPU all within the budget, on CUDA each in its share of it."""
    if device == "cuda":
        return {name: _on_cuda(make, budget / share, _warm_ups(name)) for name, make in makes}
    return interleaved(dict(makes), budget)


def interleaved(makes: Mapping[str, Make], budget: float) -> dict[str, Measured]:
    """Time sides on a CPU in turn, over and over, so that a busy machine slows all alike."""
    made = {name: _first(make) for name, make in makes.items()}
    sides = {name: side for name, (side, _) in made.items()}
    peaks = {name: _peak_on_cpu(side) for name, side in sides.items()}
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    began = time.perf_counter()
    for turn in range(_MOST):
        if turn >= _LEAST and time.perf_counter() - began > budget:
            break
        for name, side in sides.items():
            start = time.perf_counter()
            side()
            seconds[name].append(time.perf_counter() - start)
    return {
        name: Measured(min(own), len(own), peaks[name], made[name][1])
        for name, own in seconds.items()
    }


def _first(make: Make) -> tuple[Side, float]:
    """Make a side and run it once: plans, widths, kernels; return it and the seconds it took."""
    autotune.forget()
    start = time.perf_counter()
    side = make()
    side()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return side, time.perf_counter() - start


def _warm_ups(name: str) -> int:
    """Return how often a side runs first: captured ones eagerly, captured and replayed."""
    return 1 if name in ("plain loop", "sequential", "vectorised") else 3


def _on_cuda(make: Make, budget: float, warm: int) -> Measured:
    """Time one side on a GPU that nobody else uses.

    Short turns are timed several together, as they follow each other in a run. A turn that takes
    longer than the budget is done once.
    """
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    side, first = _first(make)
    for _ in range(warm - 2):
        side()
    several = max(1, round(_TOGETHER / _seconds_on_cuda(side, 1)))
    seconds: list[float] = []
    began = time.perf_counter()
    while len(seconds) < _MOST and time.perf_counter() - began < budget:
        seconds.append(_seconds_on_cuda(side, several))
    peak = torch.cuda.max_memory_allocated() / 2**20
    return Measured(median(seconds), len(seconds) * several, peak, first)


def _seconds_on_cuda(side: Side, turns: int) -> float:
    """Time turns that may overlap: the host waits once, after launching all."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(turns):
        side()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / turns


def _peak_on_cpu(side: Side) -> float | None:
    """Return how far a turn raises the memory of this process; None where Linux does not say."""
    try:
        ctypes.CDLL(None).malloc_trim(0)  # else memory freed before would be used unseen
        _RESET.write_text("5")
        before = _resident("VmRSS")
        side()
        return max(0.0, _resident("VmHWM") - before)
    except (OSError, AttributeError, StopIteration):
        return None


def _resident(field: str) -> float:
    line = next(own for own in _STATUS.read_text().splitlines() if own.startswith(field))
    return int(line.split()[1]) / 1024


# Agreement of a backend with the sequential one, on a few rounds.

_ROUNDS = 4  # on CUDA: one eager, one captured, two replayed
LARGEST = 1e-9  # difference in float64 that rounding explains


def differences(work: Workload, backend: Backend) -> tuple[float, float]:
    """Return how far a backend is from the sequential CPU one after a few rounds.

    First with both in float64, then in single precision against float64. The clients are few and
    ragged; the network, the method and its batch are the workload's own.
    """
    batch = work.method.batch
    sizes = (2 * batch + 1, batch, batch // 2 + 1, 2 * batch)
    small = replace(work, sizes=sizes, cohort=None, build=work.steady or work.build)
    right = _trained(small, Backend("sequential", "cpu"), torch.float64)
    backend = replace(backend, width=len(sizes))  # stacked, though so few may not pay
    exact, single = (
        _distance(right, _trained(small, backend, kind)) for kind in (torch.float64, torch.float32)
    )
    return exact, single


def _trained(work: Workload, backend: Backend, kind: torch.dtype) -> list[torch.Tensor]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        fed = federation(work.sizes, work.shape)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            start = work.build().state_dict()

        def build() -> torch.nn.Module:
            """Start from the same numbers, whatever the precision."""
            model = work.build()
            model.load_state_dict(start)
            return model

        torch.set_default_dtype(kind)
        sim = simulation(work, fed, backend, build)
        for _ in range(_ROUNDS):
            sim.advance()
        return [leaf.cpu().double() for leaf in tree.leaves(sim.tree)]
    finally:
        torch.set_default_dtype(before)


def _distance(right: list[torch.Tensor], found: list[torch.Tensor]) -> float:
    """Return the largest difference of any tensor, relative to its largest value."""
    pairs = [(a, b) for a, b in zip(right, found, strict=True) if a.numel()]
    return max(float((a - b).abs().max() / (1e-3 + a.abs().max())) for a, b in pairs)


# How a round's time grows with clients, batch, network, cohort and population.

Point = tuple[float, Workload]
_SMALL = Workload(
    "FedAvg, MLR 64-10, clients of 20 examples, batch 10",
    partial(MLR, (1, 8, 8), CLASSES),
    (1, 8, 8),
    (20,) * 2000,
    FedAvg(batch=10, lr=0.01),
    cohort=50,
)


def curves(device: str) -> dict[str, tuple[str, list[Point]]]:
    """Return the curves by name: what is on the axis, and the workload of each point."""
    dnn, lenet = WORKLOADS["dnn-20"], WORKLOADS["lenet5-20"]
    cuda = device == "cuda"
    clients = (10, 20, 50, 100, 200, 500, 1000) if cuda else (5, 10, 20, 40)
    fewer = clients[1:4] if cuda else clients[:3]
    batches = (5, 10, 20, 50, 100, 200) if cuda else (10, 20, 50, 100)
    hidden = (25, 100, 400, 1600) if cuda else (25, 100, 400)
    cohorts = (50, 100, 200, 500, 1000, 2000) if cuda else (50, 100, 200, 400)
    populations = (1000, 10_000, 100_000) if cuda else (1000, 10_000, 40_000)
    points: dict[str, list[Point]] = {
        "clients": [(n, replace(dnn, sizes=(600,) * n)) for n in clients],
        "clients_lenet5": [(n, replace(lenet, sizes=(600,) * n)) for n in fewer],
        "batch": [(n, replace(dnn, method=FedAvg(batch=n, lr=0.01))) for n in batches],
        "hidden": [(n, replace(dnn, build=partial(DNN, MNIST, CLASSES, n))) for n in hidden],
        "cohort": [(n, replace(_SMALL, cohort=n)) for n in cohorts],
        "population": [(n, replace(_SMALL, sizes=(20,) * n)) for n in populations],
    }
    axes = {
        "clients": "clients, DNN 784-100-10",
        "clients_lenet5": "clients, LeNet-5",
        "batch": "batch, DNN 784-100-10",
        "hidden": "hidden units of the DNN",
        "cohort": "cohort of 2,000 clients, MLR 64-10",
        "population": "population, cohort 50, MLR 64-10",
    }
    return {name: (axes[name], points[name]) for name in axes}


def growth(name: str, axis: str, points: list[Point], device: str, budget: float) -> dict[str, Any]:
    """Measure a curve; its points are interleaved on a CPU."""
    gc.collect()
    makes = ((str(at), partial(_advance, work, None, fastest(device))) for at, work in points)
    took = timed(makes, device, budget, share=10).values()
    rows = [
        {"at": at, "ms": own.seconds * 1e3, "samples_per_second": work.examples / own.seconds,
         "peak_mib": own.peak_mib}
        for (at, work), own in zip(points, took, strict=True)
    ]  # fmt: skip
    return {"name": name, "axis": axis, "points": rows}


def _advance(work: Workload, fed: Federation | None, backend: Backend) -> Side:
    return simulation(work, fed or federation(work.sizes, work.shape), backend).advance


# How much of the work is padding on ragged data, where a block is as wide as it can be.

_CASES: dict[str, dict[str, Any]] = {
    "CIFAR-10 DS-1": {"partition": "persfl-ds1"},
    "CIFAR-10 DS-2": {"partition": "persfl-ds2"},
    "CIFAR-10 DS-3": {"partition": "persfl-ds3", "kind": "cifar"},
}


def padding(seeds: int = 5, batch: int = 128) -> list[dict[str, Any]]:
    """Return the padded share of each partition, of one run and of all trained together."""
    dataset = like_cifar10((1, 1, 1))  # partitions look at labels alone
    rows = []
    for name, options in _CASES.items():
        runs = [federate(dataset, seed=seed, **options) for seed in range(seeds)]
        sizes = [[len(rows) for rows in run.train] for run in runs]
        rows.append(
            {
                "name": name,
                "batch": batch,
                "smallest": min(map(min, sizes)),
                "largest": max(map(max, sizes)),
                "one_block": padded_share(sizes[0], batch, blocks=False),
                "one_run": padded_share(sizes[0], batch),
                "five_runs": padded_share([size for run in sizes for size in run], batch),
            }
        )
    return rows


def padded_share(sizes: list[int], batch: int, blocks: bool = True) -> float:
    """Return the share of an epoch's places that hold no example; `blocks`: cut by length."""
    line = sorted(sizes, reverse=True)
    cuts = cut_blocks(line, len(line)) if blocks else [(0, len(line))]
    planned = sum(
        (last - first) * -(-line[first] // batch) * narrowed(batch, line[first])
        for first, last in cuts
    )
    return 1 - sum(line) / planned


# A whole experiment, and what TF32 and bfloat16 cost in accuracy and gain in speed.


def persfl(device: str, data_dir: Path | None = None) -> dict[str, Any]:
    """Time `experiments/persfl/cifar10-ds1.toml` from nothing to the last score."""
    dataset = _cifar10(data_dir)
    federations = [federate(dataset, "persfl-ds1", seed=seed, imbalance=0.35) for seed in range(5)]
    method = PersFL(batch=128, epochs=2, lr=0.01, momentum=0.9, distil_lr=0.003, distil_epochs=10)
    cuda = device == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    sim = _lenet5(method, federations, CIFAR, device, "fp32")
    for round in range(1, 51):
        sim.advance()
        if round % 5 == 0:
            sim.evaluate(only_global=True)
    trained = time.perf_counter()
    accuracy = _accuracy(sim, federations)
    done = time.perf_counter()  # scores are on the host, so the device has finished
    return {
        "about": "PersFL, LeNet-5, CIFAR-10 DS-1: 10 clients, 50 rounds, grid of 15 cells, 5 seeds",
        "data": dataset.name,
        "seconds": done - start,
        "rounds_seconds": trained - start,
        "distillation_seconds": done - trained,
        "peak_mib": torch.cuda.max_memory_allocated() / 2**20 if cuda else None,
        "padding": sim.padding(),
        "accuracy": accuracy.tolist(),
    }


def _cifar10(data_dir: Path | None) -> Dataset:
    """Load CIFAR-10 where it is at hand; else random images, and a name that says so."""
    try:
        return load("cifar10", data_dir, download=False)
    except (IdiolectError, ImportError):
        return like_cifar10()


def precisions(device: str, budget: float) -> dict[str, Any]:
    """Train real digits and time a few workloads in every precision the device has."""
    cuda = device == "cuda"
    known = ("fp32", "tf32", "bf16") if cuda else ("fp32", "bf16")
    deep = ("pfl-cifar10", "gru-20", "vit-20", "resnet10-20", "resnet18-10")
    workloads = ("dnn-20", "lenet5-20", *(deep if cuda else ()))
    seeds, rounds = (5, 40) if cuda else (2, 15)
    digits = load("embedded")
    federations = [federate(digits, "persfl-ds1", seed=n, imbalance=0.6) for n in range(seeds)]
    found = {}
    for name in known:
        method = FedPer(batch=20, lr=0.05, epochs=1)
        sim = _lenet5(method, federations, MNIST, device, name)
        for _ in range(rounds):
            sim.advance()
        found[name] = 100 * _accuracy(sim, federations)
    return {
        "about": f"FedPer, LeNet-5, embedded digits DS-1, {rounds} rounds, {seeds} seeds",
        "accuracy": {name: own.tolist() for name, own in found.items()},
        "change": {name: float(np.mean(own - found["fp32"])) for name, own in found.items()},
        "ms": {name: _milliseconds(WORKLOADS[name], known, device, budget) for name in workloads},
    }


def _lenet5(
    method: Method,
    federations: list[Federation],
    shape: tuple[int, ...],
    device: str,
    precision: str,
) -> Simulation:
    return Simulation(
        method,
        [SeededRun(seed, federation.train_data) for seed, federation in enumerate(federations)],
        {"all": Architecture(partial(LeNet5, shape, CLASSES))},
        backend=Backend("vectorised", device, precision=precision, kernels="first"),
    )


def _accuracy(sim: Simulation, federations: list[Federation]) -> np.ndarray:
    """Return each seed's mean test accuracy of the personal models."""
    verdicts = sim.evaluate([federation.test_data for federation in federations])
    return np.array([verdict.scores["personal"]["accuracy"].mean() for verdict in verdicts])


def _milliseconds(
    work: Workload, known: tuple[str, ...], device: str, budget: float
) -> dict[str, float]:
    fed = federation(work.sizes, work.shape)
    makes = ((one, partial(_advance, work, fed, fastest(device, one))) for one in known)
    took = timed(makes, device, budget, share=5)
    return {one: own.seconds * 1e3 for one, own in took.items()}
