"""Time long rounds of unequal clients on CUDA: PFLlib's clients of Fashion-MNIST, one by one.

    PYTHONPATH=src python benchmarks/long_rounds.py [--json FILE] [--rounds 8] [--cpu]

20 clients of 61 to 6,784 training rows (its two partitions), batch 10, `mcmahan-cnn` with 512
hidden units: up to 679 steps. Seconds of each round from the first on, what choosing kernels and
recording took of them, and the same with blocks in turn and of the longest client alone, which is
the floor. Then rounds of the same clients at an eighth are compared with the sequential
backend in double precision. `--cpu` does all of it in small where there is no GPU.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from idiolect.bench.workloads import CLASSES, MNIST, Workload, federation, simulation
from idiolect.core import tree
from idiolect.engine import block_runner, local_group
from idiolect.engine.backend import Backend
from idiolect.engine.rounds import Simulation
from idiolect.kernels import autotune
from idiolect.methods import FedAvg
from idiolect.models import MODELS

SIZES = {
    "dirichlet": (6413, 5102, 4627, 4170, 4104, 3817, 3624, 3523, 3345, 3288, 2667, 2202, 1952,
                  1091, 996, 656, 469, 240, 146, 61),
    "pathological": (6784, 6557, 6068, 5466, 4945, 2337, 2199, 1923, 1749, 1737, 1719, 1544, 1443,
                     1434, 1431, 1419, 1262, 975, 751, 750),
}  # fmt: skip
network = partial(MODELS["mcmahan-cnn"], MNIST, CLASSES, hidden=512)


def workload(sizes: tuple[int, ...]) -> Workload:
    return Workload("", network, MNIST, sizes, FedAvg(batch=10, lr=0.005))


@contextmanager
def watched(spent: dict[str, float], owner: Any, name: str, label: str) -> Iterator[None]:
    """Add up the seconds of the host in a function."""
    run = getattr(owner, name)

    def timed(*given: Any, **options: Any) -> Any:
        began = time.perf_counter()
        try:
            return run(*given, **options)
        finally:
            spent[label] = spent.get(label, 0.0) + time.perf_counter() - began

    with mock.patch.object(owner, name, timed):
        yield


def rounds(sizes: tuple[int, ...], count: int, device: str, beside: bool = True) -> dict[str, Any]:
    """Return the seconds of each round, and of those the host's in choosing and recording."""
    autotune.forget()
    began, spent, took = time.perf_counter(), dict[str, float](), []

    def in_turn(works: list, streams: list) -> list:
        return [work(None) for work in works]

    run = local_group.side_by_side if beside else in_turn
    with (
        mock.patch.object(local_group, "side_by_side", run),
        watched(spent, autotune, "choose", "choosing"),
        watched(spent, block_runner.CapturedBlock, "__init__", "recording"),
    ):
        sim = simulation(
            workload(sizes),
            federation(sizes, MNIST),
            Backend("vectorised", device, kernels="first"),
        )
        made = time.perf_counter() - began
        for _ in range(count):
            start = time.perf_counter()
            sim.advance()
            if device == "cuda":
                torch.cuda.synchronize()
            took.append(round(time.perf_counter() - start, 4))
    peak = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else 0.0
    return {"made": round(made, 2), "rounds": took, "of host": spent, "peak GiB": round(peak, 2)}


def apart(make: Callable[[str], Simulation], count: int = 4) -> float:
    """Return how far rounds are from those of the sequential backend, in double precision.

    `make` makes a simulation for a kind of backend.
    """
    ends = []
    torch.set_default_dtype(torch.float64)
    try:
        for kind in ("sequential", "vectorised"):
            sim = make(kind)
            for _ in range(count):
                sim.advance()
            ends.append([leaf.cpu() for leaf in tree.leaves(sim.tree["server"])])
    finally:
        torch.set_default_dtype(torch.float32)
    pairs = zip(*ends, strict=True)
    return max(float((a - b).norm() / b.norm().clamp(min=1e-30)) for a, b in pairs)


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__)
    ask.add_argument("--json", type=Path, help="also write the figures here")
    ask.add_argument("--rounds", type=int, default=8)
    ask.add_argument("--cpu", action="store_true", help="all of it in small")
    given = ask.parse_args()
    device, by = ("cpu", 200) if given.cpu else ("cuda", 1)
    found: dict[str, object] = {}

    def tell(name: str, value: object) -> None:
        found[name] = value
        print(f"{name}: {value}", flush=True)
        if given.json:
            given.json.write_text(json.dumps(found, indent=1) + "\n")

    for name, sizes in SIZES.items():
        own = tuple(-(-size // by) for size in sizes)
        tell(f"{name}, side by side", rounds(own, given.rounds, device))
        tell(f"{name}, in turn", rounds(own, 4, device, beside=False))
        tell(f"{name}, longest alone", rounds(own[:1], 4, device))
        few = tuple(-(-size // (8 * by)) for size in sizes)

        def make(kind: str, few: tuple[int, ...] = few) -> Simulation:
            return simulation(workload(few), federation(few, MNIST), Backend(kind, device))

        tell(f"{name}, apart in float64", apart(make))


if __name__ == "__main__":
    main()
