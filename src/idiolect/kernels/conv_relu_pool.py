"""Convolutions with the bias, ReLU and 2×2 max-pooling that follow them, in one launch."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from idiolect.kernels import max_pool
from idiolect.kernels.compiled import aligned, attempt, launch
from idiolect.kernels.convolution import (
    Pair,
    StackedConv2d,
    conv_shape,
    fastest_form,
    gradients,
    windows,
)
from idiolect.kernels.convolution_cuda import has_fused_form
from idiolect.kernels.vmap_rules import GroupedFunction, call, float32_on_cuda, halved_on_cuda

_THREADS = 256
_MANY = 64  # channels


def conv_relu(layer: nn.Conv2d, x: Tensor) -> Tensor:
    """Convolve and apply ReLU: in one launch where that pays."""
    padding = _fused_padding("conv_relu", layer, x)
    if padding is None or layer.bias is None:
        return layer(x).relu()  # type: ignore[no-any-return]
    with torch.autocast(x.device.type, enabled=False):
        given = (_single(x)[None], layer.weight[None], layer.bias[None])
        y: Tensor = call(_ConvReLU, *given, padding)
    return y.squeeze(0)


def conv_relu_pool(layer: nn.Conv2d, x: Tensor) -> Tensor:
    """Convolve, apply ReLU and max-pool by 2: in one launch where that pays."""
    padding = _fused_padding("conv_relu_pool", layer, x)
    if padding is None or layer.bias is None:
        if isinstance(layer, StackedConv2d) and max_pool.suits_conv(layer, x):
            return max_pool.conv_relu_pool(layer, x)
        return F.max_pool2d(layer(x), 2).relu()  # the same, on a quarter of the numbers
    with torch.autocast(x.device.type, enabled=False):
        given = (_single(x)[None], layer.weight[None], layer.bias[None])
        y: Tensor = call(_ConvReLUPool, *given, padding)[0]
    return y.squeeze(0)


def _fused_padding(task: str, layer: nn.Conv2d, x: Tensor) -> int | None:
    """Return the padding of a layer that we have kernels for; None for others.

    Where networks multiply in bfloat16, they round to TF32; only with many channels the library's
    kernels for bfloat16 are faster.
    """
    padding = layer.padding[0]
    ours = isinstance(layer, StackedConv2d) and layer.groups == 1
    few = min(layer.in_channels, layer.out_channels) < _MANY
    suits = float32_on_cuda(x) or (few and halved_on_cuda(x))
    if not ours or not suits or not isinstance(padding, int):
        return None
    shape = conv_shape((1, *x.shape), layer.weight[None], layer.stride[0], padding)
    return padding if has_fused_form(task, shape) else None


def _step(padding: int) -> tuple[int, int, bool, bool]:
    return 1, padding, False, True  # see `_Convolve`


def _single(x: Tensor) -> Tensor:
    return x.float() if x.dtype == torch.bfloat16 else x


class _ConvReLU(GroupedFunction):
    """Convolution, bias and ReLU."""

    joins_examples = 1

    @staticmethod
    def forward(x: Tensor, w: Tensor, bias: Tensor, padding: int) -> Any:
        return fastest_form("conv_relu", conv_shape(x.shape, w, *_step(padding)), x, w, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, w, _, ctx.padding = inputs
        ctx.save_for_backward(x, w, output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, w, y = ctx.saved_tensors
        masked, bias = call(_ReLUGradient, gradient, y.detach())
        return *gradients(ctx, masked, x, w, *_step(ctx.padding)), bias, None


class _ConvReLUPool(GroupedFunction):
    """Convolution, bias, ReLU and 2×2 max-pooling -> the result, and which pixel it was."""

    joins_examples = 1

    @staticmethod
    def forward(x: Tensor, w: Tensor, bias: Tensor, padding: int) -> Any:
        return fastest_form("conv_relu_pool", conv_shape(x.shape, w, *_step(padding)), x, w, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        x, w, _, ctx.padding = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)  # that of the pixels would be zeros, made for nothing
        ctx.save_for_backward(x, w, output[1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> Any:
        x, w, chosen = ctx.saved_tensors
        shape = conv_shape(x.shape, w, *_step(ctx.padding))
        full, bias = call(_PoolGradient, gradient, chosen, (shape.out_height, shape.out_width))
        return *gradients(ctx, full, x, w, *_step(ctx.padding)), bias, None


class _ReLUGradient(GroupedFunction):
    """The gradient where y is above 0, and its sums over examples and pixels: the bias's."""

    @staticmethod
    def forward(gradient: Tensor, y: Tensor) -> Any:
        def plain() -> tuple[Tensor, Tensor]:
            masked = torch.where(y <= 0, 0.0, gradient)
            return masked, masked.sum((1, 3, 4))

        if not float32_on_cuda(gradient):
            return plain()
        size = (y.shape[-2], y.shape[-1])
        return attempt("masks", lambda: _launched("relu_gradient", gradient, y, size), plain)

    @staticmethod
    def backward(ctx: Any, masked: Tensor, bias: Tensor) -> Any:
        _, y = ctx.saved_tensors
        return torch.where(y <= 0, 0.0, masked + bias[:, None, :, None, None]), None


class _PoolGradient(GroupedFunction):
    """The gradient at the pixels that were chosen, and its sums over examples and pixels."""

    @staticmethod
    def forward(gradient: Tensor, chosen: Tensor, size: Pair) -> Any:
        def plain() -> tuple[Tensor, Tensor]:
            full = _unpool(gradient, chosen, size)
            return full, full.sum((1, 3, 4))

        if not float32_on_cuda(gradient):
            return plain()
        return attempt(
            "unpooling", lambda: _launched("pool_gradient", gradient, chosen, size), plain
        )

    @staticmethod
    def backward(ctx: Any, full: Tensor, bias: Tensor) -> Any:
        _, chosen = ctx.saved_tensors
        by_bias = torch.where(chosen < 4, bias[:, None, :, None, None], 0.0)
        padded = F.pad(windows(full), (0, 1))  # a fifth entry of 0, where no pixel was chosen
        picked = padded.gather(-1, chosen[..., None].long())[..., 0]
        return picked + by_bias, None, None


def _unpool(gradient: Tensor, chosen: Tensor, size: Pair) -> Tensor:
    """Copy each number to the pixel that was chosen in its window, and 0 elsewhere."""
    height, width = gradient.shape[-2:]
    four = torch.arange(4, device=gradient.device)
    spots = torch.where(chosen[..., None] == four, gradient[..., None], 0.0)
    pairs = spots.reshape(*gradient.shape, 2, 2).transpose(-2, -3)
    full = pairs.reshape(*gradient.shape[:-2], 2 * height, 2 * width)
    return F.pad(full, (0, size[1] - 2 * width, 0, size[0] - 2 * height))


def _launched(name: str, gradient: Tensor, by: Tensor, size: Pair) -> tuple[Tensor, Tensor]:
    groups, images, channels = gradient.shape[:3]
    full = gradient.new_empty(groups, images, channels, *size)
    bias = gradient.new_empty(groups, channels)
    constants = {
        name.upper(): 1, "CHANNELS": channels, "OH": size[0], "OW": size[1], "THREADS": _THREADS
    }  # fmt: skip
    given = [aligned(gradient), aligned(by), full, bias, images]
    blocks, shared = (channels, groups, 1), 4 * _THREADS // 32
    launch("conv_relu_pool.cu", name, constants, blocks, _THREADS, given, shared)
    return full, bias
