"""A convolution in which every client of a stack has its own weights.

vmap turns it into one grouped convolution, which uses a small part of a GPU when the groups are
thin. Here our own kernels may compute the same sums; which is faster depends on shape and device,
so it is measured once and remembered. All functions are differentiable any number of times, since
the derivatives of each are among the others.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from idiolect.kernels import (
    convolution_cuda,
    convolution_halo,
    convolution_last,
    convolution_library,
    convolution_pointwise,
    convolution_stem,
    residual,
    second_stream,
)
from idiolect.kernels.autotune import FEW, Form, fastest
from idiolect.kernels.convolution_cuda import ConvShape
from idiolect.kernels.deferred import computed
from idiolect.kernels.vmap_rules import GroupedFunction, call, float32_on_cuda, halved_on_cuda

Pair = tuple[int, int]
_DEEP = 32  # channels with which kernels for channels last are faster than others of ours
_DEEPER = 64  # with which a gradient by weights is worth a stream of its own, if it has as many
_PRODUCTS = 1 << 30  # of all clients: some ten microseconds


class StackedConv2d(nn.Conv2d):
    """A convolution layer that is fast under vmap on CUDA; elsewhere it is torch's own."""

    @staticmethod
    def suits(layer: nn.Module) -> bool:
        """Return whether a layer is of the plain kind that can be replaced."""
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
        if halved_on_cuda(x):  # as torch's autocast does
            x = x.bfloat16()  # weights are rounded where they are laid out
            bias = None if bias is None else bias.bfloat16()
        elif not float32_on_cuda(x):
            own: Tensor = super()._conv_forward(x, weight, bias)
            return own
        step = (self.stride[0], self.padding[0], self.groups > 1, False)
        y: Tensor = call(_Convolve, x[None], weight[None], *step)
        y = y.squeeze(0)  # the backward pass of y[0] would allocate zeros
        return y if bias is None else y + bias[:, None, None]


class _Convolve(GroupedFunction):
    """x [group, image, channel, ...], w [group, out, channel, ...] -> y.

    The options of the three functions end in (stride, padding, depthwise, fused), called `step`.
    """

    joins_examples = 1

    @classmethod
    def may_join(cls, first: Tensor, *rest: Any) -> bool:
        w, *step = rest
        sizes = (len(first), *first.shape[2:])
        return not _one_order("convolve", conv_shape(sizes, w, *step), first)

    @staticmethod
    def forward(x: Tensor, w: Tensor, *step: Any) -> Any:
        return fastest_form("convolve", conv_shape(x.shape, w, *step), x, w)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return *gradients(ctx, gradient, *ctx.saved_tensors, *ctx.options), None, None, None, None


class _ConvInputGradient(GroupedFunction):
    """The gradient by y, w -> the gradient by x [..., *size]: the transposed convolution."""

    joins_examples = 1

    @classmethod
    def may_join(cls, first: Tensor, *rest: Any) -> bool:
        w, *options = rest
        shape = _seen_shape((len(first), first.shape[2]), w, *options)
        return not _one_order("input_gradient", shape, first)

    @staticmethod
    def forward(gradient: Tensor, w: Tensor, size: Pair, *step: Any) -> Any:
        shape = _seen_shape(gradient.shape[:2], w, size, *step)
        return residual.tagged(fastest_form("input_gradient", shape, gradient, w))

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> Any:
        gradient, w = ctx.saved_tensors
        wanted, step = ctx.needs_input_grad, ctx.options[1:]
        by_gradient = call(_Convolve, dx, w, *step) if wanted[0] else None
        dw = call(_ConvWeightGradient, gradient, dx, _size(w), *step) if wanted[1] else None
        return by_gradient, dw, None, None, None, None, None


