"""Check every method's captured CUDA rounds against the sequential backend, and time them.

    PYTHONPATH=src python benchmarks/gpu_check.py [--json FILE] [--checks] [--quick] [--part 0/4]

First 4 rounds of 8 ragged clients in float64 on both sides, then milliseconds a round for 20
clients of 600 examples at batch 20, as in the table of peers. `--quick` compares 3 rounds of 5
clients (one kernel by kernel, one captured, one replayed), and times nothing; the line at the end
says how many were compared, which were too far apart, and the seconds of the slowest.
"""

import argparse
import dataclasses
import json
import time
from collections.abc import Callable, Iterator
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
from idiolect.models.adapters import LoRA, adapt_network

SHAPE = (1, 28, 28)
RAGGED, QUICK = [90, 61, 40, 34, 20, 7, 64, 80], [80, 25, 40, 7, 16]


def network() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(784, 100), nn.GroupNorm(4, 100), nn.ReLU(), nn.Linear(100, 10)
    )


def network_of(method: Method) -> Callable[[], nn.Module]:
    """Return the network, with LoRA for methods that divide its matrices."""
    return with_lora if "LoRA" in type(method).__name__ else network


def with_lora() -> nn.Module:
    return adapt_network(network(), LoRA(rank=8))


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
        # Adam divides by |gradient| + 1e-8, so that rounding comes out 1e8 times as large.
        small = {"sample": 48, "fuse_optimiser": "sgd"}
        return settings | {k: v for k, v in small.items() if k in kind.__dataclass_fields__}

    plain = {name: lambda kind=kind: kind(**few(kind)) for name, kind in METHODS.items()}
    return plain | {name: lambda made=made: made for name, made in wrapped(**settings).items()}


def simulation(method: Method, fed: Federation, build: object, backend: Backend):
    return Simulation(
        method, [SeededRun(0, fed.train_data)], {"a": Architecture(build)}, backend=backend
    )


def difference(
    method: Method,
    shape: tuple[int, ...] = SHAPE,
    build: object = network,
    device: str = "cuda",
    quick: bool = False,
) -> float:
    """Largest relative difference of any tree after the rounds and deployment, in float64."""
    # At batch 16 no last batch is of one example, of which batch normalisation keeps only rounding.
    sizes, rounds = (QUICK, 3) if quick else (RAGGED, 4)
    fed = federation(sizes, shape, held_out=10)
    fed = with_public(fed) if shape == SHAPE else fed
    sides = []
    torch.set_default_dtype(torch.float64)
    for backend in (Backend("sequential", "cpu"), Backend("vectorised", device)):
        sim = simulation(method, fed, build, backend)
        for _ in range(rounds):
            sim.advance()
        if not quick:
            sim.evaluate([fed.test_data], keep=True)
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


Row = dict[str, float | str]
FAR = 1e-9  # a difference in float64 that rounding does not explain


def checked(
    name: str, made: Callable[[], Method], device: str, timed: Method | None, quick: bool
) -> Row:
    """Compare a method's captured rounds with the sequential ones; time `timed` as well."""
    began = time.perf_counter()
    try:
        method = made()
        row: Row = {"difference": difference(method, SHAPE, network_of(method), device, quick)}
        row["seconds"] = round(time.perf_counter() - began, 2)
        if timed is not None:
            equal = with_public(federation([600] * 20, SHAPE, held_out=10))
            row["ms"] = milliseconds(
                simulation(
                    timed, equal, network_of(timed), Backend(device="cuda", kernels="first")
                ),
                5,
            )
    except Exception as error:
        torch.set_default_dtype(torch.float32)
        row = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
    print(name, row, flush=True)
    return row


NETWORKS: dict[str, dict[str, Any]] = {
    "shufflenet": {"norm": "batch"},
    "resnet18": {"width": 8, "norm": "batch"},
    "alexnet": {"hidden": 64, "dropout": 0.0},  # torch draws other masks on another device
    "lenet5": {},
}


def networks(device: str, part: int, parts: int, quick: bool) -> Iterator[tuple[str, Row]]:
    """Check FedAvg on networks of the papers."""
    for name, more in list(NETWORKS.items())[part::parts]:
        try:
            # Batch normalisation of a last batch of two lets rounding grow 60-fold a round at 0.05.
            fedavg = METHODS["fedavg"](batch=16, lr=0.001)
            build = lambda name=name, more=more: MODELS[name]((3, 32, 32), CLASSES, **more)  # noqa: E731
            began = time.perf_counter()
            row: Row = {"difference": difference(fedavg, (3, 32, 32), build, device, quick)}
            row["seconds"] = round(time.perf_counter() - began, 2)
        except Exception as error:
            row = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
        print(name, more, row, flush=True)
        yield f"fedavg {name} {more}", row


def speeds() -> Iterator[tuple[str, Row]]:
    """Time FedAvg on two networks at two batch sizes."""
    equal = federation([600] * 20, SHAPE, held_out=10)
    colour = federation([600] * 20, (3, 32, 32), held_out=10)
    for label, fed, build in (
        ("dnn", equal, lambda: MODELS["dnn"](SHAPE, CLASSES)),
        ("lenet5", colour, lambda: MODELS["lenet5"]((3, 32, 32), CLASSES)),
    ):
        for batch in (20, 100):
            backend = Backend(device="cuda", kernels="first")
            took = milliseconds(simulation(METHODS["fedavg"](batch=batch), fed, build, backend))
            row: Row = {"ms": took, "samples_per_s": 12e6 / took}
            print(label, batch, row, flush=True)
            yield f"fedavg {label} batch {batch}", row


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path, help="where figures go, one by one as they come")
    parser.add_argument("--part", default="0/1", help="k/n: every n-th method from the k-th on")
    parser.add_argument("--checks", action="store_true", help="compare, and time nothing")
    parser.add_argument("--quick", action="store_true", help="less of it, and time nothing")
    parser.add_argument("--device", default="cuda", help="cpu to try this script without a GPU")
    options = parser.parse_args()
    options.checks |= options.quick
    began = time.perf_counter()
    part, parts = map(int, options.part.split("/"))
    out: dict[str, Row] = {}
    named = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
    about = {"device": named, "torch": torch.__version__}

    def note(name: str, row: Row) -> None:
        out[name] = row
        if options.json:
            options.json.write_text(json.dumps({"about": about, "rows": out}, indent=1))

    timed = methods(batch=20)
    for name, made in list(methods(batch=16, lr=0.05).items())[part::parts]:
        own = None if options.checks else timed[name]()
        note(name, checked(name, made, options.device, own, options.quick))
    for name, row in networks(options.device, part, parts, options.quick):
        note(name, row)
    for name, row in speeds() if part == 0 and not options.checks else ():
        note(name, row)
    compared = {name: row for name, row in out.items() if "ms" not in row or "difference" in row}
    far = [name for name, row in compared.items() if not float(row.get("difference", 1)) < FAR]
    slow = sorted(compared, key=lambda name: -float(out[name].get("seconds", 0)))[:5]
    print(f"{len(compared)} compared, {len(far)} not equal: {far}; "
          f"{time.perf_counter() - began:.0f} s, of which "
          f"{ {name: out[name].get('seconds') for name in slow} }")  # fmt: skip


if __name__ == "__main__":
    main()
