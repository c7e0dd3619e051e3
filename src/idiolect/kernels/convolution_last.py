"""Stacked convolutions with channels last, by our kernel on matrix units: `channels_last.cu`.

Images are [image, pixel, client, channel] in memory, as one grouped convolution with channels last
takes them, and all clients are one launch. Products are rounded to TF32, or images are bfloat16.
The tasks are those of `convolution_cuda`, without what may follow a convolution.
"""

import functools
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from idiolect.kernels import weight_order
from idiolect.kernels.autotune import Form
from idiolect.kernels.compiled import launch, round_up
from idiolect.kernels.convolution_cuda import ConvShape
from idiolect.kernels.convolution_library import InLayout, all_last

_WARP, _BYTES = 32, 16  # threads of a warp; bytes that are copied at once
_DEEP, _PADDING = 32, 8  # pixels of a stage of a weight gradient, numbers between them
_FEW = 16  # output channels, at least: a matrix unit makes 16 rows
_MANY = 64  # rows and columns of wide matrices are more
_WAVES = 3  # blocks of a weight gradient for each multiprocessor


class Cut(NamedTuple):
    """How the work is cut: rows and columns of a block and of a warp, pieces in shared memory."""

    BM: int
    BN: int
    WM: int
    WN: int
    STAGES: int

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.BM // self.WM * (self.BN // self.WN) * _WARP


# For wide matrices and for others; of several, those that won on an H200 (bfloat16, TF32). The last
# two, again for wide ones and others, have larger pieces for a warp: fewer reads for each product.
_THIN, _SMALL = Cut(128, 64, 32, 32, 3), Cut(64, 64, 32, 32, 4)
_SQUARE = Cut(128, 128, 64, 64, 3)
_LARGE, _TALL = Cut(256, 128, 64, 64, 3), Cut(128, 64, 64, 32, 3)
_CUTS = {
    ("convolve", torch.bfloat16): (Cut(128, 128, 64, 32, 3), _THIN, _LARGE, _TALL),
    ("convolve", torch.float32): (_SQUARE, _THIN, _LARGE, _TALL),
    ("input_gradient", torch.bfloat16): (_SQUARE, _THIN, _LARGE, _TALL),
    ("input_gradient", torch.float32): (_SQUARE, _THIN, _LARGE, _TALL),
    ("weight_gradient", torch.bfloat16): (Cut(128, 64, 64, 32, 4), _SMALL),
    ("weight_gradient", torch.float32): (_SQUARE, _SMALL),
}
_NAMES = ("matrix wide", "matrix", "matrix large", "matrix tall")


def forms(task: str, shape: ConvShape) -> dict[str, Form]:
    """Return the ways to do a task that may be worth a try, by name."""
    if (
        task not in _RUN
        or shape.depthwise
        or min(shape.out_channels, shape.taps * shape.channels) < _FEW
    ):
        return {}
    if shape.out_channels % 8 or (task == "input_gradient" and shape.channels % 8):
        return {}
    s = shape.seen_by(task)
    sides = (s.out_channels, s.taps * s.channels if task == "weight_gradient" else _MANY + 1)
    images = 2 if task == "weight_gradient" else 1
    known = range(2 if task == "weight_gradient" else len(_NAMES))
    return {
        _NAMES[which]: InLayout(functools.partial(_RUN[task], which=which), all_last, images)
        for which in (known if min(sides) > _MANY else known[1::2])
    }


def convolve(x: Tensor, w: Tensor, shape: ConvShape, which: int) -> Tensor:
    """Convolve."""
    return _images("convolve", x, weight_order.by_taps(w, x, _filled(x)), shape, which)


def input_gradient(gradient: Tensor, w: Tensor, shape: ConvShape, which: int) -> Tensor:
    """Return the gradient by the images."""
    return _images("input_gradient", gradient, weight_order.turned(w, gradient), shape, which)


