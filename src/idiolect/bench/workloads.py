"""The timed workloads by name, their random data, and the ways to train them that are compared."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from idiolect.bench.timed_networks import DeepResNet, RowsGRU, SmallViT
from idiolect.core.method import Method
from idiolect.data import Dataset, Federation
from idiolect.engine.architecture import Architecture
from idiolect.engine.backend import Backend
from idiolect.engine.rounds import SeededRun, Simulation
from idiolect.kernels.conv_relu_pool import conv_relu, conv_relu_pool
from idiolect.kernels.linear import linear_relu
from idiolect.methods import FedAvg, PFedMe
from idiolect.models.feedforward import DNN, MLR, LeNet5

CLASSES = 10
CIFAR, MNIST = (3, 32, 32), (1, 28, 28)

Shape = tuple[int, ...]


class PflCNN(nn.Module):
    """The network of pfl-research's CIFAR-10 benchmark: 1,626,442 parameters, with dropout."""

    def __init__(self, dropout: bool = True) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 32, 3)
        self.conv2 = nn.Conv2d(32, 64, 3)
        self.fc1 = nn.Linear(64 * 14 * 14, 128)
        self.fc2 = nn.Linear(128, CLASSES)
        self.drop1 = nn.Dropout(0.25) if dropout else nn.Identity()
        self.drop2 = nn.Dropout(0.5) if dropout else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [example, class]."""
        x = self.drop1(conv_relu_pool(self.conv2, conv_relu(self.conv1, x)))
        logits: Tensor = self.fc2(self.drop2(linear_relu(self.fc1, x.flatten(1))))
        return logits


@dataclass(frozen=True)
class Workload:
    """A method, a network and clients of certain sizes, of which one round is timed."""

    about: str
    build: Callable[[], nn.Module]
    shape: Shape
    sizes: tuple[int, ...]  # training examples of each client
    method: Method
    cohort: int | None = None  # clients a round; None: all
    steady: Callable[[], nn.Module] | None = None  # without dropout, to compare backends
    devices: tuple[str, ...] = ("cpu", "cuda")  # where a plain `idiolect bench` includes it
    few: int = 50  # the most clients that sequential sides train
    published: dict[str, float] = field(default_factory=dict)  # of peers on an H200: ms a round

    @property
    def has_loop(self) -> bool:
        """Whether the plain loop computes what the method does."""
        return type(self.method) is FedAvg

    @property
    def examples(self) -> float:
        """Examples that a round trains on, on average where a cohort is sampled."""
        share = 1.0 if self.cohort is None else self.cohort / len(self.sizes)
        return sum(self.sizes) * self.method.epochs * share


_dnn = partial(DNN, MNIST, CLASSES)


def _twenty(build: Any, title: str, shape: Shape, batch: int, **published: float) -> Workload:
    return Workload(
        f"FedAvg, {title}, 20 × 600, batch {batch}",
        partial(build, shape, CLASSES),
        shape,
        (600,) * 20,
        FedAvg(batch=batch, lr=0.01),
        published=published,
    )


def _deep(
    build: Any, title: str, shape: Shape, clients: int = 20, batch: int = 32, **options: Any
) -> Workload:
    return Workload(
        f"FedAvg, {title}, {clients} × 320, batch {batch}",
        partial(build, shape, CLASSES, **options),
        shape,
        (320,) * clients,
        FedAvg(batch=batch, lr=0.01),
        devices=("cuda",),
        few=5,
    )


WORKLOADS: dict[str, Workload] = {
    "mlr-20": _twenty(MLR, "MLR 784-10", MNIST, 20),
    "mlr-100": _twenty(MLR, "MLR 784-10", MNIST, 100),
    "dnn-20": _twenty(DNN, "DNN 784-100-10", MNIST, 20, PFLlib=780.0),
    "dnn-100": _twenty(DNN, "DNN 784-100-10", MNIST, 100, PFLlib=230.0),
    "lenet5-20": _twenty(LeNet5, "LeNet-5", CIFAR, 20),
    "lenet5-100": _twenty(LeNet5, "LeNet-5", CIFAR, 100),
    "gru-20": _deep(RowsGRU, "nn.GRU of 64 units over rows", MNIST),
    "vit-20": _deep(SmallViT, "ViT of four nn.TransformerEncoderLayer", CIFAR),
    "resnet10-20": _deep(DeepResNet, "ResNet-10 with group normalisation", CIFAR, blocks=1),
    "resnet18-10": _deep(
        DeepResNet, "ResNet-18 with group normalisation", CIFAR, clients=10, batch=64
    ),
    "pfedme-20": Workload(
        "pFedMe (K = 5), DNN 784-100-10, 20 × 600, batch 20",
        _dnn,
        MNIST,
        (600,) * 20,
        PFedMe(batch=20, lr=0.01, inner_steps=5),
        published={"PFLlib": 4100.0},
    ),
    "pfl-cifar10": Workload(
        "FedAvg, pfl-research's CNN of 1,626,442 parameters, 50 of 1,000 × 50, batch 10",
        PflCNN,
        CIFAR,
        (50,) * 1000,
        FedAvg(batch=10, lr=0.1),
        cohort=50,
        steady=partial(PflCNN, dropout=False),
        devices=("cuda",),
        published={"pfl 0.6.0": 537.0},
    ),
    "dnn-1000": Workload(
        "FedAvg, DNN 784-100-10, 1,000 × 600, batch 20",
        _dnn,
        MNIST,
        (600,) * 1000,
        FedAvg(batch=20, lr=0.01),
        devices=("cuda",),
        few=20,
    ),
}
"""`persfl`, a whole experiment, and `padding` are apart: see `measurements`."""


# Random images of the right shape: times do not depend on pixels.


def federation(sizes: Sequence[int], shape: Shape, held_out: int = 0) -> Federation:
    """Give each client so many training examples, and as many for validation and test as asked."""
    rows = sum(sizes) + 2 * held_out * len(sizes)
    parts = np.split(np.arange(rows), np.cumsum([size + 2 * held_out for size in sizes])[:-1])
    return Federation(
        _images(rows, shape),
        tuple(part[: len(part) - 2 * held_out] for part in parts),
        tuple(part[len(part) - 2 * held_out : len(part) - held_out] for part in parts),
        tuple(part[len(part) - held_out :] for part in parts),
    )


def like_cifar10(shape: Shape = CIFAR) -> Dataset:
    """Draw as many images of each class as CIFAR-10 has in its two files.

    The partitions of the papers look at labels alone, so clients are as large as the real ones.
    """
    labels = np.concatenate([np.repeat(np.arange(CLASSES), each) for each in (5000, 1000)])
    origin = (np.arange(len(labels)) >= 50_000).astype(np.int64)
    drawn = _images(len(labels), shape)
    return replace(drawn, name="random, as large as cifar10", y=labels, origin=origin)


def _images(rows: int, shape: Shape) -> Dataset:
    draw = np.random.default_rng(0)
    return Dataset(
        "random",
        draw.integers(0, 256, (rows, *shape), dtype=np.uint8),
        draw.integers(0, CLASSES, rows),
        tuple(map(str, range(CLASSES))),
        np.full(1, 127.5, np.float32),
        np.full(1, 127.5, np.float32),
    )


def tensors(fed: Federation) -> list[tuple[Tensor, Tensor]]:
    """Return every client's decoded training examples and labels."""
    x = (torch.from_numpy(np.array(fed.dataset.x)).float() - 127.5) / 127.5
    y = torch.from_numpy(np.array(fed.dataset.y))
    return [(x[rows], y[rows]) for rows in fed.train]


