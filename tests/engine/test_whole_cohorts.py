"""On a GPU everybody's round may be computed where half of the clients are drawn: nothing changes.

The engine does it to replay a captured round; here it is switched on for a CPU.
"""

import pytest
import torch

import worlds
from idiolect.aggregation import Attacked
from idiolect.aggregation.attacks import Broken, Gaussian, SignFlip
from idiolect.core import tree
from idiolect.methods import APFL, Centralised, Ditto, FedAMP, FedAvg, FedFomo, FedRep, Scaffold


def same(left, right):
    pairs = zip(tree.leaves(left), tree.leaves(right), strict=True)
    return all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in pairs)


def simulations(method, **more):
    sides = [worlds.simulation(method, worlds.federation(), **more) for _ in range(2)]
    for group in sides[1].groups:
        group._replays = True
    return sides


@pytest.mark.parametrize(
    "method", [FedAvg(), Ditto(), FedRep(), APFL(), Scaffold(), FedAMP(), FedFomo()]
)
def test_what_the_others_computed_is_thrown_away(method):
    plain, wide = simulations(method, cohort=3)
    for _ in range(4):
        one, other = plain.advance(), wide.advance()
        assert same(plain.tree, wide.tree)
        assert one.traffic == other.traffic and one.examples == other.examples
    computed = sum(len(runner._train_plans._members) for runner in wide.groups[0]._active["step"])
    assert computed == 5  # the sixth client has nothing to train on


def test_padding_is_that_of_what_was_computed():
    _, wide = simulations(FedAvg(), cohort=3)
    wide.advance()
    group = wide.groups[0]
    runners = group._active["step"]
    full = sum(own.examples for own in runners) / sum(own.planned for own in runners)
    assert group.padding("step") == pytest.approx(1 - full, abs=0.02)  # both counts are rounded


@pytest.mark.parametrize("attack", [SignFlip(), Gaussian(), Broken()])
def test_attackers_that_were_not_drawn_do_nothing(attack):
    method = Attacked(FedAvg(batch=3, lr=0.1), attack, attackers=(1, 2))
    plain, wide = simulations(method, cohort=3)
    for _ in range(4):
        assert plain.advance().traffic == wide.advance().traffic
        assert not worlds.differing(plain.tree, wide.tree, 1e-5)


@pytest.mark.parametrize("method", [Ditto(), Scaffold(), FedFomo()])
def test_runs_side_by_side_with_cohorts_of_any_size(method):
    """Each run draws its own clients, sometimes too few for all to be computed."""
    both = [worlds.federation(), worlds.federation(seed=1)]
    how = {"seeds": (0, 1), "cohort": 3, "draw": "poisson"}
    plain, wide = (worlds.simulation(method, both, **how) for _ in range(2))
    wide.groups[0]._replays = True
    for _ in range(4):
        assert plain.advance().examples == wide.advance().examples
        assert not worlds.differing(plain.tree, wide.tree, 1e-5)


def test_not_for_a_few_of_many():
    _, wide = simulations(FedAvg(), cohort=2)
    wide.advance()
    assert sum(len(own._train_plans._members) for own in wide.groups[0]._active["step"]) == 2


def test_clients_whose_rows_are_pooled_are_one():
    plain, pooled = simulations(Centralised())
    for _ in range(2):
        plain.advance(), pooled.advance()
        assert same(plain.tree, pooled.tree)
