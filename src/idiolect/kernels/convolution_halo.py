"""Stacked convolutions with channels last, by kernels for Hopper's matrix units: `halo.cu`.

For kernels of stride 1 whose result is as large as the image. Images lie in memory as in
`convolution_last`; of the tasks, weight gradients are for bfloat16 alone, and kernels of 3×3.
"""

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from idiolect.kernels import layout
from idiolect.kernels.autotune import Form
from idiolect.kernels.compiled import is_hopper, launch, round_up
from idiolect.kernels.convolution_cuda import ConvShape
from idiolect.kernels.convolution_last import processors, wide
from idiolect.kernels.convolution_library import InLayout, all_last

_ROW, _PIECE = 128, 1024  # bytes of a row in shared memory, and of eight
_SHARED = 227 * 1024  # bytes of shared memory of a block, at most
_SIDE, _BLOCK = 3, 64  # of weight gradients: the side of kernels, channels of a block
_PLACES, _STAGES, _WAVES = 128, 4, 2


class Cut(NamedTuple):
    """How the work is cut: channels made by a block, matrices of a warpgroup, threads, stages."""

    BN: int
    MT: int
    THREADS: int = 256
    STAGES: int = 4

    @property
    def places(self) -> int:
        """Places made by a block."""
        return self.THREADS // 128 * self.MT * 64


_CUTS = (Cut(64, 2), Cut(128, 1), Cut(128, 2), Cut(64, 1))


def forms(task: str, shape: ConvShape, kind: torch.dtype) -> dict[str, Form]:
    """Return the ways to do a task that may be worth a try, by name."""
    s, side = shape.seen_by(task), shape.kernel_height
    same = side == shape.kernel_width == 2 * shape.padding + 1 and shape.stride == 1
    deep = _ROW // kind.itemsize  # channels that fill a row
    if not is_hopper() or shape.depthwise or not same or side == 1:
        return {}
    if task == "weight_gradient":
        fits = side == _SIDE and kind == torch.bfloat16 and _gradient_room(shape) <= _SHARED
        if not fits or s.channels % 8 or s.out_channels % 8:
            return {}
        return {"halo": InLayout(weight_gradient, all_last, 2)}
    if task not in _RUN or s.channels % deep or s.out_channels % 8:
        return {}
    return {
        f"halo {cut.BN}x{cut.places}": InLayout(functools.partial(_RUN[task], cut=cut), all_last, 1)
        for cut in _CUTS
        if _room(cut, s, deep) <= _SHARED and cut.BN < 2 * s.out_channels
    }


def convolve(x: Tensor, w: Tensor, shape: ConvShape, cut: Cut) -> Tensor:
    """Convolve."""
    laid = layout.by_taps(w, x, w.shape[2], rounded=True)
    return _images("convolve", x, laid, shape, cut)


def input_gradient(gradient: Tensor, w: Tensor, shape: ConvShape, cut: Cut) -> Tensor:
    """Return the gradient by the images."""
    laid = layout.turned(w, gradient, rounded=True)
    return _images("input_gradient", gradient, laid, shape, cut)


def _images(task: str, x: Tensor, w: Tensor, shape: ConvShape, cut: Cut) -> Tensor:
    """Do a task that makes images; weights are [group, made, row, column, read]."""
    s, x = shape.seen_by(task), wide(x, x.shape[2])
    out = x.new_empty(s.images, s.height, s.width, s.groups, s.out_channels)
    places = s.images * (s.height + s.padding) * (s.width + s.padding)
    grid = (-(-places // cut.places), s.groups, -(-s.out_channels // cut.BN))
    constants = {**cut._asdict(), **_half(x), "TRANSPOSED": int(task == "input_gradient")}
    kernel = (s.kernel_height, s.kernel_width, s.padding)
    given = [x, w, out, s.images, s.channels, s.height, s.width, s.out_channels, *kernel]
    room = _room(cut, s, _ROW // x.element_size())
    launch("halo.cu", "convolve", constants, grid, cut.THREADS, given, room)
    return out.permute(3, 0, 4, 1, 2)


def weight_gradient(gradient: Tensor, x: Tensor, shape: ConvShape) -> Tensor:
    """Return the gradient by the weights, summed in a fixed order."""
    s = shape
    gradient, x = wide(gradient, s.out_channels), wide(x, s.channels)
    places = s.images * (s.height + s.padding) * (s.width + s.padding)
    blocks = -(-s.out_channels // _BLOCK) * -(-s.channels // _BLOCK)
    parts = max(1, _WAVES * processors(x) // (s.groups * blocks))
    each = round_up(-(-places // parts), _PLACES)
    parts = -(-places // each)
    kernel = (s.kernel_height, s.kernel_width)
    out = torch.empty(
        parts, s.groups, s.out_channels, *kernel, s.channels, dtype=torch.float32, device=x.device
    )
    threads = 128 * _SIDE
    constants = {"WEIGHT_GRADIENT": 1, "SIDE": _SIDE, "PLACES": _PLACES, "STAGES": _STAGES}
    constants |= {"THREADS": threads, **_half(x)}
    given = [gradient, x, out, s.images, each, s.channels, s.height, s.width, s.out_channels]
    grid = (parts, s.groups, blocks)
    launch("halo.cu", "weight_gradient", constants, grid, threads, given, _gradient_room(s))
    return layout.put_back(out, s.channels)


def _half(x: Tensor) -> dict[str, int]:
    return {"HALF": 1} if x.dtype == torch.bfloat16 else {}


def _around(s: ConvShape, places: int) -> int:
    """Return the bytes of so many places with those around them; see the source."""
    rows = places + 2 * s.padding * (s.width + s.padding + 1)
    return round_up(rows * _ROW, _PIECE)


def _room(cut: Cut, s: ConvShape, deep: int) -> int:
    """Return the bytes of shared memory of a block."""
    held = min(2, s.channels // deep) * _around(s, cut.places)
    return _PIECE + cut.STAGES * cut.BN * _ROW + held


def _gradient_room(s: ConvShape) -> int:
    return _PIECE + _STAGES * (_PLACES * _ROW + _around(s, _PLACES))


_RUN = {"convolve": convolve, "input_gradient": input_gradient}
