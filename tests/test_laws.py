"""The laws of the design, for every registered method: one joins by being listed in METHODS.

The world: six clients with 7, 4, 5, 9, 3 and 0 training examples, the fifth without validation
data; four features, three classes; cohorts of three; double precision, so that a law either holds
to nine digits or is broken.
"""

import dataclasses
import functools
from functools import cache
from typing import NamedTuple

import numpy as np
import pytest
import torch

import worlds
from idiolect.core import tree
from idiolect.core.capabilities import ArchitectureState, Preparation, has
from idiolect.core.client import Network
from idiolect.core.method import Sent
from idiolect.core.tree import Tree
from idiolect.engine import sampling
from idiolect.methods import METHODS

TIGHT = 1e-9
ROUNDS = 2  # in the second, clients and the server go on from what the first has left
SITS_OUT = 3  # a client that the chosen cohorts below leave out

# Small numbers for whichever of these settings a method has; the others keep their defaults.
SETTINGS = {
    "batch": 3,
    "epochs": 1,
    "lr": 0.1,
    "momentum": 0.5,
    "pull": 2.0,
    "inner_lr": 0.1,
    "inner_steps": 2,
    "adapt_lr": 0.1,
    "weight_lr": 0.1,
    "head_epochs": 1,
    "newcomer_epochs": 1,
    "tune_epochs": 1,
    "tune_lr": 0.1,
    "distil_epochs": 1,
    "distil_lr": 0.1,
    "shares": (0.0, 0.5),
    "temperatures": (1.0, 2.0),
    "sample": 5,
    "public_batch": 2,
    "transfer_epochs": 1,
    "private_epochs": 1,
    "drawn": 2,
    "fuse_epochs": 1,
    "cycle": 2,
    "ranks": (1, 2),
    "personal_rank": 1,
    "generator_steps": 2,
    "newcomer_steps": 2,
}

every_method = pytest.mark.parametrize("name", METHODS)
every_federated_method = pytest.mark.parametrize(
    "name", [name for name, method in METHODS.items() if not method.pooled]
)


def weighs(kind):
    return any(field.name == "uniform" for field in dataclasses.fields(kind))


class End(NamedTuple):
    """All trees a simulation ends with."""

    server: Tree
    personal: Tree
    deployed: Tree


def made(name, **changes):
    kind = METHODS[name]
    known = {field.name for field in dataclasses.fields(kind)} - set(kind.unused)
    wanted = {key: value for key, value in {**SETTINGS, **changes}.items() if key in known}
    return kind(**wanted)


def ended(simulation, exams, rounds=ROUNDS):
    while simulation.round < rounds:
        simulation.advance()
    verdicts = simulation.evaluate(exams, keep=True)
    kept = simulation.tree
    return End(kept["server"], kept["personal"], tuple(v.deployed[0][1] for v in verdicts))


def play(name, world=None, *, changes=(), cohort=3, **options):
    world = world or worlds.with_public()
    simulation = worlds.simulation(made(name, **dict(changes)), world, cohort=cohort, **options)
    return ended(simulation, [world.test_data])


@cache
def reference(name):
    """The run that most laws compare with, in double precision."""
    assert torch.get_default_dtype() == torch.float64
    return play(name)


def choose(simulation, *cohorts):
    """Let these clients take part, round by round; a pooled method has only one client."""
    if not simulation.method.pooled:
        simulation.cohort = lambda run: np.array(cohorts[simulation.round], np.int64)
    return simulation


@every_method
def test_vectorised_equals_sequential(name, float64):
    assert not worlds.differing(reference(name), play(name, kind="sequential", width=None), TIGHT)


@every_method
def test_vectorised_equals_sequential_in_single_precision(name):
    left, right = play(name), play(name, kind="sequential", width=None)
    assert not worlds.differing(left, right, 1e-5)


@every_method
def test_vectorised_equals_sequential_with_every_other_setting(name, float64):
    """Steps instead of epochs, Adam, a schedule, clipping: whatever of these a method heeds.

    Of a gradient that should be zero Adam makes a step of rate / 1e-8 times its rounding, 1e-17.
    """
    other = {"steps": 4, "optimiser": "adam", "lr": 0.02, "schedule": "cosine", "clip": 0.5}
    other |= {"decay_rounds": 5, "weight_decay": 0.1, "server_lr": 0.7}
    left, right = (
        play(name, changes=other.items(), kind=kind) for kind in ("vectorised", "sequential")
    )
    assert not worlds.differing(left, right, 1e-7)
    assert worlds.differing(left, reference(name), TIGHT)


