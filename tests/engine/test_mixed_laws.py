"""The laws with mixed architectures: three clients of one network, three of another.

Every method that exchanges no parameters joins, and so does learning alone.
"""

from functools import cache

import pytest
import torch

import worlds
from idiolect.core import tree
from idiolect.engine.architecture import Architecture
from idiolect.errors import MethodError
from idiolect.methods import METHODS
from test_laws import TIGHT, choose, made

MIXED = [name for name, kind in METHODS.items() if kind.public or name == "local"]
every_mixed_method = pytest.mark.parametrize("name", MIXED)


def simulated(name, architectures=worlds.TWO, cohort=3, changes=(), **options):
    method, world = made(name, **dict(changes)), worlds.with_public()
    return worlds.simulation(method, world, architectures=architectures, cohort=cohort, **options)


def ended(simulation, rounds=3):
    while simulation.round < rounds:
        simulation.advance()
    (verdict,) = simulation.evaluate([worlds.with_public().test_data], keep=True)
    return {**simulation.tree, "deployed": tuple(models for _, models in verdict.deployed)}


@cache
def reference(name):
    assert torch.get_default_dtype() == torch.float64
    return ended(simulated(name))


@every_mixed_method
def test_vectorised_equals_sequential(name, float64):
    left = ended(simulated(name, kind="sequential", width=None))
    assert not worlds.differing(reference(name), left, TIGHT)


@every_mixed_method
def test_resumed_equals_uninterrupted_bit_for_bit(name, float64):
    first = simulated(name)
    first.advance()
    saved = {leaf: value.clone() for leaf, value in tree.named(first.tree).items()}
    second = simulated(name)
    second.tree = tree.like(second.tree, saved)
    second.round = 1
    assert not worlds.differing(reference(name), ended(second))


@every_mixed_method
def test_which_network_is_named_first_changes_nothing(name, float64):
    """Nobody's number, batches or teacher depend on the order of the architectures."""
    turned = ended(simulated(name, dict(reversed(worlds.TWO.items()))))
    kept = reference(name)
    assert not worlds.differing(kept["server"], turned["server"], TIGHT)
    for part in ("personal", "deployed"):
        assert not worlds.differing(kept[part], tuple(reversed(turned[part])), TIGHT)


@every_mixed_method
def test_seeds_trained_together_are_as_trained_alone(name, float64):
    both = [worlds.with_public(), worlds.with_public((2, 8, 4, 1, 6, 3), seed=5)]
    together = worlds.simulation(made(name), both, seeds=(0, 7), architectures=worlds.TWO, cohort=3)
    for _ in range(3):
        together.advance()
    mine = tree.map(lambda leaf: leaf[:3], together.tree["personal"])
    assert not worlds.differing(reference(name)["personal"], mine, TIGHT)
    assert not worlds.differing(reference(name)["server"], together.tree["server"][:1], TIGHT)


@every_mixed_method
def test_everyone_is_scored(name, float64):
    simulation = simulated(name, cohort=None)
    simulation.advance()
    (verdict,) = simulation.evaluate([worlds.with_public().test_data])
    assert verdict.scores["personal"]["accuracy"].shape == (6,)


def test_methods_that_share_parameters_refuse():
    with pytest.raises(MethodError, match="give every client the same network"):
        simulated("fedavg")


THREE = {
    "batched": Architecture(worlds.Batched, clients=(4, 1)),
    "plain": Architecture(worlds.Plain, clients=(5, 0)),
    "normed": Architecture(lambda: worlds.Normed(8), clients=(3, 2)),
}


@every_mixed_method
def test_batch_normalisation_beside_others(name, float64):
    """Running statistics of one architecture, none of the others; a resumed run besides."""
    one, two, half = (
        simulated(name, THREE, **options)
        for options in ({}, {"kind": "sequential", "width": None}, {})
    )
    end = ended(one)
    assert not worlds.differing(end, ended(two), TIGHT)
    half.advance()
    again = simulated(name, THREE)
    again.tree = tree.like(again.tree, tree.named(half.tree))
    again.round = 1
    assert not worlds.differing(end, ended(again))
    moved = [leaf for n, leaf in tree.named(end).items() if n.endswith("norm.running_mean")]
    assert moved and all(float(leaf.abs().max()) > 1e-3 for leaf in moved)


@every_mixed_method
def test_a_round_may_leave_an_architecture_without_anyone(name, float64):
    """Only clients of the first, then only of the second: the others' networks stay as they were.

    Both backends agree; what crossed the network is counted for those who were there. A client that
    is alone is its own teacher: its gradient is rounding, of which Adam would make whole steps.
    """
    ends, changes = [], {"fuse_optimiser": "sgd"}
    for kind in ("vectorised", "sequential"):
        simulation = simulated(name, THREE, changes=changes, kind=kind)
        choose(simulation, (1, 4), (0,), (2, 3))
        for present in range(3):
            before, size = simulation.tree["personal"], (2, 1, 2)[present]
            done = simulation.advance()
            after = simulation.tree["personal"]
            for place in range(3):
                changed = bool(worlds.differing(before[place], after[place]))
                kept = bool(tree.leaves(before[place]))  # some methods leave nothing at a client
                assert changed == (kept and place == present), (present, place)
            (traffic,) = done.traffic
            assert traffic.clients == size and traffic.bytes_up % size == 0
            assert 0 <= simulation.padding() < 1
        ends.append(ended(simulation))
    assert not worlds.differing(*ends, TIGHT)


def test_a_report_is_of_one_form_whatever_the_architecture(float64):
    """KT-pFL: five public examples of three classes and a size, in double precision, each way."""
    simulation = simulated("ktpfl", THREE, cohort=None)
    (traffic,) = simulation.advance().traffic
    clients = 5  # the sixth has nothing to train on
    assert traffic[:3] == (clients, clients * 5 * 3 * 8, clients * (5 * 3 + 1) * 8)
