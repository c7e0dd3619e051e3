"""The laws again, for every method, on a network with batch normalisation.

Running statistics are leaves of every tree here, so that the laws hold for them too; what is asked
besides is that they move in training, are averaged, and stay at home with FedBN.
"""

from functools import cache

import numpy as np
import pytest
import torch
from torch import nn

import worlds
from idiolect.api import fit
from idiolect.core import tree
from idiolect.core.batchnorm import BatchNorm
from idiolect.core.client import Network
from idiolect.methods import METHODS, FedAvg, FedBN, PerFedAvg
from idiolect.results.run_files import load_model, save_models
from test_laws import TIGHT, ended, made, play

STATISTICS = {"norm.running_mean", "norm.running_var"}
ORDERS = ("first", "hessian-free", "exact")


@cache
def reference(name):
    """The run that the laws compare with, in double precision."""
    assert torch.get_default_dtype() == torch.float64
    return play(name, build=worlds.Batched)


def statistics(kept):
    return {n: leaf for n, leaf in tree.named(kept).items() if n.endswith(("mean", "var"))}


# Beside an adapter batch normalisation is frozen, so methods of LoRA have nothing to do with it.
every_method = pytest.mark.parametrize(
    "name", [name for name, kind in METHODS.items() if worlds.network_of(kind()) is worlds.Normed]
)


MOVES = [
    name
    for name, kind in METHODS.items()
    if hasattr(kind, "server_lr") and worlds.network_of(kind()) is worlds.Normed
]


@every_method
def test_vectorised_equals_sequential(name, float64):
    alone = play(name, build=worlds.Batched, kind="sequential", width=None)
    assert not worlds.differing(reference(name), alone, TIGHT)


@pytest.mark.parametrize("order", ORDERS)
def test_vectorised_equals_sequential_in_every_order_of_perfedavg(order, float64):
    """Two or three passes go into one step, of which the exact one sits inside a gradient."""
    settings = {"order": order, "batch": 9}.items()
    both = [
        play("per-fedavg", changes=settings, build=worlds.Batched, kind=kind)
        for kind in ("vectorised", "sequential")
    ]
    assert not worlds.differing(*both, TIGHT)
    server = tree.named(both[0].server)
    assert float(server["0.norm.running_mean"].abs().max()) > 1e-3


@every_method
def test_padding_changes_nothing(name, float64):
    """Clients of six examples each: a batch of six is exact, one of eleven mostly padding."""
    world = worlds.with_public((6, 6, 6), (2, 2, 2))
    batch = 6 if not METHODS[name].pooled else 18
    exact, padded = (
        play(name, world, changes={"batch": size}.items(), cohort=2, build=worlds.Batched)
        for size in (batch, batch + 5)
    )
    assert not worlds.differing(exact, padded, TIGHT)


@every_method
def test_resumed_equals_uninterrupted_bit_for_bit(name, float64):
    world = worlds.with_public()
    first, second = (
        worlds.simulation(made(name), world, cohort=3, build=worlds.Batched) for _ in range(2)
    )
    first.advance()
    saved = {leaf: value.clone() for leaf, value in tree.named(first.tree).items()}
    assert statistics(saved)
    second.tree = tree.like(second.tree, saved)
    second.round = 1
    assert not worlds.differing(reference(name), ended(second, [world.test_data]))


@every_method
def test_the_statistics_of_what_is_deployed_have_moved(name, float64):
    """Each deployed model was trained, so its means left 0 and its variances left 1."""
    found = statistics(reference(name).deployed)
    assert found
    for leaf, value in found.items():
        start = 0.0 if leaf.endswith("mean") else 1.0
        assert float((value[0] - start).abs().max()) > 1e-3, leaf


@every_method
def test_an_empty_client_is_left_as_it_was(name, float64):
    simulation = worlds.simulation(made(name), worlds.with_public(), build=worlds.Batched)
    before = tree.map(lambda leaf: leaf[5], simulation.tree["personal"])
    end = ended(simulation, [worlds.with_public().test_data])
    assert not worlds.differing(before, tree.map(lambda leaf: leaf[5], end.personal))


def test_the_server_averages_statistics_by_examples(float64):
    """Two clients of 6 and 3 examples, one batch each: (2 · s₁ + s₂) / 3, leaf by leaf.

    With a rate too small to move a weight, s = 0.9 s₀ + 0.1 (batch mean or unbiased variance of
    the first layer's outputs).
    """
    world = worlds.with_public((6, 3), (0, 0))
    simulation = worlds.simulation(
        FedAvg(batch=6, lr=1e-15, weight_decay=0.9), world, build=worlds.Batched
    )
    start = simulation.states[0]
    simulation.advance()
    own = []
    for rows in world.train:
        x = torch.from_numpy(world.dataset.x[rows]).double()
        seen = nn.functional.linear(x, start["fc1.weight"], start["fc1.bias"])
        own.append((0.1 * seen.mean(0), 0.9 + 0.1 * seen.var(0)))
    for place, leaf in enumerate(("norm.running_mean", "norm.running_var")):
        expected = (2 * own[0][place] + own[1][place]) / 3
        assert torch.allclose(simulation.states[0][leaf], expected, 1e-9), leaf