def shapes(end):
    return {name: leaf.shape for name, leaf in tree.named(end).items()}


@every_method
def test_vectorised_equals_sequential_with_a_private_second_network(name, float64):
    """Who has no use for a second network, and so no leaf of it, does what it does without."""
    options = {"auxiliary": lambda: worlds.Normed(8)}
    left, right = play(name, **options), reference(name)
    if shapes(left) != shapes(right):
        right = play(name, kind="sequential", **options)
    assert not worlds.differing(left, right, TIGHT)


@every_method
def test_the_width_of_a_block_changes_nothing(name, float64):
    assert not worlds.differing(reference(name), play(name, width=2), TIGHT)


@every_method
def test_spreading_clients_over_threads_changes_nothing(name, float64):
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        spread = play(name, width=1)
    finally:
        torch.set_num_threads(threads)
    assert not worlds.differing(reference(name), spread, TIGHT)


@every_method
def test_seeds_trained_together_are_as_trained_alone(name, float64):
    """Two seeds, each with its own examples, network, cohorts and batches."""
    both = [worlds.with_public(), worlds.with_public((2, 8, 4, 1, 6, 3), seed=5)]
    together = ended(
        worlds.simulation(made(name), both, seeds=(0, 7), cohort=3), [w.test_data for w in both]
    )
    rows = [slice(0, 6), slice(6, 12)]
    for run, seed in enumerate((0, 7)):
        alone = reference(name) if run == 0 else play(name, both[1], seeds=(seed,))
        mine = End(
            together.server[run : run + 1],
            tree.map(lambda leaf, run=run: leaf[rows[run]], together.personal),
            together.deployed[run : run + 1],
        )
        assert not worlds.differing(alone, mine, TIGHT), seed


@every_federated_method
def test_the_order_of_a_cohort_changes_nothing(name, float64):
    """The server sums in another order; apart from rounding nobody can tell."""
    results = []
    for cohorts in (((0, 1, 4), (1, 2, 3)), ((4, 0, 1), (3, 2, 1))):
        simulation = choose(worlds.simulation(made(name), worlds.with_public()), *cohorts)
        simulation.advance()
        simulation.advance()
        results.append(simulation.tree)
    assert not worlds.differing(*results, TIGHT)


@every_federated_method
def test_a_clients_first_round_does_not_depend_on_company(name, float64):
    rows = []
    for cohort in ((1,), (0, 1, 2, 3, 4)):
        simulation = choose(worlds.simulation(made(name), worlds.with_public()), cohort)
        simulation.advance()
        rows.append(tree.map(lambda leaf: leaf[1], simulation.tree["personal"]))
    assert not worlds.differing(*rows, TIGHT)


def without_the_last(leaf, other):
    """Cut a leaf with a place for each client, or a place there for each, to those there are."""
    return leaf[tuple(slice(size) for size in other.shape)]


@pytest.mark.parametrize(
    ("name", "uniform"),
    [(name, way) for name, kind in METHODS.items() for way in (False, True)[: 1 + weighs(kind)]],
)
def test_an_empty_client_changes_nothing(name, uniform, float64):
    """The last client has nothing to train on: leave it out of the federation altogether.

    Everyone is asked for, so that it would be among them if it could be; where clients are weighed
    alike it would pull the average towards the model it received.
    """
    changes = {"uniform": uniform}.items()
    world = worlds.with_public()
    full = play(name, world, changes=changes, cohort=None)
    without = play(name, world.subset(range(5)), changes=changes, cohort=None)
    assert not worlds.differing(tree.map(without_the_last, full, without), without, TIGHT)


@pytest.mark.parametrize("name", [n for n, k in METHODS.items() if not (k.pooled or k.alone)])
def test_an_unseen_client_changes_nothing(name, monkeypatch, float64):
    """Nor does one that has examples, but takes part in no round: no server counts it among N."""
    monkeypatch.setattr(sampling, "kept_out", lambda seed, able, unseen: able[len(able) - unseen :])
    world = worlds.with_public((7, 4, 5, 9, 3, 8))
    full = play(name, world, cohort=None, unseen=1)
    without = play(name, world.subset(range(5)), cohort=None)
    assert not worlds.differing(tree.map(without_the_last, full, without), without, TIGHT)


