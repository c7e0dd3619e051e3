"""Convolutions with the bias, ReLU and 2×2 max-pooling that follow them, in one pass."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F

from idiolect.kernels import grouped_convolution
from idiolect.kernels.compiled import attempt, kernel
from idiolect.kernels.convolution import Pair, StackedConv2d, done, shaped, slopes
from idiolect.kernels.convolution_forms import owned
from idiolect.kernels.convolution_shape import Shape
from idiolect.kernels.fused_tree_ops import own
from idiolect.kernels.vmap_rules import call, into_groups, mapped, single

_THREADS = 256


def conv_relu(layer: nn.Conv2d, x: Tensor) -> Tensor:
    """Convolve and cut off below 0: at once where that pays."""
    padding = _padding("rectified", layer, x)
    if padding is None or layer.bias is None:
        return layer(x).relu()  # type: ignore[no-any-return]
    y: Tensor = call(_Rectified, x[None], layer.weight[None], layer.bias[None], padding)
    return y.squeeze(0)


def conv_relu_pool(layer: nn.Conv2d, x: Tensor) -> Tensor:
    """Convolve, cut off below 0 and max-pool by 2: in one pass over the images where that pays."""
    padding = _padding("pooled", layer, x)
    if padding is None or layer.bias is None:
        return F.max_pool2d(layer(x), 2).relu()  # the same, on a quarter of the numbers
    y: Tensor = call(_Pooled, x[None], layer.weight[None], layer.bias[None], padding)[0]
    return y.squeeze(0)


def _padding(task: str, layer: nn.Conv2d, x: Tensor) -> int | None:
    """Return the padding of a layer that we have kernels for; None for others."""
    padding = layer.padding[0]
    ours = isinstance(layer, StackedConv2d) and layer.groups == 1 and single(x)
    if not ours or not isinstance(padding, int):
        return None
    shape = shaped((1, *x.shape), layer.weight[None], layer.stride[0], padding)
    return padding if owned(task, shape) else None


class _Rectified(Function):
    """Convolution, bias and ReLU at once."""

    @staticmethod
    def forward(x: Tensor, w: Tensor, bias: Tensor, padding: int) -> Any:
        return done("rectified", shaped(x.shape, w, 1, padding), x, w, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, w, _, ctx.padding = inputs
        ctx.save_for_backward(x, w, output)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Any:
        x, w, y = ctx.saved_tensors
        masked, bias = call(_Mask, slope, y.detach())
        return *slopes(ctx, masked, x, w, 1, ctx.padding, False), bias, None

    @staticmethod
    def vmap(info: Any, dims: Any, x: Tensor, w: Tensor, bias: Tensor, padding: int) -> Any:
        return mapped(_Rectified, info.batch_size, dims[:3], (x, w, bias), (padding,))


class _Pooled(Function):
    """Convolution, bias, ReLU and 2×2 max-pooling at once -> what is left, which pixel it was."""

    @staticmethod
    def forward(x: Tensor, w: Tensor, bias: Tensor, padding: int) -> Any:
        return done("pooled", shaped(x.shape, w, 1, padding), x, w, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        x, w, _, ctx.padding = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(x, w, output[1])

    @staticmethod
    def backward(ctx: Any, slope: Tensor, _: Tensor) -> Any:
        x, w, chosen = ctx.saved_tensors
        shape = shaped(x.shape, w, 1, ctx.padding)
        full, bias = call(_Unpool, slope, chosen, (shape.out_height, shape.out_width))
        return *slopes(ctx, full, x, w, 1, ctx.padding, False), bias, None

    @staticmethod
    def vmap(info: Any, dims: Any, x: Tensor, w: Tensor, bias: Tensor, padding: int) -> Any:
        return mapped(_Pooled, info.batch_size, dims[:3], (x, w, bias), (padding,))


class _Mask(Function):
    """Slopes where y is above 0, and their sums over examples and pixels."""

    @staticmethod
    def forward(slope: Tensor, y: Tensor) -> Any:

        def plainly() -> tuple[Tensor, Tensor]:
            masked = torch.where(y <= 0, 0.0, slope)
            return masked, masked.sum((1, 3, 4))

        if not _ours(slope):
            return plainly()
        return attempt("masks", lambda: _launched("mask", slope, y, _size(y)), plainly)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, masked: Tensor, bias: Tensor) -> Any:
        (y,) = ctx.saved_tensors
        return torch.where(y <= 0, 0.0, masked + bias[:, None, :, None, None]), None

    @staticmethod
    def vmap(info: Any, dims: Any, *inputs: Tensor) -> Any:
        out = call(_Mask, *into_groups(info.batch_size, dims, inputs))
        return tuple(part.unflatten(0, (info.batch_size, -1)) for part in out), (0, 0)


class _Unpool(Function):
    """Slopes sent back to the pixels that were chosen, and their sums over examples and pixels."""

    @staticmethod
    def forward(slope: Tensor, chosen: Tensor, size: Pair) -> Any:

        def plainly() -> tuple[Tensor, Tensor]:
            full = grouped_convolution.unpool(slope, chosen, Shape(1, 1, 1, *size, 1, 1, 1, 1, 0))
            return full, full.sum((1, 3, 4))

        if not _ours(slope):
            return plainly()
        return attempt("unpooling", lambda: _launched("unpool", slope, chosen, size), plainly)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, full: Tensor, bias: Tensor) -> Any:
        (chosen,) = ctx.saved_tensors
        by_bias = torch.where(chosen < 4, bias[:, None, :, None, None], 0.0)
        return grouped_convolution.pick(full, chosen) + by_bias, None, None

    @staticmethod
    def vmap(info: Any, dims: Any, slope: Tensor, chosen: Tensor, size: Pair) -> Any:
        out = call(_Unpool, *into_groups(info.batch_size, dims[:2], (slope, chosen)), size)
        return tuple(part.unflatten(0, (info.batch_size, -1)) for part in out), (0, 0)


def _ours(slope: Tensor) -> bool:
    return own(slope) and slope.dtype == torch.float32


def _launched(task: str, slope: Tensor, by: Tensor, size: Pair) -> tuple[Tensor, Tensor]:
    groups, images, channels = slope.shape[:3]
    full = slope.new_empty(groups, images, channels, *size)
    bias = slope.new_empty(groups, channels)
    constants = {
        task.upper(): 1, "CHANNELS": channels, "OH": size[0], "OW": size[1], "THREADS": _THREADS
    }  # fmt: skip
    shared = 4 * _THREADS // 32
    kernel("rectify.cu", task, constants, shared)(
        (channels, groups, 1),
        (_THREADS, 1, 1),
        [slope.contiguous(), by.contiguous(), full, bias, images],
        shared,
    )
    return full, bias


def _size(images: Tensor) -> Pair:
    return images.shape[-2], images.shape[-1]
