"""Stacked convolutions of pictures of few channels, the first of networks, in bfloat16: `stem.cu`.

Pictures are read as they lie in memory; what is made, and its gradient, as in `convolution_last`.
The tasks are those of `convolution_cuda`, without the gradient by pictures, which nothing needs.
"""

import torch
from torch import Tensor

from idiolect.kernels import weight_order
from idiolect.kernels.autotune import Form
from idiolect.kernels.compiled import launch, round_up
from idiolect.kernels.convolution_cuda import ConvShape
from idiolect.kernels.convolution_last import processors, wide
from idiolect.kernels.convolution_library import InLayout, all_last
from idiolect.kernels.deferred import computed

_CHANNELS, _TAPS = 4, 9  # of pictures, and of kernels, at most
_BLOCK, _THREADS, _PIXEL, _ROW = 64, 256, 8, 128  # as in the source; bytes
_MADE = {"convolve": 512, "weight_gradient": 256}  # pixels of a band, about
_ROOM = 100 * 1024  # bytes of shared memory of a block, at most, of which there are two
_WAVES = 2  # blocks of a weight gradient for each multiprocessor


def forms(task: str, shape: ConvShape) -> dict[str, Form]:
    """Return the ways to do a task that may be worth a try, by name."""
    s = shape
    suit = s.channels <= _CHANNELS and s.taps <= _TAPS and s.out_channels % 8 == 0
    if task not in _RUN or s.depthwise or not suit or _room(task, s) > _ROOM:
        return {}
    images = 2 if task == "weight_gradient" else 1
    return {"stem": InLayout(_RUN[task], _as_neighbours, images)}


def _as_neighbours(images: Tensor) -> Tensor:
    """Lay out images of many channels; pictures are given by the data, and stay as they are."""
    return images if images.shape[2] <= _CHANNELS else all_last(images)


def convolve(x: Tensor, w: Tensor, shape: ConvShape) -> Tensor:
    """Convolve."""
    s, x, w = shape, computed(x), computed(w.float())  # whose steps in memory are told
    out = x.new_empty(s.images, s.out_height, s.out_width, s.groups, s.out_channels)
    rows = _rows("convolve", s)
    blocks = s.groups * s.images * -(-s.out_height // rows)
    given = [x, w, out, s.groups, *_sizes(s), rows, *x.stride(), *w.stride()]
    grid = (blocks, -(-s.out_channels // _BLOCK), 1)
    launch("stem.cu", "convolve", _constants(s), grid, _THREADS, given, _room("convolve", s))
    return out.permute(3, 0, 4, 1, 2)


def weight_gradient(gradient: Tensor, x: Tensor, shape: ConvShape) -> Tensor:
    """Return the gradient by the weights, summed in a fixed order."""
    s, x, gradient = shape, computed(x), wide(gradient, shape.out_channels)
    rows, beside = _rows("weight_gradient", s), -(-s.out_channels // _BLOCK)
    bands = s.images * -(-s.out_height // rows)
    each = -(-bands // max(1, _WAVES * processors(x) // (s.groups * beside)))
    parts = -(-bands // each)
    sizes = (parts, s.groups, s.out_channels, s.kernel_height, s.kernel_width, s.channels)
    out = x.new_empty(sizes, dtype=torch.float32)
    given = [gradient, x, out, s.groups, s.images, each, *_sizes(s), rows, *x.stride()]
    constants = _constants(s) | {"WEIGHT_GRADIENT": 1}
    room = _room("weight_gradient", s)
    grid = (parts * s.groups, beside, 1)
    launch("stem.cu", "weight_gradient", constants, grid, _THREADS, given, room)
    return weight_order.gradient(out, s.channels, half=True)


def _constants(s: ConvShape) -> dict[str, int | str]:
    own: dict[str, int | str] = {"HALF": 1, "THREADS": _THREADS, "C": s.channels}
    return own | {"KH": s.kernel_height, "KW": s.kernel_width, "PAD": s.padding, "STRIDE": s.stride}


def _sizes(s: ConvShape) -> tuple[int, ...]:
    return s.height, s.width, s.out_channels, s.out_height, s.out_width


def _rows(task: str, s: ConvShape) -> int:
    """Return the rows of a band of what is made."""
    return min(s.out_height, max(1, _MADE[task] // s.out_width))


def _room(task: str, s: ConvShape) -> int:
    """Return the bytes of shared memory of a block."""
    rows = _rows(task, s)
    across = (s.out_width - 1) * s.stride + s.kernel_width
    held = ((rows - 1) * s.stride + s.kernel_height) * across * _PIXEL
    if task == "convolve":
        return _BLOCK * (round_up(s.taps, 4) * 8 + 4) + held
    stage = round_up(rows * s.out_width, 16) * _ROW + held // 16 * 16 + 16
    return max(2 * stage, 1024 * round_up(s.taps, 2))


_RUN: dict[str, Form] = {"convolve": convolve, "weight_gradient": weight_gradient}
