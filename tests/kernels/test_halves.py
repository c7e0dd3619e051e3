"""Halves of channels, parted and joined, against torch's operations."""

from collections.abc import Callable

import emulate
import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap

from idiolect.kernels import compiled, halves

CLIENTS, IMAGES, CHANNELS = 3, 2, 6


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let tensors on a CPU take the way they take on a GPU; count launches."""
    emulate.use(monkeypatch)
    monkeypatch.setattr(halves, "float32_on_cuda", lambda x: True)
    seen: list[int] = []

    def launch(*given: object) -> None:
        seen.append(1)
        compiled.launch(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(halves, "launch", launch)
    return seen


def unit(x: Tensor, w: Tensor) -> Tensor:
    """Let half of the channels pass, as a unit of ShuffleNetV2 does."""
    kept, taken = halves.halves(x)
    return halves.dealt(kept, (taken * w).tanh())


def plain_unit(x: Tensor, w: Tensor) -> Tensor:
    """Do the same by torch's operations."""
    kept, taken = x.chunk(2, 1)
    return torch.stack([kept, (taken * w).tanh()], 2).flatten(1, 2)


def loss_of(run: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda x, w: (run(run(x, w), w).square() * torch.linspace(0, 1, x.shape[-1])).sum()


@pytest.mark.skipif(emulate.COMPILER is None, reason="needs g++ to run CUDA sources")
@pytest.mark.parametrize(("side", "many"), [(4, 4), (2, 4), (3, 0)])
def test_two_units_and_their_gradients(side: int, many: int, launched: list[int]) -> None:
    """Two launches forward and two backward; none where channels are no whole pieces."""
    torch.manual_seed(0)
    x, w = torch.randn(CLIENTS, IMAGES, CHANNELS, side, side), torch.randn(CLIENTS, 1)
    found, exact = (vmap(grad(loss_of(own), (0, 1)))(x, w) for own in (unit, plain_unit))
    assert len(launched) == many
    for one, other in zip(found, exact, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(emulate.COMPILER is None, reason="needs g++ to run CUDA sources")
def test_a_second_derivative(launched: list[int]) -> None:
    torch.manual_seed(0)
    x, w = torch.randn(IMAGES, CHANNELS, 2, 2), torch.randn(1)

    def along(run: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda x: grad(loss_of(run))(x, w).square().sum()

    torch.testing.assert_close(grad(along(unit))(x), grad(along(plain_unit))(x))


def test_elsewhere_torch_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(halves, "call", None)
    x = torch.randn(IMAGES, CHANNELS, 3, 3)
    assert torch.equal(unit(x, torch.ones(1)), plain_unit(x, torch.ones(1)))