# The sides of a comparison: the loop that a researcher writes first, and Idiolect's backends.


def simulation(
    work: Workload, fed: Federation, backend: Backend, build: Callable[[], nn.Module] | None = None
) -> Simulation:
    """Make a simulation of a workload."""
    network = {"all": Architecture(build or work.build)}
    run = [SeededRun(0, fed.train_data)]
    return Simulation(work.method, run, network, cohort=work.cohort, backend=backend)


def backends(device: str, precision: str = "fp32") -> dict[str, Backend]:
    """Return a device's backends by name, the fastest last; only CUDA can capture rounds."""
    # Rounds are timed in the forms that they end with.
    stacked = Backend("vectorised", device, precision=precision, kernels="first")
    known = {
        "sequential": replace(stacked, kind="sequential"),
        "vectorised": replace(stacked, graph=False),
    }
    return {**known, "graph": stacked} if device == "cuda" else known


def fastest(device: str, precision: str = "fp32") -> Backend:
    """Return the fastest backend of a device."""
    return list(backends(device, precision).values())[-1]


def plain_loop(work: Workload, fed: Federation, device: str) -> Callable[[], None]:
    """Return a round as a researcher writes it first: a DataLoader and torch.optim per client."""
    sets = [TensorDataset(*own) for own in tensors(fed)]
    start = {name: value.to(device) for name, value in work.build().state_dict().items()}
    cohorts = _cohorts(len(sets), work.cohort)

    def turn() -> None:
        models = []
        for client in next(cohorts):
            model = work.build().to(device).train()
            model.load_state_dict(start)
            loader = DataLoader(sets[client], work.method.batch, shuffle=True)
            train(model, work.method, device, partial(iter, loader))
            models.append(model.state_dict())
        for name in start:
            start[name] = torch.stack([model[name] for model in models]).mean(0)

    return turn


def train(
    model: nn.Module,
    method: Method,
    device: str,
    batches: Callable[[], Iterable[tuple[Tensor, Tensor]]],
) -> None:
    """Train a client's model by SGD; `batches` returns those of an epoch."""
    optimiser = torch.optim.SGD(model.parameters(), lr=method.lr)
    for _ in range(method.epochs):
        for features, labels in batches():
            optimiser.zero_grad()
            loss = nn.functional.cross_entropy(model(features.to(device)), labels.to(device))
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()


def _cohorts(clients: int, cohort: int | None) -> Iterator[np.ndarray]:
    draw, everyone = np.random.default_rng(0), np.arange(clients)
    while True:
        yield everyone if cohort is None else draw.choice(everyone, cohort, replace=False)
