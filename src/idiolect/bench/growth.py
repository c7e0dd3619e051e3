"""How a round's time grows: with clients, batch, network, cohort and population."""

import gc
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from idiolect.bench.clock import Measured, interleaved, on_cuda
from idiolect.bench.random_images import CLASSES, MNIST, federation
from idiolect.bench.sides import backends, simulation
from idiolect.bench.workloads import WORKLOADS, Workload
from idiolect.models import DNN, MLR

_TINY = (1, 8, 8)
_COHORT = Workload(
    "FedAvg, MLR 64-10, clients of 20 examples, batch 10",
    partial(MLR, _TINY, CLASSES),
    _TINY,
    (20,) * 2000,
    WORKLOADS["mlr-20"].grown(batch=10).method,
    cohort=50,
)

Point = tuple[float, Workload]
Curve = tuple[str, list[Point]]


def curves(device: str) -> dict[str, Curve]:
    """Name the curves: what is on the axis, and the workload of each point."""
    dnn, lenet = WORKLOADS["dnn-20"], WORKLOADS["lenet5-20"]
    cuda = device == "cuda"
    clients = (10, 20, 50, 100, 200, 500, 1000) if cuda else (5, 10, 20, 40)
    batches = (5, 10, 20, 50, 100, 200) if cuda else (10, 20, 50, 100)
    hidden = (25, 100, 400, 1600) if cuda else (25, 100, 400)
    cohorts = (50, 100, 200, 500, 1000, 2000) if cuda else (50, 100, 200, 400)
    populations = (1000, 10_000, 100_000) if cuda else (1000, 10_000, 40_000)
    fewer = clients[1:4] if cuda else clients[:3]
    return {
        "clients": ("clients, DNN 784-100-10", [(n, dnn.grown(clients=n)) for n in clients]),
        "clients_lenet5": ("clients, LeNet-5", [(n, lenet.grown(clients=n)) for n in fewer]),
        "batch": ("batch, DNN 784-100-10", [(n, dnn.grown(batch=n)) for n in batches]),
        "hidden": (
            "hidden units of the DNN",
            [(n, dnn.grown(build=partial(DNN, MNIST, CLASSES, hidden=n))) for n in hidden],
        ),
        "cohort": (
            "cohort of 2,000 clients, MLR 64-10",
            [(n, replace(_COHORT, cohort=n)) for n in cohorts],
        ),
        "population": (
            "population, cohort 50, MLR 64-10",
            [(n, replace(_COHORT, sizes=(20,) * n)) for n in populations],
        ),
    }


def grown(name: str, curve: Curve, device: str, budget: float) -> dict[str, Any]:
    """Measure a curve; its points are interleaved on a CPU."""
    axis, points = curve
    gc.collect()
    rows = [
        {
            "at": at,
            "ms": own.seconds * 1e3,
            "samples_per_second": work.examples / own.seconds,
            "peak_mib": own.peak_mib,
        }
        for (at, work), own in zip(points, _measure(points, device, budget), strict=True)
    ]
    return {"name": name, "axis": axis, "points": rows}


def _measure(points: list[Point], device: str, budget: float) -> list[Measured]:
    backend = list(backends(device).values())[-1]

    def make(work: Workload) -> Callable[[], object]:
        return simulation(work, federation(work.sizes, work.shape), backend).advance

    if device == "cuda":
        return [on_cuda(partial(make, work), budget / 10) for _, work in points]
    return list(interleaved({str(at): make(work) for at, work in points}, budget).values())
