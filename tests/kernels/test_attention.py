"""Attention over a stack of clients is that of each, to the second derivative."""

import pytest
import torch
from torch.nn import functional as F

from idiolect.kernels.attention import attention

PLACES, NUMBERS = 5, 4


def plain(q, k, v, mask, causal):
    seen = mask.expand(*mask.shape[:-2], PLACES, PLACES)
    if causal:
        seen = seen & torch.ones(PLACES, PLACES, dtype=torch.bool).tril()
    logits = (q @ k.mT / NUMBERS**0.5).masked_fill(~seen, -torch.inf)
    return F.softmax(logits, -1) @ v


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_it_is_the_plain_formula_with_all_derivatives(causal, masked):
    draw = torch.Generator().manual_seed(0)
    shape = (3, 2, 2, PLACES, NUMBERS)  # client, example, head, place, number
    given = [torch.randn(shape, generator=draw, dtype=torch.float64) for _ in range(3)]
    mask = torch.rand(3, 2, 1, 1, PLACES, generator=draw) > 0.4 * masked
    mask[..., 0] = True

    def fused(q, k, v, mask):
        return attention(q, k, v, mask if masked else None, causal)

    def derivatives(function):
        def loss(q, k, v, mask):
            return function(q, k, v, mask).pow(2).sum()

        def slope(*given):
            return sum(one.pow(2).sum() for one in torch.func.grad(loss, (0, 1, 2))(*given))

        both = [torch.vmap(torch.func.grad(of, (0, 1, 2))) for of in (loss, slope)]
        return [torch.vmap(function)(*given, mask), *(d for of in both for d in of(*given, mask))]

    expected = derivatives(lambda q, k, v, mask: plain(q, k, v, mask, causal))
    for own, other in zip(derivatives(fused), expected, strict=True):
        assert torch.allclose(own, other, rtol=1e-10, atol=1e-12)


def test_what_all_clients_share_needs_no_copy_by_the_caller():
    q = torch.randn(3, 2, 1, PLACES, NUMBERS)
    k = torch.randn(2, 1, PLACES, NUMBERS)
    found = torch.vmap(lambda q: attention(q, k, k, causal=True))(q)
    each = torch.stack([attention(own, k, k, causal=True) for own in q])
    assert torch.allclose(found, each, atol=1e-6)
