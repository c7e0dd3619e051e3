"""A world small enough to compute by hand.

The network `Line` has two parameters and two classes: logits [0, z] with z = w·x + b. Hence
P(class 1) = p = 1 / (1 + e^-z), and for an example (x, y)

    ∇ cross-entropy         = (p − y) · (x, 1)
    ∇ KL(p_peer ‖ p)        = (p − p_peer) · (x, 1)
    ∇ T² KL at temperature T = T (p_T − p_peer,T) · (x, 1),   p_T = 1 / (1 + e^(−z/T))

Numbers used often: z = 0 gives p = 1/2, z = ln 3 gives 3/4, and z = ln 9 (LN9) gives 9/10.
With x = 2 the parameters HIGH = ln 9 · (0.4, 0.2) give z = ln 9. All is float64, and batches come
in the order in which the examples are written.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from idiolect.core import randomness, tree
from idiolect.core.client import Local, Network, Plan, Plans, Pool, Request
from idiolect.core.method import Method, Setup
from idiolect.core.tree import Params
from idiolect.data.dataset import Dataset
from idiolect.data.federation import TrainData
from idiolect.engine.architecture import Architecture
from idiolect.engine.backend import Backend
from idiolect.engine.rounds import SeededRun, Simulation
from idiolect.errors import ConfigError

Examples = Sequence[tuple[float, int]]
Pair = tuple[float, float]

LN9 = math.log(9)
HIGH = (0.4 * LN9, 0.2 * LN9)
ONE: Examples = [(2.0, 1)]  # the single example of most hand-computed steps


class Line(nn.Module):
    """Logits [0, w·x + b]; `boost` scales z in training mode only, to tell the modes apart."""

    def __init__(self, w: float = 0.0, b: float = 0.0, boost: float = 1.0) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(w, dtype=torch.float64))
        self.b = nn.Parameter(torch.tensor(b, dtype=torch.float64))
        self.boost = boost

    def forward(self, x: Tensor) -> Tensor:
        return _logits((self.w * x.reshape(-1) + self.b) * (self.boost if self.training else 1.0))


class Factor(nn.Module):
    """A layer of one parameter."""

    def __init__(self, w: float) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(w, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.w * x


class Chain(nn.Module):
    """Layers a, b, ... of one parameter each: logits [0, ... · b · a · x]."""

    def __init__(self, *factors: float) -> None:
        super().__init__()
        for name, w in zip("abcdef", factors, strict=False):
            self.add_module(name, Factor(w))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.children():
            x = layer(x)
        return _logits(x.reshape(-1))


class Split(Chain):
    """Logits [0, b · a · x]; the feature a · x enters the head b."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))

    def features(self, x: Tensor) -> Tensor:
        return self.a(x.reshape(-1, 1))

    def head(self, features: Tensor) -> Tensor:
        z = self.b(features)
        return torch.cat([torch.zeros_like(z), z], -1)


class Deep(Split):
    """Logits [0, c · b · a · x]; the feature b · a · x enters the head c."""

    def features(self, x: Tensor) -> Tensor:
        return self.b(super().features(x))

    def head(self, features: Tensor) -> Tensor:
        z = self.c(features)
        return torch.cat([torch.zeros_like(z), z], -1)


def _logits(z: Tensor) -> Tensor:
    return torch.stack([torch.zeros_like(z), z], -1)


# Parameters and back.


def line(at: Pair) -> Params:
    """The parameters of a `Line`."""
    return {
        name: torch.tensor(value, dtype=torch.float64) for name, value in zip("wb", at, strict=True)
    }


def pair(params: Params) -> Pair:
    """The inverse of `line`."""
    assert list(params) == ["w", "b"]
    return float(params["w"]), float(params["b"])


def close(values: object, tolerance: float = 1e-12) -> object:
    """Numbers equal but for rounding."""
    return pytest.approx(values, rel=tolerance, abs=tolerance)


def alike(left: object, right: object) -> bool:
    """Whether two trees are equal to the last bit."""
    one, two = tree.named(left), tree.named(right)
    return one.keys() == two.keys() and all(torch.equal(one[n], two[n]) for n in one)


def setup(
    main: nn.Module,
    auxiliary: nn.Module | None = None,
    sizes: Sequence[float] = (1, 3),
    public: int = 0,
    public_labels: bool = False,
) -> Setup:
    """What a method is told before the first round."""
    network = Network(main)
    return Setup(
        network.params,
        Network(auxiliary or main).params,
        torch.tensor(sizes, dtype=torch.float64),
        2,
        network.norms,
        public=public,
        public_labels=public_labels,
    )


# The hand-written mathematics.


def sigmoid(z: float) -> float:
    return 1 / (1 + math.exp(-z))


