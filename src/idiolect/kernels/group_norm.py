"""Group normalisation in which every client of a stack has its own factors.

vmap takes torch's apart, going back into some fifty operations a layer; here it is one launch each
way, and the ReLU that often follows is in it. Differentiable any number of times.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from idiolect.kernels import group_norm_cuda
from idiolect.kernels.autotune import fastest
from idiolect.kernels.group_norm_cuda import Norm
from idiolect.kernels.vmap_rules import call, into_groups, mapped, single


class StackedGroupNorm(nn.GroupNorm):
    """Group normalisation that is fast under vmap on CUDA; elsewhere it is torch's own."""

    @staticmethod
    def suits(layer: nn.Module) -> bool:
        """Say whether a layer is of the plain kind that can be replaced."""
        return type(layer) is nn.GroupNorm and layer.affine

    def forward(self, x: Tensor) -> Tensor:
        """Normalise groups of channels, then scale and shift each channel."""
        if not _ours(x):
            own: Tensor = super().forward(x)
            return own
        return _normalised(self, x, relu=False)


def norm_relu(layer: nn.Module, x: Tensor) -> Tensor:
    """Normalise and cut off below 0: at once under vmap on CUDA."""
    if not isinstance(layer, StackedGroupNorm) or not _ours(x):
        return layer(x).relu()  # type: ignore[no-any-return]
    return _normalised(layer, x, relu=True)


def _ours(x: Tensor) -> bool:
    return single(x) and x.dim() > 2


def _normalised(layer: nn.GroupNorm, x: Tensor, relu: bool) -> Tensor:
    pixels = x.flatten(2)[None]
    how = (layer.num_groups, layer.eps, relu)
    y: Tensor = call(_Normalise, pixels, layer.weight[None], layer.bias[None], *how)[0]
    return y.squeeze(0).reshape(x.shape)


class _Normalise(Function):
    """x [group, image, channel, pixel], w and b [group, channel] -> y, means, scales.

    Both functions end in (parts, eps, relu), which is called `how`.
    """

    @staticmethod
    def forward(x: Tensor, w: Tensor, b: Tensor, *how: Any) -> Any:
        return _done("normalise", x, how, x, w, b)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        x, w, _, *ctx.how = inputs
        y, mean, scale = output
        ctx.mark_non_differentiable(mean, scale)
        ctx.set_materialize_grads(False)  # theirs would be zeros, made for nothing
        ctx.save_for_backward(x, w, mean, scale, y)

    @staticmethod
    def backward(ctx: Any, slope: Tensor, *_: Any) -> Any:
        return *call(_Slopes, slope, *ctx.saved_tensors, *ctx.how), None, None, None

    @staticmethod
    def vmap(info: Any, dims: Any, x: Tensor, w: Tensor, b: Tensor, *how: Any) -> Any:
        return mapped(_Normalise, info.batch_size, dims[:3], (x, w, b), how)


class _Slopes(Function):
    """slope, x, w, means, scales, y -> the gradients with respect to x, w and b."""

    @staticmethod
    def forward(slope: Tensor, x: Tensor, *rest: Any) -> Any:
        *given, parts, eps, relu = rest
        return _done("slopes", x, (parts, eps, relu), slope, x, *given)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        slope, x, w, _, _, y, *ctx.how = inputs
        ctx.save_for_backward(slope, x, w, y)

    @staticmethod
    def backward(ctx: Any, *further: Tensor) -> Any:
        slope, x, w, y = ctx.saved_tensors
        sizes = _sizes(x, ctx.how)

        def again(slope: Tensor, x: Tensor, w: Tensor) -> Any:
            # Means and scales once more, since they depend on x.
            _, mean, scale = group_norm_cuda.plain_normalise(x, w, torch.zeros_like(w), sizes)
            return group_norm_cuda.plain_slopes(slope, x, w, mean, scale, y, sizes)

        pull: Any = torch.func.vjp(again, slope, x, w)[1]
        return *pull(further), None, None, None, None, None, None

    @staticmethod
    def vmap(info: Any, dims: Any, *inputs: Any) -> Any:
        tensors, how = inputs[:6], inputs[6:]
        out = call(_Slopes, *into_groups(info.batch_size, dims[:6], tensors), *how)
        return tuple(part.unflatten(0, (info.batch_size, -1)) for part in out), (0, 0, 0)


def _sizes(x: Tensor, how: Any) -> Norm:
    groups, images, channels, pixels = x.shape
    return Norm(groups, images, channels, pixels, *how)


def _done(task: str, x: Tensor, how: Any, *inputs: Tensor) -> Any:
    return fastest(task, _sizes(x, how), lambda: group_norm_cuda.forms(task), *inputs)
