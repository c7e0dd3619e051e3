"""MOCHA by hand, and that its rounds lead to the minimum of the paper's Eq. 1."""

import math

import pytest
import torch

from idiolect.core.method import Report, Sent
from idiolect.methods import MOCHA, LocalOnly
from idiolect.methods.mocha import Bound, Tasks
from methods.tiny import (
    HIGH,
    Line,
    alike,
    client,
    close,
    line,
    lost,
    minus,
    pair,
    plus,
    refuses,
    setup,
    slope,
)

DATA = ([(2.0, 1), (-1.0, 0), (0.5, 0)], [(1.0, 0), (3.0, 1)], [(-2.0, 1), (1.0, 1), (0.2, 0)])


def tasks(models, heard=None, least=0.0):
    rows = torch.tensor(models).double()
    there = torch.ones(len(rows)).double() if heard is None else torch.tensor(heard).double()
    members = torch.tensor(float(len(rows))).double()
    return Tasks({"w": rows[:, 0], "b": rows[:, 1]}, there, members, torch.tensor(least).double())


@pytest.mark.parametrize("stacked", [False, True])
def test_two_steps_by_hand(stacked):
    """From HIGH, where ∇f = −0.1 · (2, 1); slope (1, −2), curve 4, λ = ½.

    The first step sees λ · slope, the second also λ · 4 · (w − HIGH).
    """
    method = MOCHA(lr=0.1, pull=0.5, epochs=2)
    bound = Bound(line((1.0, -2.0)), torch.tensor(4.0).double())
    report, kept = method.client_step(Sent(own=bound), line(HIGH), client(stacked=stacked))
    once = plus(HIGH, -0.1, (-0.2 + 0.5, -0.1 - 1.0))
    down = plus(slope(once, [(2.0, 1)]), 0.5, plus((1.0, -2.0), 4.0, minus(once, HIGH)))
    assert pair(kept) == close(plus(once, -0.1, down))
    assert alike(report.params, kept)


def test_the_best_relations_by_hand():
    """Models (3, 0) and (0, 4) are orthogonal: (WᵀW)^½ = diag(3, 4), of trace 7.

    ε² is added to the squares: floor² times 9 + 16 where the initial model is (3, 4).
    """
    state, method = tasks([[3.0, 0.0], [0.0, 4.0]]), MOCHA(floor=0.5)
    assert method.covariance(state).tolist() == [close([3 / 7, 0.0]), close([0.0, 4 / 7])]
    assert method.precision(state)[0].tolist() == close([7 / 3, 0.0])
    least = method.init_server(setup(Line(3.0, 4.0))).least
    assert float(least) == close(0.25 * 25)
    assert float(method.init_server(setup(Line())).least) == close(0.25)  # of a model at zero
    more = [math.sqrt(square + 0.25 * 25) for square in (9, 16)]
    found = method.covariance(state._replace(least=least)).diagonal().tolist()
    assert found == close([root / sum(more) for root in more])


def test_no_other_relations_of_trace_one_make_the_penalty_smaller():
    """The penalty is tr(W Ω Wᵀ) + ε² tr(Ω)."""
    state = tasks([[1.0, 2.0], [1.5, 1.0], [-1.0, 0.5]], least=0.3)
    method = MOCHA()
    models = torch.stack([state.models["w"], state.models["b"]])

    def penalty(covariance):
        omega = torch.linalg.inv(covariance)
        return float((models @ omega @ models.T).trace() + 0.3 * omega.trace())

    best = method.covariance(state)
    assert float(best.trace()) == close(1.0)
    draw = torch.Generator().manual_seed(0)
    for _ in range(20):
        other = torch.randn(3, 3, generator=draw).double()
        other = 0.9 * best + 0.1 * other @ other.T / (other @ other.T).trace()
        assert penalty(other / other.trace()) > penalty(best)


