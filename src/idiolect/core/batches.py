"""What a client's batches are, and how they are asked for: the words between data and methods."""

from collections.abc import Callable
from typing import NamedTuple, Protocol, Required, TypedDict

import torch
from torch import Tensor, nn

from idiolect.core.tree import transformed
from idiolect.kernels import gpu_batches


class Batch(NamedTuple):
    """Examples of one step; `weight` is 0 for padding, `row` is the place in the pool.

    `y` is what the task's loss takes, see `core.task`. Where an example is a sequence with a label
    for each of its places, `y` and `weight` are [example, place]: losses and means are then over
    labels, whichever example they belong to. In training a rare class may weigh more than 1.

    `place` is the place in the round's public examples, in the order in which `rows` gives them:
    what a teacher's row is looked up by. Private examples have none.
    """

    x: Tensor
    y: Tensor
    weight: Tensor  # [example], or of the shape of a sequence's y
    row: Tensor
    training: bool = False
    place: Tensor | None = None


class Pool(NamedTuple):
    """Examples on the device; where they are stored as bytes, a batch is decoded when taken.

    Runs may share examples and scale them differently (`several`): then `shift` and `inverse_scale`
    have a row for each scaling, and row n is example n % len(x) decoded by scaling n // len(x).
    """

    x: Tensor
    y: Tensor  # as the task's loss takes it; [example, place] of sequences: -1 for no label
    shift: Tensor | None = None  # None: stored as the network takes them
    inverse_scale: Tensor | None = None
    several: bool = False
    importance: Tensor | None = None  # of each row in a training loss; None: all alike

    def examples(self, rows: Tensor) -> Tensor:
        """Return decoded examples."""
        shift, factor = self.shift, self.inverse_scale
        if self.several and shift is not None and factor is not None:
            which, own = rows // len(self.x), rows % len(self.x)
            return (self._taken(own).to(shift.dtype) - shift[which]) * factor[which]
        if self.several:  # tokens: only labels differ between the runs
            return self._taken(rows % len(self.x))
        if rows.is_cuda and shift is not None and factor is not None:
            if gpu_batches.suits_take(self.x, shift, factor):
                return gpu_batches.take(self.x, rows, shift, factor)
        return self.decode(self._taken(rows))

    def _taken(self, rows: Tensor) -> Tensor:
        """Return examples as they are stored."""
        if rows.is_cuda:
            return self.x[rows]
        if rows.dim() == 1 and not transformed():
            return torch.index_select(self.x, 0, rows)
        # On a CPU an index copies number by number, and a lookup whole rows, mapped or not.
        taken = nn.functional.embedding(rows, self.x.reshape(len(self.x), -1))
        return taken.reshape(*rows.shape, *self.x.shape[1:])

    def labels(self, rows: Tensor) -> Tensor:
        """Return the labels of examples: whole numbers, or real ones."""
        found = self.y[rows % len(self.y) if self.several else rows]
        real = found.is_floating_point()
        return found.to(torch.get_default_dtype() if real else torch.int64)

    def weighed(self, rows: Tensor, weight: Tensor) -> Tensor:
        """Return the weights of examples in a training loss."""
        if self.importance is None:
            return weight
        return weight * self.importance[rows % len(self.importance) if self.several else rows]

    def decode(self, x: Tensor) -> Tensor:
        """Turn stored examples of the first scaling into what the network takes."""
        if self.shift is None or self.inverse_scale is None:
            return x
        if self.several:
            return (x.to(self.shift.dtype) - self.shift[0]) * self.inverse_scale[0]
        return (x.to(self.shift.dtype) - self.shift) * self.inverse_scale


class Request(NamedTuple):
    """Which batches client code asks for; equal requests of a round get equal batches."""

    stream: str
    batch: int
    epochs: int = 1
    steps: int = 0  # 0: as many as the epochs take
    shuffled: bool = True
    call: int = 0  # number of the request in the client's round
    sample: int = 0  # of the public examples, drawn anew each round and alike for all; 0: all
    ago: int = 0  # the sample of so many rounds before
    share: float = 1.0  # of a client's own examples: a random subset, fixed for the request

    def subset(self, held: int) -> int:
        """Return how many of a client's examples are used: the share, rounded down, at least 1."""
        return held if self.share == 1 else min(held, max(1, int(self.share * held + 1e-9)))


class Batching(TypedDict, total=False):
    """The options of `Local.scan` and `Local.fit`: fields of `Request`."""

    batch: Required[int]
    epochs: int
    steps: int
    sample: int
    ago: int
    share: float


class Plan(NamedTuple):
    """The batches of a block of clients; client code sees the row of its own slot."""

    pool: Pool
    rows: Tensor  # [client, step, example] of the pool
    weight: Tensor  # [client, step, example] 1 for an example, 0 for padding
    certain: int  # this many first steps hold examples for every client of the block
    longest: int  # examples of the client that has most
    places: Tensor | None = None  # like `rows`: places in the round's public examples
    needed: Callable[[], int] | None = None  # how many steps hold examples now; None: all, always


class Pulse(Protocol):
    """Is told how far a client's long work is, to show that it is not stuck."""

    def step(self, number: int, steps: int) -> None:
        """So many steps of a scan are done."""

    def turn(self, number: int, turns: int) -> None:
        """Begin a repetition, numbered, of work that is done several times."""


class Plans(Protocol):
    """What supplies batch plans: the engine for a simulated block, a node for its own data."""

    def ask(self, request: Request) -> Plan:
        """Return the plan for a request; the same one if asked again in the same round."""

    def keys(self) -> Tensor:
        """Return each client's key for random numbers in this round: [client]."""

    @property
    def clients(self) -> int:
        """How many clients of a block work side by side."""
