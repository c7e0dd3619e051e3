"""FedRep by hand."""

import math

import pytest
import torch

from idiolect.core import tree
from idiolect.core.method import Sent
from idiolect.methods import FedAvg, FedRep
from methods.tiny import Chain, alike, client, close, refuses, setup, sigmoid

LN3 = math.log(3)


def tensor(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64)


@pytest.mark.parametrize("stacked", [False, True])
def test_one_round_by_hand(stacked: bool) -> None:
    """Z = b · a · x with base a = 1, head b = ln 3 / 2, example (2, 1), lr = ln 3, one pass each.

    Head first: p = 3/4, ∂/∂b = (3/4 − 1) · 1 · 2 = −1/2, so b = ln 3 / 2 + ln 3 / 2 = ln 3.
    Then the base under that head: z = 2 ln 3 = ln 9, p = 9/10, ∂/∂a = −(1/10) · ln 3 · 2, so
    a = 1 + 0.2 ln² 3. (Together, as FedPer trains them, a would become 1 + ln² 3 / 4.)
    """
    method = FedRep(lr=LN3, head_epochs=1)
    local = client(main=Chain(1.0, LN3 / 2), stacked=stacked)
    report, head = method.client_step(Sent({"a.w": tensor(1.0)}), {"b.w": tensor(LN3 / 2)}, local)
    assert float(head["b.w"]) == close(LN3)
    assert float(report.params["a.w"]) == close(1 + 0.2 * LN3**2)
    assert list(report.params) == ["a.w"]
    assert list(head) == ["b.w"]


def test_each_part_stands_still_while_the_other_fits() -> None:
    """Three passes for the head on the received base, then two for the base under the new head."""
    a, b = 1.3, 0.2
    for _ in range(3):
        b -= 0.1 * (sigmoid(2 * a * b) - 1) * 2 * a
    new = a
    for _ in range(2):
        new -= 0.1 * (sigmoid(2 * new * b) - 1) * 2 * b
    method = FedRep(lr=0.1, head_epochs=3, epochs=2)
    report, head = method.client_step(
        Sent({"a.w": tensor(a)}), {"b.w": tensor(0.2)}, client(main=Chain(a, 0.2))
    )
    assert float(head["b.w"]) == close(b)
    assert float(report.params["a.w"]) == close(new)
    assert float(report.size) == 1


def test_without_a_head_it_is_fedavg() -> None:
    model, settings = Chain(0.7, -0.4), {"lr": 0.3, "epochs": 2}
    state = setup(model).params
    plain, _ = FedAvg(**settings).client_step(Sent(state), (), client(main=model))
    method = FedRep(head_layers=0, **settings)
    report, head = method.client_step(Sent(state), {}, client(main=model))
    assert alike(report, plain)
    assert tree.leaves(head) == []


def test_a_newcomer_trains_the_head_alone() -> None:
    """As FedPer's: one pass on the base a = 2 from b = 0 gives b = lr · (1/2) · 2 · 2."""
    method = FedRep(lr=0.1, newcomer_epochs=1)
    adapted = method.adapt(
        Sent({"a.w": tensor(2.0)}), {"b.w": tensor(0.0)}, client(main=Chain(1.0, 0.0))
    )
    assert (float(adapted["a.w"]), float(adapted["b.w"])) == close((2.0, 0.2))


def test_settings_out_of_range_are_refused() -> None:
    refuses(FedRep, "head_epochs", 0, "at least 1")
