"""Rounds of methods with state on both sides, against plain loops written from their papers.

Two seeds are stacked, of six clients with 7, 4, 5, 9, 3 and no examples three come to a round, and
one that has examples never comes. All is in double precision; batches are data, taken from the
plan.
"""

import math

import numpy as np
import pytest
import torch
from torch import nn

import worlds
from idiolect.aggregation.aggregator import Aggregated
from idiolect.aggregation.server_optimisers import FedAdam
from idiolect.core import tree
from idiolect.core.client import Request
from idiolect.engine.batch_plan import BatchPlanner
from idiolect.engine.data_pools import DataPools
from idiolect.engine.sampling import eligible
from idiolect.methods import APFL, IFCA, MOCHA, Ditto, FedAMP, FedDyn, Scaffold

SIZES, SEEDS, ROUNDS = (7, 4, 5, 9, 3, 0), (3, 8), 5
BATCHES = {"batch": 3, "epochs": 2}


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x):
        return self.b(self.a(x).tanh())


class Rounds:
    """A method's rounds in the engine, and what a loop of one seed needs to do them again."""

    def __init__(self, method):
        self.worlds = [worlds.federation(SIZES, (2,) * 6, seed=seed) for seed in SEEDS]
        self.simulation = worlds.simulation(
            method, self.worlds, seeds=SEEDS, build=Small, cohort=3, unseen=1
        )
        self.first, self.cohorts = self.simulation.states, []
        for _ in range(ROUNDS):
            self.cohorts.append([self.simulation.cohort(run).tolist() for run in range(2)])
            self.simulation.advance()

    def start(self, run):
        torch.manual_seed(SEEDS[run])
        return {name: leaf.detach().clone() for name, leaf in Small().named_parameters()}

    def members(self, run):
        """Who may come, those with examples but for the one that is kept out."""
        return eligible(self.worlds[run].train_data, SEEDS[run], unseen=1).tolist()

    def rows(self, run, client):
        data, mine = self.worlds[run].dataset, np.array(self.worlds[run].train[client], int)
        return torch.from_numpy(data.x[mine]).double(), torch.from_numpy(data.y[mine])

    def batches(self, run, client, round, call=0):
        pools = DataPools([self.worlds[run].train_data], torch.device("cpu"))
        book = BatchPlanner(pools.pools, torch.device("cpu"))
        book.turn([pools.members(0, SEEDS[run], self.worlds[run].train_data)[client]], round)
        plan = book.ask(Request("train", 3, 2, 0, True, call))
        x, y = (
            torch.from_numpy(own)
            for own in (self.worlds[run].dataset.x, self.worlds[run].dataset.y)
        )
        steps = [
            rows[weight > 0] for rows, weight in zip(plan.rows[0], plan.weight[0], strict=True)
        ]
        return [(x[rows].double(), y[rows]) for rows in steps if len(rows)]

    def kept(self, run):
        rows = self.simulation.groups[0].store.rows
        return [tree.map(lambda leaf, n=n: leaf[6 * run + n], rows) for n in range(6)]


def add(*terms):
    """Σ factor · tree."""
    return {name: sum(factor * own[name] for factor, own in terms) for name in terms[0][1]}


def zero(like):
    return add((0.0, like))


def flat(params):
    return torch.cat([leaf.flatten() for leaf in params.values()])


def square(left, right):
    return (flat(left) - flat(right)).square().sum()


def entropy(params, x, y):
    logits = (x @ params["a.weight"].T + params["a.bias"]).tanh() @ params["b.weight"].T
    return nn.functional.cross_entropy(logits + params["b.bias"], y)


def slope(loss, params):
    at = {name: leaf.clone().requires_grad_() for name, leaf in params.items()}
    return dict(zip(at, torch.autograd.grad(loss(at), list(at.values())), strict=True))


def descend(params, batches, lr=0.2, extra=lambda params: 0.0):
    for batch in batches:

        def loss(at, batch=batch):
            return entropy(at, *batch) + extra(at)

        params = add((1, params), (-lr, slope(loss, params)))
    return params


def average(models, weights):
    return add(*[(w / sum(weights), own) for w, own in zip(weights, models, strict=True)])


def near(found, expected):
    assert found.keys() == expected.keys()
    for name, leaf in found.items():
        assert (leaf - expected[name]).abs().max() < 1e-12, name


