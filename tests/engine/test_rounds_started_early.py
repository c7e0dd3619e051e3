"""Rounds that are begun before the last one is over, as on a GPU: results know nothing of it."""

import numpy as np
import pytest
import torch

import worlds
from idiolect.core import tree
from idiolect.core.capabilities import ArchitectureState, Averaging, Preparation
from idiolect.core.method import Sent
from idiolect.engine.client_group import CohortRequest
from idiolect.engine.rounds import Simulation
from idiolect.errors import Diverged
from idiolect.methods import FedAvg, FedPer


@pytest.fixture
def begun(monkeypatch):
    """Let every simulation hurry; return the rounds that were begun, in their order."""
    seen = []
    begin = Simulation._start

    def noted(self, round, states):
        seen.append(round)
        return begin(self, round, states)

    monkeypatch.setattr(Simulation, "_starts_early", True)
    monkeypatch.setattr(Simulation, "_start", noted)
    return seen


def equal(left, right):
    pairs = zip(tree.leaves(left), tree.leaves(right), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("cohort", [None, 3])
def test_hurrying_changes_nothing(cohort, monkeypatch, begun):
    """Round after round: states, traffic and what was trained on are those of the round itself."""
    method, world = FedAvg(batch=4), worlds.federation()
    ahead = worlds.simulation(method, world, cohort=cohort)
    done = [(ahead.advance(), ahead.tree) for _ in range(4)]
    assert begun == [0, 1, 2, 3, 4]  # each once, the next before it is asked for
    monkeypatch.setattr(Simulation, "_starts_early", False)
    plain = worlds.simulation(method, world, cohort=cohort)
    for own, state in done:
        expected = plain.advance()
        assert own.traffic == expected.traffic and own.examples == expected.examples
        assert own.crossing == expected.crossing
        assert equal(state, plain.tree)


def test_a_round_begun_early_is_forgotten_where_another_comes(begun):
    """As after a resume: the state is put back, and the round is done again from there."""
    world = worlds.federation()
    simulation = worlds.simulation(FedAvg(batch=4), world)
    simulation.advance()
    first = simulation.tree
    simulation.advance()
    second = simulation.tree
    simulation.tree, simulation.round = first, 1
    simulation.advance()
    assert begun == [0, 1, 2, 1, 2]
    assert equal(simulation.tree, second)


def test_nobody_left_is_told_of_the_right_round(begun):
    world = worlds.federation()
    simulation = worlds.simulation(FedAvg(batch=4, lr=0.01), world)
    simulation.advance()
    bad = tree.map(lambda leaf: torch.full_like(leaf, float("nan")), simulation.states[0])
    simulation.states = [bad]
    with pytest.raises(Diverged, match="round 2, seed"):
        simulation.advance()
    assert simulation.round == 1


def test_only_what_waits_for_nothing_hurries(monkeypatch):
    simulation = worlds.simulation(FedAvg(batch=4), worlds.federation())
    simulation.device, simulation._pace = torch.device("cuda"), 0.001
    assert simulation._starts_early
    simulation._pace = 1.0
    assert not simulation._starts_early
    simulation._pace = 0.001
    for name, value in {"averages": False, "public": "clients"}.items():
        with monkeypatch.context() as other:
            other.setattr(FedAvg, name, value)
            assert not simulation._starts_early, name
    for kind in (ArchitectureState, Preparation):
        with monkeypatch.context() as other:
            other.setattr(FedAvg, "offers", lambda self, asked, k=kind: asked in (k, Averaging))
            assert not simulation._starts_early, kind
    personal = worlds.simulation(FedPer(batch=4), worlds.federation())
    personal.device, personal._pace = torch.device("cuda"), 0.001
    assert not personal._starts_early  # who was broken decides what clients keep


def test_the_order_is_kept_for_the_same_clients_only():
    simulation = worlds.simulation(FedAvg(batch=4), worlds.federation())
    group, members = simulation.groups[0], simulation._trained[0]
    everyone, other = (CohortRequest(own, Sent(), members) for own in (np.arange(3), np.array([4])))
    first = group.ordered([everyone])
    assert group.ordered([everyone]) is first
    assert [key.client for key in group.ordered([other]).keys] == [4]
