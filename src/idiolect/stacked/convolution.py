"""A convolution in which every client of a stack has its own kernels.

vmap turns it into one grouped convolution, which uses a small part of a GPU when the groups are
thin. Here the same sums may also be taken by kernels of our own; which is faster depends on shape
and device, so it is measured once and remembered. All functions are differentiable any number of
times, since the derivatives of each are among the others.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F

from idiolect.stacked import plain, thin
from idiolect.stacked.choice import fastest
from idiolect.stacked.forms import forms, owned
from idiolect.stacked.linear import StackedLinear
from idiolect.stacked.mapping import call, into_groups, mapped
from idiolect.stacked.shape import Shape

Pair = tuple[int, int]


class StackedConv2d(nn.Conv2d):
    """A convolution layer that is fast under vmap on CUDA; elsewhere it is torch's own."""

    @staticmethod
    def suits(layer: nn.Module) -> bool:
        """Say whether a layer is of the plain kind that can be replaced."""
        return (
            type(layer) is nn.Conv2d
            and layer.groups == 1
            and layer.dilation == (1, 1)
            and layer.padding_mode == "zeros"
            and isinstance(layer.padding, tuple)
            and len({*layer.padding}) == 1
            and len({*layer.stride}) == 1
        )

    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if not x.is_cuda or x.dtype != torch.float32:
            own: Tensor = super()._conv_forward(x, weight, bias)
            return own
        y: Tensor = call(_Convolve, x[None], weight[None], self.stride[0], self.padding[0])[0]
        return y if bias is None else y + bias[:, None, None]


class StackedSequential(nn.Sequential):
    """Layers in a row, of which a convolution, ReLU and 2×2 max-pooling are run as one."""

    def forward(self, x: Tensor) -> Tensor:
        """Run the layers, three at once where they are these."""
        layers = list(self)
        while layers:
            first = layers[0]
            if isinstance(first, StackedConv2d) and _pools(layers[1:3]):
                x, layers = conv_relu_pool(first, x), layers[3:]
            else:
                x, layers = first(x), layers[1:]
        return x


def _pools(layers: list[nn.Module]) -> bool:
    """Say whether these are ReLU and plain max-pooling of 2×2 windows."""
    if [type(layer) for layer in layers] != [nn.ReLU, nn.MaxPool2d]:
        return False
    pool: Any = layers[1]
    sizes = (pool.kernel_size, pool.stride, pool.padding, pool.dilation)
    plain_sizes = ((2, (2, 2)), (2, (2, 2)), (0, (0, 0)), (1, (1, 1)))
    fits = all(size in usual for size, usual in zip(sizes, plain_sizes, strict=True))
    return fits and not pool.ceil_mode and not pool.return_indices


def quicken(model: nn.Module) -> nn.Module:
    """Replace plain layers and rows of them in place; parameters and names stay."""
    for layer in model.modules():
        if StackedConv2d.suits(layer):
            layer.__class__ = StackedConv2d
        if StackedLinear.suits(layer):
            layer.__class__ = StackedLinear
        if type(layer) is nn.Sequential:
            layer.__class__ = StackedSequential
    return model


def conv_relu_pool(layer: nn.Conv2d, x: Tensor) -> Tensor:
    """Convolve, cut off below 0 and max-pool by 2: in one pass over the images where that pays."""
    bias, padding = layer.bias, layer.padding[0]
    if isinstance(layer, StackedConv2d) and bias is not None and isinstance(padding, int):
        shape = _shape((1, *x.shape), layer.weight[None], layer.stride[0], padding)
        if owned("pooled", shape) and x.is_cuda and x.dtype == torch.float32:
            y: Tensor = call(_Pooled, x[None], layer.weight[None], bias[None], padding)[0][0]
            return y
    return F.max_pool2d(layer(x).relu(), 2)


class _Convolve(Function):
    """x [group, image, channel, ...], w [group, out, channel, ...] -> y."""

    @staticmethod
    def forward(x: Tensor, w: Tensor, stride: int, padding: int) -> Any:
        return _done("convolve", _shape(x.shape, w, stride, padding), x, w)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, w, ctx.stride, ctx.padding = inputs
        ctx.save_for_backward(x, w)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Any:
        x, w = ctx.saved_tensors
        return *_slopes(ctx, slope, x, w, ctx.stride, ctx.padding), None, None

    @staticmethod
    def vmap(info: Any, dims: Any, x: Tensor, w: Tensor, *step: int) -> Any:
        return mapped(_Convolve, info.batch_size, dims[:2], (x, w), step)


