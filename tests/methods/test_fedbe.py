"""FedBE by hand, and over two architectures."""

import math

import pytest
import torch

import worlds
from idiolect.core import tree
from idiolect.core.method import Sent
from idiolect.errors import ConfigError
from idiolect.methods import FedBE
from idiolect.methods.fedbe import Drawn, Said
from methods.tiny import Line, client, close, line, pair, plus, refuses, setup, sigmoid, slope

PUBLIC = [(2.0, 0), (-1.0, 1)]
MODELS = {"w": torch.tensor([0.0, 4.0]).double(), "b": torch.tensor([1.0, 1.0]).double()}
SIZES = torch.tensor([1.0, 3.0]).double()


def fedbe(**settings):
    plain = {"sample": 2, "public_batch": 2, "drawn": 2, "lr": 0.1, "fuse_epochs": 1}
    return FedBE(**{**plain, **settings})


def told(chances):
    """What models say, on average, as shares of both classes."""
    return torch.tensor([[1 - p, p] for p in chances], dtype=torch.float64)


def test_the_gaussian_has_the_mean_and_the_variance_of_the_models():
    """By size: mean 3, variance (1 · 9 + 3 · 1) / 4 = 3; alike: mean 2, variance 4."""
    reports = Drawn(MODELS, SIZES, torch.zeros(2, 0).double())
    found = fedbe().group_step(line((9, 9)), reports)
    assert found["w"].tolist() == close([3.0, math.sqrt(3.0)])
    assert found["b"].tolist() == close([1.0, 0.0])
    assert fedbe(uniform=True).group_step(line((9, 9)), reports)["w"].tolist() == close([2.0, 2.0])


def test_a_dirichlet_mixes_by_draws_and_sizes():
    """γ = (3, 1) and (1, 1): weights (3, 3) and (1, 3), so 2 and 3; alike 1 and 2."""
    reports = Drawn(MODELS, SIZES, torch.tensor([[3.0, 1.0], [1.0, 1.0]]).double())
    method = fedbe(distribution="dirichlet")
    assert method.group_step(line((9, 9)), reports)["w"].tolist() == close([3.0, 2.0, 3.0])
    method = fedbe(distribution="dirichlet", uniform=True)
    assert method.group_step(line((9, 9)), reports)["w"].tolist() == close([2.0, 1.0, 2.0])


@pytest.mark.parametrize("alpha", [1, 4])
def test_draws_are_those_of_a_dirichlet(alpha, float64):
    """Of n clients each has the mean share 1/n, with variance (n − 1) / (n² (n α + 1))."""
    world = worlds.with_public((4, 4, 4), (1, 1, 1))
    method = FedBE(distribution="dirichlet", drawn=2000, alpha=alpha, sample=5, steps=1)
    network = worlds.local(world, 0)._networks["main"].params
    gamma = torch.stack(
        [
            method.client_step(Sent(group=network), (), worlds.local(world, n))[0].gamma
            for n in range(3)
        ]
    )
    assert (gamma > 0).all()
    shares = gamma / gamma.sum(0)
    assert shares.mean(1).tolist() == pytest.approx([1 / 3] * 3, abs=0.02)
    assert shares.var(1).tolist() == pytest.approx([2 / 9 / (3 * alpha + 1)] * 3, rel=0.15)


def test_models_are_drawn_around_the_mean(float64):
    """N(3, √3²) in w and no deviation in b; running statistics stay at their mean."""
    world = worlds.with_public()
    group = {
        "w": torch.tensor([3.0, math.sqrt(3.0)]),
        "b": torch.tensor([1.0, 0.0]),
        "n.running_var": torch.tensor([2.0, 5.0]),
    }
    models = FedBE(drawn=4000)._models(group, worlds.local(world, 0))
    assert float(models["w"].mean()) == pytest.approx(3.0, abs=0.1)
    assert float(models["w"].var()) == pytest.approx(3.0, rel=0.06)
    assert models["b"].eq(1.0).all() and models["n.running_var"].eq(2.0).all()


@pytest.mark.parametrize("stacked", [False, True])
def test_the_mean_learns_what_all_models_say(stacked):
    """Mean (0, 0), drawn (1, 0) and (0, 2), two clients that say 0.9 and 0.2 on average.

    The target is the mean of five: 2 · clients + σ of the three others. One step, the first of a
    cycle of one, is at the least rate.
    """
    method = fedbe(distribution="dirichlet", cycle=1, fuse_lr=9.0, fuse_least_lr=0.5)
    group = {"w": torch.tensor([0.0, 1.0, 0.0]).double(), "b": torch.tensor([0.0, 0, 2]).double()}
    state = Said(told((0.9, 0.2)), torch.tensor(2.0).double())
    local = client(train=[], public=PUBLIC, stacked=stacked)
    down = (0.0, 0.0)
    for (x, _), said in zip(PUBLIC, (0.9, 0.2), strict=True):
        target = (2 * said + 0.5 + sigmoid(x) + sigmoid(2.0)) / 5
        down = plus(down, (0.5 - target) / 2, (x, 1.0))
    assert pair(method.fuse(group, state, local)) == close(plus((0.0, 0.0), -0.5, down))
    down = (0.0, 0.0)
    for x, _ in PUBLIC:
        target = (0.5 + sigmoid(x) + sigmoid(2.0)) / 3
        down = plus(down, (0.5 - target) / 2, (x, 1.0))
    alone = fedbe(
        distribution="dirichlet", cycle=1, fuse_lr=9.0, fuse_least_lr=0.5, with_clients=False
    )
    assert pair(alone.fuse(group, state, local)) == close(plus((0.0, 0.0), -0.5, down))


