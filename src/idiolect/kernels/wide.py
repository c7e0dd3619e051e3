"""Stacked convolutions with many channels on CUDA: `wide.cu`, compiled for each shape when met."""

from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from idiolect.kernels import convolution_launch
from idiolect.kernels.compiled import Side, kernel, side, up
from idiolect.kernels.convolution_shape import Shape

_CHANNELS = 16  # with fewer that are read, or made, the kernels of `thin` do better
_SUMS = (32, 100)  # sums of a thread: enough to be worth its loads, and held in registers
_BEST_SUMS = 64
_HALF = 112 * 1024  # bytes of shared memory of which two blocks fit on a multiprocessor
_LANES = 32


class Tile(NamedTuple):
    """How the work is cut: see the constants in `wide.cu`."""

    tall: int
    pixels: int
    channels: int
    channels_of_block: int
    chunk: int
    threads: int


class Sweep(NamedTuple):
    """How the kernels' gradient is cut; `waves` is how often the blocks fill the chip."""

    band: int
    channels: int
    channels_of_block: int
    waves: int


def tiles(task: str, shape: Shape, most: int = 4) -> Sequence[Tile | Sweep]:
    """Propose the cuts that waste least; none where the kernels cannot do it."""
    if shape.stride != 1 or shape.padding >= min(shape.kernel_height, shape.kernel_width):
        return []
    own = side(task, shape)
    if min(own.channels, own.out_channels) < _CHANNELS or own.out_channels % 4:
        return []
    if task == "correlate":
        return list(_sweeps(shape))[:most]
    width = own.out_width

    def waste(tile: Tile) -> tuple[float, int]:
        sums = tile.tall * tile.pixels * tile.channels
        return up(width, tile.pixels) / width, abs(sums - _BEST_SUMS)

    return sorted(_tiles(task, shape, own), key=waste)[:most]


def _tiles(task: str, shape: Shape, own: Side) -> Iterator[Tile]:
    block = next(b for b in (64, 32, 16, 8, 4) if own.out_channels % b == 0)
    chunk = next(c for c in (4, 2, 1) if own.channels % c == 0)
    talls = (2,) if task == "pooled" else (1, 2)
    for tall, pixels, channels, threads in product(talls, range(2, 11), (8, 16), (128, 256)):
        tile = Tile(tall, pixels, channels, block, chunk, threads)
        if (task == "pooled" and pixels % 2) or block % channels:
            continue
        if not _SUMS[0] <= tall * pixels * channels <= _SUMS[1]:
            continue
        whole_warps = threads // (block // channels) % _LANES == 0
        if whole_warps and _shared(task, tile, shape) <= _HALF:
            yield tile


def _sweeps(shape: Shape) -> Iterator[Sweep]:
    taps = shape.kernel_height * shape.kernel_width
    for channels, band, waves in product((8, 4, 2), (4, 2), (1, 2)):
        if shape.out_channels % channels or not _SUMS[0] <= taps * channels <= _SUMS[1]:
            continue
        block = next(b for b in (8, 4, 2, 1) if shape.out_channels % (b * channels) == 0)
        sweep = Sweep(min(band, shape.out_height), channels, block * channels, waves)
        if _shared_by_sweep(sweep, shape) <= _HALF:
            yield sweep


def _apply(
    task: str, x: Tensor, w: Tensor, bias: Tensor, shape: Shape, tile: Tile
) -> tuple[Tensor, Tensor]:
    out, chosen = convolution_launch.room(task, x, shape)
    constants, shared = _constants(task, tile, shape), _shared(task, tile, shape)
    bands, columns = _cut(task, tile, shape)
    units = tile.threads // (tile.channels_of_block // tile.channels)
    kernel("wide.cu", "convolve", constants, shared)(
        (
            -(-shape.images * bands * columns // units),
            shape.groups,
            side(task, shape).out_channels // tile.channels_of_block,
        ),
        (tile.threads, 1, 1),
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
    blocks = shape.out_channels // tile.channels_of_block * -(-shape.channels // _LANES)
    chip = 2 * torch.cuda.get_device_properties(x.device).multi_processor_count
    steps = shape.images * -(-shape.out_height // tile.band)
    parts, each = convolution_launch.shares(steps, tile.waves * chip // (shape.groups * blocks))
    out = convolution_launch.sums(parts, x, shape)
    constants, shared = _sweep_constants(tile, shape), _shared_by_sweep(tile, shape)
    kernel("wide.cu", "correlate", constants, shared)(
        (parts, shape.groups, blocks),
        (constants["THREADS"], 1, 1),
        [slope.contiguous(), x.contiguous(), out, shape.images, each],
        shared,
    )
    return convolution_launch.total(out)


def _cut(task: str, tile: Tile, shape: Shape) -> tuple[int, int]:
    """Return how many bands and columns of tiles an image has."""
    own, pool = side(task, shape), convolution_launch.window(task)
    height, width = own.out_height // pool * pool, own.out_width // pool * pool
    return -(-height // tile.tall), -(-width // tile.pixels)


def _constants(task: str, tile: Tile, shape: Shape) -> dict[str, int]:
    return {
        **convolution_launch.constants(task, shape), "TALL": tile.tall,
        "PX": tile.pixels, "OCT": tile.channels, "OCB": tile.channels_of_block,
        "CHUNK": tile.chunk, "THREADS": tile.threads, "ROWS": _rows(task, tile, shape),
    }  # fmt: skip


def _sweep_constants(sweep: Sweep, shape: Shape) -> dict[str, int]:
    return {
        **convolution_launch.constants("correlate", shape),
        "OCT": sweep.channels, "OCB": sweep.channels_of_block, "BAND": sweep.band,
        "THREADS": _LANES * (sweep.channels_of_block // sweep.channels),
    }  # fmt: skip


def _rows(task: str, tile: Tile, shape: Shape) -> int:
    """Count the rows of images that a block may need: its bands may begin amid one, and cross."""
    bands, columns = _cut(task, tile, shape)
    units = tile.threads // (tile.channels_of_block // tile.channels)
    most = (columns + units - 2) // columns + 1
    crossings = (most - 2) // bands + 1 if most > 1 else 0
    return most * tile.tall + (shape.kernel_height - 1) * (1 + crossings)


def _shared(task: str, tile: Tile, shape: Shape) -> int:
    """Count the bytes of shared memory: kernels and rows of some channels, twice."""
    _, columns = _cut(task, tile, shape)
    line = up(columns * tile.pixels + shape.kernel_width - 1, 4)
    taps = shape.kernel_height * shape.kernel_width
    channel = taps * tile.channels_of_block + _rows(task, tile, shape) * line
    return 2 * 4 * tile.chunk * channel


def _shared_by_sweep(sweep: Sweep, shape: Shape) -> int:
    """Count the bytes of shared memory: a band of slopes and of images, twice."""
    wide = up(shape.out_width, 2)
    plane = (sweep.band + shape.kernel_height - 1) * (wide + shape.kernel_width - 1) | 1
    return 2 * 4 * up(sweep.channels_of_block * sweep.band * wide + _LANES * plane, 4)
