"""Rotary positions and gated units against the same written out, plain and as the kernels do it."""

import emulate
import pytest
import torch
from torch.func import grad, vmap
from torch.nn import functional as F

from idiolect.kernels import transformer_ops
from idiolect.kernels.transformer_ops import Angles, gated, rotated


@pytest.fixture(params=["plain", "kernels"])
def way(request, monkeypatch):
    """Take either branch: torch's operations, or the CUDA source, thread by thread on a CPU."""
    if request.param == "plain":
        return
    if emulate.COMPILER is None:
        pytest.skip("needs g++ to run CUDA sources")
    emulate.use(monkeypatch)
    monkeypatch.setattr(transformer_ops, "_suits", lambda x: True)


def derivatives(function, given):
    count = tuple(range(len(given)))

    def loss(*given):
        return function(*given).pow(3).sum()

    def slope(*given):
        return sum((one * one.detach().cos()).sum() for one in grad(loss, count)(*given))

    both = [vmap(grad(of, count))(*given) for of in (loss, slope)]
    return [vmap(function)(*given), *both[0], *both[1]]


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


ANGLES = torch.arange(3.0).double()[:, None] / torch.tensor([1.0, 3.0, 9.0, 27.0])  # [place, half]


def turned(x):
    """Turn pairs as complex numbers: another way to write it."""
    first, second = x.chunk(2, -1)
    found = torch.complex(first, second) * torch.polar(torch.ones(3, 4).double(), ANGLES)[:, None]
    return torch.cat([found.real, found.imag], -1)


def test_rotary_positions(way):
    angles = Angles(ANGLES.cos(), ANGLES.sin())
    given = (drawn(2, 2, 3, 2, 8),)  # client, example, place, head, number
    found = derivatives(lambda x: rotated(x, angles), given)
    for own, other in zip(found, derivatives(turned, given), strict=True):
        assert torch.allclose(own, other, rtol=1e-9, atol=1e-9)


def test_gated_units(way):
    given = (drawn(2, 3, 8), drawn(2, 3, 8, seed=1))
    expected = derivatives(lambda gate, up: F.silu(gate) * up, given)
    for own, other in zip(derivatives(gated, given), expected, strict=True):
        assert torch.allclose(own, other, rtol=1e-9, atol=1e-9)


def test_in_bfloat16_the_kernels_round_once(way):
    angles = Angles(ANGLES.cos(), ANGLES.sin())
    gate, up = drawn(4, 8).bfloat16(), drawn(4, 8, seed=1).bfloat16()
    wide = F.silu(gate.float()) * up.float()
    assert torch.allclose(gated(gate, up).float(), wide, rtol=2**-6)
    x = drawn(2, 3, 2, 8).bfloat16()
    expected = turned(x.double()).float()
    assert torch.allclose(rotated(x, angles).float(), expected, rtol=2**-6, atol=2**-6)
    assert torch.isnan(gated(torch.full_like(gate, torch.nan), up)).all()
