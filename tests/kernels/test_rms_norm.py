"""Normalisation by the root mean square is the plain formula, to the second derivative."""

import pytest
import torch

from idiolect.kernels.rms_norm import rms_norm


@pytest.mark.parametrize("own", [False, True], ids=["shared weight", "own weight"])
def test_it_is_the_plain_formula_with_all_derivatives(own):
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(3, 2, 4, 5, generator=draw, dtype=torch.float64)
    weight = torch.randn((3, 5) if own else (5,), generator=draw, dtype=torch.float64)

    def plain(x, weight):
        return x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt() * weight

    def derivatives(function):
        def loss(x, weight):
            return (function(x, weight).pow(3) / 7).sum()

        def slope(x, weight):
            parts = torch.func.grad(loss, (0, 1) if own else 0)(x, weight)
            parts = parts if own else (parts,)
            return sum((one * one.detach().cos()).sum() for one in parts)

        dims, of = (0, 0 if own else None), (0, 1)
        mapped = [torch.vmap(torch.func.grad(f, of), dims)(x, weight) for f in (loss, slope)]
        return [torch.vmap(function, dims)(x, weight), *(one for own in mapped for one in own)]

    found = derivatives(lambda x, weight: rms_norm(x, weight, 1e-3))
    for one, other in zip(found, derivatives(plain), strict=True):
        assert torch.allclose(one, other, rtol=1e-9, atol=1e-9)
