"""2×2 max-pooling of single clients on a CPU is torch's, with and without a convolution before."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from idiolect.bench.workloads import federation
from idiolect.core import network, tree
from idiolect.engine.architecture import Architecture
from idiolect.engine.backend import Backend
from idiolect.engine.rounds import SeededRun, Simulation
from idiolect.kernels import max_pool
from idiolect.kernels.conv_relu_pool import conv_relu_pool
from idiolect.kernels.convolution import StackedConv2d
from idiolect.methods import FedAvg

SIZES = [(2, 3, 4, 6), (2, 3, 7, 6), (1, 2, 6, 7), (3, 1, 5, 5), (1, 1, 2, 2)]


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take small images for many."""
    monkeypatch.setattr(max_pool, "_FEW", 0)


def layers(inputs: int, outputs: int, padding: int) -> tuple[nn.Conv2d, nn.Conv2d]:
    """Return torch's convolution, and ours with the same weights."""
    torch.manual_seed(0)
    plain = nn.Conv2d(inputs, outputs, 3, padding=padding, dtype=torch.float64)
    ours = StackedConv2d(inputs, outputs, 3, padding=padding, dtype=torch.float64)
    ours.load_state_dict(plain.state_dict())
    return plain, ours


def with_gradients(
    do: Callable[[Tensor], Tensor], layer: nn.Module, x: Tensor, first: bool = False
) -> list[Tensor]:
    x = x.clone().requires_grad_(not first)
    y = do(x)
    weights = torch.linspace(-1, 2, y.numel(), dtype=y.dtype).view(y.shape)
    by = [*layer.parameters()] if first else [x, *layer.parameters()]
    return [y, *torch.autograd.grad((y * weights).sum(), by)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
def test_pooling_and_its_gradient_are_torchs_bit_for_bit(
    size: tuple[int, ...], kind: torch.dtype
) -> None:
    ours = network.replace_layers(nn.MaxPool2d(2))
    assert type(ours) is max_pool.HostMaxPool2d
    for seed in range(20):
        draw = torch.Generator().manual_seed(seed)
        x = torch.randint(0, 3, size, generator=draw).to(kind)  # many are equal
        for a, b in zip(
            *(with_gradients(f, ours, x) for f in (nn.MaxPool2d(2), ours)), strict=True
        ):
            assert torch.equal(a, b)


# Both columns are channels where there are few and a gradient by the images is not wanted.
@pytest.mark.parametrize(("outputs", "first"), [(2, True), (2, False), (12, True), (12, False)])
@pytest.mark.parametrize("padding", [0, 1])
@pytest.mark.parametrize("sides", [(6, 8), (7, 8), (8, 7), (9, 9)])
def test_a_convolution_with_pooling_has_torchs_gradients(
    outputs: int, first: bool, padding: int, sides: tuple[int, int]
) -> None:
    plain, ours = layers(3, outputs, padding)
    x = torch.randn(4, 3, *sides, dtype=torch.float64)
    x[0] = 1.0  # all pixels of most windows are equal
    assert max_pool.suits_conv(ours, x)
    expected = with_gradients(lambda x: F.max_pool2d(plain(x).relu(), 2), plain, x, first)
    found = with_gradients(lambda x: conv_relu_pool(ours, x), ours, x, first)
    for a, b in zip(expected, found, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-13)


@pytest.mark.parametrize("outputs", [2, 12])
def test_gradients_may_be_differentiated(outputs: int) -> None:
    plain, ours = layers(2, outputs, 1)
    x = torch.randn(2, 2, 6, 6, dtype=torch.float64)
    second = []
    pool = network.replace_layers(nn.MaxPool2d(2))
    for layer, do in (
        (plain, lambda x: F.max_pool2d(F.max_pool2d(plain(x), 2).relu(), 2)),
        (ours, lambda x: pool(conv_relu_pool(ours, x))),
    ):
        held = list(layer.parameters())
        first = torch.autograd.grad(do(x).pow(3).sum(), held, create_graph=True)
        second.append(torch.autograd.grad(sum(g.square().sum() for g in first), held))
    for a, b in zip(*second, strict=True):
        torch.testing.assert_close(a, b)


def test_nan_is_kept_in_sight() -> None:
    _, ours = layers(1, 2, 0)
    x = torch.randn(1, 1, 6, 6, dtype=torch.float64)
    x[0, 0, 0, 0] = torch.nan
    y = conv_relu_pool(ours, x)
    assert y[0, :, 0, 0].isnan().all() and not y[0, :, 1, 1].isnan().any()


def test_other_images_and_layers_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    x, conv, seen = torch.randn(2, 3, 8, 8), StackedConv2d(3, 4, 3), list[bool]()
    assert max_pool.suits(x) and max_pool.suits_conv(conv, x)
    assert not max_pool.suits(x.contiguous(memory_format=torch.channels_last))
    assert not max_pool.suits(x.half()) and not max_pool.suits(x[0])
    torch.vmap(lambda own: seen.append(max_pool.suits(own)) or own)(x[None])
    assert seen == [False]
    with torch.autocast("cpu", torch.bfloat16):
        assert not max_pool.suits(x)
    for other in (
        StackedConv2d(3, 4, 3, stride=2), StackedConv2d(3, 3, 3, groups=3),
        StackedConv2d(3, 4, 8), StackedConv2d(3, 4, 3, bias=False),
    ):  # fmt: skip
        assert not max_pool.suits_conv(other, x)
    for pool in (nn.MaxPool2d(3), nn.MaxPool2d(2, 1), nn.MaxPool2d(2, ceil_mode=True)):
        assert type(network.replace_layers(pool)) is nn.MaxPool2d
    with pytest.raises(RuntimeError, match="too small"):
        network.replace_layers(nn.MaxPool2d(2))(torch.randn(1, 3, 1, 4))
    monkeypatch.setattr(max_pool, "_FEW", 1 << 13)
    assert not max_pool.suits(x)


class Pooling(nn.Module):
    """A user's network: a convolution and its pooling side by side, and a sequence of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.pool = nn.Conv2d(1, 3, 3), nn.MaxPool2d(2, 2)
        self.rest = nn.Sequential(
            nn.Conv2d(3, 12, 2), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(12, 10)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(F.relu(self.first(x)))
        logits: Tensor = self.rest(x)
        return logits


def test_single_clients_of_a_user_s_network_are_trained_by_it(
    monkeypatch: pytest.MonkeyPatch, float64: None
) -> None:
    ran: list[str] = []
    for name in ("_HostMaxPool", "_InnerConvReLUPool"):
        own = getattr(max_pool, name)

        def spread(ctx: Any, gradient: Tensor, own: Any = own.backward, name: str = name) -> Any:
            ran.append(name)
            return own(ctx, gradient)

        monkeypatch.setattr(own, "backward", staticmethod(spread))

    def trained(backend: Backend) -> list[Tensor]:
        fed = federation([9, 6, 4], (1, 8, 8))

        def build() -> nn.Module:
            torch.manual_seed(0)
            return Pooling()

        sim = Simulation(
            FedAvg(batch=4, lr=0.05),
            [SeededRun(0, fed.train_data)],
            {"all": Architecture(build)},
            backend=backend,
        )
        for _ in range(2):
            sim.advance()
        return tree.leaves(sim.tree)

    expected = trained(Backend("sequential", "cpu"))
    assert not ran
    for a, b in zip(expected, trained(Backend("vectorised", "cpu", width=1)), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-13)
    assert {*ran} == {"_HostMaxPool", "_InnerConvReLUPool"}
