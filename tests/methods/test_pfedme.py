"""pFedMe by hand."""

import pytest
import torch

from idiolect.core import tree
from idiolect.core.method import Report, Sent, mean_report
from idiolect.errors import ConfigError
from idiolect.methods import PFedMe
from methods.tiny import (
    HIGH,
    LN9,
    ONE,
    Examples,
    Line,
    Ordered,
    Pair,
    alike,
    client,
    close,
    line,
    minus,
    pair,
    plus,
    refuses,
    setup,
    slope,
)

TWO = [(2.0, 1), (-1.0, 0)]


def by_hand(method: PFedMe, start: Pair, batches: list[Examples]) -> tuple[Pair, Pair]:
    """W and θ after a round, in plain Python."""
    w = theta = start
    for batch in batches:
        theta = theta if method.warm else w
        for _ in range(method.inner_steps):
            gradient = plus(slope(theta, batch), method.pull, minus(theta, w))
            gradient = plus(gradient, method.weight_decay, theta)
            theta = plus(theta, -method.inner_lr, gradient)
        w = plus(w, -method.lr * method.pull, minus(w, theta))
    return w, theta


@pytest.mark.parametrize("stacked", [False, True])
def test_one_round_by_hand(stacked: bool) -> None:
    """One batch (2, 1), w = (0, 0), K = 2, inner_lr α = 0.4 ln 9, pull λ = 0.5, lr η = 0.2.

    Inner step 1: θ = w, gradient (−1, −1/2), no pull yet: θ = α (1, 1/2) = (0.4, 0.2) ln 9 = HIGH.
    Inner step 2: p = 9/10, gradient (−0.2, −0.1) + 0.5 (HIGH − w): with (1, 1/2) as unit it is
    −0.2 + 0.5 α, so θ = α (1 + 0.2 − 0.5 α) · (1, 1/2) = α (1.2 − 0.5 α) (1, 1/2).
    Then w ← w − ηλ (w − θ) = 0.1 θ. The report is w, the personal model θ.
    """
    a = 0.4 * LN9
    theta = plus((0.0, 0.0), a * (1.2 - 0.5 * a), (1.0, 0.5))
    method = PFedMe(lr=0.2, inner_lr=a, inner_steps=2, pull=0.5)
    report, personal = method.client_step(
        Sent(line((0, 0))), line((5.0, 5.0)), client(stacked=stacked)
    )
    assert pair(personal) == close(theta)
    assert pair(report.params) == close((0.1 * theta[0], 0.1 * theta[1]))
    assert float(report.size) == 1


@pytest.mark.parametrize("warm", [True, False])
@pytest.mark.parametrize("weight_decay", [0.0, 0.05])
def test_several_batches_against_plain_python(warm: bool, weight_decay: float) -> None:
    """Two passes over two batches; `warm` decides where θ starts at each batch but the first."""
    method = PFedMe(
        lr=0.1,
        inner_lr=0.05,
        inner_steps=3,
        pull=4.0,
        warm=warm,
        weight_decay=weight_decay,
        batch=1,
        epochs=2,
    )
    w, theta = by_hand(method, (0.3, -0.2), [[TWO[0]], [TWO[1]]] * 2)
    report, personal = method.client_step(Sent(line((0.3, -0.2))), line((5.0, 5.0)), client(TWO))
    assert pair(report.params) == close(w)
    assert pair(personal) == close(theta)


def test_warm_and_cold_starts_differ() -> None:
    ends = [
        PFedMe(inner_lr=0.05, batch=1, warm=warm).client_step(
            Sent(line((0.3, -0.2))), line((0, 0)), client(TWO)
        )
        for warm in (True, False)
    ]
    assert not alike(*ends)


def test_theta_is_not_w_and_is_what_is_scored() -> None:
    """Public code scores w, or the global model; here θ, which fits the client better than w."""
    method, sent = PFedMe(inner_lr=0.05, lr=0.01), Sent(line((0, 0)))
    report, theta = method.client_step(sent, method.init_personal(setup(Line())), client())
    assert not alike(theta, report.params)
    assert pair(theta) > pair(report.params) > (0.0, 0.0)
    after = Sent(report.params)
    deployed = method.deploy(after, theta, client())
    models = method.models(after, deployed)
    assert models["personal"] is theta
    assert models["global"] is report.params
    scored = method.predict(models["personal"], torch.tensor([2.0]).double(), client())
    assert float(scored[0, 1]) == close(2 * pair(theta)[0] + pair(theta)[1])


def test_many_inner_steps_reach_the_envelopes_fixed_point() -> None:
    """At the minimum of f(θ) + λ/2 ‖θ − w‖² the gradient is nil: θ = w − ∇f(θ)/λ."""
    w = (0.3, -0.2)
    method = PFedMe(inner_lr=0.2, inner_steps=80, pull=2.0, batch=2)
    _, personal = method.client_step(Sent(line(w)), line((0, 0)), client(TWO))
    theta = pair(personal)
    assert theta == close(plus(w, -1 / 2.0, slope(theta, TWO)), 1e-9)


def test_w_steps_along_the_envelopes_gradient() -> None:
    """∇F(w) = λ (w − θ) = ∇f(θ) at that point, so w moves by −η ∇f(θ)."""
    w = (0.3, -0.2)
    method = PFedMe(lr=0.1, inner_lr=0.2, inner_steps=80, pull=2.0, batch=2)
    report, personal = method.client_step(Sent(line(w)), line((0, 0)), client(TWO))
    assert pair(report.params) == close(plus(w, -0.1, slope(pair(personal), TWO)), 1e-9)


def test_without_a_pull_w_stays() -> None:
    report, theta = PFedMe(pull=0.0).client_step(Sent(line(HIGH)), line((0, 0)), client())
    assert pair(report.params) == HIGH
    assert pair(theta) != HIGH


def test_the_servers_rate() -> None:
    """β = 1 is plain averaging; β = 2 goes as far again: (1 − β) w + β · average."""
    reports = Report(
        tree.stack([line((1.0, 2.0)), line((4.0, -1.0))]), torch.tensor([1.0, 3.0]).double()
    )
    cohort, state = torch.tensor([0, 1]), line((1.0, 1.0))
    mean = mean_report(reports, uniform=True)
    assert alike(PFedMe(server_lr=1.0).server_step(state, cohort, reports), mean)
    assert pair(PFedMe(server_lr=2.0).server_step(state, cohort, reports)) == close((4.0, 0.0))


def test_a_newcomer_finds_its_theta_in_one_round() -> None:
    method, sent = PFedMe(inner_lr=0.05, pull=4.0), Sent(line((0.3, -0.2)))
    plans = Ordered({"train": ONE})
    adapted = method.adapt(sent, line((0, 0)), client(plans=plans))
    assert pair(adapted) == close(by_hand(method, (0.3, -0.2), [ONE])[1])
    assert plans.asked == ["train"]


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("inner_lr", 0.0, "above 0"),
        ("inner_steps", 0, "at least 1"),
        ("pull", -1.0, "at least 0"),
        ("server_lr", 0.0, "above 0"),
    ],
)
def test_settings_out_of_range_are_refused(field: str, value: object, rule: str) -> None:
    refuses(PFedMe, field, value, rule)


def test_settings_without_effect_are_refused() -> None:
    """Its steps are plain gradient steps: momentum would be silently ignored."""
    with pytest.raises(ConfigError, match=r"PFedMe: momentum is 0\.9, but its steps are plain"):
        PFedMe(momentum=0.9)
