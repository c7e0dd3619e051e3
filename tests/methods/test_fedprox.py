"""FedProx by hand."""

import pytest

from idiolect.core.method import Sent
from idiolect.methods import FedAvg, FedProx
from methods.tiny import HIGH, LN9, alike, client, close, line, pair, plus, refuses


@pytest.mark.parametrize("stacked", [False, True])
def test_two_steps_by_hand(stacked: bool) -> None:
    """From w0 = (0, 0) with (2, 1), lr = 0.4 ln 9 and pull = 0.5.

    Step 1: the pull is 0.5 (w0 − w0) = 0, so FedAvg's step leads to HIGH = (0.4, 0.2) ln 9.
    Step 2: p = 9/10, gradient (−0.2, −0.1) + 0.5 (HIGH − w0) = (−0.2 + 0.2 ln 9, −0.1 + 0.1 ln 9).
    """
    lr = 0.4 * LN9
    gradient = (-0.2 + 0.2 * LN9, -0.1 + 0.1 * LN9)
    method = FedProx(lr=lr, pull=0.5, epochs=2)
    report, personal = method.client_step(Sent(line((0, 0))), (), client(stacked=stacked))
    assert pair(report.params) == close(plus(HIGH, -lr, gradient))
    assert float(report.size) == 1
    assert personal == ()


def test_the_pull_is_to_the_received_model_not_to_zero() -> None:
    """One step never feels the pull, wherever it starts."""
    sent = Sent(line((3.0, -1.0)))
    held, _ = FedProx(lr=0.1, pull=5.0).client_step(sent, (), client())
    free, _ = FedAvg(lr=0.1).client_step(sent, (), client())
    assert alike(held, free)


def test_without_a_pull_it_is_fedavg() -> None:
    settings = {"lr": 0.3, "epochs": 3, "batch": 1, "momentum": 0.5}
    sent, examples = Sent(line((0.3, -0.2))), [(2.0, 1), (-1.0, 0)]
    prox, _ = FedProx(pull=0.0, **settings).client_step(sent, (), client(examples))
    plain, _ = FedAvg(**settings).client_step(sent, (), client(examples))
    assert alike(prox, plain)


def test_a_strong_pull_keeps_it_near() -> None:
    """The farther, the weaker the pull; the limit is at distance ‖∇f‖ / pull < √1.25 / pull."""
    ways = []
    for pull in (0.0, 1.0, 9.0):
        method = FedProx(lr=0.1, pull=pull, epochs=50)
        report, _ = method.client_step(Sent(line((0, 0))), (), client())
        w, b = pair(report.params)
        ways.append((w * w + b * b) ** 0.5)
    assert ways[0] > ways[1] > ways[2]
    assert ways[2] < 1.25**0.5 / 9


def test_settings_out_of_range_are_refused() -> None:
    refuses(FedProx, "pull", -0.1, "at least 0")
