"""On a GPU everybody's round may be computed where half of the clients are drawn: nothing changes.

The engine does it to replay a captured round; here it is switched on for a CPU.
"""

import pytest
import torch

import worlds
from idiolect.core import tree
from idiolect.methods import APFL, Ditto, FedAMP, FedAvg, FedFomo, FedRep, Scaffold


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


def test_not_for_a_few_of_many():
    _, wide = simulations(FedAvg(), cohort=2)
    wide.advance()
    assert sum(len(own._train_plans._members) for own in wide.groups[0]._active["step"]) == 2
