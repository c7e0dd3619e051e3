"""Stacked convolutions with channels last, by kernels for Hopper's matrix units.

`halo.cu` is for kernels whose result is as large as the image, or half as large with a stride of 2;
its weight gradients are for kernels of 3×3. `gathered.cu` is for all, `planes.cu` for gradients by
images of kernels of 3×3 or 1×1 with a stride of 2. These, and weight gradients, are for bfloat16
alone. Images lie in memory as in `convolution_last`.
"""

import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from idiolect.kernels import weight_order
from idiolect.kernels.autotune import Form
from idiolect.kernels.compiled import is_hopper, launch, round_up
from idiolect.kernels.convolution_cuda import ConvShape
from idiolect.kernels.convolution_last import processors, wide
from idiolect.kernels.convolution_library import InLayout, all_last

_ROW, _PIECE = 128, 1024  # bytes of a row in shared memory, and of eight
_BYTES = 16  # that are copied at once
_SHARED = 227 * 1024  # bytes of shared memory of a block, at most
_SIDE, _BLOCK = 3, 64  # of weight gradients: the side of kernels, channels of a block
_PLACES = {1: 128, 2: 64}  # at a time, by stride
_STAGES, _WAVES = 4, 2
_PANELS = (2, 4)  # of 64 channels that a tap sees, of a block
_PIXELS = 64  # of theirs at a time
_AT_ONCE = (
    128,
    64,
)  # places of a block that makes planes; with the latter, two share shared memory
_TASKS = ("convolve", "input_gradient")  # that make images


class HaloTile(NamedTuple):
    """How the work is cut: channels made by a block, matrices of a warpgroup, threads, stages."""

    BN: int
    MT: int
    THREADS: int = 256
    STAGES: int = 4

    @property
    def places(self) -> int:
        """Places made by a block."""
        return self.THREADS // 128 * self.MT * 64


_CUTS = (HaloTile(64, 2), HaloTile(128, 1))  # of four, each won on some layer of a ResNet
# Of the last two, two blocks are on a multiprocessor: one computes while another begins or ends.
_GATHERED = (
    HaloTile(128, 1, 256, 6), HaloTile(128, 2, 256, 4), HaloTile(64, 2, 256, 4),
    HaloTile(128, 1, 256, 3), HaloTile(64, 1, 256, 4),
)  # fmt: skip


class Line(NamedTuple):
    """Images as one line of places; see the source."""

    places: int  # of all images of a client
    around: int  # that a block needs beside its own
    read: int  # planes of what is read
    made: int  # planes of what is made
    held: int  # chunks of channels in shared memory

    def bytes_of(self, places: int) -> int:
        """Return the bytes of so many places of all planes, with those around them."""
        return self.read * round_up((places + self.around) * _ROW, _PIECE)


