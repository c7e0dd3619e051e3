"""FedPAC by hand."""

import math
from typing import Any

import pytest
import torch

from idiolect.core.method import Sent
from idiolect.methods import FedPAC
from idiolect.methods.fedpac import Collaboration, Common, PACReport
from methods.tiny import Factor, Split, client, close, refuses, setup

LN3 = math.log(3)


def tensor(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def sent(a: float, b: float, centroid: float = 0.0, known: float = 0.0) -> Sent:
    common = Common({"a.w": tensor(a)}, tensor([[0.0], [centroid]]), tensor([0.0, known]))
    return Sent(common, {"b.w": tensor(b)})


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("known", [0.0, 1.0])
def test_one_round_by_hand(known: float, stacked: bool) -> None:
    """A = 1, b = ln 3 / 2, example (2, 1), centroid 1 of class 1, λ = 1/2.

    The feature is 2. Head first, at rate ln 3: p = 3/4, ∂/∂b = −1/2, so b = ln 3. Then the body at
    0.1: z = 2 ln 3 = ln 9, p = 9/10, ∂/∂a = −(1/10) · ln 3 · 2, and of λ (2a − 1)² it is
    1/2 · 2 · 1 · 2 = 2 where the centroid is known. The centroid is taken under the new a, the
    statistics H under the old one; a single example has no spread.
    """
    method = FedPAC(lr=0.1, head_lr=LN3, pull=0.5)
    local = client(main=Split(1.0, 0.0), stacked=stacked)
    report, kept = method.client_step(sent(1.0, LN3 / 2, 1.0, known), (), local)
    a = 1 + 0.1 * (0.2 * LN3 - 2 * known)
    assert float(report.head["b.w"]) == close(LN3)
    assert float(report.body["a.w"]) == close(a)
    assert report.centroids.tolist() == [[0.0], [close(2 * a)]]
    assert report.means.tolist() == [[0.0], [close(2.0)]]
    assert report.classes.tolist() == [0.0, 1.0]
    assert float(report.spread) == close(0.0) and kept == ()


def test_statistics_of_two_classes() -> None:
    """Features 1, 3 of class 0 and 2 of class 1: H = (4/3, 2/3).

    The mean square is 14/3, less 16/9 + 4/9 is 22/9, over three examples 22/27.
    """
    local = client([(1.0, 0), (3.0, 0), (2.0, 1)], main=Split(1.0, 0.0))
    report, _ = FedPAC(lr=1e-37, head_lr=1e-37).client_step(sent(1.0, 0.0), (), local)
    assert report.means.flatten().tolist() == close([4 / 3, 2 / 3])
    assert report.classes.tolist() == close([2 / 3, 1 / 3])
    assert float(report.spread) == close(22 / 27)


class Pair(torch.nn.Module):
    """Features (a x, x), logits [0, b a x]."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Factor(1.0), Factor(0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(x))

    def features(self, x: torch.Tensor) -> torch.Tensor:
        x = x.reshape(-1, 1)
        return torch.cat([self.a(x), x], -1)

    def head(self, features: torch.Tensor) -> torch.Tensor:
        z = self.b(features[..., :1])
        return torch.cat([torch.zeros_like(z), z], -1)


def test_the_distance_to_a_centroid_is_a_mean_over_features() -> None:
    """Features (2a, 2) against (1, 0): of ((2a − 1)² + 4) / 2 the slope at a = 1 is 2."""
    common = Common({"a.w": tensor(1.0)}, tensor([[0.0, 0.0], [1.0, 0.0]]), tensor([0.0, 1.0]))
    method = FedPAC(lr=0.1, head_lr=1e-37, pull=1.0)
    start = Sent(common, {"b.w": tensor(0.0)})  # a head of zero passes no other slope on
    report, _ = method.client_step(start, (), client(main=Pair()))
    assert float(report.body["a.w"]) == close(0.8)


def test_a_mixture_of_two_by_hand() -> None:
    """V = (1, 2), H one apart. With share t of the other: (1 − t)² V_own + t² (V_other + 1).

    It is least at t = V_own / (V_own + V_other + 1): 1/4 for the first, 1/2 for the second.
    """
    alpha = FedPAC().combine(tensor([[0.0], [1.0]]), tensor([1.0, 2.0]), tensor([1.0, 1.0]))
    assert alpha.tolist() == [close([0.75, 0.25], 1e-9), close([0.5, 0.5], 1e-9)]


def test_a_mixture_of_many_is_least_at_every_corner() -> None:
    """The slope at α is as low as anywhere on the simplex: no corner lies further down."""
    torch.manual_seed(0)
    means, spread = torch.randn(9, 4, dtype=torch.float64), torch.rand(9, dtype=torch.float64)
    alpha = FedPAC().combine(means, spread, torch.ones(9, dtype=torch.float64))
    assert torch.allclose(alpha.sum(1), torch.ones(9, dtype=torch.float64)) and alpha.min() >= 0
    for own, row in zip(means, alpha, strict=True):
        slope = 2 * spread * row + 2 * means @ (row @ means - own)
        assert float((row * slope).sum() - slope.min()) < 1e-4


def test_a_client_without_examples_has_no_share() -> None:
    alpha = FedPAC().combine(tensor([[0.0], [0.0]]), tensor([1.0, 0.0]), tensor([1.0, 0.0]))
    assert alpha[0].tolist() == close([1.0, 0.0])


def test_the_server_by_hand() -> None:
    """Clients 2 and 0 of three, with 3 and 1 examples; H and V as in the mixture of two.

    Body (3 · 2 + 6) / 4. Class 0: (3 · 1 · 5 + 1 · 9) / 4 by examples. Class 1: nobody, as before.
    """
    state = Collaboration(
        {"a.w": tensor(0.0)},
        tensor([[0.0], [7.0]]),
        tensor([0.0, 1.0]),
        {"b.w": tensor([10.0, 20.0, 30.0])},
        torch.zeros(3, 3, dtype=torch.float64),
    )
    reports = PACReport(
        {"a.w": tensor([2.0, 6.0])},
        {"b.w": tensor([0.0, 8.0])},
        tensor([[[5.0], [0.0]], [[9.0], [0.0]]]),
        tensor([[1.0, 0.0], [1.0, 0.0]]),
        tensor([[[0.0], [0.0]], [[1.0], [0.0]]]),
        tensor([1.0, 2.0]),
        tensor([3.0, 1.0]),
    )
    new = FedPAC().server_step(state, torch.tensor([2, 0]), reports)
    assert float(new.body["a.w"]) == close(3.0)
    assert new.centroids.flatten().tolist() == close([6.0, 7.0])
    assert new.known.tolist() == [1.0, 1.0]
    assert new.heads["b.w"].tolist() == close([4.0, 20.0, 2.0], 1e-8)
    assert new.weights.tolist() == [
        close([0.5, 0, 0.5], 1e-9), [0, 0, 0], close([0.25, 0, 0.75], 1e-9),
    ]  # fmt: skip


def test_clients_are_sent_their_heads_and_newcomers_the_mean() -> None:
    start = setup(Split(1.0, 2.0))._replace(features=(1,))
    method = FedPAC(lr=0.1, head_lr=0.1, newcomer_epochs=1)
    state = method.init_server(start)._replace(heads={"b.w": tensor([1.0, 4.0])})
    assert method.send(state, torch.tensor([1])).own["b.w"].tolist() == [4.0]
    assert method.welcome(state, torch.tensor([5, 6])).own["b.w"].tolist() == [2.5, 2.5]
    came = state._replace(weights=tensor([[0.0, 0.0], [0.0, 1.0]]))  # the first never did
    assert method.welcome(came, torch.tensor([5])).own["b.w"].tolist() == [4.0]
    local = client(main=Split(1.0, 0.0))
    own = method.deploy(sent(3.0, 5.0), (), local)
    assert {n: float(v) for n, v in own.items()} == {"a.w": 3.0, "b.w": 5.0}
    adapted = method.adapt(sent(1.0, 0.0), (), local)  # feature 2, p = 1/2
    assert {n: float(v) for n, v in adapted.items()} == {"a.w": 1.0, "b.w": close(0.1)}


def test_settings_out_of_range_are_refused() -> None:
    refuses(FedPAC, "pull", -1.0, "at least 0")
    refuses(FedPAC, "head_lr", 0.0, "above 0")
