"""What a client does once: just before its first round, whenever that is, and never again."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pytest
import torch

import worlds
from idiolect.core import tree
from idiolect.core.capabilities import Preparation, has
from idiolect.core.method import Method, Report, Sent
from idiolect.engine.architecture import Architecture
from idiolect.engine.deployment_runtime import ClientIdentity, ClientRuntime

COHORT, ROUNDS = 2, 4


class Diary(NamedTuple):
    """How often a client prepared, in which round, and how often it stepped after that."""

    prepared: torch.Tensor
    when: torch.Tensor
    steps: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class Noted(Preparation, Method):
    """Writes a diary."""

    def init_personal(self, setup):
        return Diary(*(torch.zeros(()) for _ in range(3)))

    def prepare(self, sent, personal, local):
        assert local.size is not None
        return Diary(personal.prepared + 1, local.round + 1, personal.steps)

    def client_step(self, sent, personal, local):
        kept = personal._replace(steps=personal.steps + personal.prepared)
        return Report(sent.shared, local.size), kept


def simulation(kind="vectorised", cohort=COHORT):
    return worlds.simulation(Noted(), worlds.federation(), kind=kind, cohort=cohort)


@pytest.mark.parametrize("kind", ["vectorised", "sequential"])
@pytest.mark.parametrize("cohort", [COHORT, None])
def test_everyone_prepares_before_the_first_round_it_is_in(kind, cohort):
    world, drawn = simulation(kind, cohort), []
    for _ in range(ROUNDS):
        drawn.append(world.cohort(0))
        world.advance()
    diary = world.tree["personal"][0]
    for client in range(6):
        rounds = [n + 1 for n, own in enumerate(drawn) if client in own]
        expected = (1.0, rounds[0], len(rounds)) if rounds else (0.0, 0.0, 0.0)
        assert tuple(float(leaf[client]) for leaf in diary) == expected
    if cohort:
        assert 1 < len({float(when) for when in diary.when})  # not all of them in the first


def test_a_resumed_run_prepares_nobody_twice():
    whole, first, second = simulation(), simulation(), simulation()
    for _ in range(ROUNDS):
        whole.advance()
    first.advance()
    second.tree, second.round = first.tree, first.round
    while second.round < ROUNDS:
        second.advance()
    assert not worlds.differing(whole.tree, second.tree)


def test_a_node_prepares_with_its_first_round_and_keeps_nothing_by_itself():
    """A first round that failed is asked for again: it must find the state as it was."""
    world = worlds.federation().subset([1])
    alone = ClientRuntime(
        Noted(),
        ClientIdentity(1, 6, 0),
        world.train_data,
        world.test[0],
        Architecture(worlds.Normed),
        torch.device("cpu"),
    )
    for _ in range(2):
        _, kept = alone.first(alone.form, 3)
        assert [float(leaf) for leaf in kept] == [1.0, 4.0, 1.0]
        assert not any(float(leaf) for leaf in alone.personal)
    with pytest.raises(RuntimeError):
        alone.first(Sent(shared={"fc1.weight": torch.zeros(1, device="meta")}), 3)
    assert not any(float(leaf) for leaf in alone.personal)
    alone.personal = kept
    _, kept = alone.step(alone.form, 5)
    assert [float(leaf) for leaf in kept] == [1.0, 4.0, 2.0]


def test_a_method_without_such_a_thing_runs_nothing_more():
    assert has(Noted(), Preparation) and not has(Method(), Preparation)
    world = worlds.simulation(Method(), worlds.federation())
    np.testing.assert_array_equal(world.cohort(0), np.arange(5))
    assert tree.leaves(world.tree["personal"]) == []
