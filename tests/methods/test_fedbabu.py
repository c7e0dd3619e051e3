"""FedBABU by hand."""

import math

import pytest
import torch

from idiolect.core.method import Report, Sent
from idiolect.core.tree import Params
from idiolect.methods import FedAvg, FedBABU
from methods.tiny import Chain, alike, client, close, refuses

LN3 = math.log(3)


def params(a: float, b: float) -> Params:
    return {name: torch.tensor(v, dtype=torch.float64) for name, v in (("a.w", a), ("b.w", b))}


@pytest.mark.parametrize("stacked", [False, True])
def test_one_round_by_hand(stacked: bool) -> None:
    """Z = b · a · x, a = 1, head b = ln 3 / 2, example (2, 1), lr 0.1: p = 3/4.

    ∂/∂a = (3/4 − 1) · (ln 3 / 2) · 2 = −ln 3 / 4, so a = 1 + 0.025 ln 3. The head stays, and is not
    reported.
    """
    local = client(main=Chain(1.0, LN3 / 2), stacked=stacked)
    report, kept = FedBABU(lr=0.1).client_step(Sent(params(1.0, LN3 / 2)), (), local)
    assert list(report.params) == ["a.w"] and kept == ()
    assert float(report.params["a.w"]) == close(1 + 0.025 * LN3)
    assert float(report.size) == 1


def test_the_server_averages_the_body_by_examples_and_keeps_the_head() -> None:
    method, state = FedBABU(server_lr=0.5), params(1.0, 7.0)
    body = {"a.w": torch.tensor([2.0, 6.0], dtype=torch.float64)}
    reports = Report(body, torch.tensor([1.0, 3.0], dtype=torch.float64))
    new = method.server_step(state, torch.tensor([0, 1]), reports)
    assert {name: float(v) for name, v in new.items()} == {"a.w": 1 + 0.5 * (5 - 1), "b.w": 7.0}
    assert list(method.reference(state, torch.tensor([0]))) == ["a.w"]


@pytest.mark.parametrize(
    ("tune", "a", "b"),
    [("all", 0.025 * LN3, 0.05), ("body", 0.025 * LN3, 0.0), ("head", 0.0, 0.05)],
)
def test_what_is_tuned_after_the_rounds(tune: str, a: float, b: float) -> None:
    """One pass at rate 0.1: ∂/∂a = −ln 3 / 4 as above, ∂/∂b = −1/4 · 1 · 2 = −1/2."""
    method = FedBABU(lr=9.0, tune=tune, tune_lr=0.1, tune_epochs=1)
    tuned = method.deploy(Sent(params(1.0, LN3 / 2)), (), client(main=Chain(1.0, LN3 / 2)))
    assert float(tuned["a.w"]) == close(1 + a)
    assert float(tuned["b.w"]) == close(LN3 / 2 + b)


def test_without_a_head_the_rounds_are_fedavgs() -> None:
    given, state = {"lr": 0.3, "epochs": 2}, params(0.7, -0.4)
    plain, _ = FedAvg(**given).client_step(Sent(state), (), client(main=Chain(0.7, -0.4)))
    method = FedBABU(head_layers=0, tune="head", **given)
    report, _ = method.client_step(Sent(state), (), client(main=Chain(0.7, -0.4)))
    assert alike(report, plain)
    assert alike(method.deploy(Sent(state), (), client(main=Chain(0.7, -0.4))), state)


@pytest.mark.parametrize("stacked", [False, True])
def test_a_network_that_is_all_head_learns_nothing_in_rounds(stacked: bool) -> None:
    method, state = FedBABU(head_layers=2), params(0.7, -0.4)
    local = client(main=Chain(0.7, -0.4), stacked=stacked)
    report, _ = method.client_step(Sent(state), (), local)
    assert report.params == {}


def test_settings_out_of_range_are_refused() -> None:
    refuses(FedBABU, "tune", "nothing", "one of 'all', 'body', 'head'")
    refuses(FedBABU, "tune_epochs", 0, "at least 1")