class _Spread(Function):
    """The transpose of a convolution: its derivative with respect to the images."""

    @staticmethod
    def forward(slope: Tensor, w: Tensor, stride: int, padding: int, size: Pair) -> Any:
        sizes = (*slope.shape[:2], w.shape[2], *size)
        return _done("spread", _shape(sizes, w, stride, padding), slope, w)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        slope, w, ctx.stride, ctx.padding, _ = inputs
        ctx.save_for_backward(slope, w)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> Any:
        slope, w = ctx.saved_tensors
        step = ctx.stride, ctx.padding
        dslope = call(_Convolve, dx, w, *step) if ctx.needs_input_grad[0] else None
        dw = call(_Correlate, slope, dx, *step, _size(w)) if ctx.needs_input_grad[1] else None
        return dslope, dw, None, None, None

    @staticmethod
    def vmap(info: Any, dims: Any, slope: Tensor, w: Tensor, *step: Any) -> Any:
        return mapped(_Spread, info.batch_size, dims[:2], (slope, w), step)


class _Correlate(Function):
    """The derivative of a convolution with respect to its kernels."""

    @staticmethod
    def forward(slope: Tensor, x: Tensor, stride: int, padding: int, size: Pair) -> Any:
        shape = Shape(*x.shape, slope.shape[2], *size, stride, padding)  # type: ignore[call-arg]
        return _done("correlate", shape, slope, x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        slope, x, ctx.stride, ctx.padding, _ = inputs
        ctx.save_for_backward(slope, x)

    @staticmethod
    def backward(ctx: Any, dw: Tensor) -> Any:
        slope, x = ctx.saved_tensors
        step = ctx.stride, ctx.padding
        dslope = call(_Convolve, x, dw, *step) if ctx.needs_input_grad[0] else None
        dx = call(_Spread, slope, dw, *step, _size(x)) if ctx.needs_input_grad[1] else None
        return dslope, dx, None, None, None

    @staticmethod
    def vmap(info: Any, dims: Any, slope: Tensor, x: Tensor, *step: Any) -> Any:
        inputs = into_groups(info.batch_size, dims[:2], (slope, x))
        return call(_Correlate, *inputs, *step).unflatten(0, (info.batch_size, -1)), 0


class _Pooled(Function):
    """Convolution, bias, ReLU and 2×2 max-pooling at once -> what is left, which pixel it was."""

    @staticmethod
    def forward(x: Tensor, w: Tensor, bias: Tensor, padding: int) -> Any:
        return _done("pooled", _shape(x.shape, w, 1, padding), x, w, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        x, w, _, ctx.padding = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(x, w, output[1])

    @staticmethod
    def backward(ctx: Any, slope: Tensor, _: Tensor) -> Any:
        x, w, chosen = ctx.saved_tensors
        shape = _shape(x.shape, w, 1, ctx.padding)
        bias = torch.where(chosen < 4, slope, 0.0).sum((1, 3, 4))
        full = call(_Unpool, slope, chosen, (shape.out_height, shape.out_width))
        return *_slopes(ctx, full, x, w, 1, ctx.padding), bias, None

    @staticmethod
    def vmap(info: Any, dims: Any, x: Tensor, w: Tensor, bias: Tensor, padding: int) -> Any:
        return mapped(_Pooled, info.batch_size, dims[:3], (x, w, bias), (padding,))


class _Unpool(Function):
    """Send slopes back to the pixels that were chosen."""

    @staticmethod
    def forward(slope: Tensor, chosen: Tensor, size: Pair) -> Tensor:
        shape = Shape(1, 1, 1, *size, 1, 1, 1, 1, 0)
        own = slope.is_cuda and slope.dtype == torch.float32
        return thin.unpool(slope, chosen, shape) if own else plain.unpool(slope, chosen, shape)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, full: Tensor) -> Any:
        return plain.pick(full, ctx.saved_tensors[0]), None, None

    @staticmethod
    def vmap(info: Any, dims: Any, slope: Tensor, chosen: Tensor, size: Pair) -> Any:
        inputs = into_groups(info.batch_size, dims[:2], (slope, chosen))
        return call(_Unpool, *inputs, size).unflatten(0, (info.batch_size, -1)), 0


def _slopes(ctx: Any, slope: Tensor, x: Tensor, w: Tensor, *step: int) -> tuple[Any, Any]:
    """Return the gradients with respect to images and kernels, where they are wanted."""
    dx = call(_Spread, slope, w, *step, _size(x)) if ctx.needs_input_grad[0] else None
    dw = call(_Correlate, slope, x, *step, _size(w)) if ctx.needs_input_grad[1] else None
    return dx, dw


def _shape(sizes: tuple[int, ...], w: Tensor, stride: int, padding: int) -> Shape:
    return Shape(*sizes, w.shape[1], *_size(w), stride, padding)  # type: ignore[call-arg]


def _size(images: Tensor) -> Pair:
    return images.shape[-2], images.shape[-1]


def _done(task: str, shape: Shape, *inputs: Tensor) -> Any:
    return fastest(task, shape, lambda: forms(task, shape), *inputs)
