"""A dense layer that all clients share, with a low-rank change of each client's own.

vmap would add the change in a pass of its own, and each gradient in another. Here the product with
the shared weights is one for all clients' examples, and what is each client's own is added by the
batched product that makes it.
"""

from typing import Any

import torch
from torch import Tensor

from idiolect.kernels.vmap_rules import GroupedFunction, call


def low_rank_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float
) -> Tensor:
    """Return x Wᵀ + bias + scale · (x Aᵀ) Bᵀ; W [out, in] and the bias are no client's own."""
    if torch.is_autocast_enabled(x.device.type):
        kind = torch.get_autocast_dtype(x.device.type)
        x, weight, a, b = (one.to(kind) for one in (x, weight, a, b))
        bias = None if bias is None else bias.to(kind)
    rows = x.reshape(1, -1, x.shape[-1])
    shared = (weight.detach(), None if bias is None else bias.detach(), scale)
    y: Tensor = call(_LowRank, rows, a[None], b[None], _Shared(*shared))[0]
    return y.squeeze(0).reshape(*x.shape[:-1], -1)


class _Shared:
    """What no client has of its own, hidden from vmap: constants of the function."""

    def __init__(self, weight: Tensor, bias: Tensor | None, scale: float) -> None:
        self.weight, self.bias, self.scale = weight, bias, scale

    def forward(self, x: Tensor) -> Tensor:
        """Return x Wᵀ + bias of [group, row, in], as one product."""
        rows, weight = x.flatten(0, 1), self.weight.mT
        y = rows @ weight if self.bias is None else torch.addmm(self.bias, rows, weight)
        return y.view(*x.shape[:2], -1)

    def backward(self, gradient: Tensor) -> Tensor:
        """Return the gradient by x of that."""
        return (gradient.flatten(0, 1) @ self.weight).view(*gradient.shape[:2], -1)


class _LowRank(GroupedFunction):
    """x [group, row, in], a [group, rank, in], b [group, out, rank] -> y, and x aᵀ for later."""

    @staticmethod
    def forward(x: Tensor, a: Tensor, b: Tensor, shared: _Shared) -> Any:
        low = torch.bmm(x, a.mT)
        return shared.forward(x).baddbmm_(low, b.mT, alpha=shared.scale), low

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        *tensors, ctx.shared = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, output[1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Any) -> Any:
        return *call(_LowRankGradient, gradient, *ctx.saved_tensors, ctx.shared), None


class _LowRankGradient(GroupedFunction):
    """The gradient by y, x, a, b and x aᵀ -> the gradients by x, a and b."""

    @staticmethod
    def forward(g: Tensor, x: Tensor, a: Tensor, b: Tensor, low: Tensor, shared: _Shared) -> Any:
        by_low = torch.bmm(g, b)
        dx = shared.backward(g).baddbmm_(by_low, a, alpha=shared.scale)
        return dx, shared.scale * torch.bmm(by_low.mT, x), shared.scale * torch.bmm(g.mT, low)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        *tensors, _, ctx.shared = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, dx: Tensor, da: Tensor, db: Tensor) -> Any:
        g, x, a, b = ctx.saved_tensors
        scale, low, by_low = ctx.shared.scale, x @ a.mT, g @ b
        further = dx @ a.mT + x @ da.mT  # by what is done in `by_low`
        by_g = dx @ ctx.shared.weight.mT + scale * (further @ b.mT + low @ db.mT)
        by_x = scale * (by_low @ da + (g @ db) @ a)
        by_a = scale * (by_low.mT @ dx + (g @ db).mT @ x)
        by_b = scale * (g.mT @ further)
        return by_g, by_x, by_a, by_b, None, None