def line_of(task: str, s: ConvShape) -> Line:
    """Return how the images of a convolution are seen; `s` is its own shape for every task."""
    reach, less = -(-s.padding // s.stride), s.padding // s.stride
    pitch = s.out_width + reach
    places, planes = s.images * (s.out_height + reach) * pitch, s.stride**2
    turned = task == "input_gradient"
    read, made = (1, planes) if turned else (planes, 1)
    return Line(places, (reach + less) * (pitch + 1), read, made, 4 if made > 1 else 2)


def forms(task: str, shape: ConvShape, kind: torch.dtype) -> dict[str, Form]:
    """Return the ways to do a task that may be worth a try, by name."""
    if not is_hopper() or shape.depthwise:
        return {}
    found = _held_forms(task, shape, kind) | _gathered_forms(task, shape, kind)
    if task == "input_gradient" and kind == torch.bfloat16:
        return found | _planes_forms(shape)
    return found


def _gathered_forms(task: str, shape: ConvShape, kind: torch.dtype) -> dict[str, Form]:
    read, made = _channels(task, shape)
    suit = read % (_ROW // kind.itemsize) == 0 == made % 8
    if task == "weight_gradient" and suit and kind == torch.bfloat16:
        return {
            f"gathered {many * _BLOCK}": InLayout(
                functools.partial(gathered_weight_gradient, many=many), all_last, 2
            )
            for many in _PANELS
        }
    if task not in _TASKS:
        return {}
    return {
        f"gathered {cut.BN}x{cut.places}x{cut.STAGES}": _in_layout(gathered, task, cut)
        for cut in _GATHERED
        if suit and cut.BN < 2 * made
    }


def _held_forms(task: str, shape: ConvShape, kind: torch.dtype) -> dict[str, Form]:
    side, line = shape.kernel_height, line_of(task, shape)
    same = side == shape.kernel_width == 2 * shape.padding + 1 and side > 1 and shape.stride <= 2
    deep = _ROW // kind.itemsize  # channels that fill a row
    if not same:
        return {}
    if task == "weight_gradient":
        fits = side == _SIDE and kind == torch.bfloat16 and _gradient_room(shape) <= _SHARED
        if not fits or shape.channels % 8 or shape.out_channels % 8:
            return {}
        return {"halo": InLayout(weight_gradient, all_last, 2)}
    read, made = _channels(task, shape)
    if task not in _TASKS or read % deep or made % 8:
        return {}
    return {
        f"halo {cut.BN}x{cut.places}": _in_layout(held, task, cut)
        for cut in _CUTS
        if _room(cut, line, read, kind) <= _SHARED and cut.BN < 2 * made
    }


def _in_layout(run: Form, task: str, cut: HaloTile) -> Form:
    return InLayout(functools.partial(run, task, cut=cut), all_last, 1)


def _channels(task: str, s: ConvShape) -> tuple[int, int]:
    """Return the channels of the images that a task reads, and of those that it makes."""
    turned = task == "input_gradient"
    return (s.out_channels, s.channels) if turned else (s.channels, s.out_channels)


def held(task: str, x: Tensor, w: Tensor, s: ConvShape, cut: HaloTile) -> Tensor:
    """Do a task that makes images by `halo.cu`."""
    turned, line = task == "input_gradient", line_of(task, s)
    read, made = _channels(task, s)
    out, given = _images(task, x, w, s)
    grid = (-(-line.places // cut.places) * line.made, s.groups, -(-made // cut.BN))
    constants = {**cut._asdict(), **_half(x), "TRANSPOSED": int(turned), "STRIDE": s.stride}
    room = _room(cut, line, read, x.dtype)
    launch("halo.cu", "convolve", constants, grid, cut.THREADS, given, room)
    return out.permute(3, 0, 4, 1, 2)


def gathered(task: str, x: Tensor, w: Tensor, s: ConvShape, cut: HaloTile) -> Tensor:
    """Do a task that makes images by `gathered.cu`."""
    turned, (_, made) = task == "input_gradient", _channels(task, s)
    out, given = _images(task, x, w, s)
    classes = s.stride if turned else 1
    pixels = s.images * math.prod(-(-size // classes) for size in out.shape[1:3])
    grid = (-(-pixels // cut.places) * classes**2, s.groups, -(-made // cut.BN))
    constants = {**cut._asdict(), **_half(x), "TRANSPOSED": int(turned)}
    room = max(cut.STAGES * (cut.places + cut.BN) * _ROW, _made_bytes(cut, x.dtype))
    given = [*given, s.stride]
    launch("gathered.cu", "convolve", constants, grid, cut.THREADS, given, _PIECE + room)
    return out.permute(3, 0, 4, 1, 2)


def _planes_forms(s: ConvShape) -> dict[str, Form]:
    side, gap = s.kernel_height, s.kernel_height // 2
    suit = side in (1, _SIDE) and (s.kernel_width, s.padding, s.stride) == (side, gap, 2)
    if not suit or s.out_channels % _BLOCK or s.channels % 8:
        return {}
    return {
        f"planes {places}": InLayout(functools.partial(planes_gradient, places=places), all_last, 1)
        for places, room in zip(_AT_ONCE, (_SHARED, _SHARED // 2), strict=True)
        if _planes_room(s, places) <= room
    }


def planes_gradient(gradient: Tensor, w: Tensor, s: ConvShape, places: int) -> Tensor:
    """Return the gradient by the images, of a stride of 2, by `planes.cu`."""
    out, (gradient, laid, *_) = _images("input_gradient", gradient, w, s)
    gap = s.kernel_height // 2
    every = s.images * (s.out_height + gap) * (s.out_width + gap)
    grid = (-(-every // places), s.groups, -(-s.channels // _BLOCK))
    sizes = (s.channels, s.height, s.width, s.out_channels, s.out_height, s.out_width)
    constants = {"HALF": 1, "THREADS": 2 * places, "SIDE": s.kernel_height}
    given, room = [gradient, laid, out, s.images, *sizes], _planes_room(s, places)
    launch("planes.cu", "input_gradient", constants, grid, 2 * places, given, room)
    return out.permute(3, 0, 4, 1, 2)


def _planes_room(s: ConvShape, places: int) -> int:
    chunks, gap = s.out_channels // _BLOCK, s.kernel_height // 2
    weights = _BLOCK * _ROW * (_SIDE**2 if gap else chunks)
    return _PIECE + weights + chunks * round_up((places + gap * (s.out_width + 2)) * _ROW, _PIECE)


def _images(task: str, x: Tensor, w: Tensor, s: ConvShape) -> tuple[Tensor, list[Any]]:
    """Return room for the images that a task makes, and what kernels are given for it."""
    turned = task == "input_gradient"
    if turned:  # weights are [group, made, row, column, read]
        laid = weight_order.turned(w, x, rounded=True)
    else:
        laid = weight_order.by_taps(w, x, w.shape[2], rounded=True)
    x, sizes = wide(x, x.shape[2]), [(s.height, s.width), (s.out_height, s.out_width)]
    seen, size = sizes[::-1] if turned else sizes
    read, made = _channels(task, s)
    out = x.new_empty(s.images, *size, s.groups, made)
    kernel = (s.kernel_height, s.kernel_width, s.padding)
    return out, [x, laid, out, s.images, read, *seen, made, *size, *kernel]


def weight_gradient(gradient: Tensor, x: Tensor, shape: ConvShape) -> Tensor:
    """Return the gradient by the weights, summed in a fixed order."""
    s = shape
    gradient, x = wide(gradient, s.out_channels), wide(x, s.channels)
    line, few = line_of("weight_gradient", s), _PLACES[s.stride]
    blocks = -(-s.out_channels // _BLOCK) * -(-s.channels // _BLOCK)
    parts, each = _cut(line.places, few, s.groups * blocks, x)
    kernel = (s.kernel_height, s.kernel_width)
    out = x.new_empty(parts, s.groups, s.out_channels, *kernel, s.channels, dtype=torch.float32)
    threads = 128 * _SIDE
    constants = {"WEIGHT_GRADIENT": 1, "SIDE": _SIDE, "PLACES": few, "STAGES": _STAGES}
    constants |= {"THREADS": threads, "STRIDE": s.stride, **_half(x)}
    sizes = (s.channels, s.height, s.width, s.out_channels, s.out_height, s.out_width)
    given = [gradient, x, out, s.images, each, *sizes]
    grid = (parts, s.groups, blocks)
    launch("halo.cu", "weight_gradient", constants, grid, threads, given, _gradient_room(s))
    return weight_order.gradient(out, s.channels, x.dtype == torch.bfloat16)


def gathered_weight_gradient(gradient: Tensor, x: Tensor, shape: ConvShape, many: int) -> Tensor:
    """Return the same by `gathered.cu`."""
    s, threads = shape, 256
    outs = threads // 128
    gradient, x = wide(gradient, s.out_channels), wide(x, s.channels)
    blocks = -(-s.out_channels // (outs * _BLOCK)) * -(-s.taps * s.channels // (many * _BLOCK))
    pixels = s.images * s.out_height * s.out_width
    parts, each = _cut(pixels, _PIXELS, s.groups * blocks, x)
    kernel = (s.kernel_height, s.kernel_width)
    out = x.new_empty(parts, s.groups, s.out_channels, *kernel, s.channels, dtype=torch.float32)
    constants = {"WEIGHT_GRADIENT": 1, "PIXELS": _PIXELS, "NT": many // 2, "STAGES": _STAGES}
    constants |= {"THREADS": threads, **_half(x)}
    sizes = (s.channels, s.height, s.width, s.out_channels, s.out_height, s.out_width)
    given = [gradient, x, out, s.images, each, *sizes, *kernel, s.padding, s.stride]
    room = _PIECE + _STAGES * (outs + many) * _PIXELS * _ROW
    grid = (parts, s.groups, blocks)
    launch("gathered.cu", "weight_gradient", constants, grid, threads, given, room)
    return weight_order.gradient(out, s.channels, half=True)


def _cut(numbers: int, few: int, blocks: int, x: Tensor) -> tuple[int, int]:
    """Return into how many parts a sum is cut, so that blocks fill the GPU, and their length."""
    parts = max(1, _WAVES * processors(x) // blocks)
    each = round_up(-(-numbers // parts), few)
    return -(-numbers // each), each


def _half(x: Tensor) -> dict[str, int]:
    return {"HALF": 1} if x.dtype == torch.bfloat16 else {}


def _room(cut: HaloTile, line: Line, channels: int, kind: torch.dtype) -> int:
    """Return the bytes of shared memory of a block: of what it reads, later of what it made."""
    chunks = channels * kind.itemsize // _ROW
    held = min(line.held, chunks) * line.bytes_of(cut.places)
    return _PIECE + max(cut.STAGES * cut.BN * _ROW + held, _made_bytes(cut, kind))


def _made_bytes(cut: HaloTile, kind: torch.dtype) -> int:
    return cut.places * (cut.BN * kind.itemsize + _BYTES)


def _gradient_room(s: ConvShape) -> int:
    few = _PLACES[s.stride]
    return _PIECE + _STAGES * (few * _ROW + line_of("weight_gradient", s).bytes_of(few))
