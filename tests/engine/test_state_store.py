"""Personal state of many clients."""

from typing import NamedTuple

import torch

from idiolect.engine.state_store import MemoryStore


class Own(NamedTuple):
    model: torch.Tensor
    round: torch.Tensor


CPU = torch.device("cpu")


def own(value):
    return Own(torch.full((2,), float(value)), torch.tensor(float(value)))


def test_rows_start_from_each_state_in_turn():
    store = MemoryStore([(own(1), 2), (own(5), 3)], CPU)
    assert store.rows.round.tolist() == [1, 1, 5, 5, 5]
    assert store.rows.model.shape == (5, 2)


def test_what_is_put_is_taken_and_nobody_else_moves():
    store = MemoryStore([(own(1), 4)], CPU)
    before = store.rows
    rows = torch.tensor([3, 0])
    store.put(rows, Own(torch.tensor([[30.0, 30.0], [0.0, 0.0]]), torch.tensor([30.0, 0.0])))
    assert store.rows.round.tolist() == [0, 1, 1, 30]
    assert store.take(rows).model.tolist() == [[30, 30], [0, 0]]
    assert before.round.tolist() == [1, 1, 1, 1]  # what a checkpoint holds is not written over


def test_nothing_can_be_kept():
    store = MemoryStore([((), 3)], CPU)
    store.put(torch.tensor([1]), ())
    assert store.take(torch.tensor([1])) == ()