class _ConvWeightGradient(GroupedFunction):
    """The gradient by y, x -> the gradient by w [..., *size]."""

    @staticmethod
    def forward(gradient: Tensor, x: Tensor, size: Pair, *step: Any) -> Any:
        shape = ConvShape(*x.shape, gradient.shape[2], *size, *step)  # type: ignore[call-arg]

        def work(gradient: Tensor, x: Tensor) -> Tensor:
            dw: Tensor = fastest_form("weight_gradient", shape, gradient, x)
            return dw.float() if dw.dtype == torch.bfloat16 else dw

        if _takes_long(shape):
            return second_stream.beside(work, gradient, x)
        return work(gradient, x)

    @staticmethod
    def backward(ctx: Any, dw: Tensor) -> Any:
        gradient, x = ctx.saved_tensors
        wanted, step = ctx.needs_input_grad, ctx.options[1:]
        by_gradient = call(_Convolve, x, dw, *step) if wanted[0] else None
        dx = call(_ConvInputGradient, gradient, dw, _size(x), *step) if wanted[1] else None
        return by_gradient, dx, None, None, None, None, None


def gradients(ctx: Any, gradient: Tensor, x: Tensor, w: Tensor, *step: Any) -> tuple[Any, Any]:
    """Return the gradients by images and weights, where they are wanted."""
    wanted = ctx.needs_input_grad
    dx = call(_ConvInputGradient, gradient, w, _size(x), *step) if wanted[0] else None
    dw = call(_ConvWeightGradient, gradient, x, _size(w), *step) if wanted[1] else None
    return dx, dw


def conv_shape(sizes: Any, w: Tensor, *step: Any) -> ConvShape:
    """Return the shape of images of some sizes and weights; `step` is as above."""
    return ConvShape(*sizes, w.shape[1], *_size(w), *step)  # type: ignore[call-arg]


def _seen_shape(many: Any, w: Tensor, size: Pair, *step: Any) -> ConvShape:
    """Return the shape of so many groups of images of a size, of which w makes others."""
    depthwise = step[2]
    return conv_shape((*many, w.shape[1 if depthwise else 2], *size), w, *step)


def _one_order(task: str, shape: ConvShape, images: Tensor) -> bool:
    """Say whether images of all clients lie between one another in memory, with channels last.

    Then clients stay groups even where all have the same weights: in the other order, every layer's
    gradient by the weights, which no two clients share, would begin by copying images.
    """
    return _rounded(images) and not shape.fused and bool(convolution_last.forms(task, shape))


def _takes_long(s: ConvShape) -> bool:
    """Say whether the gradient by the weights takes so long that others may be done beside it."""
    if s.depthwise or min(s.channels, s.out_channels) < _DEEPER:
        return False
    made = s.groups * s.images * s.out_height * s.out_width * s.out_channels
    return made * s.channels * s.taps >= _PRODUCTS


def _rounded(images: Tensor) -> bool:
    """Say whether products may be rounded."""
    single = images.dtype == torch.float32
    return images.dtype == torch.bfloat16 or (single and torch.backends.cuda.matmul.allow_tf32)


def _size(images: Tensor) -> Pair:
    return images.shape[-2], images.shape[-1]


def fastest_form(task: str, shape: ConvShape, *inputs: Tensor) -> Any:
    """Do a task in the form that is fastest here; one or two images in the plain form."""
    inputs = computed(inputs, laid=True)  # weights that a step has left on a second stream
    if shape.groups * shape.images <= FEW:
        return PLAIN[task](*inputs, shape)
    own = inputs[0].dtype == torch.float32
    known = partial(forms, task, shape, own=own, rounded=_rounded(inputs[0]))
    return fastest(task, shape, known, *inputs)


def forms(
    task: str, shape: ConvShape, most: int = 4, own: bool = True, rounded: bool = False
) -> dict[str, Form]:
    """Return all ways to do a task on a GPU, by name; see `convolution_cuda` for the tasks.

    Some of our kernels are for single precision (`own`), some for products that may be rounded.
    Where neighbours want another order in memory than a form, it is timed with copies.
    """
    known = {"plain": PLAIN[task], **convolution_library.forms(task, shape, rounded)}
    last = convolution_last.forms(task, shape) if rounded else {}
    known |= last
    if last:
        known |= convolution_halo.forms(task, shape, torch.float32 if own else torch.bfloat16)
        known |= {} if own else convolution_stem.forms(task, shape)
    first = shape.pointwise and not last  # neighbours are depthwise, say: channels first
    if last:
        known.pop("pixels", None)
    if shape.fused or first:
        known = {
            name: form if name == "pixels" else partial(_in_order, form)
            for name, form in known.items()
        }
    if own and first:
        known |= convolution_pointwise.forms(task, shape)
    deep = last and min(shape.channels, shape.out_channels) >= _DEEP
    slower = not shape.fused and (first or deep)
    return {**known, **convolution_cuda.forms(task, shape, most)} if own and not slower else known


