"""Scaled dot-product attention of all clients' examples in one launch.

Torch has no rule for mapping its fused attention, and vmap then runs it client by client. An
example's attention knows nothing of clients, so their axis joins that of the examples.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from idiolect.kernels.vmap_rules import GroupedFunction, call

_WIDEST = 128  # numbers of a head that the fused kernels of CUDA take in every precision


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Return softmax(q kᵀ · scale) v of [example, head, place, number].

    `mask` [example or 1, head or 1, place or 1, key] is true where a key is seen; every place has
    to see one. `causal`: a place sees those up to itself. The scale is 1 / √numbers unless given.
    """
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    if q.shape[:2] != k.shape[:2]:  # a fused kernel would not say so, but end the process
        raise ValueError(f"{q.shape[1]} heads of queries and {k.shape[1]} of keys; repeat the keys")
    if mask is not None:
        mask = mask.expand(len(q), *mask.shape[1:])
    out: Tensor = call(_Attention, q, k, v, mask, causal, scale)[0]
    return out


def attention_shares(
    q: Tensor,
    k: Tensor,
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Return softmax(q kᵀ · scale) itself, where more is done with it than `attention` does."""
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    return _logits(q, k, mask, causal, scale).softmax(-1)


class _Attention(GroupedFunction):
    """q, k, v [example, head, place, number] and a mask, or none -> the same, and its logarithms.

    Those of the sums under the softmax [example, head, place] are for the backward pass alone.
    """

    @staticmethod
    def forward(
        q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float
    ) -> Any:
        kind, aten = _kernel(q, k, v, mask), torch.ops.aten
        if kind == "cpu":
            fused = aten._scaled_dot_product_flash_attention_for_cpu
            return fused(q, k, v, 0.0, causal, attn_mask=_bias(mask, q), scale=scale)
        if kind == "flash":
            fused = aten._scaled_dot_product_flash_attention
            return fused(q, k, v, 0.0, causal, False, scale=scale)[:2]
        if kind == "efficient":
            fused = aten._scaled_dot_product_efficient_attention
            return fused(q, k, v, _bias(mask, q, k), True, 0.0, causal, scale=scale)[:2]
        logits = _logits(q, k, mask, causal, scale)
        return logits.softmax(-1) @ v, logits.logsumexp(-1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        *_, mask, ctx.causal, ctx.scale = inputs
        ctx.masked = mask is not None
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs[:3], *output, *([mask] if ctx.masked else []))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Any) -> Any:
        mask = () if ctx.masked else (None,)
        options = (*ctx.saved_tensors, *mask, ctx.causal, ctx.scale)
        return *call(_AttentionGradient, gradient, *options), None, None, None


class _AttentionGradient(GroupedFunction):
    """The gradient by the output, q, k, v, the output, its logarithms, mask -> by q, k and v."""

    @staticmethod
    def forward(
        g: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        logs: Tensor,
        mask: Tensor | None,
        causal: bool,
        scale: float,
    ) -> Any:
        kind, aten = _kernel(q, k, v, mask), torch.ops.aten
        if kind == "cpu":
            fused = aten._scaled_dot_product_flash_attention_for_cpu_backward
            bias = _bias(mask, q)
            return fused(g, q, k, v, out, logs, 0.0, causal, attn_mask=bias, scale=scale)
        if kind == "plain":
            return _gradient(g, q, k, v, mask, causal, scale)
        nothing = torch.zeros((), dtype=torch.int64, device=q.device)  # seeds of a dropout of 0
        if kind == "flash":
            fused = aten._scaled_dot_product_flash_attention_backward
            sizes = (None, None, q.shape[2], k.shape[2])
            rest = (0.0, causal, nothing, nothing)
            return fused(g, q, k, v, out, logs, *sizes, *rest, scale=scale)
        fused = aten._scaled_dot_product_efficient_attention_backward
        more = (nothing, nothing, 0.0, [True, True, True, False], causal)
        return fused(g, q, k, v, _bias(mask, q, k), out, logs, *more, scale=scale)[:3]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        *_, mask, ctx.causal, ctx.scale = inputs
        ctx.save_for_backward(*inputs[:4], *([] if mask is None else [mask]))

    @staticmethod
    def backward(ctx: Any, *further: Tensor) -> Any:
        g, q, k, v, *mask = ctx.saved_tensors

        def plain(g: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
            return _gradient(g, q, k, v, mask[0] if mask else None, ctx.causal, ctx.scale)

        pull: Any = torch.func.vjp(plain, g, q, k, v)[1]
        return *pull(further), None, None, None, None, None


def _kernel(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> str:
    """Choose among torch's fused kernels, or the plain formula."""
    width = q.shape[-1]
    if width != v.shape[-1] or not q.dtype == k.dtype == v.dtype:
        return "plain"
    if not q.is_cuda:
        return "cpu" if q.device.type == "cpu" else "plain"
    if width % 8 or width > _WIDEST or q.dtype == torch.float64:
        return "plain"
    half = q.dtype in (torch.bfloat16, torch.float16)
    return "flash" if half and mask is None else "efficient"


def _bias(mask: Tensor | None, q: Tensor, k: Tensor | None = None) -> Tensor | None:
    """Return 0 where a key is seen and -∞ elsewhere, as fused kernels want it.

    Those of CUDA want it for every place, with rows of a multiple of eight numbers in memory.
    """
    if mask is None:
        return None
    bias = torch.zeros(mask.shape, dtype=q.dtype, device=q.device)
    bias.masked_fill_(~mask, -math.inf)
    if k is None:
        return bias
    keys = k.shape[2]
    bias = F.pad(bias, (0, -keys % 8))[..., :keys]
    return bias.expand(*q.shape[:3], keys)


def _logits(q: Tensor, k: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Tensor:
    logits: Tensor = (q * scale) @ k.mT
    if causal:
        seen = torch.ones(logits.shape[-2:], dtype=torch.bool, device=q.device).tril()
        logits = logits.masked_fill(~seen, -math.inf)
    return logits if mask is None else logits.masked_fill(~mask, -math.inf)


def _gradient(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients by q, k and v, as formulas that have gradients themselves."""
    share = _logits(q, k, mask, causal, scale).softmax(-1)
    by_share = g @ v.mT
    by_logits = share * (by_share - (by_share * share).sum(-1, keepdim=True)) * scale
    return by_logits @ k, by_logits.mT @ q, share.mT @ g
