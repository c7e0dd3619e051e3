"""Stacked convolutions with many channels on matrix units: `tensor.cu`, compiled for each shape."""

from collections.abc import Sequence
from itertools import product
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from idiolect.kernels import convolution_launch
from idiolect.kernels.compiled import kernel, side
from idiolect.kernels.convolution_shape import Shape

_CHUNK = 8  # channels that a product takes
_HALF = 112 * 1024  # bytes of shared memory of which two blocks fit on a multiprocessor
_SUMS = 100  # of a thread, held in registers
_THREADS = 256
_WARPS = _THREADS // 32


class Tile(NamedTuple):
    """How the work is cut: see the constants in `tensor.cu`."""

    sixteens: int  # of channels, for a warp
    eights: int  # of pixels, for a warp
    channels_of_block: int


class Sweep(NamedTuple):
    """How the kernels' gradient is cut; `waves` is how often the blocks fill the chip."""

    band: int
    sixteens: int
    channels_of_block: int
    waves: int


def tiles(task: str, shape: Shape) -> Sequence[Tile | Sweep]:
    """Propose a few cuts; none where the kernels cannot do it."""
    if shape.stride != 1 or shape.padding >= min(shape.kernel_height, shape.kernel_width):
        return []
    own, taps = side(task, shape), shape.kernel_height * shape.kernel_width
    if own.channels % _CHUNK or own.out_channels % 16 or taps % 2 == 0:
        return []
    if task == "correlate":
        return _sweeps(shape, taps)
    found = []
    for block, sixteens, eights in product((64, 32, 16), (2, 4, 1), (8, 4, 2)):
        tile = Tile(sixteens, eights, block)
        if (
            own.out_channels % block
            or block % (16 * sixteens)
            or _WARPS % (block // 16 // sixteens)
        ):
            continue
        if 4 * sixteens * eights in (32, 64) and _shared(task, tile, shape) <= _HALF:
            found.append(tile)
    return found[:4]


def _sweeps(shape: Shape, taps: int) -> Sequence[Sweep]:
    found = []
    for block, sixteens, band, waves in product((64, 32, 16), (2, 1), (4, 2), (1, 2)):
        if (
            shape.out_channels % block
            or block % (16 * sixteens)
            or _WARPS % (block // 16 // sixteens)
        ):
            continue
        sweep = Sweep(min(band, shape.out_height), sixteens, block, waves)
        if 4 * taps * sixteens <= _SUMS and _shared_by_sweep(sweep, shape) <= _HALF:
            found.append(sweep)
    return found[:4]


def _apply(
    task: str, x: Tensor, w: Tensor, bias: Tensor, shape: Shape, tile: Tile
) -> tuple[Tensor, Tensor]:
    out, chosen = convolution_launch.room(task, x, shape)
    shared, cells = _shared(task, tile, shape), _cells(task, tile)
    constants = {
        **convolution_launch.constants(task, shape), "MT": tile.sixteens, "NT": tile.eights,
        "OCB": tile.channels_of_block, "THREADS": _THREADS, "ROWS": _rows(task, tile, shape),
    }  # fmt: skip
    kernel("tensor.cu", "convolve", constants, shared)(
        (
            -(-shape.images * prod(out.shape[3:]) // cells),
            shape.groups,
            out.shape[2] // tile.channels_of_block,
        ),
        (_THREADS, 1, 1),
        [
            x.contiguous(),
            convolution_launch.by_source(task, w),
            bias.contiguous(),
            out,
            chosen,
            shape.images,
        ],
        shared,
    )
    return out, chosen


convolve, spread, rectified, pooled = convolution_launch.tasks(_apply)


def correlate(slope: Tensor, x: Tensor, shape: Shape, tile: Sweep) -> Tensor:
    """Return the gradient with respect to the kernels, summed in a fixed order."""
    reads = _reads(tile)
    blocks = shape.out_channels // tile.channels_of_block * -(-shape.channels // reads)
    chip = 2 * torch.cuda.get_device_properties(x.device).multi_processor_count
    steps = shape.images * -(-shape.out_height // tile.band)
    parts, each = convolution_launch.shares(steps, tile.waves * chip // (shape.groups * blocks))
    out = convolution_launch.sums(parts, x, shape)
    shared = _shared_by_sweep(tile, shape)
    constants = {
        **convolution_launch.constants("correlate", shape), "MT": tile.sixteens,
        "OCB": tile.channels_of_block, "BAND": tile.band, "THREADS": _THREADS,
    }  # fmt: skip
    kernel("tensor.cu", "correlate", constants, shared)(
        (parts, shape.groups, blocks),
        (_THREADS, 1, 1),
        [slope.contiguous(), x.contiguous(), out, shape.images, each],
        shared,
    )
    return convolution_launch.total(out)


def _cells(task: str, tile: Tile) -> int:
    """Count the pixels, or windows of them, that a block makes."""
    along = _WARPS // (tile.channels_of_block // (16 * tile.sixteens))
    return along * tile.eights * 8 // convolution_launch.window(task) ** 2


def _rows(task: str, tile: Tile, shape: Shape) -> int:
    """Count the rows of images that a block may need: its bands may begin amid one, and cross."""
    own, pool = side(task, shape), convolution_launch.window(task)
    bands, width = own.out_height // pool, own.out_width // pool
    most = (width + _cells(task, tile) - 2) // width + 1
    crossings = (most - 2) // bands + 1 if most > 1 else 0
    return most * pool + (shape.kernel_height - 1) * (1 + crossings)


def _shared(task: str, tile: Tile, shape: Shape) -> int:
    """Count the bytes of shared memory: kernels and rows of some channels, twice."""
    pool = convolution_launch.window(task)
    line = side(task, shape).out_width // pool * pool + shape.kernel_width - 1
    plane = (_rows(task, tile, shape) * line + 7) // 16 * 16 + 8
    taps = shape.kernel_height * shape.kernel_width
    return 2 * 4 * _CHUNK * (taps * (tile.channels_of_block + 8) + plane)


def _reads(sweep: Sweep) -> int:
    return _CHUNK * _WARPS // (sweep.channels_of_block // (16 * sweep.sixteens))


def _shared_by_sweep(sweep: Sweep, shape: Shape) -> int:
    """Count the bytes of shared memory: a band of slopes and of images, twice."""
    pixels = -(-sweep.band * shape.out_width // 8) * 8 + 4
    deep = (sweep.band + shape.kernel_height - 1) * (shape.out_width + shape.kernel_width - 1)
    plane = (deep + 3) // 8 * 8 + 4
    return 2 * 4 * (sweep.channels_of_block * pixels + _reads(sweep) * plane)
