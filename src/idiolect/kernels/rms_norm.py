"""Normalisation by the root mean square, in one launch each way on CUDA.

As separate operations it takes seven passes over the numbers forward and twelve back.
"""

from typing import Any

import torch
from torch import Tensor

from idiolect.kernels.vmap_rules import GroupedFunction, call


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / rms(x) · weight over the last axis, in the precision of x."""
    rows = x.reshape(1, -1, x.shape[-1])
    y: Tensor = call(_RMSNorm, rows, weight[None], eps)[0]
    return y.squeeze(0).reshape(x.shape)


class _RMSNorm(GroupedFunction):
    """x [group, row, number], weight [group, number] -> y, and 1 / rms [group, row, 1]."""

    joins_examples = 1

    @staticmethod
    def forward(x: Tensor, weight: Tensor, eps: float) -> Any:
        if _fused(x, weight):
            return torch.ops.aten._fused_rms_norm(x, x.shape[-1:], weight[0].to(x.dtype), eps)
        wide = x.to(weight.dtype)
        inverse = _inverse(wide, eps)
        return (wide * inverse * weight[:, None]).to(x.dtype), inverse

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        x, weight, ctx.eps = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, output[1], weight)

    @staticmethod
    def backward(ctx: Any, g: Tensor, _: Any) -> Any:
        x, inverse, weight = ctx.saved_tensors
        by_weight = None
        if ctx.needs_input_grad[1]:
            wide = x.to(weight.dtype)
            by_weight = (g * wide * _inverse(wide, ctx.eps)).sum(1)
        return call(_RMSNormGradient, g, x, inverse, weight, ctx.eps), by_weight, None


class _RMSNormGradient(GroupedFunction):
    """The gradient by y, x, 1 / rms, weight -> the gradient by x."""

    joins_examples = 3

    @staticmethod
    def forward(g: Tensor, x: Tensor, inverse: Tensor, weight: Tensor, eps: float) -> Any:
        if _fused(x, weight):
            back = torch.ops.aten._fused_rms_norm_backward
            own = weight[0].to(x.dtype)
            return back(g, x, x.shape[-1:], inverse, own, [True, False])[0]
        return _gradient(g, x, weight, inverse).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, further: Tensor) -> Any:
        (g, x, _, weight), (eps,) = ctx.saved_tensors, ctx.options

        def plain(g: Tensor, x: Tensor, weight: Tensor) -> Tensor:
            return _gradient(g, x, weight, _inverse(x, eps))

        pull: Any = torch.func.vjp(plain, g, x, weight)[1]
        by_g, by_x, by_weight = pull(further)
        return by_g, by_x, None, by_weight, None


def _inverse(x: Tensor, eps: float) -> Tensor:
    return (x.square().mean(-1, keepdim=True) + eps).rsqrt()


def _gradient(g: Tensor, x: Tensor, weight: Tensor, inverse: Tensor) -> Tensor:
    scaled = g * weight[:, None]
    normed = x * inverse
    return inverse * (scaled - normed * (scaled * normed).mean(-1, keepdim=True))


def _fused(x: Tensor, weight: Tensor) -> bool:
    """Say whether torch's kernel will do: on CUDA, where all rows have the same weight."""
    known = hasattr(torch.ops.aten, "_fused_rms_norm")
    return known and x.is_cuda and len(weight) == 1 and x.dtype != torch.float64