@every_method
def test_an_empty_client_is_left_as_it_was(name, float64):
    """It keeps its first personal state, and what it deploys is finite."""
    simulation = worlds.simulation(made(name), worlds.with_public())
    before = tree.map(lambda leaf: leaf[5], simulation.tree["personal"])
    end = ended(simulation, [worlds.with_public().test_data])
    assert not worlds.differing(before, tree.map(lambda leaf: leaf[5], end.personal))
    assert all(bool(torch.isfinite(leaf[5]).all()) for leaf in tree.leaves(end.deployed))


@every_method
def test_padding_changes_nothing(name, float64):
    """Clients of four examples each: a batch of four is exact, a batch of nine mostly padding."""
    world = worlds.with_public((4, 4, 4), (2, 2, 2))
    batch = 4 if not METHODS[name].pooled else 12
    exact, padded = (
        play(name, world, changes={"batch": size}.items(), cohort=2) for size in (batch, batch + 5)
    )
    assert not worlds.differing(exact, padded, TIGHT)


@every_method
def test_resumed_equals_uninterrupted_bit_for_bit(name, float64):
    """Save after round 1 leaf by leaf, restore into a fresh simulation, go on to the end."""
    world = worlds.with_public()
    first = worlds.simulation(made(name), world, cohort=3)
    first.advance()
    saved = {leaf: value.clone() for leaf, value in tree.named(first.tree).items()}
    second = worlds.simulation(made(name), world, cohort=3)
    second.tree = tree.like(second.tree, saved)
    second.round = 1
    assert not worlds.differing(reference(name), ended(second, [world.test_data]))


@every_federated_method
def test_a_client_that_sits_out_keeps_its_personal_state(name, float64):
    simulation = choose(worlds.simulation(made(name), worlds.with_public()), (0, 3, 4), (0, 1, 4))
    simulation.advance()
    before = simulation.tree["personal"]
    simulation.advance()
    after = simulation.tree["personal"]
    out = torch.tensor([2, 3, 5])
    assert not worlds.differing(tree.take(before, out), tree.take(after, out))
    if tree.leaves(before) and name != "ffa-lora":  # whose A is a constant
        came = torch.tensor([0, 1, 4])
        assert worlds.differing(tree.take(before, came), tree.take(after, came))


@every_federated_method
def test_personal_state_reaches_the_server_only_through_a_report(name, float64):
    """Spoil what a client keeps while it sits out: nobody else may notice, nor the server."""
    ends = []
    for spoil in (False, True):
        simulation = choose(worlds.simulation(made(name), worlds.with_public()), *[(0, 1, 4)] * 2)
        simulation.advance()
        if spoil:
            kept = simulation.tree
            row = torch.tensor([SITS_OUT])
            spoilt = tree.map(lambda leaf: leaf + 1000, tree.take(kept["personal"], row))
            simulation.tree = {**kept, "personal": tree.put(kept["personal"], row, spoilt)}
        simulation.advance()
        others = torch.tensor([n for n in range(6) if n != SITS_OUT])
        kept = simulation.tree
        ends.append((kept["server"], tree.take(kept["personal"], others)))
    assert not worlds.differing(*ends)


@every_method
def test_test_data_changes_no_tree(name, float64):
    """Other test examples with other labels: server, personal and deployed stay bit for bit."""
    assert not worlds.differing(reference(name), play(name, worlds.poisoned(worlds.with_public())))


@every_method
def test_training_labels_change_what_is_deployed(name, float64):
    """The counterpart of the law above: what should be noticed is."""
    world = worlds.with_public()
    labels = world.dataset.y.copy()
    labels[world.train[0]] = (labels[world.train[0]] + 1) % worlds.CLASSES
    data = dataclasses.replace(world.dataset, y=labels)
    changed = play(name, dataclasses.replace(world, dataset=data))
    assert worlds.differing(reference(name).deployed, changed.deployed, TIGHT)