def test_what_is_sent_bounds_the_penalty_from_above():
    """tr((W+D) Ω (W+D)ᵀ)/2 ≤ tr(W Ω Wᵀ)/2 + Σ ⟨slope, d⟩ + κ/2 ‖d‖², with equality at d = 0."""
    state, method = tasks([[1.0, 2.0], [1.5, 1.0], [-1.0, 0.5]], least=0.1), MOCHA()
    omega = method.precision(state)
    bound = method.send(state, torch.arange(3)).own
    flat = torch.stack([state.models["w"], state.models["b"]])
    along = torch.stack([bound.gradient["w"], bound.gradient["b"]])
    assert torch.allclose(along, flat @ omega)
    draw = torch.Generator().manual_seed(1)
    for _ in range(20):
        step = torch.randn(2, 3, generator=draw).double()
        true = ((flat + step) @ omega @ (flat + step).T).trace() / 2
        most = (flat @ omega @ flat.T).trace() / 2 + (along * step).sum()
        most = most + (bound.curvature * step.square().sum(0)).sum() / 2
        assert float(true) <= float(most) + 1e-9


@pytest.mark.parametrize("relations", ["mean", "learned"])
def test_logistic_regressions_come_to_the_minimum_of_equation_1(relations):
    """Convex losses: where ∇f_t + λ Σ_s Ω_ts w_s = 0 for all t, Eq. 1 is least; it never rises.

    Learned relations change with the models, so Eq. 1 with its best Ω is compared from round to
    round, and its gradient in W is that with Ω fixed, for Ω is best.
    """
    pull, method = 0.3, MOCHA(pull=0.3, lr=0.5, steps=10, batch=5, relations=relations, floor=1.0)
    locals_ = [client(own) for own in DATA]
    state = method.init_server(setup(Line(0.5, -0.3), sizes=(3, 2, 3)))
    own = [line((0.5 + n, -0.3 * n)) for n in range(3)]
    everyone = torch.arange(3)
    reports = Report({n: torch.stack([one[n] for one in own]) for n in "wb"}, state.heard + 1)
    state = method.server_step(state, everyone, reports)

    def objective():
        flat = torch.stack([state.models["w"], state.models["b"]])
        omega = method.precision(state)
        penalty = float((flat @ omega @ flat.T).trace())
        penalty += float(state.least * omega.trace()) if relations == "learned" else 0.0
        fits = [lost(pair(one), data) for one, data in zip(own, DATA, strict=True)]
        return sum(fits) + pull / 2 * penalty

    before = objective()
    for number in range(150):
        bound = method.send(state, everyone).own
        for t in everyone.tolist() if number % 3 else [0, 2]:  # client 1 is often away
            mine = Bound({n: leaf[t] for n, leaf in bound.gradient.items()}, bound.curvature[t])
            own[t] = method.client_step(Sent(own=mine), own[t], locals_[t])[1]
        stacked = {n: torch.stack([one[n] for one in own]) for n in "wb"}
        state = method.server_step(state, everyone, Report(stacked, state.heard))
        assert objective() <= before + 1e-9
        before = objective()
    omega = method.precision(state).tolist()
    for t, data in enumerate(DATA):
        down = slope(pair(own[t]), data)
        for s in range(3):
            down = plus(down, pull * omega[t][s], pair(own[s]))
        assert down == close((0.0, 0.0), 1e-6)


def test_relations_to_the_mean_are_a_pull_to_it():
    """Ω = I − 11ᵀ/3: the slope is w_t − w̄, and κ = 2 (1 − 1/3)."""
    method = MOCHA(relations="mean")
    bound = method.send(tasks([[1.0, 0.0], [2.0, 3.0], [6.0, 3.0]]), torch.tensor([2, 0])).own
    assert bound.gradient["w"].tolist() == close([3.0, -2.0])
    assert bound.gradient["b"].tolist() == close([1.0, -2.0])
    assert bound.curvature.tolist() == close([4 / 3, 4 / 3])
    assert method.trace(tasks([[1.0, 0.0], [2.0, 3.0]])) == {}


