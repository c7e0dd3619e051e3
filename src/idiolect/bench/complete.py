"""A whole experiment by the clock: PersFL on CIFAR-10 DS-1, from nothing to the last score."""

import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from idiolect.bench.random_images import CIFAR, CLASSES, like_cifar10
from idiolect.data import Dataset, federate, load
from idiolect.engine.architecture import Architecture
from idiolect.engine.backend import Backend
from idiolect.engine.rounds import SeededRun, Simulation
from idiolect.errors import IdiolectError
from idiolect.methods import PersFL
from idiolect.models import LeNet5

SEEDS, ROUNDS, EVERY = 5, 50, 5
ABOUT = "PersFL, LeNet-5, CIFAR-10 DS-1: 10 clients, 50 rounds, grid of 15 cells, 5 seeds"


def persfl(device: str, precision: str = "fp32", data_dir: Path | None = None) -> dict[str, Any]:
    """Run the experiment of `experiments/persfl/cifar10-ds1.toml` and say how long it took."""
    dataset = cifar10(data_dir)
    federations = [
        federate(dataset, "persfl-ds1", seed=seed, imbalance=0.35) for seed in range(SEEDS)
    ]
    method = PersFL(
        batch=128, epochs=2, lr=0.01, momentum=0.9, distil_lr=0.003, distil_epochs=10
    )  # fmt: skip
    cuda = device == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    sim = Simulation(
        method,
        [SeededRun(seed, federation.train_data) for seed, federation in enumerate(federations)],
        {"all": Architecture(partial(LeNet5, CIFAR, CLASSES))},
        backend=Backend("vectorised", device, precision=precision),
    )
    for round in range(1, ROUNDS + 1):
        sim.advance()
        if round % EVERY == 0:
            sim.judge(only_global=True)
    trained = time.perf_counter()
    verdicts = sim.judge([federation.test_data for federation in federations])
    done = time.perf_counter()  # scores are on the host, so nothing is left to wait for
    scores = [float(np.mean(verdict.scores["personal"]["accuracy"])) for verdict in verdicts]
    return {
        "about": ABOUT,
        "data": dataset.name,
        "seconds": done - start,
        "rounds_seconds": trained - start,
        "distillation_seconds": done - trained,
        "peak_mib": torch.cuda.max_memory_allocated() / 2**20 if cuda else None,
        "padding": sim.padding(),
        "accuracy": scores,
    }


def cifar10(data_dir: Path | None) -> Dataset:
    """Load CIFAR-10 where it is at hand; else random images, and a name that says so."""
    try:
        return load("cifar10", data_dir, download=False)
    except (IdiolectError, ImportError):
        return like_cifar10()
