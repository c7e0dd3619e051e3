"""Check every method's captured CUDA rounds against the sequential backend, and time them.

    PYTHONPATH=src python benchmarks/gpu_check.py [--json FILE]

First 3 rounds of 8 ragged clients in float64 on both sides, then milliseconds a round for 20
clients of 600 examples at batch 20, as in the table of peers.
"""

import argparse
import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from idiolect.aggregation.aggregator import Aggregated
from idiolect.aggregation.robust import Krum, Median, TrimmedMean
from idiolect.aggregation.server_optimisers import FedAdam
from idiolect.bench.workloads import CLASSES, federation
from idiolect.core import tree
from idiolect.core.method import Method
from idiolect.data import Federation
from idiolect.engine.architecture import Architecture
from idiolect.engine.backend import Backend
from idiolect.engine.rounds import SeededRun, Simulation
from idiolect.methods import METHODS
from idiolect.methods.personalise import Combined
from idiolect.models import MODELS

SHAPE = (1, 28, 28)


def network() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(784, 100), nn.GroupNorm(4, 100), nn.ReLU(), nn.Linear(100, 10)
    )


def with_public(fed: Federation) -> Federation:
    """Give everyone 64 public examples as well, for the methods that exchange predictions."""
    return dataclasses.replace(fed, public=federation([64], SHAPE).dataset)


def wrapped(**settings: Any) -> dict[str, Method]:
    """Make what stands around a method: the thirteen combinations, and rules of aggregation."""
    fedavg = METHODS["fedavg"](**settings)
    return {
        "fedavg, 13 combinations": Combined(
            fedavg, tune_epochs=8, expert_epochs=8
        ),  # long enough for `folding`
        "fedavg, median": Aggregated(fedavg, Median()),
        "fedavg, trimmed mean": Aggregated(fedavg, TrimmedMean()),
        "fedavg, krum": Aggregated(fedavg, Krum()),
        "fedavg, fedadam": Aggregated(fedavg, FedAdam()),
    }


def methods(**settings: Any) -> dict[str, Callable[[], Method]]:
    """List every registered method, and the wrapped ones."""

    def few(kind: type[Method]) -> dict[str, Any]:
        return settings | ({"sample": 48} if "sample" in kind.__dataclass_fields__ else {})

    plain = {name: lambda kind=kind: kind(**few(kind)) for name, kind in METHODS.items()}
    return plain | {name: lambda made=made: made for name, made in wrapped(**settings).items()}


def simulation(method: Method, fed: Federation, build: object, backend: Backend):
    return Simulation(
        method, [SeededRun(0, fed.train_data)], {"a": Architecture(build)}, backend=backend
    )


def difference(method: Method, shape: tuple[int, ...] = SHAPE, build: object = network) -> float:
    """Largest relative difference of any tree after 4 rounds and deployment, in float64."""
    # At batch 16 no last batch is of one example, of which batch normalisation keeps only rounding.
    fed = federation([90, 61, 40, 34, 20, 7, 64, 80], shape, held_out=10)
    fed = with_public(fed) if shape == SHAPE else fed
    sides = []
    torch.set_default_dtype(torch.float64)
    for backend in (Backend("sequential", "cpu"), Backend("vectorised", "cuda")):
        sim = simulation(method, fed, build, backend)
        for _ in range(4):
            sim.advance()
        verdict = sim.evaluate([fed.test_data], keep=True)[0]
        verdict = sim.evaluate([fed.test_data], keep=True)[0]
        deployed = [kept for _, kept in verdict.deployed]
        sides.append([leaf.cpu().double() for leaf in tree.leaves((sim.tree, deployed))])
    torch.set_default_dtype(torch.float32)
    return max(
        float((a - b).nan_to_num().abs().max() / (1 + a.nan_to_num(posinf=0).abs().max()))
        for a, b in zip(*sides, strict=True)
        if a.numel()
    )


def milliseconds(sim: Simulation, rounds: int = 20) -> float:
    for _ in range(3):
        sim.advance()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(rounds):
        sim.advance()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start) / rounds


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    out: dict[str, dict[str, float]] = {}
    cuda = Backend(device="cuda")
    equal = federation([600] * 20, SHAPE, held_out=10)
    timed = methods(batch=20)
    for name, made in methods(batch=16, lr=0.05).items():
        try:
            out[name] = {"difference": difference(made())}
            sim = simulation(timed[name](), with_public(equal), network, cuda)
            out[name]["ms"] = milliseconds(sim, 5)
        except Exception as error:
            out[name] = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
        print(name, out[name], flush=True)
    for name, more in {
        "shufflenet": {"norm": "batch"},
        "resnet18": {"width": 8, "norm": "batch"},
        "alexnet": {"hidden": 64},
        "lenet5": {},
    }.items():
        try:
            fedavg = METHODS["fedavg"](batch=16, lr=0.05)
            build = lambda name=name, more=more: MODELS[name]((3, 32, 32), CLASSES, **more)  # noqa: E731
            found = difference(fedavg, (3, 32, 32), build)
            out[f"fedavg {name} {more}"] = {"difference": found}
        except Exception as error:
            out[f"fedavg {name} {more}"] = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
        print(name, more, out[f"fedavg {name} {more}"], flush=True)
    colour = federation([600] * 20, (3, 32, 32), held_out=10)
    for label, fed, build in (
        ("dnn", equal, lambda: MODELS["dnn"](SHAPE, CLASSES)),
        ("lenet5", colour, lambda: MODELS["lenet5"]((3, 32, 32), CLASSES)),
    ):
        for batch in (20, 100):
            sim = simulation(METHODS["fedavg"](batch=batch), fed, build, cuda)
            took = milliseconds(sim)
            out[f"fedavg {label} batch {batch}"] = {"ms": took, "samples_per_s": 12e6 / took}
            print(label, batch, out[f"fedavg {label} batch {batch}"], flush=True)
    if options.json:
        about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
        options.json.write_text(json.dumps({"about": about, "rows": out}, indent=1))


if __name__ == "__main__":
    main()