def test_who_was_not_heard_stands_alone():
    state = tasks([[3.0, 0.0], [0.0, 4.0], [9.0, 9.0]], heard=[1, 1, 0])
    method = MOCHA()
    omega = method.precision(state)
    assert omega[2].tolist() == close([0.0, 0.0, 3.0]) and omega[0, 2] == 0
    assert float(method.covariance(state).trace()) == close(1.0)
    fresh = method.init_server(setup(Line(9.0, 9.0), sizes=(1.0, 2.0, 0.0)))
    assert method.precision(fresh).diagonal().tolist() == close([2.0] * 3)  # m counts who has data


def test_a_newcomer_trains_near_the_mean_of_the_models():
    """Heard are (3, 0) and (0, 4); the curve is the mean of theirs, and at the mean is no slope."""
    method = MOCHA(lr=0.1, pull=0.5)
    state = tasks([[3.0, 0.0], [0.0, 4.0], [9.0, 9.0]], heard=[1, 1, 0])
    sent = method.welcome(state, torch.arange(2))
    assert pair(sent.shared) == close((1.5, 2.0))
    assert sent.own.gradient["w"].tolist() == [0.0, 0.0]
    assert sent.own.curvature.tolist() == close(
        [(7 / 2 + 21 / 8) / 2] * 2
    )  # Ω⁻¹ = 2/3 · (3, 4) / 7
    one = Bound({n: leaf[0] for n, leaf in sent.own.gradient.items()}, sent.own.curvature[0])
    own = method.adapt(Sent(sent.shared, one), line((9, 9)), client())
    assert pair(own) == close(plus((1.5, 2.0), -0.1, slope((1.5, 2.0), [(2.0, 1)])))
    fresh = method.init_server(setup(Line(0.5, 0.25)))
    assert pair(method.welcome(fresh, torch.arange(1)).shared) == close((0.5, 0.25))


def test_the_rate_is_lowered_to_where_the_bound_is_least():
    """At a rate of 1/(λκ) = 1/4, below the 10 asked for; a schedule lowers it no further here."""
    bound = Bound(line((1.0, -2.0)), torch.tensor(8.0).double())
    for given in ({}, {"schedule": "step", "decay_rounds": 1, "decay": 0.5}):
        method = MOCHA(lr=10.0, pull=0.5, **given)
        _, kept = method.client_step(Sent(own=bound), line(HIGH), client(round=2))
        assert pair(kept) == close(plus(HIGH, -0.25, (-0.2 + 0.5, -0.1 - 1.0)))
    method = MOCHA(lr=0.8, pull=0.5, schedule="step", decay_rounds=1, decay=0.5)
    _, kept = method.client_step(Sent(own=bound), line(HIGH), client(round=2))
    assert pair(kept) == close(plus(HIGH, -0.2, (-0.2 + 0.5, -0.1 - 1.0)))


def test_without_a_pull_it_is_local():
    bound = Bound(line((1.0, -2.0)), torch.tensor(4.0).double())
    given = {"lr": 0.3, "batch": 1, "epochs": 2}
    _, own = MOCHA(pull=0.0, **given).client_step(Sent(own=bound), line(HIGH), client(DATA[0]))
    _, alone = LocalOnly(**given).client_step(Sent(), line(HIGH), client(DATA[0]))
    assert pair(own) == close(pair(alone))


def test_relations_are_traced_as_correlations():
    state = tasks([[1.0, 2.0], [1.1, 2.1], [-1.0, -2.0]], least=0.01)
    found = MOCHA().trace(state)["relations"]
    assert found.diagonal().tolist() == close([1.0] * 3)
    assert float(found[0, 1]) > 0.5 and float(found[0, 2]) < -0.5


def test_settings_out_of_range_are_refused():
    refuses(MOCHA, "pull", -1.0, "at least 0")
    refuses(MOCHA, "floor", 0.0, "above 0")
    refuses(MOCHA, "relations", "guessed", "one of 'learned', 'mean'")
