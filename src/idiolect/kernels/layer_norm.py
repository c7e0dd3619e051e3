"""Layer normalisation in which every client of a stack has its own factors.

vmap splits torch's into dozens of operations going backward. What is normalised knows nothing of
clients: torch's fused kernels do that for all rows at once, and only the factors are each client's.
Differentiable any number of times.
"""

from typing import Any

import torch
from torch import Tensor, nn

from idiolect.kernels.vmap_rules import GroupedFunction, call


class StackedLayerNorm(nn.LayerNorm):
    """Layer normalisation that is fast under vmap."""

    @staticmethod
    def suits(layer: nn.Module) -> bool:
        """Return whether a layer is of the plain kind that can be replaced."""
        return type(layer) is nn.LayerNorm and layer.elementwise_affine

    def forward(self, x: Tensor) -> Tensor:
        """Normalise each row, then scale and shift each of its numbers."""
        last = len(self.normalized_shape)
        if x.shape[x.dim() - last :] != torch.Size(self.normalized_shape):
            own: Tensor = super().forward(x)  # says what is wrong
            return own
        if x.dtype != self.weight.dtype:  # as autocast has it
            x = x.to(self.weight.dtype)
        rows, weight = x.reshape(1, -1, self.weight.numel()), self.weight.reshape(1, -1)
        bias = torch.zeros_like(weight) if self.bias is None else self.bias.reshape(1, -1)
        y: Tensor = call(_LayerNorm, rows, weight, bias, self.eps)[0]
        return y.reshape(x.shape)


class _LayerNorm(GroupedFunction):
    """x [group, row, number], w and b [group, number] -> y, means, scales."""

    joins_examples = True

    @staticmethod
    def forward(x: Tensor, w: Tensor, b: Tensor, eps: float) -> Any:
        standard, mean, scale = torch.native_layer_norm(x, x.shape[2:], None, None, eps)
        return torch.addcmul(b[:, None], standard, w[:, None]), mean, scale

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        x, w, _, ctx.eps = inputs
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, w, *output[1:])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> Any:
        return *call(_LayerNormGradient, gradient, *ctx.saved_tensors, ctx.eps), None


class _LayerNormGradient(GroupedFunction):
    """The gradient by y, x, w, means, scales -> the gradients by x, w and b."""

    @staticmethod
    def forward(
        gradient: Tensor, x: Tensor, w: Tensor, mean: Tensor, scale: Tensor, eps: float
    ) -> Any:
        back = torch.ops.aten.native_layer_norm_backward
        mask = [True, False, False]
        dx = back(gradient * w[:, None], x, x.shape[2:], mean, scale, None, None, mask)[0]
        standard = (x - mean) * scale
        return dx, (gradient * standard).sum(1), gradient.sum(1)

    @staticmethod
    def backward(ctx: Any, *further: Tensor) -> Any:
        gradient, x, w, _, _ = ctx.saved_tensors
        (eps,) = ctx.options

        def plain(gradient: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
            off = x - x.mean(-1, keepdim=True)
            scale = (off.square().mean(-1, keepdim=True) + eps).rsqrt()
            standard, scaled = off * scale, gradient * w[:, None]
            level = scaled.mean(-1, keepdim=True)
            tilt = (scaled * standard).mean(-1, keepdim=True)
            dx = scale * (scaled - level - standard * tilt)
            return dx, (gradient * standard).sum(1), gradient.sum(1)

        pull: Any = torch.func.vjp(plain, gradient, x, w)[1]
        return *pull(further), None, None, None
