"""What a client's batches are, and how they are asked for: the words between data and methods."""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from idiolect.stacked import taking


class Batch(NamedTuple):
    """Examples of one step; `weight` is 0 for padding, `row` is the place in the pool.

    Where an example is a sequence with a label for each of its places, `y` and `weight` are
    [example, place]: losses and means are then over labels, whichever example they belong to.

    `place` is the place in the round's public examples, in the order in which `rows` gives them:
    what a teacher's row is looked up by. Private examples have none.
    """

    x: Tensor
    y: Tensor
    weight: Tensor  # of the shape of y
    row: Tensor
    training: bool = False
    place: Tensor | None = None


class Pool(NamedTuple):
    """Examples on the device; where they are stored as bytes, a batch is decoded when taken."""

    x: Tensor
    y: Tensor  # [example], or [example, place] with -1 where a place has no label
    shift: Tensor | None = None  # None: stored as the network takes them
    inverse_scale: Tensor | None = None

    def examples(self, rows: Tensor) -> Tensor:
        """Return decoded examples."""
        if rows.is_cuda:
            shift, factor = self.shift, self.inverse_scale
            if shift is None or factor is None or not taking.suits(self.x, shift, factor):
                return self.decode(self.x[rows])
            return taking.take(self.x, rows, shift, factor)
        # On a CPU an index copies number by number, and a lookup whole rows, mapped or not.
        taken = nn.functional.embedding(rows, self.x.reshape(len(self.x), -1))
        return self.decode(taken.reshape(*rows.shape, *self.x.shape[1:]))

    def labels(self, rows: Tensor) -> Tensor:
        """Return the labels of examples."""
        return self.y[rows].to(torch.int64)

    def decode(self, x: Tensor) -> Tensor:
        """Turn stored examples into what the network takes."""
        if self.shift is None or self.inverse_scale is None:
            return x
        return (x.to(self.shift.dtype) - self.shift) * self.inverse_scale


class Request(NamedTuple):
    """Which batches client code asks for; equal requests of a round get equal batches."""

    stream: str
    batch: int
    epochs: int
    steps: int  # 0: as many as the epochs take
    shuffled: bool
    call: int
    sample: int = 0  # of the public examples, drawn anew each round and alike for all; 0: all
    ago: int = 0  # the sample of so many rounds before


class Plan(NamedTuple):
    """The batches of a block of clients; client code sees the row of its own slot."""

    pool: Pool
    rows: Tensor  # [client, step, example] of the pool
    weight: Tensor  # [client, step, example] 1 for an example, 0 for padding
    certain: int  # this many first steps hold examples for every client of the block
    longest: int  # examples of the client that has most
    places: Tensor | None = None  # like `rows`: places in the round's public examples


class Plans(Protocol):
    """Where plans come from: an engine that simulates a block, or a node with its own data."""

    def ask(self, request: Request) -> Plan:
        """Return the plan for a request; the same one if asked again in the same round."""

    @property
    def clients(self) -> int:
        """How many clients of a block work side by side."""
