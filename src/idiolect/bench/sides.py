"""The sides of a comparison: the loop that a researcher writes first, and Idiolect's backends."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from idiolect.bench.workloads import Workload
from idiolect.data import Federation
from idiolect.engine.architecture import Architecture
from idiolect.engine.backend import Backend
from idiolect.engine.rounds import SeededRun, Simulation

Turn = Callable[[], None]


def simulation(
    work: Workload, fed: Federation, backend: Backend, build: Callable[[], nn.Module] | None = None
) -> Simulation:
    """Seat a workload's clients."""
    return Simulation(
        work.method,
        [SeededRun(0, fed.train_data)],
        {"all": Architecture(build or work.build)},
        cohort=work.cohort,
        backend=backend,
    )


def backends(device: str, precision: str = "fp32") -> dict[str, Backend]:
    """Name the backends that a device has; only CUDA can capture rounds."""
    stacked = Backend("vectorised", device, precision=precision)
    known = {
        "sequential": Backend("sequential", device, precision=precision),
        "vectorised": replace(stacked, graph=False),
    }
    return {**known, "graph": stacked} if device == "cuda" else known


def plain_loop(work: Workload, fed: Federation, device: torch.device) -> Turn:
    """What a researcher writes first: a DataLoader and torch.optim for each client in turn."""
    x = (torch.from_numpy(np.array(fed.dataset.x)).float() - 127.5) / 127.5
    y = torch.from_numpy(np.array(fed.dataset.y))
    sets = [TensorDataset(x[rows], y[rows]) for rows in fed.train]
    start = {name: value.to(device) for name, value in work.build().state_dict().items()}
    drawn = _cohorts(len(sets), work.cohort)

    def turn() -> None:
        models = []
        for client in next(drawn):
            model = work.build().to(device).train()
            model.load_state_dict(start)
            optimiser = torch.optim.SGD(model.parameters(), lr=work.method.lr)
            for _ in range(work.method.epochs):
                for features, labels in DataLoader(sets[client], work.method.batch, shuffle=True):
                    optimiser.zero_grad()
                    logits = model(features.to(device))
                    loss = nn.functional.cross_entropy(logits, labels.to(device))
                    loss.backward()  # type: ignore[no-untyped-call]
                    optimiser.step()
            models.append(model.state_dict())
        for name in start:
            start[name] = torch.stack([model[name] for model in models]).mean(0)

    return turn


def _cohorts(clients: int, cohort: int | None) -> Iterator[np.ndarray]:
    draw = np.random.default_rng(0)
    while True:
        everyone = np.arange(clients)
        yield everyone if cohort is None else draw.choice(everyone, cohort, replace=False)
