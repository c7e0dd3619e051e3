"""The workloads that are timed, by name: who trains what, on how much."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

from torch import Tensor, nn

from idiolect.bench.random_images import CIFAR, CLASSES, MNIST
from idiolect.core.method import Method
from idiolect.kernels.conv_relu_pool import conv_relu, conv_relu_pool
from idiolect.methods import FedAvg, PFedMe
from idiolect.models import DNN, MLR, LeNet5

SIDES = ("plain loop", "sequential", "vectorised", "graph")


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
        logits: Tensor = self.fc2(self.drop2(self.fc1(x.flatten(1)).relu()))
        return logits


@dataclass(frozen=True)
class Workload:
    """A method, a network and clients of certain sizes; one round is what is timed."""

    about: str
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    sizes: tuple[int, ...]  # training examples of each client
    method: Method
    cohort: int | None = None  # clients a round; None: all
    steady: Callable[[], nn.Module] | None = None  # without dropout, to compare backends
    devices: tuple[str, ...] = ("cpu", "cuda")  # where it is part of a plain `idiolect bench`
    few: int = 50  # where there are more clients, the loops take only so many
    published: dict[str, float] = field(default_factory=dict)  # of peers on an H200: ms a round

    @property
    def in_turn(self) -> bool:
        """Whether the plain loop does what the method does."""
        return type(self.method) is FedAvg

    @property
    def examples(self) -> float:
        """Examples that a round trains on, on average where a cohort is drawn."""
        share = 1.0 if self.cohort is None else self.cohort / len(self.sizes)
        return sum(self.sizes) * self.method.epochs * share

    def grown(
        self, clients: int = 0, batch: int = 0, build: Callable[[], nn.Module] | None = None
    ) -> "Workload":
        """Return the same with other clients, all alike, another batch or another network."""
        sizes = (self.sizes[0],) * clients if clients else self.sizes
        method = replace(self.method, batch=batch) if batch else self.method
        return replace(self, sizes=sizes, method=method, build=build or self.build)


def _twenty(build: Callable[..., nn.Module], title: str, shape: tuple[int, ...], batch: int,
            **rest: object) -> Workload:  # fmt: skip
    return Workload(
        f"FedAvg, {title}, 20 × 600, batch {batch}",
        partial(build, shape, CLASSES),
        shape,
        (600,) * 20,
        FedAvg(batch=batch, lr=0.01),
        **rest,  # type: ignore[arg-type]
    )


WORKLOADS: dict[str, Workload] = {
    "mlr-20": _twenty(MLR, "MLR 784-10", MNIST, 20),
    "mlr-100": _twenty(MLR, "MLR 784-10", MNIST, 100),
    "dnn-20": _twenty(DNN, "DNN 784-100-10", MNIST, 20, published={"PFLlib": 780.0}),
    "dnn-100": _twenty(DNN, "DNN 784-100-10", MNIST, 100, published={"PFLlib": 230.0}),
    "lenet5-20": _twenty(LeNet5, "LeNet-5", CIFAR, 20),
    "lenet5-100": _twenty(LeNet5, "LeNet-5", CIFAR, 100),
    "pfedme-20": Workload(
        "pFedMe (K = 5), DNN 784-100-10, 20 × 600, batch 20",
        partial(DNN, MNIST, CLASSES),
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
        partial(DNN, MNIST, CLASSES),
        MNIST,
        (600,) * 1000,
        FedAvg(batch=20, lr=0.01),
        devices=("cuda",),
        few=20,
    ),
}
"""`persfl`, a whole experiment, and `padding` are apart: see `complete` and `padding`."""
