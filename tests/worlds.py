"""Tiny worlds: a handful of examples, clients of unequal size, a network of a few weights."""

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from idiolect.core import tree
from idiolect.core.batchnorm import BatchNorm
from idiolect.core.client import Local, Network
from idiolect.core.survival import Cox, Discrete
from idiolect.core.task import Classes, Labels, Number
from idiolect.data import Dataset, Federation
from idiolect.data.text import SPECIAL, UserText, streams
from idiolect.engine.architecture import Architecture
from idiolect.engine.backend import Backend, Ray
from idiolect.engine.batch_plan import BatchPlanner
from idiolect.engine.data_pools import DataPools
from idiolect.engine.rounds import SeededRun, Simulation
from idiolect.models import NextWord

FEATURES, CLASSES = 4, 3
PUBLIC = 8  # examples that everyone holds


class Normed(nn.Module):
    """A small smooth network with a normalisation layer, so that FedBN has something to keep."""

    def __init__(self, hidden: int = 6, outputs: int = CLASSES) -> None:
        super().__init__()
        self.fc1 = nn.Linear(FEATURES, hidden)
        self.norm = nn.GroupNorm(2, hidden)
        self.fc2 = nn.Linear(hidden, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(self.norm(self.fc1(x)).tanh())


class Batched(nn.Module):
    """The same with batch normalisation, whose running statistics are leaves too."""

    def __init__(self, hidden: int = 6) -> None:
        super().__init__()
        self.fc1 = nn.Linear(FEATURES, hidden)
        self.norm = BatchNorm(hidden)
        self.fc2 = nn.Linear(hidden, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(self.norm(self.fc1(x)).tanh())


class LowRank(nn.Linear):
    """A frozen layer with LoRA of rank 2, named as `models.adapters` does."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.requires_grad_(False)
        self.lora_A = nn.Parameter(torch.randn(2, inputs) / 2)
        self.lora_B = nn.Parameter(torch.zeros(outputs, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + 2 * (x @ self.lora_A.mT) @ self.lora_B.mT


class Adapted(nn.Module):
    """The small network with LoRA in its first layer, for methods that divide A and B.

    Its base is the same under every seed, as a pretrained one is.
    """

    def __init__(self, hidden: int = 6, outputs: int = CLASSES) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.fc1 = LowRank(FEATURES, hidden)
        nn.init.normal_(self.fc1.lora_A)
        self.norm = nn.GroupNorm(2, hidden)
        self.fc2 = nn.Linear(hidden, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(self.norm(self.fc1(x)).tanh())


def network_of(method) -> type[nn.Module]:
    """Return the world's network: with LoRA for methods that divide its matrices."""
    while hasattr(method, "base"):
        method = method.base
    return Adapted if "LoRA" in type(method).__name__ else Normed


class Plain(nn.Module):
    """Another network, with other parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.only = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.only(x)


TWO = {
    "normed": Architecture(Normed, clients=(4, 1, 2)),
    "plain": Architecture(Plain, clients=(5, 0, 3)),
}


def dataset(rows: int, seed: int = 0) -> Dataset:
    draw = np.random.default_rng(seed)
    x = draw.normal(size=(rows, FEATURES)).astype(np.float32)
    y = (x @ draw.normal(size=(FEATURES, CLASSES))).argmax(1)
    names = tuple(f"class {n}" for n in range(CLASSES))
    return Dataset(f"tiny {seed}", x, y, names, np.zeros(1, np.float32), np.ones(1, np.float32))


def federation(
    train: Sequence[int] = (7, 4, 5, 9, 3, 0), val: Sequence[int] | None = None, seed: int = 0
) -> Federation:
    """Deal rows out: so many to each client for training and validation, two for its test.

    By default the fifth client has no validation data and the last one nothing to train on.
    """
    if val is None:
        val = [2, 3, 2, 1, 0, 2][: len(train)]
    sizes = np.array([train, val, [2] * len(train)])
    data = dataset(int(sizes.sum()), seed)
    rows = np.random.default_rng((seed, 1)).permutation(len(data))
    parts = np.split(rows, np.cumsum(sizes.reshape(-1))[:-1])
    count = len(train)
    cut = [tuple(parts[n * count : (n + 1) * count]) for n in range(3)]
    return Federation(data, *cut)


def with_public(*arguments, **options) -> Federation:
    """Make a federation whose clients hold public examples too."""
    world = federation(*arguments, **options)
    return dataclasses.replace(world, public=dataset(PUBLIC, 99))


TASKS = {
    "number": (Number(), ("price",)),
    "labels": (Labels(), ("a", "b")),
    "cox": (Cox(), ("log risk",)),
    "discrete": (Discrete(intervals=4), ("1", "2", "3", "4")),
    "weighted": (Classes(balanced=True), tuple(f"class {n}" for n in range(CLASSES))),
}


def with_task(world: Federation, name: str) -> Federation:
    """Make the same world of another task; its public examples have labels of it too."""
    return dataclasses.replace(
        world,
        dataset=_tasked(world.dataset, name),
        public=None if world.public is None else _tasked(world.public, name),
    )


def _tasked(data: Dataset, name: str) -> Dataset:
    task, outputs = TASKS[name]
    draw = np.random.default_rng(len(data))
    said = data.x @ np.array([1.0, -2.0, 0.5, 1.0]) + 0.1 * draw.normal(size=len(data))
    y = {
        "number": 100 + 20 * said,
        "labels": np.stack([said > 0, data.x[:, 1] > 0], 1),
        "weighted": data.y,
    }.get(name)
    if y is None:
        y = np.stack([np.round(3 * np.exp(-said / 2), 1), draw.random(len(data)) < 0.7], 1)
    kind = np.int64 if name == "weighted" else np.float32
    return dataclasses.replace(data, y=np.asarray(y, kind), classes=outputs, task=task)


def network_for(name: str, build=Normed):
    """Return a builder of the world's network with the outputs that a task needs."""
    return functools.partial(build, outputs=len(TASKS[name][1]))


def simulation(
    method,
    worlds: Federation | Sequence[Federation],
    *,
    seeds: Sequence[int] = (0,),
    build=None,
    auxiliary=None,
    architectures=None,
    cohort: int | None = None,
    draw: str = "fixed",
    bystanders: str = "rest",
    unseen: int = 0,
    kind: str = "vectorised",
    width: int | None = 64,
) -> Simulation:
    worlds = [worlds] if isinstance(worlds, Federation) else worlds
    runs = [SeededRun(seed, world.train_data) for seed, world in zip(seeds, worlds, strict=True)]
    build = build or network_of(method)
    architectures = architectures or {"main": Architecture(build, auxiliary)}
    backend = Backend(kind, "cpu", width, ray=Ray(workers=2, cpus=0.5))
    return Simulation(
        method,
        runs,
        architectures,
        cohort=cohort,
        draw=draw,
        bystanders=bystanders,
        unseen=unseen,
        backend=backend,
    )


def local(
    world: Federation, client: int, *, build=Normed, seed: int = 0, round: int = 0, initial=None
) -> Local:
    """Make what one client holds, alone, as a node of its own would."""
    library = DataPools([world.train_data], torch.device("cpu"))
    member = library.members(0, seed, world.train_data)[client]
    book = BatchPlanner(library.pools, torch.device("cpu"))
    book.turn([member], round)
    network = Network(build())
    network.find_head(library.examples())
    networks = dict.fromkeys(("main", "auxiliary"), network)
    size = torch.tensor(float(len(member.rows["train"])))
    slot = torch.zeros((), dtype=torch.int64)
    return Local(networks, book, slot, size, torch.tensor(float(round)), False, initial)


def poisoned(world: Federation) -> Federation:
    """Change every test example and every test label."""
    rows = np.concatenate(world.test)
    x, y = world.dataset.x.copy(), world.dataset.y.copy()
    x[rows], y[rows] = 100 + x[rows], (y[rows] + 1) % CLASSES
    return dataclasses.replace(world, dataset=dataclasses.replace(world.dataset, x=x, y=y))


def differing(left, right, tolerance: float = 0.0) -> dict[str, float]:
    """Name the leaves in which two trees differ by more than a relative tolerance, and by what.

    Infinity and NaN must stand in the same places.
    """
    left, right = tree.named(left), tree.named(right)
    assert left.keys() == right.keys()
    found = {}
    for name, one in left.items():
        other = right[name]
        assert one.shape == other.shape, name
        if tolerance == 0:
            same = torch.equal(one.nan_to_num(nan=1e9), other.nan_to_num(nan=1e9))
        else:
            same = torch.allclose(one, other, tolerance, tolerance, equal_nan=True)
        if not same:
            found[name] = float((one.double() - other.double()).nan_to_num().abs().max())
    return found


LENGTH, SIZES = 4, (6, 3, 5, 2)  # of next-word examples: words, and training rows of each user


def next_word_federation(seed: int = 0) -> Federation:
    """Four users of unequal length; the last row of each is filled up, the vocabulary is given."""
    draw = np.random.default_rng(seed)
    users = [
        UserText(f"u{n}", [list(draw.choice(list("abcdefgh"), 5 * size - 5))])
        for n, size in enumerate((9, 6, 8, 5))
    ]
    data = streams("tiny", users, LENGTH, 99)
    rows = [np.flatnonzero(data.clients == n) for n in range(4)]
    cuts = [np.split(own, [size, size + 1]) for own, size in zip(rows, SIZES, strict=True)]
    return Federation(data, *(tuple(part) for part in zip(*cuts, strict=True)))


def next_word_network() -> NextWord:
    return NextWord((LENGTH,), 8 + len(SPECIAL), units=3, layers=1, dropout=0.0)
