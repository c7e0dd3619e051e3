"""FedCP by hand."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from idiolect.core.method import Sent
from idiolect.core.tree import Params
from idiolect.methods import FedCP
from idiolect.methods.fedcp import Separated, discrepancy, separate
from methods.tiny import Deep, Split, client, close, refuses, setup, sigmoid

LN3 = math.log(3)
WIDTHS = (10, 15, 20, 50)


def tensor(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def shared(a: float, b: float, *shift: float) -> Params:
    """A network and a policy that gives the same two numbers for every feature."""
    policy = {"weight": [[0.0], [0.0]], "bias": [0.0, 0.0], "scale": [0.0, 0.0], "shift": shift}
    named = {f"policy.{name}": tensor(value) for name, value in policy.items()}
    return {"a.w": tensor(a), "b.w": tensor(b), **named}


@pytest.mark.parametrize("stacked", [False, True])
def test_one_step_by_hand(stacked: bool) -> None:
    """A = 1, global head ln 3, personal head ln 3 / 3, example (2, 1), shares 3/4 and 1/4, lr 0.1.

    The heads get 3/2 and 1/2 of the feature 2, so z = ln 3 / 2 + ln 3 / 2 = ln 3, the error −1/4.
    ∂/∂personal = −1/4 · 3/2, ∂/∂a = −1/4 · ln 3 and ∂/∂share = −1/4 · 2 · (ln 3 / 3 − ln 3), whose
    slope in the policy's first number is 3/4 · 1/4, in the second minus that. Features are still
    the received ones, so λ has no say. Reported as head is the mean of both.
    """
    local = client(main=Split(1.0, 0.0), stacked=stacked)
    report, own = FedCP(lr=0.1).client_step(
        Sent(shared(1.0, LN3, 0.5 + LN3, 0.5)), {"b.w": tensor(LN3 / 3)}, local
    )
    personal = LN3 / 3 + 0.1 * 3 / 8
    moved = 0.1 * (LN3 / 3) * 3 / 16
    assert float(own["b.w"]) == close(personal)
    assert float(report.params["b.w"]) == close((personal + LN3) / 2)
    assert float(report.params["a.w"]) == close(1 + 0.1 * LN3 / 4)
    shift = report.params["policy.shift"].tolist()
    assert shift == close([0.5 + LN3 - moved, 0.5 + moved])


def test_features_stay_near_the_received_ones() -> None:
    """Two steps: in the second the feature is 2 (a − 1) off, which λ times MMD² pulls back."""
    a, own, rest, s = 1.0, LN3 / 3, LN3, [0.5 + LN3, 0.5]
    for _ in range(2):
        share, off = sigmoid(s[0] - s[1]), 2 * (a - 1)
        error = sigmoid(2 * a * (own * share + rest * (1 - share))) - 1
        pull = sum(2 * off / w * math.exp(-(off**2) / (2 * w)) for w in WIDTHS) * 2
        to_share = error * 2 * a * (own - rest) * share * (1 - share)
        to_a = error * 2 * (own * share + rest * (1 - share)) + 4.0 * pull
        own -= 0.1 * error * 2 * a * share
        a -= 0.1 * to_a
        s = [s[0] - 0.1 * to_share, s[1] + 0.1 * to_share]
    report, kept = FedCP(lr=0.1, align=4.0, epochs=2).client_step(
        Sent(shared(1.0, LN3, 0.5 + LN3, 0.5)),
        {"b.w": tensor(LN3 / 3)},
        client(main=Split(1.0, 0.0)),
    )
    assert float(report.params["a.w"]) == close(a)
    assert float(kept["b.w"]) == close(own)
    assert report.params["policy.shift"].tolist() == close(s)


def test_the_discrepancy_by_hand_and_without_padding() -> None:
    """Samples {0} and {2}: four kernels of 1 each, twice, less twice those at distance 2."""
    wanted = 8 - 2 * sum(math.exp(-4 / (2 * w)) for w in WIDTHS)
    left, right = tensor([[0.0], [77.0]]), tensor([[2.0], [-5.0]])
    assert float(discrepancy(left, right, tensor([1.0, 0.0]))) == close(wanted)
    assert float(discrepancy(left, left, tensor([1.0, 1.0]))) == close(0.0)


def test_the_policy_is_a_dense_layer_a_norm_and_a_softmax() -> None:
    torch.manual_seed(0)
    dense, norm = nn.Linear(3, 6, dtype=torch.float64), nn.LayerNorm(6, dtype=torch.float64)
    nn.init.normal_(norm.weight), nn.init.normal_(norm.bias)
    named = {"weight": dense.weight, "bias": dense.bias, "scale": norm.weight, "shift": norm.bias}
    policy = {f"policy.{name}": value.detach() for name, value in named.items()}
    features, context = torch.randn(5, 3, dtype=torch.float64), tensor([0.6, 0.0, -0.8])
    shares = norm(dense(features * context)).relu().reshape(5, 2, 3).softmax(1)
    mine, rest = separate(policy, context, features)
    assert torch.allclose(mine, features * shares[:, 0])
    assert torch.allclose(rest, features * shares[:, 1])


def test_the_context_is_the_direction_of_the_heads_weights() -> None:
    """Of a linear head it is the sum of its class weights at length one; its sign matters."""
    head = nn.Linear(2, 3, dtype=torch.float64)
    head.weight.data = tensor([[1.0, 2.0], [0.0, 1.0], [2.0, 1.0]])  # sum (3, 4)
    start = setup(head)._replace(features=(2,), classes=3)
    method = FedCP()
    state = method.init_server(start)
    own = {**method.init_personal(start)}
    local, x = client(main=head), tensor([[0.5, -1.0]])
    mine, rest = separate(state, tensor([0.6, 0.8]), x)
    with torch.no_grad():
        wanted = head(mine) + head(rest)
    assert torch.allclose(method.predict(Separated(state, own), x, local), wanted)
    flipped = {"weight": -own["weight"], "bias": own["bias"]}
    mine, rest = separate(state, tensor([-0.6, -0.8]), x)
    with torch.no_grad():
        wanted = 2 * head.bias - mine @ head.weight.T + rest @ head.weight.T
    assert torch.allclose(method.predict(Separated(state, flipped), x, local), wanted)


def test_the_policy_is_drawn_from_the_runs_seed() -> None:
    start = setup(Split(1.0, 0.0))._replace(features=(4,))
    one, two, other = (
        FedCP().init_server(start._replace(seed=seed))["policy.weight"] for seed in (0, 0, 1)
    )
    assert one.shape == (8, 4) and float(one.abs().max()) <= 0.5
    assert torch.equal(one, two) and not torch.equal(one, other)


def test_a_newcomer_trains_a_head_from_the_global_one() -> None:
    """All to the personal head but e⁻⁹⁹: feature 2, b = 0, p = 1/2: b grows by 0.1 · 1/2 · 2."""
    method = FedCP(lr=0.1, newcomer_epochs=1)
    state = shared(1.0, 0.0, 99.0, 0.0)
    found = method.adapt(Sent(state), {"b.w": tensor(5.0)}, client(main=Split(1.0, 0.0)))
    assert float(found.head["b.w"]) == close(0.1)
    assert float(found.params["b.w"]) == 0


def test_features_are_those_of_the_own_layers_where_the_head_has_two() -> None:
    """Own layers (3, 1) on a = 1: the feature of 2 is 6, of which either head takes a half.

    So they were trained: the loss starts from the own layers, at z = 3 + 3 as well.
    """
    method, local = FedCP(lr=0.1, head_layers=2), client(main=Deep(1.0, 1.0, 1.0))
    sent = Sent({**shared(1.0, 1.0, 0.0, 0.0), "c.w": tensor(1.0)})
    own = {"b.w": tensor(3.0), "c.w": tensor(1.0)}
    deployed = method.deploy(sent, own, local)
    assert method.predict(deployed, tensor([2.0]), local).tolist() == [close([0.0, 6.0])]
    _, kept = method.client_step(sent, own, local)
    assert float(kept["c.w"]) == close(1 + 0.1 * (1 - sigmoid(6.0)) * 3)


def test_settings_out_of_range_are_refused() -> None:
    refuses(FedCP, "align", -1.0, "at least 0")