def learned(steps, rate, target=(0.8, 0.3)):
    """The weights after each step of SGD with momentum 0.9 from (0, 0) towards a target."""
    at, velocity, path = (0.0, 0.0), (0.0, 0.0), []
    for taken in range(steps):
        down = (0.0, 0.0)
        for (x, _), wanted in zip(PUBLIC, target, strict=True):
            down = plus(down, (sigmoid(at[0] * x + at[1]) - wanted) / 2, (x, 1.0))
        velocity = plus(down, 0.9, velocity)
        at = plus(at, -rate(taken), velocity)
        path.append(at)
    return path


@pytest.mark.parametrize(
    ("steps", "first", "ends"), [(7, 0, (2, 5)), (7, 3, (5,)), (7, 4, (5,)), (2, 0, ())]
)
def test_weights_are_averaged_at_the_ends_of_cycles(steps, first, ends):
    """Cycles of three steps, in which the rate goes 0.4, 0.3, 0.2; none ended: the last weights."""
    method = fedbe(
        drawn=1, cycle=3, fuse_lr=0.5, fuse_least_lr=0.2, fuse_epochs=steps, first_collected=first,
        distribution="dirichlet",
    )  # fmt: skip
    model = {"w": torch.zeros(2).double(), "b": torch.zeros(2).double()}
    many = Said(told((0.8, 0.3)), torch.tensor(1e15).double())  # so that it alone is the target
    path = learned(steps, lambda taken: (0.4, 0.3, 0.2)[taken % 3])
    chosen = [path[n] for n in ends] or [path[-1]]
    mean = tuple(sum(one[n] for one in chosen) / len(chosen) for n in (0, 1))
    found = method.fuse(model, many, client(train=[], public=PUBLIC))
    assert pair(found) == close(mean, 1e-9)


def test_the_target_may_be_sharpened():
    """At ½, p becomes p² / (p² + (1 − p)²)."""
    method = fedbe(drawn=1, cycle=1, fuse_least_lr=0.5, distribution="dirichlet", sharpen=0.5)
    many = Said(told((0.8, 0.3)), torch.tensor(1e15).double())
    model = {"w": torch.zeros(2).double(), "b": torch.zeros(2).double()}
    found = method.fuse(model, many, client(train=[], public=PUBLIC))
    target = tuple(p**2 / (p**2 + (1 - p) ** 2) for p in (0.8, 0.3))
    assert pair(found) == close(learned(1, lambda _: 0.5, target)[0], 1e-9)


def test_a_client_trains_the_global_model_and_uses_it():
    start = (0.3, -0.2)
    report, kept = fedbe().client_step(Sent(group=line(start)), (), client(public=PUBLIC))
    end = plus(start, -0.1, slope(start, [(2.0, 1)]))
    assert pair(report.params) == close(end) and kept == () and report.gamma.shape == (0,)
    read = fedbe().read(report, client(public=PUBLIC))
    assert read[:, 1].tolist() == close([sigmoid(2 * end[0] + end[1]), sigmoid(-end[0] + end[1])])
    assert pair(fedbe().deploy(Sent(group=line(start)), (), client())) == start


@pytest.mark.parametrize("distribution", ["gaussian", "dirichlet"])
def test_an_architecture_of_which_nobody_came_learns_from_the_others(distribution, float64):
    """Clients 4 and 1 have one network, 0 and 3 another; only 0 comes, then 4."""
    method = FedBE(
        distribution=distribution, drawn=2, sample=5, public_batch=3, batch=3, lr=0.1, fuse_lr=0.1
    )
    simulation = worlds.simulation(method, worlds.with_public(), architectures=worlds.TWO)
    simulation.cohort = lambda run: torch.tensor([[0], [4]][simulation.round]).numpy()
    for _ in range(2):
        before = [tree.map(torch.clone, group.groups[0]) for group in simulation.groups]
        simulation.advance()
        for old, group in zip(before, simulation.groups, strict=True):
            new = group.groups[0]
            assert {n: leaf.shape for n, leaf in new.items()} == {
                n: leaf.shape for n, leaf in old.items()
            }
            assert worlds.differing(old, new, 1e-9)


def test_without_public_examples_it_is_refused():
    with pytest.raises(ConfigError, match="FedBE: needs 2 public examples on the server"):
        fedbe().init_server(setup(Line(), public=1))
    assert fedbe(sample=0).init_server(setup(Line(), public=3)).mean.shape == (3, 2)


def test_settings_out_of_range_are_refused():
    refuses(FedBE, "drawn", 0, "at least 1")
    refuses(FedBE, "alpha", 0, "at least 1")
    refuses(FedBE, "distribution", "uniform", "one of 'gaussian', 'dirichlet'")
    code = FedBE(**FedBE.presets["code"])
    assert (code.sharpen, code.first_collected, code.fuse_least_lr) == (0.5, 500, 0.001)
