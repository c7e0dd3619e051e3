"""FedDyn by hand."""

import pytest
import torch

from idiolect.core.method import Report, Sent
from idiolect.methods import FedDyn
from idiolect.methods.feddyn import Dynamic
from methods.tiny import Line, alike, client, close, line, minus, pair, plus, refuses, setup, slope

TWO = [(2.0, 1), (-1.0, 0)]


def sent(at: tuple[float, float]) -> Sent:
    return Sent(Dynamic(line(at), line((9, 9)), torch.tensor(4.0, dtype=torch.float64)))


@pytest.mark.parametrize("stacked", [False, True])
def test_one_step_by_hand(stacked: bool) -> None:
    """θ = (0, 0), example (2, 1), lr 0.1, g = (0.2, −0.1), α = 1/2: at θ the penalty pulls not.

    The gradient is (−1, −1/2) − g = (−1.2, −0.4), so θ = (0.12, 0.04) and g falls by half of that.
    """
    local = client(stacked=stacked)
    report, own = FedDyn(lr=0.1, alpha=0.5).client_step(sent((0, 0)), line((0.2, -0.1)), local)
    assert pair(report.params) == close((0.12, 0.04))
    assert pair(own) == close((0.2 - 0.06, -0.1 - 0.02))


def test_a_round_against_plain_python() -> None:
    at, received, own = (0.4, -0.3), (0.4, -0.3), (0.2, -0.1)
    for example in TWO * 2:
        down = plus(minus(slope(at, [example]), own), 0.5, minus(at, received))
        at = plus(at, -0.1, down)
    method = FedDyn(lr=0.1, alpha=0.5, batch=1, epochs=2)
    report, kept = method.client_step(sent(received), line(own), client(TWO))
    assert pair(report.params) == close(at)
    assert pair(kept) == close(plus(own, -0.5, minus(at, received)))


@pytest.mark.parametrize(("server_lr", "found"), [(1.0, 2.6), (0.5, 1.3)])
def test_the_server_by_hand(server_lr: float, found: float) -> None:
    """Received 0, reported 1 and 3 of four clients, h = 0.2, α = 1/2.

    h = 0.2 − 1/2 · (1 + 3) / 4 = −0.3, and the model is 2 + 0.3 / (1/2) = 2.6.
    """

    def leaf(*values: float) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64)

    state = Dynamic({"w": leaf(0.0)[0]}, {"w": leaf(0.2)[0]}, leaf(4.0)[0])
    reports = Report({"w": leaf(1.0, 3.0)}, leaf(5.0, 2.0))
    method = FedDyn(alpha=0.5, server_lr=server_lr)
    new = method.server_step(state, torch.tensor([1, 2]), reports)
    assert float(new.drift["w"]) == close(-0.3)
    assert float(new.params["w"]) == close(found)


def test_the_server_weighs_by_examples_in_both() -> None:
    """Clients with 5 and 2 of ten examples: h = 0.2 − 1/2 · (5 · 1 + 2 · 3) / 10 = −0.35.

    The mean is 11/7, and the model 11/7 + 0.35 / (1/2).
    """

    def leaf(*values: float) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64)

    method = FedDyn(alpha=0.5, uniform=False)
    whole = method.init_server(setup(Line(), sizes=(5, 0, 2, 3))).clients
    state = Dynamic({"w": leaf(0.0)[0]}, {"w": leaf(0.2)[0]}, whole)
    reports = Report({"w": leaf(1.0, 3.0)}, leaf(5.0, 2.0))
    new = method.server_step(state, torch.tensor([0, 2]), reports)
    assert float(new.drift["w"]) == close(-0.35)
    assert float(new.params["w"]) == close(11 / 7 + 0.7)


def test_it_starts_without_drift_and_shows_the_global_model() -> None:
    start = setup(Line(0.4, -0.3), sizes=(2, 0, 5))
    state = FedDyn().init_server(start)
    assert (pair(state.drift), float(state.clients)) == ((0, 0), 2)
    assert alike(FedDyn().models(Sent(state), state.params)["global"], start.params)


def test_settings_out_of_range_are_refused() -> None:
    refuses(FedDyn, "alpha", 0.0, "above 0")
