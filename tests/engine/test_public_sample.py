"""The round's public examples: the same for everyone, other ones each round, known by the seed."""

import numpy as np
import pytest
import torch

from idiolect.core.client import Pool, Request
from idiolect.engine.batch_plan import BatchPlanner, ClientRows

CPU = torch.device("cpu")
PUBLIC = 40 + np.arange(20)  # rows of the pool; a second run's examples would stand elsewhere


def book():
    return BatchPlanner(
        {
            "train": Pool(torch.zeros(1), torch.zeros(1)),
            "public": Pool(torch.zeros(60), torch.zeros(60)),
        },
        CPU,
    )


def members(seed=0, clients=(0, 1, 5)):
    return [ClientRows(seed, n, {"train": np.arange(n), "public": PUBLIC}) for n in clients]


def listed(round, *, sample=6, ago=0, of=None, pages=None):
    """Return each client's rows, in order."""
    pages = pages or book()
    pages.turn(of or members(), round)
    plan = pages.ask(Request("public", 4, 1, 0, False, 0, sample, ago))
    return [rows[real > 0].tolist() for rows, real in zip(plan.rows, plan.weight, strict=True)]


def test_everyone_sees_the_same_sample_in_the_same_order():
    first, second, third = listed(3)
    assert first == second == third
    assert len(set(first)) == 6 and set(first) <= set(PUBLIC.tolist())


def test_each_round_has_its_own_and_the_one_before_can_be_asked_for():
    rounds = [listed(round)[0] for round in range(4)]
    assert len({tuple(sorted(rows)) for rows in rounds}) == 4
    assert listed(3, ago=1)[0] == rounds[2]
    assert listed(0, ago=1)[0] == rounds[0]  # nothing lies before


def test_a_run_has_its_own_and_company_does_not_matter():
    assert listed(1)[0] != listed(1, of=members(seed=7))[0]
    assert listed(1)[0] == listed(1, of=members(clients=(5,)))[0]


def test_without_a_sample_there_are_all_in_their_order():
    assert listed(2, sample=0)[0] == PUBLIC.tolist()


@pytest.mark.parametrize("ago", [0, 1])
def test_a_shuffled_plan_says_where_each_example_stands(ago):
    """Places lead from a batch to the row of a teacher, which is in the order of `listed`."""
    pages = book()
    for round in (1, 2, 3):  # refilled in place from the second time on
        pages.turn(members(), round)
        plan = pages.ask(Request("public", 4, 2, 0, True, 0, 6, ago))
        order = np.array(listed(round - ago)[0])
        for rows, places, weight in zip(plan.rows, plan.places, plan.weight, strict=True):
            assert (order[places[weight > 0]] == rows[weight > 0].numpy()).all()
            assert sorted(places[weight > 0].tolist()) == sorted([*range(6)] * 2)
    own = [rows[real > 0].tolist() for rows, real in zip(plan.rows, plan.weight, strict=True)]
    assert own[0] != own[1]  # everyone shuffles for itself


def test_a_kept_plan_is_refilled_with_the_new_rounds_sample():
    pages = book()
    listed(0, pages=pages)
    assert listed(1, pages=pages) == listed(1)
    assert pages.turn(members(), 2)


def test_private_examples_have_no_place():
    pages = book()
    pages.turn(members(), 0)
    assert pages.ask(Request("train", 4, 1, 0, True, 0)).places is None


def test_the_very_same_clients_get_the_new_rounds_sample_too():
    """Plans that only the clients decide are kept for them; a sample is decided by the round."""
    pages, same = book(), members()
    for round in (0, 1, 2):
        assert listed(round, pages=pages, of=same) == listed(round)
        assert listed(round, pages=pages, of=same, ago=1) == listed(max(round - 1, 0))
