"""LG-FedAvg by hand."""

import math

import pytest
import torch

from idiolect.core.method import Sent
from idiolect.methods import LGFedAvg
from methods.tiny import Chain, client, close, refuses, setup

LN3 = math.log(3)


def tensor(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64)


@pytest.mark.parametrize("stacked", [False, True])
def test_one_round_by_hand(stacked: bool) -> None:
    """Z = b · a · x with the own a = 1, the shared b = ln 3 / 2, example (2, 1), lr 0.1: p = 3/4.

    Both are trained together: ∂/∂b = −1/4 · 1 · 2 = −1/2 and ∂/∂a = −1/4 · (ln 3 / 2) · 2. The last
    layer is reported, the first stays.
    """
    local = client(main=Chain(1.0, 0.0), stacked=stacked)
    report, kept = LGFedAvg(lr=0.1).client_step(
        Sent({"b.w": tensor(LN3 / 2)}), {"a.w": tensor(1.0)}, local
    )
    assert {name: float(v) for name, v in report.params.items()} == {"b.w": close(LN3 / 2 + 0.05)}
    assert {name: float(v) for name, v in kept.items()} == {"a.w": close(1 + 0.025 * LN3)}


def test_the_server_has_the_last_layers_and_clients_the_first() -> None:
    start = setup(Chain(1.0, 2.0, 3.0))
    method = LGFedAvg(head_layers=2)
    assert list(method.init_server(start)) == ["b.w", "c.w"]
    assert list(method.init_personal(start)) == ["a.w"]
    own = method.deploy(Sent({"b.w": tensor(5.0)}), {"a.w": tensor(4.0)}, client())
    assert {name: float(v) for name, v in own.items()} == {"a.w": 4.0, "b.w": 5.0}


def test_a_newcomer_trains_its_representation_under_the_shared_layers() -> None:
    """From a = 0 under b = 2, example (2, 1): p = 1/2, ∂/∂a = −1/2 · 2 · 2 = −2."""
    method = LGFedAvg(lr=0.1, newcomer_epochs=1)
    own = method.adapt(Sent({"b.w": tensor(2.0)}), {"a.w": tensor(0.0)}, client(main=Chain(0, 0)))
    assert {name: float(v) for name, v in own.items()} == {"a.w": close(0.2), "b.w": 2.0}


def test_settings_out_of_range_are_refused() -> None:
    refuses(LGFedAvg, "head_layers", 0, "at least 1")
