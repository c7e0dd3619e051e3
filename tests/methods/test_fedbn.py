"""FedBN by hand."""

import pytest
import torch
from torch import Tensor, nn

from idiolect.core.method import Sent
from idiolect.core.tree import Params
from idiolect.errors import MethodError
from idiolect.methods import FedBN
from methods.tiny import Chain, Factor, Line, client, close, refuses, setup, sigmoid


class Normed(nn.Module):
    """Logits out · (scale · n + shift), where n is (−x, x) brought to mean 0 and variance 1."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(2, eps=0.0, dtype=torch.float64)
        self.out = Factor(2.0)

    def forward(self, x: Tensor) -> Tensor:
        x = x.reshape(-1)
        return self.out(self.norm(torch.stack([-x, x], -1)))


def numbers(params: Params) -> dict[str, object]:
    return {name: value.tolist() for name, value in params.items()}


@pytest.mark.parametrize("stacked", [False, True])
def test_one_step_by_hand(stacked: bool) -> None:
    """N = (−1, 1) for any x > 0. From scale 1, shift 0, out = 2: logits (−2, 2), z = 4, p = σ(4).

    With y = 1 and e = p − 1 the logits' gradient is (−e, e). So ∂/∂out = (−e)(−1) + e · 1 = 2e,
    ∂/∂scale = 2 · (−e · −1, e · 1) = (2e, 2e), ∂/∂shift = 2 · (−e, e).
    """
    e, model = sigmoid(4.0) - 1, Normed()
    method, told = FedBN(lr=0.1), setup(Normed())
    report, norms = method.client_step(
        Sent(method.init_server(told)),
        method.init_personal(told),
        client(main=model, stacked=stacked),
    )
    assert numbers(report.params) == {"out.w": close(2 - 0.2 * e)}
    assert numbers(norms) == {
        "norm.weight": close([1 - 0.2 * e, 1 - 0.2 * e]),
        "norm.bias": close([0.2 * e, -0.2 * e]),
    }
    assert float(report.size) == 1


def test_normalisation_is_personal_and_persists() -> None:
    """It goes on from round to round at the client, and the server never holds it."""
    method, told = FedBN(lr=0.1), setup(Normed())
    assert list(method.init_server(told)) == ["out.w"]
    personal = method.init_personal(told)
    assert list(personal) == ["norm.weight", "norm.bias"]
    sent, local = Sent({"out.w": torch.tensor(2.0).double()}), client(main=Normed())
    _, once = method.client_step(sent, personal, local)
    report, twice = method.client_step(sent, once, local)
    assert list(report.params) == ["out.w"]
    assert float(twice["norm.weight"][0]) > float(once["norm.weight"][0]) > 1
    deployed = method.deploy(sent, twice, local)
    assert set(deployed) == set(told.params)
    assert deployed["norm.weight"] is twice["norm.weight"]
    assert method.models(sent, deployed) == {"personal": deployed}


def test_a_newcomer_fits_its_normalisation_alone() -> None:
    """As above, three times: z is 2 · (scale₁ + scale₂ + shift₂ − shift₁), and out stays at 2."""
    scale, shift = 1.0, 0.0  # shifts are −shift and shift
    for _ in range(3):
        e = sigmoid(4 * (scale + shift)) - 1
        scale, shift = scale - 0.2 * e, shift - 0.2 * e
    method, told = FedBN(lr=0.1, newcomer_epochs=3, epochs=7), setup(Normed())
    sent = Sent({"out.w": torch.tensor(2.0).double()})
    found = method.adapt(sent, method.init_personal(told), client(main=Normed()))
    assert numbers(found) == {
        "out.w": 2.0,
        "norm.weight": close([scale, scale]),
        "norm.bias": close([-shift, shift]),
    }


def test_group_and_layer_normalisation_count() -> None:
    model = nn.Sequential(nn.Linear(1, 4), nn.GroupNorm(2, 4), nn.Linear(4, 4), nn.LayerNorm(4))
    kept = FedBN().init_personal(setup(model))
    assert list(kept) == ["1.weight", "1.bias", "3.weight", "3.bias"]


@pytest.mark.parametrize("model", [Line(), Chain(1.0, 2.0)])
def test_a_network_without_normalisation_is_refused(model: nn.Module) -> None:
    with pytest.raises(MethodError, match=r"no normalisation layer.*nn\.GroupNorm, or use fedavg"):
        FedBN().init_server(setup(model))
    with pytest.raises(MethodError, match="no normalisation layer"):
        FedBN().init_personal(setup(model))


def test_settings_out_of_range_are_refused() -> None:
    refuses(FedBN, "server_lr", 0.0, "above 0")
