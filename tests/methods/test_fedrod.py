"""FedRoD by hand."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from idiolect.core.batchnorm import BatchNorm
from idiolect.core.method import Sent
from idiolect.core.tree import Params
from idiolect.errors import ConfigError
from idiolect.methods import FedRoD
from idiolect.methods.fedrod import PersonalHead, TwoHeads
from methods.tiny import Deep, Split, client, close, refuses, setup, sigmoid

LN3 = math.log(3)


def tensor(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def params(a: float, b: float) -> Params:
    return {"a.w": tensor(a), "b.w": tensor(b)}


def kept(b: float, *prior: float) -> PersonalHead:
    return PersonalHead({"b.w": tensor(b)}, tensor(prior))


@pytest.mark.parametrize("stacked", [False, True])
def test_one_step_by_hand(stacked: bool) -> None:
    """A = 1, generic b = ln 3 / 2, personal head 0, example (2, 1), classes 1/4 and 3/4, lr 0.1.

    Z = ln 3, and with the prior ln 3 + ln (3/4) − ln (1/4) = ln 9: the balanced error is −1/10, so
    a grows by 0.1 · 0.1 · (ln 3 / 2) · 2 and b by 0.1 · 0.1 · 2. Both heads add up to z = ln 3, an
    error of −1/4: the personal head grows by 0.1 · 1/4 · 2, and nothing else by that.
    """
    local = client(main=Split(1.0, LN3 / 2), stacked=stacked)
    report, own = FedRoD(lr=0.1).client_step(
        Sent(params(1.0, LN3 / 2)), kept(0.0, 0.25, 0.75), local
    )
    assert float(report.params["a.w"]) == close(1 + 0.01 * LN3)
    assert float(report.params["b.w"]) == close(LN3 / 2 + 0.02)
    assert sorted(report.params) == ["a.w", "b.w"]
    assert float(own.head["b.w"]) == close(0.05)
    assert own.prior.tolist() == [0.25, 0.75]


def test_a_class_that_a_client_has_not_is_left_out() -> None:
    """With class 1 alone the balanced loss is zero whatever the logits: the network stays."""
    local = client(main=Split(1.0, 0.3))
    report, own = FedRoD(lr=0.1).client_step(Sent(params(1.0, 0.3)), kept(0.2, 0.0, 1.0), local)
    assert {n: float(v) for n, v in report.params.items()} == close({"a.w": 1.0, "b.w": 0.3})
    assert float(own.head["b.w"]) == close(0.2 + 0.1 * (1 - sigmoid(1.0)) * 2)


def test_classes_are_counted_once_before_the_first_round() -> None:
    start = FedRoD().init_personal(setup(Split(1.0, 0.5)))
    assert start.prior.tolist() == [0, 0] and float(start.head["b.w"]) == 0.5
    local = client([(1.0, 0), (4.0, 1), (2.0, 0), (5.0, 0)], main=Split(1.0, 0.0))
    assert FedRoD().prepare(Sent(), start, local).prior.tolist() == close([0.75, 0.25])


def test_both_heads_add_up_and_the_generic_is_the_global_model() -> None:
    """Feature 3, heads 2 and 5: logits [0, 21], and 6 for the global model."""
    local, method = client(main=Split(1.0, 1.0)), FedRoD()
    deployed = method.deploy(Sent(params(1.0, 2.0)), kept(5.0, 0.5, 0.5), local)
    models = method.models(Sent(params(1.0, 2.0)), deployed)
    found = {name: method.predict(m, tensor([3.0]), local).tolist() for name, m in models.items()}
    assert found == {"personal": [[0, 21]], "global": [[0, 6]]}


def test_a_newcomer_trains_a_head_alone() -> None:
    """Feature 2 under b = 0 and a head of 0: p = 1/2, so the head grows by 0.1 · 1/2 · 2."""
    method = FedRoD(lr=0.1, newcomer_epochs=1)
    found = method.adapt(Sent(params(1.0, 0.0)), kept(0.0, 0, 0), client(main=Split(1.0, 0.0)))
    assert isinstance(found, TwoHeads)
    assert float(found.head["b.w"]) == close(0.1)
    assert {n: float(v) for n, v in found.params.items()} == {"a.w": 1.0, "b.w": 0.0}


def test_a_personal_head_of_two_layers_is_trained_and_used() -> None:
    """Generic (1, 1, 0), personal layers (1/2, ln 3), example (2, 1), classes alike, lr 0.1.

    The generic z is 0, an error of −1/2 that c alone feels, at the feature 2. The personal feature
    is 1/2 · 2, so both heads add up to ln 3, an error of −1/4: c grows by 0.1 · 1/4 · 1 and b by
    0.1 · 1/4 · ln 3 · 2.
    """
    method, local = FedRoD(lr=0.1, head_layers=2), client(main=Deep(1.0, 1.0, 0.0))
    generic = {"a.w": tensor(1.0), "b.w": tensor(1.0), "c.w": tensor(0.0)}
    own = PersonalHead({"b.w": tensor(0.5), "c.w": tensor(LN3)}, tensor([0.5, 0.5]))
    report, kept = method.client_step(Sent(generic), own, local)
    found = {name: float(leaf) for name, leaf in report.params.items()}
    assert found == close({"a.w": 1.0, "b.w": 1.0, "c.w": 0.1})
    head = {name: float(leaf) for name, leaf in kept.head.items()}
    assert head == close({"b.w": 0.5 + 0.05 * LN3, "c.w": LN3 + 0.025})
    both = method.predict(TwoHeads({**generic, "c.w": tensor(2.0)}, own.head), tensor([3.0]), local)
    assert both.tolist()[0] == close([0.0, 2.0 * 3 + LN3 * 1.5])


def test_a_personal_head_does_not_reach_running_statistics() -> None:
    start = setup(nn.Sequential(nn.Linear(1, 2), BatchNorm(2), nn.Linear(2, 2)))
    assert sorted(FedRoD().init_personal(start).head) == ["2.bias", "2.weight"]
    with pytest.raises(ConfigError, match=r"head_layers = 2 takes '1\.running_mean'.*lower it"):
        FedRoD(head_layers=2).init_personal(start)


def test_settings_out_of_range_are_refused() -> None:
    refuses(FedRoD, "head_layers", 0, "at least 1")
