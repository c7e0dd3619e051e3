"""A shared dense layer with low-rank changes is the plain formula, to the second derivative."""

import pytest
import torch
from torch.nn import functional as F

from idiolect.kernels.low_rank import low_rank_linear


@pytest.mark.parametrize("biased", [False, True])
def test_it_is_the_plain_formula_with_all_derivatives(biased):
    draw = torch.Generator().manual_seed(0)

    def drawn(*shape):
        return torch.randn(shape, generator=draw, dtype=torch.float64)

    weight, bias = drawn(6, 5), drawn(6) if biased else None
    given = drawn(3, 2, 4, 5), drawn(3, 2, 5), drawn(3, 6, 2)  # of three clients

    def fused(x, a, b):
        return low_rank_linear(x, weight, bias, a, b, 0.7)

    def plain(x, a, b):
        return F.linear(x, weight, bias) + 0.7 * F.linear(F.linear(x, a), b)

    def derivatives(function):
        def loss(*given):
            return function(*given).pow(3).sum()

        def slope(*given):
            parts = torch.func.grad(loss, (0, 1, 2))(*given)
            return sum((one * one.detach().cos()).sum() for one in parts)

        both = [torch.vmap(torch.func.grad(of, (0, 1, 2))) for of in (loss, slope)]
        return [torch.vmap(function)(*given), *(d for of in both for d in of(*given))]

    for own, other in zip(derivatives(fused), derivatives(plain), strict=True):
        assert torch.allclose(own, other, rtol=1e-9, atol=1e-9)
