"""Time a round of FedAvg over 139 schools (a regression) beside a plain loop in PyTorch.

python benchmarks/schools.py DATA_DIR     # holds school/all.csv.gz
"""

import sys
import time
from statistics import median

import numpy as np
import torch

from idiolect.data import federate, load
from idiolect.engine.architecture import Architecture
from idiolect.engine.backend import Backend
from idiolect.engine.rounds import SeededRun, Simulation
from idiolect.methods import METHODS
from idiolect.models import MODELS

BATCH, RATE, ROUNDS = 16, 0.01, 7


def plain_round(model: torch.nn.Module, x: list[torch.Tensor], y: list[torch.Tensor]) -> None:
    """Train the model at every school for an epoch, and average: what a script does."""
    start = {name: value.clone() for name, value in model.state_dict().items()}
    total = {name: torch.zeros_like(value) for name, value in start.items()}
    rows = sum(map(len, x))
    for own, target in zip(x, y, strict=True):
        model.load_state_dict(start)
        optimiser = torch.optim.SGD(model.parameters(), lr=RATE)
        for batch in torch.randperm(len(own)).split(BATCH):
            optimiser.zero_grad()
            torch.nn.functional.mse_loss(model(own[batch])[:, 0], target[batch]).backward()
            optimiser.step()
        for name, value in model.state_dict().items():
            total[name] += value * (len(own) / rows)
    model.load_state_dict(total)


def main() -> None:
    """Print seconds a round, and the ratio."""
    federation = federate(load("school", data_dir=sys.argv[1]), "natural", 0)
    dataset = federation.dataset

    def build() -> torch.nn.Module:
        return MODELS["mlr"](dataset.x.shape[1:], 1)

    one, five = (
        Simulation(
            METHODS["fedavg"](batch=BATCH, lr=RATE),
            [SeededRun(seed, federation.train_data) for seed in range(seeds)],
            {"a": Architecture(build)},
            backend=Backend("vectorised", "cpu"),
        )
        for seeds in (1, 5)
    )
    x = [torch.from_numpy(dataset.decoded(rows).astype(np.float32)) for rows in federation.train]
    encoded = dataset.task.encode(dataset.y)
    y = [torch.from_numpy(np.asarray(encoded[rows], np.float32)) for rows in federation.train]
    model = build()
    spent: dict[str, list[float]] = {}
    for repeat in range(ROUNDS + 1):  # in turn, so that all meet the same machine
        for name, work in (
            ("one seed", one.advance),
            ("five seeds together", five.advance),
            ("plain loop, one seed", lambda: plain_round(model, x, y)),
        ):
            began = time.perf_counter()
            work()
            if repeat:  # plans and widths are made once
                spent.setdefault(name, []).append(time.perf_counter() - began)
    took = {name: 1000 * median(own) for name, own in spent.items()}
    print(f"{federation.clients} schools, {sum(map(len, x)):,} rows, batch {BATCH}, ms a round:")
    print(", ".join(f"{name} {value:.1f}" for name, value in took.items()))
    plain = took["plain loop, one seed"]
    print(
        f"ratio {plain / took['one seed']:.1f}, with five seeds "
        f"{5 * plain / took['five seeds together']:.1f}"
    )


if __name__ == "__main__":
    main()
