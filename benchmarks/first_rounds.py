"""Time the first rounds on CUDA, in which kernels are compiled and chosen.

    PYTHONPATH=src python benchmarks/first_rounds.py [NAME ...] [--json FILE] [--seconds 10] [--cpu]

Seconds of each round from the first on: in the plain forms alone, with kernels chosen first,
with kernels chosen meanwhile, and meanwhile once more with what that left on disk. Each begins
without anything compiled, ends after so many seconds, and tells how far its server's state is from
that of the plain forms after as many rounds. A workload is one of `idiolect bench`, with a
precision after a colon, or `pathological`: PFLlib's clients of `long_rounds.py`.
"""

import argparse
import json
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from idiolect.bench.workloads import WORKLOADS, federation, simulation
from idiolect.core import tree
from idiolect.engine.backend import Backend
from idiolect.kernels import autotune, compiled
from long_rounds import SIZES, workload

ALL = ("lenet5-20:fp32", "pathological:fp32", "resnet18-10:bf16", "resnet10-20:tf32",
       "pfl-cifar10:fp32")  # fmt: skip
MOST = 200  # rounds


def forget() -> None:
    """Begin as a new process does."""
    autotune.forget()
    autotune._shipped.cache_clear()
    compiled.kernel.cache_clear()
    compiled._binaries.clear()


def rounds(work: Any, fed: Any, backend: Backend, seconds: float) -> tuple[list[float], list[Any]]:
    """Return the seconds of rounds, and the server's state after each."""
    forget()
    took, states, began = list[float](), list[Any](), time.perf_counter()
    sim = simulation(work, fed, backend)
    while len(took) < MOST and (time.perf_counter() - began < seconds or len(took) < 3):
        start = time.perf_counter()
        sim.advance()
        if backend.device == "cuda":
            torch.cuda.synchronize()
        took.append(round(time.perf_counter() - start, 4))
        states.append([leaf.cpu() for leaf in tree.leaves(sim.tree["server"])])
    return took, states


def apart(one: list[Any], other: list[Any]) -> float:
    pairs = zip(one, other, strict=True)
    return max(float((a - b).norm() / b.norm().clamp(min=1e-30)) for a, b in pairs)


def modes(name: str, seconds: float, cpu: bool) -> dict[str, Any]:
    """Time one workload in all ways."""
    name, _, precision = name.partition(":")
    work = workload(SIZES[name]) if name in SIZES else WORKLOADS[name]
    device = "cpu" if cpu else "cuda"
    if cpu:
        precision = "fp32"
        work = replace(work, sizes=tuple(-(-size // 200) for size in work.sizes))
    fed = federation(work.sizes, work.shape)
    plain, found = [], dict[str, Any]()
    with tempfile.TemporaryDirectory() as folder:
        for mode in ("plain", "first", "meanwhile", "again"):
            own = Path(folder) / ("first" if mode == "first" else "meanwhile")
            backend = Backend(
                "vectorised", device, cache=own / "widths.json", precision=precision or "fp32",
                kernels="first" if mode == "first" else "meanwhile",
            )  # fmt: skip
            if mode == "plain":
                with (
                    mock.patch.object(autotune, "_waits", lambda *given: True),
                    mock.patch.object(autotune, "settle", lambda: None),
                ):
                    took, plain = rounds(work, fed, backend, seconds)
                states = plain
            else:
                took, states = rounds(work, fed, backend, seconds)
            last = min(len(plain), len(states)) - 1
            found[mode] = {
                "rounds": took[:30], "best": min(took), "count": len(took),
                "switches": autotune._Choosing.switches, "waiting": len(autotune._waiting),
                "apart": apart(states[last], plain[last]), "after": last + 1,
            }  # fmt: skip
    return found


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__)
    ask.add_argument("workloads", nargs="*", default=ALL)
    ask.add_argument("--json", type=Path, help="also write the figures here")
    ask.add_argument("--seconds", type=float, default=10.0)
    ask.add_argument("--cpu", action="store_true", help="all of it in small")
    given = ask.parse_args()
    found: dict[str, object] = {}
    if not given.cpu:  # handles, and what else comes once in a process
        modes("mlr-20:fp32", 1.0, False)
    for name in given.workloads:
        found[name] = modes(name, given.seconds, given.cpu)
        print(name, json.dumps(found[name]), flush=True)
        if given.json:
            given.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
