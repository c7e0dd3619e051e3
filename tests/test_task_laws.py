"""The laws of the design for regression, labels and survival: what every method must keep.

All methods learn numbers; those with losses, teachers, mixtures or choices of their own learn
every task. The world is that of `test_laws`.
"""

import dataclasses

import numpy as np
import pytest
import torch

import worlds
from idiolect.core import tree
from idiolect.errors import ConfigError
from idiolect.methods import METHODS
from idiolect.methods.personalise.combined import Combined
from test_laws import TIGHT, End, ended, made

CLASSES_ONLY = {name for name, method in METHODS.items() if method.needs_classes}
OWN_LOSSES = ("persfl", "ktpfl", "fedmd", "feddf", "fml", "portfolio", "fedavg+parts")
KINDS = ("number", "labels", "cox", "discrete", "weighted")
every_pair = pytest.mark.parametrize(
    ("name", "kind"), [(name, kind) for kind in KINDS for name in OWN_LOSSES]
)


def method(name):
    if name != "fedavg+parts":
        return made(name)
    parts = (("ft", "kd", "ewc", "moe"), ("fb",), ("moe",))
    return Combined(made("fedavg"), combinations=parts, expert_epochs=1, tune_epochs=1)


def world_of(kind, *arguments, **options):
    return worlds.with_task(worlds.with_public(*arguments, **options), kind)


def play(name, task, world=None, **options):
    world = world or world_of(task)
    used = method(name)
    build = worlds.network_for(task, worlds.network_of(used))
    simulation = worlds.simulation(used, world, build=build, cohort=3, **options)
    return ended(simulation, [world.test_data])


@every_pair
def test_vectorised_equals_sequential(name, kind, float64):
    """Ragged clients are padded in one, not in the other; something is learnt from the labels."""
    left = play(name, kind)
    right = play(name, kind, kind="sequential", width=None)
    assert not worlds.differing(left, right, TIGHT)
    numbers = tree.leaves((left.server, left.deployed))
    assert all(leaf.isfinite().all() for leaf in numbers if leaf.is_floating_point())


@pytest.mark.parametrize("name", sorted(set(METHODS) - CLASSES_ONLY - set(OWN_LOSSES)))
def test_every_method_learns_numbers(name):
    left = play(name, "number")
    numbers = tree.leaves((left.server, left.deployed))
    assert all(leaf.isfinite().all() for leaf in numbers if leaf.is_floating_point())


@pytest.mark.parametrize("kind", ["number", "discrete", "weighted"])
def test_seeds_with_units_of_their_own_train_together_as_alone(kind, float64):
    """Each has its own mean and deviation, cut points or class weights; examples are shared."""
    first = world_of(kind)
    order = np.random.default_rng(3).permutation(len(first.dataset))
    moved = [tuple(order[rows] for rows in part) for part in (first.train, first.val, first.test)]
    fresh = dataclasses.replace(first.dataset, task=worlds.TASKS[kind][0])
    second = dataclasses.replace(first, dataset=fresh, train=moved[0], val=moved[1], test=moved[2])
    assert second.dataset.task != first.dataset.task
    together = ended(
        worlds.simulation(
            method("fedavg+parts"),
            [first, second],
            seeds=(0, 7),
            cohort=3,
            build=worlds.network_for(kind),
        ),
        [first.test_data, second.test_data],
    )
    alone = play("fedavg+parts", kind, second, seeds=(7,))
    mine = End(
        together.server[1:2],
        tree.map(lambda leaf: leaf[6:12], together.personal),
        together.deployed[1:2],
    )
    assert not worlds.differing(alone, mine, TIGHT)


@pytest.mark.parametrize("kind", ["number", "cox", "discrete", "weighted"])
def test_labels_and_units_of_test_rows_change_no_tree(kind, float64):
    world = world_of(kind)
    rows = np.concatenate(world.test)
    y = world.dataset.y.copy()
    y[rows] = {"number": 1e6, "weighted": 0}.get(kind, 1)
    changed = dataclasses.replace(world.dataset, y=y, task=worlds.TASKS[kind][0])
    other = dataclasses.replace(world, dataset=changed)
    assert other.dataset.task == world.dataset.task
    assert not worlds.differing(play("fedavg", kind), play("fedavg", kind, other))


@pytest.mark.parametrize("kind", worlds.TASKS)
def test_training_lowers_the_loss(kind, float64):
    world = world_of(kind, (40, 30, 20))
    method = dataclasses.replace(made("fedavg"), lr=0.3, momentum=0.0, batch=10)
    simulation = worlds.simulation(method, world, build=worlds.network_for(kind))
    losses = []
    for _ in range(2):
        scores = simulation.evaluate([world.test_data])[0].scores
        losses.append(np.nanmean(scores["global"]["val_loss"]))
        for _ in range(8):
            simulation.advance()
    assert losses[1] < losses[0]


@pytest.mark.parametrize("name", sorted(CLASSES_ONLY))
def test_methods_that_need_classes_say_so(name):
    world = world_of("number")
    with pytest.raises(ConfigError, match="for each class, and task number"):
        worlds.simulation(made(name), world, build=worlds.network_for("number"))


def test_weights_count_in_training_as_repeated_rows_do(float64):
    """A class of weight 3 trains as if its rows were there three times, in one batch of all."""
    base = worlds.federation((6,), [1])
    y = base.dataset.y.copy()
    y[base.train[0]] = [0, 0, 1, 1, 2, 2]
    weights = dataclasses.replace(worlds.TASKS["weighted"][0], balanced=False, weights=(3.0, 1, 1))
    weighted = dataclasses.replace(
        base, dataset=dataclasses.replace(base.dataset, y=y, task=weights)
    )
    rows = base.train[0]
    x = np.concatenate([base.dataset.x, base.dataset.x[rows[:2]], base.dataset.x[rows[:2]]])
    longer = np.concatenate([y, [0, 0, 0, 0]])
    more = np.arange(len(y), len(longer))
    repeated = dataclasses.replace(
        base,
        dataset=dataclasses.replace(base.dataset, x=x, y=longer),
        train=(np.concatenate([rows, more]),),
    )
    method = dataclasses.replace(made("fedavg"), batch=16, momentum=0.0)
    ends = []
    for world in (weighted, repeated):
        simulation = worlds.simulation(method, world)
        simulation.advance()
        ends.append(simulation.tree["server"])
    assert not worlds.differing(*ends, 1e-6)
    assert torch.get_default_dtype() == torch.float64