pytestmark = pytest.mark.usefixtures("float64")


@pytest.mark.parametrize("uniform", [True, False])
def test_scaffold(uniform):
    done = Rounds(Scaffold(lr=0.2, server_lr=0.6, weight_decay=0.01, uniform=uniform, **BATCHES))
    for run in range(2):
        x = done.start(run)
        c, own = zero(x), [zero(x) for _ in SIZES]
        weight = [1 if uniform else size for size in SIZES]
        for round in range(ROUNDS):
            cohort = done.cohorts[round][run]
            ends, changes = [], []
            for i in cohort:
                y, steps = x, done.batches(run, i, round)
                for batch in steps:
                    g = slope(lambda w, batch=batch: entropy(w, *batch), y)
                    y = add((1, y), (-0.2, add((1, g), (0.01, y), (-1, own[i]), (1, c))))
                pace = 1 / (len(steps) * 0.2)
                new = add((1, own[i]), (-1, c), (pace, x), (-pace, y))
                changes.append((weight[i], add((1, new), (-1, own[i]))))
                ends.append(y)
                own[i] = new
            x = add((0.4, x), (0.6, average(ends, [weight[i] for i in cohort])))
            everyone = sum(weight[i] for i in done.members(run))
            c = add((1, c), *[(w / everyone, change) for w, change in changes])
        near(done.simulation.states[run].params, x)
        near(done.simulation.states[run].control, c)
        for found, expected in zip(done.kept(run), own, strict=True):
            near(found, expected)


@pytest.mark.parametrize("uniform", [True, False])
def test_feddyn(uniform):
    done = Rounds(FedDyn(lr=0.2, alpha=0.3, uniform=uniform, **BATCHES))
    for run in range(2):
        w = done.start(run)
        h, own = zero(w), [zero(w) for _ in SIZES]
        weight = [1 if uniform else size for size in SIZES]
        for round in range(ROUNDS):
            cohort, ends = done.cohorts[round][run], []
            for i in cohort:

                def extra(at, w=w, mine=own[i]):
                    return 0.15 * square(at, w) - flat(mine) @ flat(at)

                ends.append(descend(w, done.batches(run, i, round), extra=extra))
                own[i] = add((1, own[i]), (-0.3, ends[-1]), (0.3, w))
            everyone = sum(weight[i] for i in done.members(run))
            for i, end in zip(cohort, ends, strict=True):
                h = add((1, h), (-0.3 * weight[i] / everyone, add((1, end), (-1, w))))
            w = add((1, average(ends, [weight[i] for i in cohort])), (-1 / 0.3, h))
        near(done.simulation.states[run].params, w)
        near(done.simulation.states[run].drift, h)
        for found, expected in zip(done.kept(run), own, strict=True):
            near(found, expected)


def test_apfl():
    done = Rounds(APFL(lr=0.2, weight=0.4, weight_lr=0.05, **BATCHES))
    for run in range(2):
        w = done.start(run)
        v, alpha = [w] * 6, [0.4] * 6
        for round in range(ROUNDS):
            cohort, ends = done.cohorts[round][run], []
            for i in cohort:
                at = w
                for x, y in done.batches(run, i, round):
                    mixed = add((alpha[i], v[i]), (1 - alpha[i], at))
                    g = slope(lambda p, x=x, y=y: entropy(p, x, y), mixed)
                    turn = float((flat(v[i]) - flat(at)) @ flat(g))
                    at = add((1, at), (-0.2, slope(lambda p, x=x, y=y: entropy(p, x, y), at)))
                    v[i] = add((1, v[i]), (-0.2 * alpha[i], g))
                    alpha[i] = min(1.0, max(0.0, alpha[i] - 0.05 * turn))
                ends.append(at)
            w = average(ends, [SIZES[i] for i in cohort])
        near(done.simulation.states[run], w)
        assert len(set(alpha)) > 3 and 0 < min(alpha) < max(alpha) < 1
        for i, found in enumerate(done.kept(run)):
            near(found.v, v[i])
            assert abs(float(found.weight) - alpha[i]) < 1e-12