def _in_order(form: Form, *inputs: Any) -> Any:
    """Do a task in a form that may leave its result in another order in memory."""
    made = form(*inputs)
    return tuple(one.contiguous() for one in made) if isinstance(made, tuple) else made.contiguous()


# The plain forms: one grouped convolution for all clients, as torch has it.


def _convolve(x: Tensor, w: Tensor, shape: ConvShape) -> Tensor:
    weight = w.flatten(0, 1).to(x.dtype)
    y = F.conv2d(_join(x), weight, None, shape.stride, shape.padding, 1, shape.convolutions)
    return _separate(y, shape.groups)


def _input_gradient(gradient: Tensor, w: Tensor, shape: ConvShape) -> Tensor:
    sizes = (shape.images, shape.groups * shape.channels, shape.height, shape.width)
    x = gradient.new_empty(()).expand(sizes)
    return _separate(_backward(gradient, x, w.flatten(0, 1).to(x.dtype), shape, 0), shape.groups)


def _weight_gradient(gradient: Tensor, x: Tensor, shape: ConvShape) -> Tensor:
    kernel = (shape.inputs, shape.kernel_height, shape.kernel_width)
    w = x.new_empty(()).expand(shape.groups * shape.out_channels, *kernel)
    dw = _backward(gradient, _join(x), w, shape, 1)
    kind = torch.float32 if dw.dtype == torch.bfloat16 else dw.dtype
    # As weights are, which the step would make of it: so that it is timed with that.
    dw = dw.to(kind, memory_format=torch.contiguous_format)
    return dw.view(shape.groups, shape.out_channels, *kernel)


def _backward(gradient: Tensor, x: Tensor, w: Tensor, shape: ConvShape, which: int) -> Tensor:
    found = torch.ops.aten.convolution_backward(
        _join(gradient), x, w, None, [shape.stride] * 2, [shape.padding] * 2, [1, 1], False,
        [0, 0], shape.convolutions, [which == 0, which == 1, False],
    )  # fmt: skip
    result: Tensor = found[which]
    return result


def _conv_relu(x: Tensor, w: Tensor, bias: Tensor, shape: ConvShape) -> Tensor:
    return (_convolve(x, w, shape) + bias[:, None, :, None, None]).relu()


def _conv_relu_pool(x: Tensor, w: Tensor, bias: Tensor, shape: ConvShape) -> tuple[Tensor, Tensor]:
    """Return also which of a window's four pixels was largest; 4 where none was above 0."""
    y = _convolve(x, w, shape) + bias[:, None, :, None, None]
    most, which = windows(y).max(-1)
    off = most <= 0
    return torch.where(off, 0.0, most), torch.where(off, 4, which).to(torch.uint8)


def windows(images: Tensor) -> Tensor:
    """Make the pixels of each 2×2 window the last axis, without an odd last row or column."""
    height, width = images.shape[-2] // 2, images.shape[-1] // 2
    even = images[..., : 2 * height, : 2 * width]
    return even.reshape(*images.shape[:-2], height, 2, width, 2).transpose(-2, -3).flatten(-2)


def _join(t: Tensor) -> Tensor:
    """Make the groups part of the channels, as torch's grouped convolution takes them."""
    return t.transpose(0, 1).flatten(1, 2)


def _separate(t: Tensor, groups: int) -> Tensor:
    """Undo `_join`."""
    return t.reshape(t.shape[0], groups, -1, *t.shape[2:]).transpose(0, 1)


PLAIN: dict[str, Form] = {
    "convolve": _convolve,
    "input_gradient": _input_gradient,
    "weight_gradient": _weight_gradient,
    "conv_relu": _conv_relu,
    "conv_relu_pool": _conv_relu_pool,
}
