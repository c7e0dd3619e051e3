"""Time a step of the sequential backend beside a plain loop's: what it costs the host.

    PYTHONPATH=src python benchmarks/sequential_steps.py [--json FILE] [--device cuda]

Ten clients, 30 steps of batch 20 each, rounds in turn, the least time of each side counts. On a CPU
it is this thread's, and the sequential backend takes its examples and its loss as on a GPU.
"""

import argparse
import json
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch

from idiolect.bench.workloads import WORKLOADS, federation, plain_loop, simulation
from idiolect.core import client, losses
from idiolect.engine.backend import Backend

CLIENTS, STEPS, BATCH, ROUNDS = 10, 30, 20, 8


def microseconds(name: str, device: str) -> dict[str, float]:
    """Return the time of a step of both sides."""
    work = WORKLOADS[name]
    work = replace(
        work, sizes=(STEPS * BATCH,) * CLIENTS, method=replace(work.method, batch=BATCH, epochs=1)
    )
    fed = federation(work.sizes, work.shape)
    sides = {
        "sequential": simulation(work, fed, Backend("sequential", device)).advance,
        "plain loop": plain_loop(work, fed, device),
    }
    least = dict.fromkeys(sides, float("inf"))
    clock = time.thread_time if device == "cpu" else time.perf_counter
    for _ in range(ROUNDS):
        for side, turn in sides.items():
            began = clock()
            turn()
            if device == "cuda":
                torch.cuda.synchronize()
            least[side] = min(least[side], (clock() - began) / CLIENTS / STEPS * 1e6)
    return {side: round(took, 1) for side, took in least.items()}


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__)
    ask.add_argument("--json", type=Path, help="also write the figures here")
    ask.add_argument("--device", default="cpu")
    given = ask.parse_args()
    found = {}
    with ExitStack() as changed:
        if given.device == "cpu":
            torch.set_num_threads(1)
            single = losses.single_cross_entropy
            changed.enter_context(mock.patch.object(losses, "cross_entropy", single))
            changed.enter_context(mock.patch.object(client, "_span", lambda plan: 8))
        for name in ("mlr-20", "dnn-20", "lenet5-20"):
            found[name] = microseconds(name, given.device)
            print(name, found[name], flush=True)
            if given.json:
                given.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