def test_ditto_under_fedadam():
    done = Rounds(Aggregated(Ditto(lr=0.2, pull=0.7, **BATCHES), FedAdam(lr=0.05)))
    for run in range(2):
        w = done.start(run)
        m, v, own = zero(w), {name: 0 * leaf + 1e-6 for name, leaf in w.items()}, [w] * 6
        for round in range(ROUNDS):
            cohort, ends = done.cohorts[round][run], []
            for i in cohort:
                ends.append(descend(w, done.batches(run, i, round)))
                again = done.batches(run, i, round, call=1)
                own[i] = descend(own[i], again, extra=lambda at, w=w: 0.35 * square(at, w))
            update = add((1, average(ends, [1] * 3)), (-1, w))
            m = add((0.9, m), (0.1, update))
            v = {name: 0.99 * leaf + 0.01 * update[name] ** 2 for name, leaf in v.items()}
            w = {name: leaf + 0.05 * m[name] / (v[name].sqrt() + 1e-3) for name, leaf in w.items()}
        near(done.simulation.states[run].inner, w)
        for found, expected in zip(done.kept(run), own, strict=True):
            near(found, expected)


def test_fedamp():
    """σ = 1/2, and one other client weighs a fifth at most."""
    done = Rounds(FedAMP(lr=0.2, pull=0.5, share=0.2, sigma=0.5, **BATCHES))
    for run in range(2):
        own, heard = [done.start(run)] * 6, set()
        for round in range(ROUNDS):
            new = {}
            for i in done.cohorts[round][run]:
                others = heard - {i} if i in heard else set()
                xi = {j: 0.2 * math.exp(-2 * float(square(own[i], own[j]))) for j in others}
                u = add((1 - sum(xi.values()), own[i]), *[(xi[j], own[j]) for j in others])
                batches = done.batches(run, i, round)
                new[i] = descend(own[i], batches, extra=lambda at, u=u: 0.25 * square(at, u))
            for i, model in new.items():
                own[i] = model
                heard.add(i)
        for found, expected in zip(done.kept(run), own, strict=True):
            near(found, expected)


def test_ifca():
    done, chosen = Rounds(IFCA(lr=0.3, clusters=3, **BATCHES)), set()
    for run in range(2):
        rows = done.first[run].models
        models = [{name: leaf[j] for name, leaf in rows.items()} for j in range(3)]
        near(models[0], done.start(run))
        for round in range(ROUNDS):
            trained = {}
            for i in done.cohorts[round][run]:
                j = int(torch.stack([entropy(own, *done.rows(run, i)) for own in models]).argmin())
                end = descend(models[j], done.batches(run, i, round), lr=0.3)
                trained.setdefault(j, []).append(end)
            for j, ends in trained.items():
                models[j] = average(ends, [1] * len(ends))
                chosen.add(j)
        for j, expected in enumerate(models):
            own = {name: leaf[j] for name, leaf in done.simulation.states[run].models.items()}
            near(own, expected)
    assert len(chosen) > 1


def test_mocha():
    """Ω among those heard so far is the inverse of (WᵀW + ε²)^½ over its trace, of five members."""
    done = Rounds(MOCHA(lr=0.2, pull=0.05, floor=0.1, **BATCHES))
    for run in range(2):
        own, heard, members = [done.start(run)] * 6, [], len(done.members(run))
        least = 0.01 * flat(own[0]).square().sum()
        for round in range(ROUNDS):
            new, omega = {}, members * torch.eye(6)
            if heard:
                w = torch.stack([flat(own[i]) for i in heard])
                values, vectors = torch.linalg.eigh(w @ w.T + least * torch.eye(len(heard)))
                root = vectors * values.sqrt() @ vectors.T
                inverse = torch.linalg.inv(root / root.trace() * len(heard) / members)
                for place, i in enumerate(heard):
                    omega[i, heard] = inverse[place]
            for i in done.cohorts[round][run]:
                along = flat(add(*[(omega[i, j], own[j]) for j in range(6)]))
                curve = omega[i].abs().sum()

                def extra(at, mine=own[i], along=along, curve=curve):
                    off = flat(at) - flat(mine)
                    return 0.05 * (along @ off + curve / 2 * off.square().sum())

                rate = min(0.2, 1 / float(0.05 * curve))
                new[i] = descend(own[i], done.batches(run, i, round), lr=rate, extra=extra)
            for i, model in new.items():
                own[i] = model
            heard = sorted({*heard, *new})
        for found, expected in zip(done.kept(run), own, strict=True):
            near(found, expected)