@every_federated_method
def test_a_node_with_one_client_computes_what_the_simulation_does(name, float64):
    """The same method on a `Local` made by hand: what it reports and what it keeps."""
    method, world = made(name), worlds.with_public()
    local = functools.partial(worlds.local, world, 1, build=worlds.network_of(method))
    simulation = choose(worlds.simulation(method, world), (1,))
    state, (personal,) = simulation.states[0], simulation.tree["personal"]
    group = simulation.groups[0].groups[0]
    simulation.advance()
    cohort = torch.tensor([1])
    sent = method.send(state, cohort)
    sent = Sent(sent.shared, tree.map(lambda leaf: leaf[0], sent.own), group)
    mine = tree.map(lambda leaf: leaf[1], personal)
    if has(method, Preparation) and not method.first_preparation:
        mine = method.prepare(sent, mine, local())
    report, kept = method.client_step(sent, mine, local())
    if has(method, ArchitectureState):
        report = method.read(report, local())
    there = tree.map(lambda leaf: leaf[1], simulation.tree["personal"][0])
    assert not worlds.differing(kept, there, TIGHT)
    served = method.server_step(state, cohort, tree.stack([report]))
    assert not worlds.differing(served, simulation.states[0], TIGHT)


@every_method
def test_newcomers_adapt(name, float64):
    """A federation that never took part meets the final model, adapts, and predicts.

    The client without training data too: it can only look. Both backends agree.
    """
    world, ends = worlds.with_public(), []
    for kind in ("vectorised", "sequential"):
        simulation = worlds.simulation(made(name), world, kind=kind)
        simulation.tree = {**simulation.tree, "server": reference(name).server}
        simulation.round = ROUNDS
        simulation.meet()
        (verdict,) = simulation.evaluate([world.test_data], newcomers=True, keep=True)
        assert np.isfinite(verdict.scores["personal"]["loss"]).all()
        ends.append((simulation.tree, verdict.deployed[0][1]))
    assert not worlds.differing(ends[0][0]["server"], reference(name).server)
    assert not worlds.differing(*ends, TIGHT)


@every_method
def test_models_are_named_and_predict(name, float64):
    """With nothing deployed there is at most the global model; judging agrees."""
    method, world = made(name), worlds.with_public()
    simulation = worlds.simulation(method, world)
    simulation.advance()
    local = worlds.local(world, 1, build=worlds.network_of(method))
    sent = method.send(simulation.states[0], torch.arange(6))
    group = simulation.groups[0].groups[0]
    sent = Sent(sent.shared, tree.map(lambda leaf: leaf[1], sent.own), group)
    there = {key for key, model in method.models(sent, ()).items() if tree.leaves(model)}
    assert there <= {"global"}
    personal = tree.map(lambda leaf: leaf[1], simulation.tree["personal"][0])
    models = method.models(sent, method.deploy(sent, personal, local))
    assert "personal" in models and there <= set(models)
    for model in models.values():
        logits = method.predict(model, torch.randn(5, worlds.FEATURES), local)
        assert logits.shape == (5, worlds.CLASSES)
    (only,) = simulation.evaluate(only_global=True)
    assert set(only.scores) == there and not only.facts
    (whole,) = simulation.evaluate([world.test_data])
    assert set(whole.scores) == set(models)
    for scores in whole.scores.values():
        assert scores["loss"].shape == (6,) and np.isfinite(scores["loss"]).all()


@every_method
def test_every_setting_is_declared(name):
    """Each has a line of meaning, and each method a title and a first line of documentation."""
    kind = METHODS[name]
    assert kind.title and kind.__doc__
    for field in dataclasses.fields(kind):
        assert field.metadata.get("doc"), field.name


def test_the_worlds_network_has_parameters_of_every_kind():
    """The laws are only as strong as the network they run on."""
    network = Network(worlds.Normed())
    assert network.norms == {"norm.weight", "norm.bias"}
    assert set(network.params) > network.norms


@every_federated_method
def test_who_says_it_chooses_nothing_does_without_validation_rows(name, float64):
    """Else `refit` would train a method on the rows by which it chooses."""
    world = worlds.with_public()
    blind = dataclasses.replace(world, val=tuple(rows[:0] for rows in world.val))
    changed = worlds.differing(play(name, blind), reference(name), TIGHT)
    assert bool(changed) == made(name).chooses
