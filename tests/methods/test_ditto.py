"""Ditto by hand."""

import pytest

from idiolect.core.method import Sent
from idiolect.methods import Ditto, FedAvg, LocalOnly
from methods.tiny import (
    HIGH,
    LN9,
    Line,
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


@pytest.mark.parametrize("stacked", [False, True])
def test_one_step_by_hand(stacked: bool) -> None:
    """w^t = (0, 0), v = HIGH = (0.4, 0.2) ln 9, the example (2, 1), lr = 0.1, pull = 3.

    The report is FedAvg's: (0, 0) + 0.1 · (1, 1/2). At v, p = 9/10: the gradient is (−0.2, −0.1)
    plus 3 (v − w^t) = (1.2, 0.6) ln 9, so v becomes (0.4 ln 9 + 0.02 − 0.12 ln 9, half of that).
    The pull is to the received w^t, not to the newly trained one.
    """
    method = Ditto(lr=0.1, pull=3.0)
    report, v = method.client_step(Sent(line((0, 0))), line(HIGH), client(stacked=stacked))
    assert pair(report.params) == close((0.1, 0.05))
    assert pair(v) == close((0.28 * LN9 + 0.02, 0.14 * LN9 + 0.01))
    assert float(report.size) == 1


def test_a_round_against_plain_python() -> None:
    received, v = (0.3, -0.2), (-0.5, 0.4)
    for example in TWO * 2:
        v = plus(v, -0.1, plus(slope(v, [example]), 2.0, minus(v, received)))
    method = Ditto(lr=0.1, pull=2.0, batch=1, epochs=2)
    report, kept = method.client_step(Sent(line(received)), line((-0.5, 0.4)), client(TWO))
    assert pair(kept) == close(v)
    plain, _ = FedAvg(lr=0.1, batch=1, epochs=2).client_step(Sent(line(received)), (), client(TWO))
    assert alike(report, plain)  # nothing of v is sent


def test_without_a_pull_v_trains_alone() -> None:
    settings = {"lr": 0.3, "batch": 1, "epochs": 2, "momentum": 0.5}
    _, v = Ditto(pull=0.0, **settings).client_step(Sent(line(HIGH)), line((0.3, -0.2)), client(TWO))
    _, alone = LocalOnly(**settings).client_step(Sent(), line((0.3, -0.2)), client(TWO))
    assert alike(v, alone)


def test_v_is_personal_and_w_global() -> None:
    method = Ditto()
    sent, v = Sent(line((0, 0))), line(HIGH)
    assert method.models(sent, method.deploy(sent, v, client())) == {
        "personal": v,
        "global": sent.shared,
    }
    assert alike(method.init_personal(setup(Line(0.5, 0.25))), line((0.5, 0.25)))


def test_a_newcomer_starts_v_from_the_global_model() -> None:
    """Not from its fresh v, here far away."""
    method, sent = Ditto(lr=0.1, pull=3.0, epochs=2), Sent(line((0.3, -0.2)))
    _, v = method.client_step(sent, sent.shared, client())
    assert alike(method.adapt(sent, line((9.0, 9.0)), client()), v)


def test_settings_out_of_range_are_refused() -> None:
    refuses(Ditto, "pull", -1.0, "at least 0")
