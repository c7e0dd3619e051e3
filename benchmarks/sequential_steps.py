"""Time a step of the sequential backend beside a plain loop's: what it costs the host.

    PYTHONPATH=src python benchmarks/sequential_steps.py [NAME ...] [--json FILE] [--device cuda]

Ten clients, 30 steps of batch 20 each, rounds in turn, the least time of each side counts. On a CPU
it is this thread's, and the sequential backend takes its examples as on a GPU.
`operations` are those of torch that a step launches, without views (on a CPU, also where the times
are a GPU's, so that the plain loop's two copies to the device are not among them, and its step of
all leaves at once is one for each).
"""

import argparse
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from idiolect.bench.workloads import WORKLOADS, federation, plain_loop, simulation
from idiolect.core import client
from idiolect.engine.backend import Backend

CLIENTS, STEPS, BATCH, ROUNDS = 10, 30, 20, 8
NAMES = ("mlr-20", "dnn-20", "lenet5-20", "resnet10-20")
DEEP = {"resnet10-20": 3}  # clients of networks whose steps are long


def sides(name: str, device: str, clients: int, steps: int, batch: int) -> dict[str, Any]:
    """Return a round of each side."""
    work = WORKLOADS[name]
    method = replace(work.method, batch=batch, epochs=1)
    work = replace(work, sizes=(steps * batch,) * clients, method=method)
    fed = federation(work.sizes, work.shape)
    return {
        "sequential": simulation(work, fed, Backend("sequential", device)).advance,
        "plain loop": plain_loop(work, fed, device),
    }


class Counted(TorchDispatchMode):
    """Counts operations that compute something."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = [own.alias_info for own in op._schema.returns]
        view = bool(made) and all(own is not None and not own.is_write for own in made)
        self.count += not view and op.namespace == "aten"
        return op(*args, **(kwargs or {}))


def operations(name: str, few: int = 8) -> dict[str, float]:
    """Return the operations of a step: what twice as many steps launch more."""
    found = dict[str, list[int]]()
    for steps in (few, 2 * few):
        for side, turn in sides(name, "cpu", 1, steps, 2).items():
            turn()
            with Counted() as counted:
                turn()
            found.setdefault(side, []).append(counted.count)
    return {side: round((more - less) / few, 1) for side, (less, more) in found.items()}


def microseconds(name: str, device: str) -> dict[str, float]:
    """Return the time of a step of both sides."""
    clients = DEEP.get(name, CLIENTS)
    turns = sides(name, device, clients, STEPS, BATCH)
    least = dict.fromkeys(turns, float("inf"))
    clock = time.thread_time if device == "cpu" else time.perf_counter
    for _ in range(ROUNDS if clients == CLIENTS else 3):
        for side, turn in turns.items():
            began = clock()
            turn()
            if device == "cuda":
                torch.cuda.synchronize()
            least[side] = min(least[side], (clock() - began) / clients / STEPS * 1e6)
    return {side: round(took, 1) for side, took in least.items()}


@contextmanager
def as_on_gpu() -> Iterator[None]:
    """Let one thread of the CPU launch what the sequential backend launches on a GPU."""
    torch.set_num_threads(1)
    with mock.patch.object(client, "_span", lambda plan: 8):
        yield


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__)
    ask.add_argument("--json", type=Path, help="also write the figures here")
    ask.add_argument("--device", default="cpu")
    ask.add_argument("names", nargs="*", default=NAMES)
    ask.add_argument("--count", action="store_true", help="operations alone, and no time")
    given = ask.parse_args()
    found: dict[str, Any] = {}
    for name in given.names:
        found[name] = {}
        with as_on_gpu():
            found[name]["operations"] = operations(name)
        if not given.count:
            with nullcontext() if given.device == "cuda" else as_on_gpu():
                found[name] |= microseconds(name, given.device)
        print(name, found[name], flush=True)
        if given.json:
            given.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
