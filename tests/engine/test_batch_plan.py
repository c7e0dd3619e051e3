"""Batch plans: every example once in an epoch, and nobody's batches depend on the others."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from idiolect.core.client import Pool, Request
from idiolect.engine.batch_plan import BatchPlanner, ClientRows

CPU = torch.device("cpu")
POOL = Pool(torch.zeros(1), torch.zeros(1))


def book(limit=None):
    return BatchPlanner({"train": POOL, "val": POOL}, CPU, limit)


def members(sizes, seed=0, first=0):
    """Give each client a hundred numbers of its own: client 2 holds rows 200, 201, ..."""
    return [
        ClientRows(seed, n, {"train": 100 * n + np.arange(size), "val": 100 * n + np.arange(size)})
        for n, size in enumerate(sizes, first)
    ]


def request(batch=3, epochs=1, steps=0, shuffled=True, call=0, stream="train"):
    return Request(stream, batch, epochs, steps, shuffled, call)


def drawn(of, wanted, round=0, limit=None):
    """Return each client's batches as lists of rows without padding, empty steps left out."""
    pages = book(limit)
    pages.turn(of, round)
    plan = pages.ask(wanted)
    batches = [
        [rows[real > 0].tolist() for rows, real in zip(index, weight, strict=True)]
        for index, weight in zip(plan.rows, plan.weight, strict=True)
    ]
    return [[batch for batch in own if batch] for own in batches]


sizes = st.lists(st.integers(0, 12), min_size=1, max_size=6)


