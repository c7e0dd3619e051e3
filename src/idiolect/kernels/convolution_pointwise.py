"""Stacked 1×1 convolutions with channels first, by our kernels on matrix units: `pointwise.cu`.

The tasks are those of `convolution_cuda`, without what may follow a convolution.
"""

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from idiolect.kernels import weight_order
from idiolect.kernels.autotune import Form
from idiolect.kernels.compiled import launch, round_up
from idiolect.kernels.convolution_cuda import ConvShape
from idiolect.kernels.convolution_last import processors

_ROWS, _DEEP = 64, 32  # of a block, see the source
_FEW = 16  # channels, at least: a matrix unit makes 16 rows


class PixelCut(NamedTuple):
    """Threads of a block, stages in shared memory, blocks of a weight gradient a multiprocessor."""

    threads: int
    stages: int
    waves: int = 0

    @property
    def name(self) -> str:
        """Name the form."""
        return "pointwise " + "x".join(map(str, self if self.waves else self[:2]))


_CUTS = {
    "convolve": (PixelCut(256, 2), PixelCut(256, 3), PixelCut(128, 3)),
    "input_gradient": (PixelCut(256, 2), PixelCut(256, 3), PixelCut(128, 3)),
    "weight_gradient": (PixelCut(256, 2, 4), PixelCut(256, 3, 3), PixelCut(128, 3, 4)),
}


def forms(task: str, shape: ConvShape) -> dict[str, Form]:
    """Return the ways to do a task that may be worth a try, by name; in single precision."""
    fits = shape.pointwise and min(shape.channels, shape.out_channels) >= _FEW
    if not fits or shape.height * shape.width % 4 or task not in _RUN:
        return {}
    return {cut.name: functools.partial(_RUN[task], cut=cut) for cut in _CUTS[task]}


def _images(task: str, x: Tensor, w: Tensor, shape: ConvShape, cut: PixelCut) -> Tensor:
    s, turned, columns = shape.seen_by(task), task == "input_gradient", cut.threads // 2
    pixels = s.height * s.width
    out = x.new_empty(s.groups, s.images, s.out_channels, s.height, s.width)
    grid = (-(-s.images * pixels // columns), s.groups, -(-s.out_channels // _ROWS))
    x, w = _as_read(x), w.contiguous()
    sizes = (s.images, pixels, s.channels, s.out_channels, x.stride(1))
    weights = _DEEP * (_ROWS + 8) if turned else _ROWS * (_DEEP + 4)
    room = 4 * cut.stages * (weights + _DEEP * (columns + 8))
    whole = shape.channels % 4 == 0 and w.data_ptr() % 16 == 0  # rows of weights, in 16 bytes
    own: dict[str, int | str] = {"TRANSPOSED": int(turned), "AT_ONCE": 4 if whole else 1}
    _launch("convolve", own, cut, grid, [x, w, out, *sizes], room)
    return out


def weight_gradient(gradient: Tensor, x: Tensor, shape: ConvShape, cut: PixelCut) -> Tensor:
    """Return the gradient by the weights, summed in a fixed order."""
    s, pixels = shape, shape.height * shape.width
    blocks = -(-s.out_channels // _ROWS) * -(-s.channels // _ROWS)
    parts = max(1, cut.waves * processors(x) // (s.groups * blocks))
    each = round_up(-(-s.images * pixels // parts), _DEEP)
    parts = -(-s.images * pixels // each)
    out = x.new_empty(parts, s.groups, s.out_channels, 1, 1, s.channels)
    gradient, x = _as_read(gradient), _as_read(x)
    sizes = (s.images, pixels, s.channels, s.out_channels, each, gradient.stride(1), x.stride(1))
    given = [gradient, x, out, *sizes]
    room = 4 * cut.stages * 2 * _ROWS * (_DEEP + 4)
    _launch("weight_gradient", {"WEIGHT_GRADIENT": 1}, cut, (parts, s.groups, blocks), given, room)
    return out[0].view(s.groups, s.out_channels, s.channels, 1, 1) if parts == 1 else _sum(out)


def _sum(parts: Tensor) -> Tensor:
    return weight_order.put_back(parts, parts.shape[-1])


def _as_read(t: Tensor) -> Tensor:
    """Return images, perhaps some channels of others, as they can be read: four numbers at once."""
    images, _, height, width = t.shape[1:]
    kept = t.stride()[2:] == (height * width, width, 1) and t.stride(1) % 4 == 0
    if kept and t.stride(0) == images * t.stride(1) and t.data_ptr() % 16 == 0:
        return t
    t = t.contiguous()
    return t if t.data_ptr() % 16 == 0 else t.clone()


def _rounded() -> bool:
    """Say whether products may be rounded."""
    return bool(torch.backends.cuda.matmul.allow_tf32)


def _launch(
    name: str,
    own: dict[str, int | str],
    cut: PixelCut,
    grid: tuple[int, int, int],
    given: list[Any],
    room: int,
) -> None:
    constants: dict[str, int | str] = {"THREADS": cut.threads, "STAGES": cut.stages}
    constants |= {"ROUNDED": int(_rounded()), **own}
    launch("pointwise.cu", name, constants, grid, cut.threads, given, room)


_RUN: dict[str, Form] = {
    "convolve": functools.partial(_images, "convolve"),
    "input_gradient": functools.partial(_images, "input_gradient"),
    "weight_gradient": weight_gradient,
}
