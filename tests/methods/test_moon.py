"""MOON by hand."""

import math

import pytest
import torch
from torch import Tensor, nn

from idiolect.core.method import Sent
from idiolect.core.tree import Params
from idiolect.methods import MOON, FedAvg
from methods.tiny import Factor, alike, client, close, refuses, setup, sigmoid


class Angle(nn.Module):
    """Features (a · x, 1), logits [0, b · a · x]: the cosine of two models' features varies."""

    def __init__(self, a: float = 0.0, b: float = 0.0) -> None:
        super().__init__()
        self.a, self.b = Factor(a), Factor(b)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))

    def features(self, x: Tensor) -> Tensor:
        s = self.a(x.reshape(-1, 1))
        return torch.cat([s, torch.ones_like(s)], -1)

    def head(self, features: Tensor) -> Tensor:
        z = self.b(features[:, :1])
        return torch.cat([torch.zeros_like(z), z], -1)


def params(a: float, b: float) -> Params:
    return {name: torch.tensor(v, dtype=torch.float64) for name, v in (("a.w", a), ("b.w", b))}


@pytest.mark.parametrize("stacked", [False, True])
def test_one_step_by_hand(stacked: bool) -> None:
    """Received a = 0, b = 3, last model a' = 3/8, example (2, 1), τ = 1/5, μ = 1/2, lr 0.1.

    Features are (0, 1), received the same, of the last model (3/4, 1): cosines 1 and 4/5. As the
    first feature s grows, the former stands still and the latter grows by 3/5, so the contrast
    softplus((4/5 − 1) · 5) grows by σ(−1) · 5 · 3/5. With ds/da = 2, z = 0 and p = 1/2:
    ∂/∂a = −1/2 · 3 · 2 + 1/2 · 6 σ(−1), and ∂/∂b = 0.
    """
    method = MOON(lr=0.1, contrast=0.5, temperature=0.2)
    local = client(main=Angle(), stacked=stacked)
    report, last = method.client_step(Sent(params(0.0, 3.0)), params(0.375, 1.0), local)
    assert float(report.params["a.w"]) == close(0.1 * (3 - 3 * sigmoid(-1)))
    assert float(report.params["b.w"]) == close(3.0)
    assert alike(report.params, last)


def turn(s: float, t: float) -> tuple[float, float]:
    """The cosine of (s, 1) and (t, 1), and its derivative in s."""
    length = math.sqrt(t * t + 1)
    return (s * t + 1) / math.sqrt(s * s + 1) / length, (t - s) / (s * s + 1) ** 1.5 / length


def test_two_steps_against_plain_python() -> None:
    """In the second step the model has left the received one, which pulls it back."""
    a, b, start, before = 0.4, -0.3, 0.4, -0.9
    for _ in range(2):
        s, p = 2 * a, sigmoid(2 * a * b)
        (near, to), (far, away) = turn(s, 2 * start), turn(s, 2 * before)
        contrast = sigmoid((far - near) / 0.7) / 0.7 * (away - to) * 2
        a, b = a - 0.3 * ((p - 1) * 2 * b + 4 * contrast), b - 0.3 * (p - 1) * s
    method = MOON(lr=0.3, contrast=4.0, temperature=0.7, epochs=2)
    report, _ = method.client_step(
        Sent(params(0.4, -0.3)), params(before, 5.0), client(main=Angle())
    )
    assert float(report.params["a.w"]) == close(a)
    assert float(report.params["b.w"]) == close(b)


def test_in_a_clients_first_round_and_first_step_it_is_fedavg() -> None:
    """The last model is the received one, so the contrast is log 2 wherever the model goes."""
    start = setup(Angle(0.4, -0.3))
    own = MOON().init_personal(start)
    plain, _ = FedAvg(lr=0.3, epochs=2).client_step(
        Sent(start.params), (), client(main=Angle(0.4, -0.3))
    )
    report, _ = MOON(lr=0.3, epochs=2, contrast=9.0).client_step(
        Sent(start.params), own, client(main=Angle(0.4, -0.3))
    )
    for name in plain.params:
        assert float(report.params[name]) == close(float(plain.params[name]))


def test_settings_out_of_range_are_refused() -> None:
    refuses(MOON, "contrast", -1.0, "at least 0")
    refuses(MOON, "temperature", 0.0, "above 0")