def _images(task: str, x: Tensor, w: Tensor, shape: ConvShape, which: int) -> Tensor:
    """Do a task that makes images; weights are [group, made, row, column, read]."""
    s, tile = shape.seen_by(task), _CUTS[task, x.dtype][which]
    channels = w.shape[4]
    x = wide(x, channels)
    made = (shape.height, shape.width) if task == "input_gradient" else (s.out_height, s.out_width)
    out = x.new_empty(s.images, *made, s.groups, s.out_channels)
    turned = shape.stride if task == "input_gradient" else 1
    pixels = s.images * -(-made[0] // turned) * -(-made[1] // turned)
    blocks = -(-pixels // tile.BM) * turned**2
    constants = _constants(x, tile) | {"TRANSPOSED": int(task == "input_gradient")}
    grid = (blocks, s.groups, -(-s.out_channels // tile.BN))
    shared = tile.STAGES * (tile.BM + tile.BN) * 128
    sizes = (channels, s.height, s.width, s.out_channels, *made, *w.shape[2:4])
    given = [x, w, out, s.images, *sizes, shape.padding, s.stride]
    launch("channels_last.cu", "convolve", constants, grid, tile.threads, given, shared)
    return out.permute(3, 0, 4, 1, 2)


def weight_gradient(gradient: Tensor, x: Tensor, shape: ConvShape, which: int) -> Tensor:
    """Return the gradient by the weights, summed in a fixed order."""
    s, channels, tile = shape, _filled(x), _CUTS["weight_gradient", x.dtype][which]
    gradient, x = wide(gradient, s.out_channels), wide(x, channels)
    pixels = s.images * s.out_height * s.out_width
    blocks = -(-s.out_channels // tile.BM) * -(-s.taps * channels // tile.BN)
    parts = max(1, _WAVES * processors(x) // (s.groups * blocks))
    each = round_up(-(-pixels // parts), _DEEP)
    parts = -(-pixels // each)
    out = torch.empty(
        parts, s.groups, s.out_channels, s.kernel_height, s.kernel_width, channels,
        dtype=torch.float32, device=x.device,
    )  # fmt: skip
    constants = _constants(x, tile) | {"WEIGHT_GRADIENT": 1}
    padding = 0 if x.dtype == torch.bfloat16 else 2 * _PADDING
    shared = tile.STAGES * _DEEP * (tile.BM + tile.BN + padding) * x.element_size()
    sizes = (channels, s.height, s.width, s.out_channels, s.out_height, s.out_width)
    kernel = (s.kernel_height, s.kernel_width, s.padding, s.stride)
    given = [gradient, x, out, s.images, each, *sizes, *kernel]
    launch("channels_last.cu", "weight_gradient", constants, (parts, s.groups, blocks),
           tile.threads, given, shared)  # fmt: skip
    return weight_order.gradient(out, s.channels, x.dtype == torch.bfloat16)


def _constants(x: Tensor, tile: Cut) -> dict[str, int | str]:
    half: dict[str, int | str] = {"HALF": 1} if x.dtype == torch.bfloat16 else {}
    return {"THREADS": tile.threads, **tile._asdict(), **half}


def _filled(x: Tensor) -> int:
    """Return the channels of images, so many more that they are whole pieces of 16 bytes."""
    return round_up(x.shape[2], _BYTES // x.element_size())


def wide(t: Tensor, channels: int) -> Tensor:
    """Lay images out as [image, row, column, group, channel]: one copy, or none."""
    last = t.permute(1, 3, 4, 0, 2)
    if channels > t.shape[2]:
        last = F.pad(last, (0, channels - t.shape[2]))
    return last.contiguous()


def processors(x: Tensor) -> int:
    """Return the multiprocessors of the GPU that a tensor is on; elsewhere 1."""
    if not x.is_cuda:
        return 1
    return torch.cuda.get_device_properties(x.device).multi_processor_count


_RUN = {
    "convolve": convolve,
    "input_gradient": input_gradient,
    "weight_gradient": weight_gradient,
}
