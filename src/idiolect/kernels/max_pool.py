"""2×2 max-pooling of single clients on a CPU, alone and after a convolution with bias and ReLU.

Torch's own asks of each pixel whether it is the largest so far. A processor cannot guess that, and
waits for it longer than a small convolution takes. Here all windows are compared at once, first the
two columns and then the two rows. Results and gradients are the same: of equal pixels the first one
is taken.

Of a convolution of few channels to many, with others before it, channels come last where torch can
compare them side by side, and where oneDNN takes the gradient by the weights; they come first where
it takes that by the images. Each is the faster way.

A first convolution of few channels leaves most of a vector register empty. There the two columns
become channels of one convolution with stride 2, by weights that are there twice, the second time a
pixel further to the right.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F

from idiolect.kernels.vmap_rules import call

_FEW = 1 << 13  # numbers, up to which torch's one operation is faster than several
_LANES = 16 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 8  # of a vector

Columns = tuple[Tensor, Tensor]


def suits(x: Tensor) -> bool:
    """Say whether images are those of a single client on a CPU, and channels come first."""
    return (
        x.device.type == "cpu"
        and x.dim() == 4
        and x.numel() >= _FEW
        and x.dtype in (torch.float32, torch.float64)
        and x.stride(3) == 1  # with channels last, torch compares many channels at once
        and torch._C._functorch.peek_interpreter_stack() is None
        and not torch.is_autocast_enabled("cpu")
    )


def halves(layer: nn.Module) -> bool:
    """Return whether a layer is plain max-pooling of 2×2 windows."""
    if type(layer) not in (nn.MaxPool2d, HostMaxPool2d):
        return False
    pool: Any = layer
    sizes = (pool.kernel_size, pool.stride, pool.padding, pool.dilation)
    usual = ((2, (2, 2)), (2, (2, 2)), (0, (0, 0)), (1, (1, 1)))
    fits = all(size in known for size, known in zip(sizes, usual, strict=True))
    return fits and not pool.ceil_mode and not pool.return_indices


class HostMaxPool2d(nn.MaxPool2d):
    """Max-pooling that is faster for single clients on a CPU; elsewhere it is torch's own."""

    suits = staticmethod(halves)

    def forward(self, x: Tensor) -> Tensor:
        """Return the largest pixel of each window."""
        if not suits(x) or min(x.shape[2:]) < 2:
            own: Tensor = super().forward(x)
            return own
        pooled: Tensor = call(_HostMaxPool, x)
        return pooled


def suits_conv(layer: nn.Conv2d, x: Tensor) -> bool:
    """Say whether a convolution of the plain kind, and its images, are for `conv_relu_pool`."""
    around, sides = int(layer.padding[0]), zip(x.shape[2:], layer.kernel_size, strict=False)
    return (
        suits(x)
        and layer.bias is not None
        and layer.stride == (1, 1)
        and layer.groups == 1
        and layer.weight.dtype == x.dtype
        and all(
            side + 2 * around > kernel for side, kernel in sides
        )  # two pixels are left, or more
    )


def conv_relu_pool(layer: nn.Conv2d, x: Tensor) -> Tensor:
    """Convolve, apply ReLU and max-pool by 2."""
    inner = x.requires_grad and 1 < layer.in_channels < _LANES < 2 * layer.out_channels
    function = _InnerConvReLUPool if inner else _HostConvReLUPool
    pooled: Tensor = call(function, x, layer.weight, layer.bias, layer.padding[0])
    return pooled


class _HostMaxPool(Function):
    """Images -> the largest pixel of each window."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        pooled, across, down = _largest(_columns(x))
        ctx.save_for_backward(x, across, down)
        return pooled

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, across, down = ctx.saved_tensors
        if torch.is_grad_enabled():
            return _differentiable(lambda x: F.max_pool2d(x, 2), gradient, ctx, x)
        images = _empty(x.shape, gradient)
        _spread(gradient, across, down, _columns(images))
        return images


class _HostConvReLUPool(Function):
    """Images, weights, bias and padding -> the largest pixel of each window, or 0."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, bias: Tensor, padding: int) -> Tensor:
        # Columns that are channels are rounded each in its own way. So of equal pixels either may
        # be taken, which a gradient by the images would show.
        ctx.joins = 2 * len(w) <= _LANES and not ctx.needs_input_grad[0]
        ctx.padding = [padding] * 2
        if ctx.joins:
            weight = torch.cat([F.pad(w, (0, 1)), F.pad(w, (1, 0))])
            y = torch.conv2d(x, weight, torch.cat([bias, bias]), [1, 2], ctx.padding)
        else:
            weight, y = w, torch.conv2d(x, w, bias, [1, 1], ctx.padding)
        pooled, across, down = _largest(_channels(y) if ctx.joins else _columns(y))
        pooled, ctx.size = torch.clamp_min_(pooled, 0), y.shape
        ctx.save_for_backward(x, w, bias, weight, pooled, across, down)
        return pooled

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, w, bias, weight, pooled, across, down = ctx.saved_tensors
        if torch.is_grad_enabled():
            return _differentiable(partial(_plain, ctx.padding), gradient, ctx, x, w, bias)
        gradient = _above(gradient, pooled)
        y = _empty(ctx.size, gradient)
        _spread(gradient, across, down, _channels(y) if ctx.joins else _columns(y))
        by_x, by_w, by_bias, _ = ctx.needs_input_grad
        stride, wanted = [1, 1 + ctx.joins], [by_x, by_w, False]
        dx, dw, _ = torch.ops.aten.convolution_backward(
            y, x, weight, None, stride, ctx.padding, [1, 1], False, [0, 0], 1, wanted
        )
        if by_w and ctx.joins:
            left, right = torch.chunk(dw, 2)
            dw = left[..., :-1] + right[..., 1:]
        return dx, dw, torch.sum(gradient, (0, 2, 3)) if by_bias else None, None


