"""A convolution in which every client of a stack has its own kernels.

vmap turns it into one grouped convolution, which uses a small part of a GPU when the groups are
thin. Here the same sums may also be taken by kernels of our own; which is faster depends on shape
and device, so it is measured once and remembered. All functions are differentiable any number of
times, since the derivatives of each are among the others.
"""

from typing import Any

from torch import Tensor, nn
from torch.autograd import Function

from idiolect.kernels.autotune import fastest
from idiolect.kernels.convolution_forms import forms
from idiolect.kernels.convolution_shape import Shape
from idiolect.kernels.vmap_rules import call, into_groups, mapped, single

Pair = tuple[int, int]


class StackedConv2d(nn.Conv2d):
    """A convolution layer that is fast under vmap on CUDA; elsewhere it is torch's own."""

    @staticmethod
    def suits(layer: nn.Module) -> bool:
        """Say whether a layer is of the plain kind that can be replaced."""
        return (
            type(layer) is nn.Conv2d
            and (layer.groups == 1 or layer.groups == layer.in_channels == layer.out_channels)
            and layer.dilation == (1, 1)
            and layer.padding_mode == "zeros"
            and isinstance(layer.padding, tuple)
            and len({*layer.padding}) == 1
            and len({*layer.stride}) == 1
        )

    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if not single(x):
            own: Tensor = super()._conv_forward(x, weight, bias)
            return own
        step = (self.stride[0], self.padding[0], self.groups > 1)
        y: Tensor = call(_Convolve, x[None], weight[None], *step)
        y = y.squeeze(0)  # not y[0], which would be filled up with zeros going back
        return y if bias is None else y + bias[:, None, None]


class _Convolve(Function):
    """x [group, image, channel, ...], w [group, out, channel, ...] -> y.

    The three functions end in (stride, padding, depthwise), which is called `step`.
    """

    @staticmethod
    def forward(x: Tensor, w: Tensor, *step: Any) -> Any:
        return done("convolve", shaped(x.shape, w, *step), x, w)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, w, *ctx.step = inputs
        ctx.save_for_backward(x, w)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Any:
        x, w = ctx.saved_tensors
        return *slopes(ctx, slope, x, w, *ctx.step), None, None, None

    @staticmethod
    def vmap(info: Any, dims: Any, x: Tensor, w: Tensor, *step: Any) -> Any:
        return mapped(_Convolve, info.batch_size, dims[:2], (x, w), step)


class _Spread(Function):
    """The transpose of a convolution: its derivative with respect to the images."""

    @staticmethod
    def forward(slope: Tensor, w: Tensor, size: Pair, *step: Any) -> Any:
        depthwise = step[-1]
        sizes = (*slope.shape[:2], w.shape[1 if depthwise else 2], *size)
        return done("spread", shaped(sizes, w, *step), slope, w)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        slope, w, _, *ctx.step = inputs
        ctx.save_for_backward(slope, w)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> Any:
        slope, w = ctx.saved_tensors
        dslope = call(_Convolve, dx, w, *ctx.step) if ctx.needs_input_grad[0] else None
        dw = call(_Correlate, slope, dx, _size(w), *ctx.step) if ctx.needs_input_grad[1] else None
        return dslope, dw, None, None, None, None

    @staticmethod
    def vmap(info: Any, dims: Any, slope: Tensor, w: Tensor, *step: Any) -> Any:
        return mapped(_Spread, info.batch_size, dims[:2], (slope, w), step)


class _Correlate(Function):
    """The derivative of a convolution with respect to its kernels."""

    @staticmethod
    def forward(slope: Tensor, x: Tensor, size: Pair, *step: Any) -> Any:
        shape = Shape(*x.shape, slope.shape[2], *size, *step)  # type: ignore[call-arg]
        return done("correlate", shape, slope, x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        slope, x, _, *ctx.step = inputs
        ctx.save_for_backward(slope, x)

    @staticmethod
    def backward(ctx: Any, dw: Tensor) -> Any:
        slope, x = ctx.saved_tensors
        dslope = call(_Convolve, x, dw, *ctx.step) if ctx.needs_input_grad[0] else None
        dx = call(_Spread, slope, dw, _size(x), *ctx.step) if ctx.needs_input_grad[1] else None
        return dslope, dx, None, None, None, None

    @staticmethod
    def vmap(info: Any, dims: Any, slope: Tensor, x: Tensor, *step: Any) -> Any:
        inputs = into_groups(info.batch_size, dims[:2], (slope, x))
        return call(_Correlate, *inputs, *step).unflatten(0, (info.batch_size, -1)), 0


def slopes(ctx: Any, slope: Tensor, x: Tensor, w: Tensor, *step: Any) -> tuple[Any, Any]:
    """Return the gradients with respect to images and kernels, where they are wanted."""
    dx = call(_Spread, slope, w, _size(x), *step) if ctx.needs_input_grad[0] else None
    dw = call(_Correlate, slope, x, _size(w), *step) if ctx.needs_input_grad[1] else None
    return dx, dw


def shaped(sizes: Any, w: Tensor, *step: Any) -> Shape:
    """Name the sizes of images and kernels; `step` is (stride, padding, depthwise)."""
    return Shape(*sizes, w.shape[1], *_size(w), *step)  # type: ignore[call-arg]


def _size(images: Tensor) -> Pair:
    return images.shape[-2], images.shape[-1]


def done(task: str, shape: Shape, *inputs: Tensor) -> Any:
    """Do a task in the form that is fastest here."""
    return fastest(task, shape, lambda: forms(task, shape), *inputs)
