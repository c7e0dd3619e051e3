"""Train 20 clients for one epoch: a plain DataLoader loop against Idiolect's backends, in one run.

    python benchmarks/loop.py [--json FILE] [--repeats N]

Each number is the best of several interleaved repeats, so that a busy machine hurts all sides
alike; read the ratios, not the seconds.
"""

import argparse
import json
import platform
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from idiolect.data import Federation
from idiolect.methods import FedAvg
from idiolect.models import MODELS
from idiolect.simulate.architecture import Architecture
from idiolect.simulate.backend import Backend
from idiolect.simulate.rounds import Run, Simulation
from random_data import CLASSES, federation

CLIENTS, EXAMPLES, LR = 20, 600, 0.01
SHAPES = {"mlr": (1, 28, 28), "dnn": (1, 28, 28), "lenet5": (3, 32, 32)}


def plain_loop(fed: Federation, build: Callable[[], nn.Module], batch: int) -> Callable[[], None]:
    """What a researcher writes first: a DataLoader and torch.optim for each client in turn."""
    x = (torch.from_numpy(np.array(fed.dataset.x)).float() - 127.5) / 127.5
    y = torch.from_numpy(np.array(fed.dataset.y))
    sets = [TensorDataset(x[rows], y[rows]) for rows in fed.train]
    start = build().state_dict()

    def round() -> None:
        models = []
        for own in sets:
            model = build()
            model.load_state_dict(start)
            optimiser = torch.optim.SGD(model.parameters(), lr=LR)
            for features, labels in DataLoader(own, batch, shuffle=True):
                optimiser.zero_grad()
                nn.functional.cross_entropy(model(features), labels).backward()
                optimiser.step()
            models.append(model.state_dict())
        for name in start:
            torch.stack([model[name] for model in models]).mean(0)

    return round


def idiolect_round(
    fed: Federation, build: Callable[[], nn.Module], batch: int, backend: Backend
) -> Simulation:
    return Simulation(
        FedAvg(batch=batch, lr=LR),
        [Run(0, fed.lessons)],
        {"all": Architecture(build)},
        backend=backend,
    )


def measure(sides: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Time the sides in turn, several times over, and keep each one's best."""
    best = dict.fromkeys(sides, float("inf"))
    for run in range(repeats + 1):
        for name, side in sides.items():
            start = time.perf_counter()
            side()
            if run:  # the first turn warms up
                best[name] = min(best[name], time.perf_counter() - start)
    return best


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--widths", type=int, nargs="*", default=[])
    options = parser.parse_args()
    rows = []
    for name, shape in SHAPES.items():
        fed = federation([EXAMPLES] * CLIENTS, shape)
        for batch in (20, 100):

            def build(name: str = name, shape: tuple[int, ...] = shape) -> nn.Module:
                return MODELS[name](shape, CLASSES)

            auto = idiolect_round(fed, build, batch, Backend(device="cpu"))
            sequential = idiolect_round(fed, build, batch, Backend("sequential", device="cpu"))
            sides: dict[str, Callable[[], object]] = {
                "plain loop": plain_loop(fed, build, batch),
                "sequential": sequential.advance,
                "vectorised": auto.advance,
            }
            for width in options.widths:
                sim = idiolect_round(fed, build, batch, Backend(device="cpu", width=width))
                sides[f"width {width}"] = sim.advance
            seconds = measure(sides, options.repeats)
            row = {
                "model": name,
                "batch": batch,
                "width": auto.widths.get("0 step"),
                "samples_per_second": {k: CLIENTS * EXAMPLES / s for k, s in seconds.items()},
                "ratio": {k: seconds["plain loop"] / s for k, s in seconds.items()},
            }
            rows.append(row)
            ratios = "  ".join(f"{side} {ratio:5.2f}x" for side, ratio in row["ratio"].items())
            print(f"{name:8} batch {batch:4}  width {row['width']!s:4}  {ratios}", flush=True)
    if options.json:
        about = {"torch": torch.__version__, "threads": torch.get_num_threads()}
        about["machine"] = platform.processor() or platform.machine()
        options.json.write_text(json.dumps({"about": about, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