def chance(at: Pair, x: float, temperature: float = 1.0) -> float:
    """P(class 1) for an example."""
    return sigmoid((at[0] * x + at[1]) / temperature)


def slope(at: Pair, batch: Examples) -> Pair:
    """Gradient of the batch's mean cross-entropy: the mean of (p − y) · (x, 1)."""
    errors = [(chance(at, x) - y, x) for x, y in batch]
    return sum(e * x for e, x in errors) / len(batch), sum(e for e, _ in errors) / len(batch)


def mutual(own: Pair, peer: Pair, batch: Examples) -> Pair:
    """Gradient in `own` of the batch's mean KL(peer ‖ own): the mean of (p − p_peer) · (x, 1)."""
    errors = [(chance(own, x) - chance(peer, x), x) for x, _ in batch]
    return sum(e * x for e, x in errors) / len(batch), sum(e for e, _ in errors) / len(batch)


def lost(at: Pair, batch: Examples) -> float:
    """The batch's mean cross-entropy."""
    chances = [(chance(at, x), y) for x, y in batch]
    return -sum(math.log(p if y else 1 - p) for p, y in chances) / len(batch)


def plus(left: Pair, factor: float, right: Pair) -> Pair:
    """Left + factor · right."""
    return left[0] + factor * right[0], left[1] + factor * right[1]


def minus(left: Pair, right: Pair) -> Pair:
    """Left − right."""
    return plus(left, -1, right)


# A client, and a federation of them.


class Ordered:
    """Plans that take the examples in their order; `asked` lists the streams asked for."""

    def __init__(self, streams: Mapping[str, Examples]) -> None:
        self.asked: list[str] = []
        self._streams = streams

    def keys(self) -> Tensor:
        return torch.from_numpy(randomness.keys([0], [0], 0))

    def ask(self, request: Request) -> Plan:
        self.asked.append(request.stream)
        examples = self._streams[request.stream]
        per_epoch = -(-len(examples) // request.batch)
        steps = request.steps or request.epochs * per_epoch
        width = min(request.batch, max(1, len(examples)))
        index = torch.zeros(1, max(1, steps), width, dtype=torch.int64)
        weight = torch.zeros(1, max(1, steps), width, dtype=torch.float64)
        for step in range(steps if examples else 0):
            first = step % per_epoch * request.batch
            rows = torch.arange(first, min(first + request.batch, len(examples)))
            index[0, step, : len(rows)] = rows
            weight[0, step, : len(rows)] = 1
        x = torch.tensor([x for x, _ in examples] or [0.0], dtype=torch.float64)
        y = torch.tensor([y for _, y in examples] or [0])
        plan = Plan(Pool(x, y), index, weight, steps if examples else 0, len(examples))
        return plan._replace(places=index) if request.stream == "public" else plan


def client(
    train: Examples = ONE,
    val: Examples = ONE,
    main: nn.Module | None = None,
    auxiliary: nn.Module | None = None,
    *,
    round: int = 0,
    stacked: bool = False,
    plans: Plans | None = None,
    public: Examples = (),
) -> Local:
    """One client; `stacked` runs it on torch.func transforms, as a vectorising engine does."""
    main = main or Line()
    return Local(
        {"main": Network(main), "auxiliary": Network(auxiliary or main)},
        plans or Ordered({"train": train, "val": val, "public": public}),
        torch.tensor(0),
        torch.tensor(float(len(train)), dtype=torch.float64),
        torch.tensor(float(round), dtype=torch.float64),
        stacked,
    )


def simulation(
    method: Method,
    clients: Sequence[Examples],
    architecture: Architecture,
    *,
    pooled: bool = False,
    cohort: int | None = None,
) -> Simulation:
    """A federation whose clients train, and are validated, on the given examples."""
    examples = [example for own in clients for example in own]
    starts = np.cumsum([0] + [len(own) for own in clients])
    rows = tuple(np.arange(a, b) for a, b in pairwise(starts))
    dataset = Dataset(
        "tiny",
        np.array([[x] for x, _ in examples], np.float32),
        np.array([y for _, y in examples], np.int64),
        ("no", "yes"),
        np.zeros(1, np.float32),
        np.ones(1, np.float32),
    )
    lessons = TrainData(dataset, rows, rows, tuple(f"client {n}" for n in range(len(rows))))
    return Simulation(
        method,
        [SeededRun(0, lessons.pooled() if pooled else lessons)],
        {"all": architecture},
        cohort=cohort,
        backend=Backend("sequential", "cpu"),
    )


def refuses(method: type[Method], field: str, value: object, rule: str) -> None:
    """The method refuses a setting, and says which, what it got and what it expected."""
    with pytest.raises(ConfigError) as told:
        method(**{field: value})
    one = value[-1] if isinstance(value, tuple) else value
    assert str(told.value) == f"{method.__name__}: {field} is {one!r}, expected {rule}"
