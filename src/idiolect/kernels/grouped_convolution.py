"""Stacked convolutions as torch has them: one grouped convolution for all clients."""

import torch
from torch import Tensor
from torch.nn import functional as F

from idiolect.kernels.convolution_shape import Shape


def convolve(x: Tensor, w: Tensor, shape: Shape) -> Tensor:
    """Apply every client's kernels to its images."""
    y = F.conv2d(
        _side(x), w.flatten(0, 1), None, shape.stride, shape.padding, 1, shape.convolutions
    )
    return _stack(y, shape.groups)


def spread(slope: Tensor, w: Tensor, shape: Shape) -> Tensor:
    """Return the gradient with respect to the images."""
    sizes = (shape.images, shape.groups * shape.channels, shape.height, shape.width)
    x = slope.new_empty(()).expand(sizes)
    return _stack(_backward(_side(slope), x, w.flatten(0, 1), shape, 0), shape.groups)


def correlate(slope: Tensor, x: Tensor, shape: Shape) -> Tensor:
    """Return the gradient with respect to the kernels."""
    kernel = (shape.inputs, shape.kernel_height, shape.kernel_width)
    w = x.new_empty(()).expand(shape.groups * shape.out_channels, *kernel)
    dw = _backward(_side(slope), _side(x), w, shape, 1)
    return dw.view(shape.groups, shape.out_channels, *kernel)


def rectified(x: Tensor, w: Tensor, bias: Tensor, shape: Shape) -> Tensor:
    """Convolve, add the bias and cut off below 0."""
    return (convolve(x, w, shape) + bias[:, None, :, None, None]).relu()


def pooled(x: Tensor, w: Tensor, bias: Tensor, shape: Shape) -> tuple[Tensor, Tensor]:
    """Convolve, add the bias, cut off below 0 and pool; and say which of four pixels it was.

    4 where none was above 0.
    """
    y = convolve(x, w, shape) + bias[:, None, :, None, None]
    most, which = _windows(y).max(-1)
    off = most <= 0
    return torch.where(off, 0.0, most), torch.where(off, 4, which).to(torch.uint8)


def unpool(slope: Tensor, chosen: Tensor, shape: Shape) -> Tensor:
    """Send each slope to the pixel that was chosen in its window, and 0 elsewhere."""
    height, width = slope.shape[-2:]
    four = torch.arange(4, device=slope.device)
    spots = torch.where(chosen[..., None] == four, slope[..., None], 0.0)
    windows = spots.reshape(*slope.shape, 2, 2).transpose(-2, -3)
    full = windows.reshape(*slope.shape[:-2], 2 * height, 2 * width)
    return F.pad(full, (0, shape.out_width - 2 * width, 0, shape.out_height - 2 * height))


def pick(full: Tensor, chosen: Tensor) -> Tensor:
    """Take from each window the pixel that was chosen; 0 where none was."""
    windows = F.pad(_windows(full), (0, 1))
    return windows.gather(-1, chosen[..., None].long())[..., 0]


def _windows(full: Tensor) -> Tensor:
    """Lay the pixels of each 2×2 window side by side; an odd last row or column is left out."""
    height, width = full.shape[-2] // 2, full.shape[-1] // 2
    even = full[..., : 2 * height, : 2 * width]
    windows = even.reshape(*full.shape[:-2], height, 2, width, 2).transpose(-2, -3)
    return windows.flatten(-2)


def _backward(slope: Tensor, x: Tensor, w: Tensor, shape: Shape, which: int) -> Tensor:
    wanted = [which == 0, which == 1, False]
    slopes = torch.ops.aten.convolution_backward(
        slope, x, w, None, [shape.stride] * 2, [shape.padding] * 2, [1, 1], False, [0, 0],
        shape.convolutions, wanted,
    )  # fmt: skip
    result: Tensor = slopes[which]
    return result


def _side(t: Tensor) -> Tensor:
    """Lay the groups side by side as channels: what torch's grouped convolution takes."""
    return t.transpose(0, 1).flatten(1, 2)


def _stack(t: Tensor, groups: int) -> Tensor:
    """Undo `_side`."""
    return t.reshape(t.shape[0], groups, -1, *t.shape[2:]).transpose(0, 1)