@pytest.mark.parametrize("name", MOVES)
def test_a_server_that_goes_past_the_average_takes_its_statistics(name, float64):
    """Twice as far, a variance of 1 whose average is 0.4 would be −0.2, and 1 the round after."""
    ends = []
    for server_lr in (1.0, 2.0):
        method = made(name, server_lr=server_lr, server_decay=0.0)
        simulation = worlds.simulation(method, worlds.with_public(), build=worlds.Batched)
        simulation.advance()
        ends.append(statistics(simulation.states))
    assert not worlds.differing(*ends)


def test_perfedavg_moves_the_statistics_by_both_parts(float64):
    """One batch of eight, dealt into two of four: means b₁ (even rows) and b₂ (odd rows).

    The exact step runs both parts in one gradient: 0 → 0.1 b₁ → 0.09 b₁ + 0.1 b₂. The first-order
    step takes its gradient at the adapted model, whose mean is 0.1 b₁, so the drift applied to w is
    0.1 (b₂ − 0.1 b₁).
    """
    world = worlds.with_public((8,), (0,))
    for order in ("exact", "first"):
        method = PerFedAvg(batch=8, lr=1e-15, adapt_lr=1e-15, order=order)
        simulation = worlds.simulation(method, world, build=worlds.Batched)
        start, shown = simulation.states[0], []
        worlds.local(world, 0).scan(lambda c, b, to=shown: to.append(b.x) or c, (), batch=8)
        seen = nn.functional.linear(shown[0].double(), start["fc1.weight"], start["fc1.bias"])
        one, two = seen[0::2].mean(0), seen[1::2].mean(0)
        expected = 0.09 * one + 0.1 * two if order == "exact" else 0.1 * (two - 0.1 * one)
        simulation.advance()
        got = simulation.states[0]["norm.running_mean"]
        assert torch.allclose(got, expected, 1e-6, 1e-8), order


def test_fedbn_keeps_statistics_at_home(float64):
    """The server has none; two clients that saw other features keep other ones."""
    simulation = worlds.simulation(
        FedBN(batch=3, lr=0.1), worlds.with_public(), build=worlds.Batched
    )
    assert not statistics(simulation.states)
    (personal,) = simulation.tree["personal"]
    assert set(personal) == STATISTICS | {"norm.weight", "norm.bias"}
    simulation.advance()
    assert not statistics(simulation.states)
    (personal,) = simulation.tree["personal"]
    assert (
        float((personal["norm.running_mean"][0] - personal["norm.running_mean"][1]).norm()) > 0.01
    )


def test_a_normalisation_of_statistics_alone_can_be_fedbns(float64):
    """Without scale and shift a newcomer has nothing to train, but statistics to find."""

    class Bare(worlds.Batched):
        def __init__(self):
            super().__init__()
            self.norm = BatchNorm(6, affine=False)

    world, ends = worlds.with_public(), []
    for kind in ("vectorised", "sequential"):
        simulation = worlds.simulation(FedBN(batch=3, lr=0.1), world, build=Bare, kind=kind)
        simulation.advance()
        (verdict,) = simulation.evaluate([world.test_data], newcomers=True, keep=True)
        ends.append((simulation.tree, verdict.deployed[0][1]))
    assert not worlds.differing(*ends, TIGHT)
    assert set(simulation.tree["personal"][0]) == STATISTICS


def test_a_clients_model_has_its_statistics_and_they_are_saved(tmp_path):
    """What `Result.model` returns predicts as the client's own parameters do."""
    world = worlds.with_public()
    result = fit("fedbn", world, worlds.Batched, rounds=2, batch=3, lr=0.1, device="cpu")
    model = result.model(1).network
    (_, deployed), *_ = result.deployed
    own = tree.map(lambda leaf: leaf[1], deployed)
    assert torch.equal(model.norm.running_var, own["norm.running_var"])
    assert not torch.equal(model.norm.running_var, torch.ones(6))
    x = torch.randn(4, worlds.FEATURES)
    assert torch.allclose(model(x), Network(worlds.Batched())(own, x, False))
    save_models(tmp_path, "FedBN", 0, world.names, result.deployed)
    read = load_model(tmp_path, "FedBN", 0, 1)
    assert torch.equal(read["norm.running_mean"], model.norm.running_mean)
    (row,) = [r for r in result.table() if r["client"] == world.names[1]]
    exam = torch.from_numpy(world.dataset.x[world.test[1]])
    right = model(exam).argmax(1).numpy() == world.dataset.y[world.test[1]]
    assert row["accuracy"] == pytest.approx(np.mean(right))