class _InnerConvReLUPool(Function):
    """The same for a layer of few channels to many, which are pooled where they come last."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, bias: Tensor, padding: int) -> Tensor:
        ctx.padding = [padding] * 2
        # With channels last, the convolution would round equal pixels each in its own way.
        y = _last(torch.conv2d(x, w, bias, [1, 1], ctx.padding))
        largest, which = torch.ops.aten.max_pool2d_with_indices(y, [2, 2])
        pooled = torch.clamp_min_(largest.contiguous(), 0)  # what follows may want a view of it
        ctx.save_for_backward(x, w, bias, y, pooled, which)
        return pooled

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, w, bias, y, pooled, which = ctx.saved_tensors
        if torch.is_grad_enabled():
            return _differentiable(partial(_plain, ctx.padding), gradient, ctx, x, w, bias)
        gradient = _above(gradient, pooled)
        y = torch.ops.aten.max_pool2d_with_indices_backward(
            gradient, y, [2, 2], [2, 2], [0, 0], [1, 1], False, which
        )

        def by(y: Tensor, x: Tensor, *wanted: bool) -> Any:
            options = [1, 1], ctx.padding, [1, 1], False, [0, 0], 1, [*wanted, False]
            return torch.ops.aten.convolution_backward(y, x, w, None, *options)

        by_x, by_w, by_bias, _ = ctx.needs_input_grad
        dx = by(y.contiguous(), x, True, False)[0] if by_x else None
        dw = by(y, _last(x), False, True)[1] if by_w else None
        return dx, dw, torch.sum(gradient, (0, 2, 3)) if by_bias else None, None


def _last(x: Tensor) -> Tensor:
    return torch.clone(x, memory_format=torch.channels_last)


def _plain(padding: list[int], x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    """Convolve, max-pool and apply ReLU by torch's operations."""
    return F.max_pool2d(torch.conv2d(x, w, bias, [1, 1], padding), 2).relu()


def _channels(y: Tensor) -> Columns:
    """Return the left and the right column of all windows, where they are channels."""
    left, right = torch.chunk(y, 2, 1)
    return left, right


def _columns(images: Tensor) -> Columns:
    """Return the left and the right column of all windows."""
    width = images.shape[3] // 2 * 2
    return images[..., 0:width:2], images[..., 1:width:2]


def _rows(column: Tensor) -> tuple[Tensor, Tensor]:
    """Return what is in the upper and in the lower row of all windows."""
    height = column.shape[2] // 2 * 2
    return column[:, :, 0:height:2], column[:, :, 1:height:2]


def _largest(columns: Columns) -> tuple[Tensor, Tensor, Tensor]:
    """Return the largest pixels, and by how much right exceeds left, and the lower row the upper.

    The later pixel of two is the larger where that is above 0.
    """
    left, right = columns
    most = torch.maximum(left, right)
    upper, lower = _rows(most)
    return torch.maximum(upper, lower), right - left, lower - upper


def _spread(gradient: Tensor, across: Tensor, down: Tensor, columns: Columns) -> None:
    """Write the gradient by the largest pixels where they are, and 0 beside them."""
    rows = _empty(across.shape, gradient)
    upper, lower = _rows(rows)
    lower.copy_(_above(gradient, down))
    torch.sub(gradient, lower, out=upper)
    left, right = columns
    right.copy_(_above(rows, across))
    torch.sub(rows, right, out=left)


def _above(values: Tensor, excess: Tensor) -> Tensor:
    """Return values where the excess is above 0, else 0."""
    kept: Tensor = torch.ops.aten.threshold_backward(values, excess, 0)
    return kept


def _empty(size: Sequence[int], like: Tensor) -> Tensor:
    """Return memory for images, of which an odd last row or column stays 0."""
    return like.new_zeros(size) if size[2] % 2 or size[3] % 2 else like.new_empty(size)


def _differentiable(
    plain: Callable[..., Tensor], gradient: Tensor, ctx: Any, *inputs: Tensor
) -> tuple[Tensor | None, ...]:
    """Return gradients that are to be differentiated themselves, by torch's operations."""
    wanted: tuple[bool, ...] = ctx.needs_input_grad
    chosen = [one for one, want in zip(inputs, wanted, strict=False) if want]
    found = iter(torch.autograd.grad(plain(*inputs), chosen, gradient, create_graph=True))
    return tuple(next(found) if want else None for want in wanted)