@given(sizes, st.integers(1, 8), st.integers(1, 3), st.integers(0, 9))
def test_every_example_comes_once_in_every_epoch(sizes, batch, epochs, round):
    for n, own in enumerate(drawn(members(sizes), request(batch, epochs), round)):
        steps = -(-sizes[n] // batch)
        assert len(own) == epochs * steps
        for epoch in range(epochs):
            seen = own[epoch * steps : (epoch + 1) * steps]
            assert all(len(one) == batch for one in seen[:-1])
            rows = [row for one in seen for row in one]
            assert sorted(rows) == list(range(100 * n, 100 * n + sizes[n]))


@given(sizes, st.integers(1, 6), st.integers(0, 20), st.randoms(use_true_random=False))
def test_a_clients_batches_do_not_depend_on_its_company(sizes, batch, round, chance):
    """Alone, in a block of some, in another order: the same batches."""
    everyone = members(sizes)
    wanted = request(batch, epochs=2)
    together = drawn(everyone, wanted, round)
    some = chance.sample(everyone, chance.randint(1, len(everyone)))
    for member, own in zip(some, drawn(some, wanted, round), strict=True):
        assert own == together[member.client]
        assert drawn([member], wanted, round) == [own]


def test_seed_round_client_and_call_each_draw_anew():
    """Nine rows have 362,880 orders; the clients here hold the same rows."""
    rows = {"train": np.arange(9)}
    orders = {
        tuple(drawn([ClientRows(seed, client, rows)], request(9, call=call), round)[0][0])
        for seed in range(2)
        for client in range(2)
        for round in range(2)
        for call in range(2)
    }
    assert len(orders) == 16


def test_epochs_are_shuffled_apart_and_a_longer_plan_begins_as_a_shorter_one():
    (own,) = drawn(members([9]), request(9, epochs=2))
    assert own[0] != own[1]
    assert drawn(members([9]), request(9, epochs=1)) == [own[:1]]


@pytest.mark.parametrize(("size", "steps"), [(7, 2), (7, 3), (7, 8), (2, 4), (0, 5)])
def test_steps_cut_or_repeat_epochs(size, steps):
    """As many steps as asked, whatever the epochs say; without data none."""
    (own,) = drawn(members([size]), request(3, epochs=9, steps=steps))
    assert len(own) == (steps if size else 0)
    per_epoch = -(-size // 3)
    whole = drawn(members([size]), request(3, epochs=9))[0]
    assert own == whole[:steps] and all(own[:per_epoch])


def test_constant_plans_are_in_order_and_the_same_in_every_round():
    for round in (0, 5):
        own = drawn(members([5, 2]), request(2, shuffled=False, stream="val"), round)
        assert own == [[[0, 1], [2, 3], [4]], [[100, 101]]]


def test_limit_cuts_plans_for_trials():
    whole = drawn(members([9, 4, 2]), request(2))
    assert drawn(members([9, 4, 2]), request(2), limit=3) == [own[:3] for own in whole]


@pytest.mark.parametrize(
    ("sizes", "certain", "longest", "steps"),
    [([9, 4], 2, 9, 3), ([9, 9], 3, 9, 3), ([4, 0], 0, 4, 2), ([0], 0, 0, 1), ([2], 1, 2, 1)],
)
def test_what_a_plan_says_of_itself(sizes, certain, longest, steps):
    """Batches of three: steps that all clients fill at least in part need no mask."""
    pages = book()
    pages.turn(members(sizes), 0)
    plan = pages.ask(request(3))
    assert (plan.certain, plan.longest, plan.rows.shape[1]) == (certain, longest, steps)
    assert plan.weight.sum() == sum(sizes) and plan.rows.min() >= 0
    assert (pages.examples, pages.planned) == (sum(sizes), len(sizes) * steps * 3)


def test_plans_are_refilled_in_place():
    """A captured graph reads the very tensors of the first round."""
    pages = book()
    pages.turn(members([5, 4]), 0)
    shuffled, constant = pages.ask(request()), pages.ask(request(shuffled=False, stream="val"))
    old = shuffled.rows.clone(), constant.rows.clone()
    assert pages.turn(members([5, 4], first=3), 1)
    assert pages.ask(request()) is shuffled
    assert pages.ask(request(shuffled=False, stream="val")) is constant
    assert pages.examples == 9  # the constant plan trains nobody
    fresh = book()
    fresh.turn(members([5, 4], first=3), 1)
    assert torch.equal(shuffled.rows, fresh.ask(request()).rows)
    assert not torch.equal(shuffled.rows, old[0]) and not torch.equal(constant.rows, old[1])


def test_another_shape_is_told_and_made_anew():
    pages = book()
    pages.turn(members([5, 4]), 0)
    before = pages.ask(request())
    assert not pages.turn(members([5, 3, 2]), 1)
    assert pages.ask(request()) is not before
    assert pages.examples == 10
    for round, sizes in enumerate(([9, 4, 4], [9, 1, 1]), 2):
        # More steps; then fewer steps that everyone fills, for which the mask is needed.
        assert not pages.turn(members(sizes), round), sizes
        pages.ask(request())
    # A longer certain stretch and another longest client fit into the plan as it is, masked.
    plan = pages.ask(request())
    assert pages.turn(members([8, 4, 4]), 9)
    assert pages.ask(request()) is plan and plan.weight.sum() == 16


def test_a_constant_plan_of_another_length_is_made_anew():
    """`rows` gives one output for each example, so the plan must know how many there are."""
    pages = book()
    constant = request(shuffled=False, stream="val")
    pages.turn(members([5, 4]), 0)
    before = pages.ask(constant)
    assert not pages.turn(members([4, 4]), 1)
    assert pages.ask(constant) is not before and pages.ask(constant).longest == 4


def test_the_same_clients_with_other_rows_get_other_plans():
    """What a client is examined on may change while the client stays."""
    pages = book()
    wanted = request(2, shuffled=False)
    pages.turn([ClientRows(0, 0, {"train": np.array([1, 2])})], 0)
    assert pages.ask(wanted).rows.tolist() == [[[1, 2]]]
    pages.turn([ClientRows(0, 0, {"train": np.array([3, 4])})], 0)
    assert pages.ask(wanted).rows.tolist() == [[[3, 4]]]


@pytest.mark.parametrize(
    ("batch", "sizes", "wide"),
    [
        (500, (3, 2), 8),  # 500 → 250 → 125 → 63 → 32 → 16 → 8
        (500, (9, 2), 16),
        (500, (250, 1), 250),
        (500, (251, 1), 500),
        (32, (40, 1), 32),
        (9, (1, 0), 5),
        (8, (1, 1), 8),
        (4, (1,), 4),
    ],
)
def test_places_that_nobody_needs_are_left_out(batch, sizes, wide):
    """Halves of the batch, as long as the longest client's rows fit; every row is there once."""
    ends = np.cumsum([0, *sizes])
    rows = [np.arange(ends[n], ends[n + 1]) for n in range(len(sizes))]
    pool = Pool(torch.zeros(sum(sizes), 1), torch.zeros(sum(sizes), dtype=torch.int64))
    book = BatchPlanner({"train": pool}, torch.device("cpu"))
    book.turn([ClientRows(0, n, {"train": own}) for n, own in enumerate(rows)], 0)
    plan = book.ask(Request("train", batch, 1, 0, True, 0))
    assert plan.rows.shape == (len(sizes), max(1, -(-max(sizes) // batch)), wide)
    for n, own in enumerate(rows):
        assert sorted(plan.rows[n][plan.weight[n] > 0].tolist()) == own.tolist()


def test_batches_drawn_ahead_are_those_of_their_round(monkeypatch):
    """For the round and clients they were drawn for, and for no others; then nothing is drawn."""
    one = members([7, 5, 2])
    other = members([7, 5, 2], first=3)
    wanted = [request(), request(call=1), request(shuffled=False, stream="val")]

    def filled(ahead, of, round):
        pages = book()
        pages.turn(one, 0)
        plans = [pages.ask(request) for request in wanted]
        if ahead is not None:
            pages.prepare(*ahead)
        assert pages.turn(of, round)
        return [plan.rows.tolist() for plan in plans] + [plan.weight.tolist() for plan in plans]

    for of, round in ((one, 4), (other, 4), (one, 5)):
        expected = filled(None, of, round)
        for ahead in ((one, 4), (other, 4), (members([9, 9, 9]), 4)):
            assert filled(ahead, of, round) == expected

    pages = book()
    pages.turn(one, 0)
    pages.ask(request())
    pages.prepare(one, 1)
    monkeypatch.setattr("idiolect.engine.batch_plan._drawn", None)
    assert pages.turn(one, 1)
    with pytest.raises(TypeError):  # used up
        pages.turn(one, 1)
