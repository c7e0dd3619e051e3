"""Attention over a stack of clients is that of each, to the second derivative."""

import emulate
import pytest
import torch
from torch.nn import functional as F

from idiolect.kernels import attention as module
from idiolect.kernels.attention import attention

PLACES, NUMBERS = 5, 4


@pytest.fixture(params=["short 1", "short 2"])
def kernels(request, monkeypatch):
    """Run the CUDA source, thread by thread on a CPU."""
    if emulate.COMPILER is None:
        pytest.skip("needs g++ to run CUDA sources")
    emulate.use(monkeypatch)

    def chosen(task, sizes, forms, *inputs):
        return forms()[request.param](*inputs, sizes)

    monkeypatch.setattr(module, "fastest", chosen)
    monkeypatch.setattr(module, "_suits", lambda *tensors: True)


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


def derivatives(function, given):
    def loss(*given):
        return function(*given).pow(2).sum()

    return [torch.vmap(function)(*given), *torch.vmap(torch.func.grad(loss, (0, 1, 2)))(*given)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("places", "keys", "width"), [(5, 5, 8), (3, 7, 16), (9, 4, 32)])
def test_kernels_of_short_rows(places, keys, width, causal, kernels):
    """Chunks of keys end within the row, heads do not fill a block, and threads share a place."""
    if causal and places != keys:
        return
    draw = torch.Generator().manual_seed(0)

    def drawn(rows):  # client, example, place, head, number: as a projection leaves it
        made = torch.randn(2, 3, rows, 3 * width, generator=draw, dtype=torch.float64)
        return made.view(2, 3, rows, 3, width).transpose(2, 3)

    given = drawn(places), drawn(keys), drawn(keys)

    def formula(q, k, v):
        logits = q @ k.mT / width**0.5
        if causal:
            logits = logits.masked_fill(~torch.ones(places, keys).bool().tril(), -torch.inf)
        return logits.softmax(-1) @ v

    found = derivatives(lambda q, k, v: attention(q, k, v, causal=causal), given)
    for own, other in zip(found, derivatives(formula, given), strict=True):
        assert torch.allclose(own, other, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kernels", ["short 1"], indirect=True)
@pytest.mark.parametrize("shape", [(2, 2, 1, 1, 6), (2, 2, 3, 6, 6)])
def test_kernels_with_a_mask(shape, kernels):
    """The same keys for all heads and places, or each its own; with their gradients."""
    draw = torch.Generator().manual_seed(0)
    given = [torch.randn(2, 2, 3, 6, 8, generator=draw, dtype=torch.float64) for _ in range(3)]
    mask = torch.rand(shape, generator=draw) > 0.5
    mask[..., 0] = True

    def formula(q, k, v, mask):
        return (q @ k.mT / 8**0.5).masked_fill(~mask, -torch.inf).softmax(-1) @ v

    expected = derivatives(formula, (*given, mask))
    for own, other in zip(derivatives(attention, (*given, mask)), expected, strict=True):
        assert torch.allclose(own, other, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kernels", ["short 1"], indirect=True)
def test_kernels_in_bfloat16(kernels):
    draw = torch.Generator().manual_seed(0)
    half = [torch.randn(2, 2, 3, 6, 8, generator=draw).bfloat16() for _ in range(3)]
    exact = derivatives(attention, [one.double() for one in half])
    for own, other in zip(derivatives(attention, half), exact, strict=True):
        assert own.dtype == torch.bfloat16
        assert (own.double() - other).norm() < 2**-7 * other.norm()


@pytest.mark.parametrize("masked", [False, True])
def test_logarithms_of_any_form_do_for_the_librarys_gradient(masked, monkeypatch):
    """CUDA's kernels pad their rows, and refuse others; no other form knows of that."""
    draw = torch.Generator().manual_seed(0)
    q, k, v, g = (torch.randn(2, 3, 5, 8, generator=draw, dtype=torch.float64) for _ in range(4))
    mask = [torch.rand(2, 1, 1, 5, generator=draw) > 0.4] if masked else []
    for one in mask:
        one[..., 0] = True
    sizes = module.AttentionSizes(2, 3, 5, 5, 8, False, 0.3, masked)

    def fused(q, k, v, bias, wanted, dropout, causal, scale):
        logits = scale * q @ k.mT + (0 if bias is None else bias)
        logs = F.pad(logits.logsumexp(-1), (0, 27), value=torch.inf)
        return logits.softmax(-1) @ v, logs, None, None

    def fused_gradient(g, q, k, v, bias, out, logs, *_, scale):
        if logs.stride(1) % 8:
            raise RuntimeError("LSE is not correctly aligned (strideH)")
        assert logs[..., 5:].isinf().all()
        logits = scale * q @ k.mT + (0 if bias is None else bias)
        share = (logits - logs[..., :5, None]).exp()
        by_logits = share * (g @ v.mT - (g * out).sum(-1, keepdim=True)) * scale
        return by_logits @ k, by_logits.mT @ q, share.mT @ g, None

    monkeypatch.setattr(module, "_kernel", lambda *given: "efficient")
    name = "_scaled_dot_product_efficient_attention"
    monkeypatch.setattr(torch.ops.aten, name, fused)
    monkeypatch.setattr(torch.ops.aten, f"{name}_backward", fused_gradient)
    out, logs = module._plain_attend(q, k, v, *mask, sizes)
    assert logs.shape == (2, 3, 5)
    exact = module._gradient(g, q, k, v, mask[0] if masked else None, False, 0.3)
    for made in (logs, logs.contiguous()):
        found = module._plain_gradient(g, q, k, v, out, made, *mask, sizes)
        for own, other in zip(found, exact, strict=True):
            assert torch.allclose(own, other, rtol=1e-10, atol=1e-12)
