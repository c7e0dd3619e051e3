"""Clients outside the cohort may train too: their own state moves, the server does not hear."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch

import worlds
from idiolect.core import tree
from idiolect.core.capabilities import ArchitectureState, has
from idiolect.errors import ConfigError
from idiolect.methods import METHODS, PFML, Ditto, FedAvg

ABLE = [0, 1, 2, 3, 4]  # the sixth client has nothing to train on


def rows(simulation):
    return simulation.groups[0].store.take(torch.arange(6))


def same(left, right):
    pairs = zip(tree.leaves(left), tree.leaves(right), strict=True)
    return all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in pairs)


@pytest.mark.parametrize("method", [PFML(), Ditto()])
def test_the_server_hears_the_cohort_and_everyone_trains(method):
    world = worlds.federation()
    resting = worlds.simulation(method, world, cohort=2)
    training = worlds.simulation(method, world, cohort=2, bystanders="train")
    everyone = worlds.simulation(method, world)
    heard = training.cohort(0).tolist()
    for simulation in (resting, training, everyone):
        simulation.advance()
    assert same(training.states, resting.states)
    assert not same(training.states, everyone.states)
    for client in range(6):
        moved, alone, all_of_them = (
            tree.take(rows(simulation), torch.tensor([client]))
            for simulation in (training, resting, everyone)
        )
        assert same(moved, all_of_them)
        assert same(moved, alone) == (client in heard or client == 5)


def test_vectorised_is_sequential_over_rounds():
    sides = [
        worlds.simulation(PFML(), worlds.federation(), cohort=2, bystanders="train", kind=kind)
        for kind in ("vectorised", "sequential")
    ]
    for side in sides:
        for _ in range(3):
            side.advance()
    assert same(sides[0].tree, sides[1].tree)


def test_bystanders_are_sent_the_model_and_send_nothing():
    world = worlds.federation()
    (whole,) = worlds.simulation(PFML(), world).advance().traffic
    (some,) = worlds.simulation(PFML(), world, cohort=2, bystanders="train").advance().traffic
    assert some.bytes_down == whole.bytes_down
    assert some.bytes_up * len(ABLE) == whole.bytes_up * 2


def test_nobody_is_a_stranger_who_trained():
    simulation = worlds.simulation(PFML(), worlds.federation(), cohort=2, bystanders="train")
    assert simulation.strangers(0).tolist() == [0, 1, 2, 3, 4, 5]
    simulation.advance()
    assert simulation.strangers(0).tolist() == [5]


def test_training_that_leaves_no_trace_is_not_done():
    world = worlds.federation()
    done = worlds.simulation(FedAvg(), world, cohort=2, bystanders="train").advance()
    assert done.traffic[0].clients == 2


@dataclass(frozen=True, kw_only=True)
class Ruined(Ditto):
    """The personal models of clients 1 and 3 turn into NaN, their reports do not."""

    def client_step(self, sent, personal, local):
        report, personal = super().client_step(sent, personal, local)
        bad = (local.size == 4) | (local.size == 9)
        return report, tree.map(lambda leaf: torch.where(bad, float("nan"), leaf), personal)


def test_a_broken_bystander_keeps_what_it_had():
    simulation = worlds.simulation(
        Ruined(), worlds.federation(), cohort=1, bystanders="train", kind="sequential"
    )
    before = rows(simulation)
    while simulation.cohort(0)[0] in (1, 3):
        simulation.round += 1  # to a cohort that is not ruined itself
    (left_out,) = simulation.advance().left_out
    assert sorted(left_out.tolist()) == [1, 3]
    kept = torch.tensor([1, 3])
    assert same(tree.take(rows(simulation), kept), tree.take(before, kept))
    assert not same(tree.take(rows(simulation), torch.tensor([2])), tree.take(before, kept[:1]))


def test_methods_whose_groups_hear_everyone_refuse():
    grouped = [name for name, method in METHODS.items() if has(method(), ArchitectureState)]
    assert grouped
    for name in grouped:
        options = {"sample": 4} if hasattr(METHODS[name](), "sample") else {}
        with pytest.raises(ConfigError, match="bystanders = 'train' does not go with"):
            worlds.simulation(
                METHODS[name](**options), worlds.with_public(), cohort=2, bystanders="train"
            )


def test_attendance_is_a_function_of_the_round():
    simulation = worlds.simulation(PFML(), worlds.federation(), cohort=2, bystanders="train")
    resting = worlds.simulation(PFML(), worlds.federation(), cohort=2)
    for _ in range(3):
        assert np.array_equal(simulation.cohort(0), resting.cohort(0))
        simulation.advance(), resting.advance()
