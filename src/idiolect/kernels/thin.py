"""Stacked convolutions with few channels on CUDA: `thin.cu`, compiled for each shape when met."""

from collections.abc import Iterator
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from idiolect.kernels import convolution_launch
from idiolect.kernels.compiled import SHARED, kernel, side, up
from idiolect.kernels.convolution_shape import Shape

_WAVES = 4  # blocks for each multiprocessor, so that some load while others compute
_THREADS = 256


class Tile(NamedTuple):
    """How the work is cut: see the constants in `thin.cu`."""

    pixels: int
    channels: int
    channels_of_block: int
    images: int = 1
    threads: int = _THREADS


def tiles(task: str, shape: Shape) -> Iterator[Tile]:
    """Propose the few cuts that were best on some shape; none where the kernels cannot do it."""
    if shape.stride != 1 or shape.padding >= min(shape.kernel_height, shape.kernel_width):
        return
    own = side(task, shape)
    snug = min((8, 6, 4), key=lambda channels: up(own.out_channels, channels))
    if task == "correlate":
        for channels, threads in product({4, snug}, (_THREADS, 2 * _THREADS)):
            groups = up(own.out_channels, channels) // channels
            for block in {min(2, groups), min(4, groups)}:
                tile = Tile(1, channels, block * channels, threads=threads)
                if _slices(tile, shape) and _shared_by_correlate(tile, shape) <= SHARED:
                    yield tile
        return
    for pixels, images in product((2, 4), (1, 2)):
        tile = Tile(pixels, snug, up(own.out_channels, snug), images)
        if _shared_by_convolve(task, tile, shape) <= SHARED and pixels <= own.out_width:
            yield tile


def _apply(
    task: str, x: Tensor, w: Tensor, bias: Tensor, shape: Shape, tile: Tile
) -> tuple[Tensor, Tensor]:
    out, chosen = convolution_launch.room(task, x, shape)
    blocks = -(-side(task, shape).out_channels // tile.channels_of_block)
    shared = _shared_by_convolve(task, tile, shape)
    _compiled(task, shape, tile, 1, shared)(
        (-(-shape.images // tile.images), shape.groups, blocks),
        (tile.threads, 1, 1),
        [x.contiguous(), w.contiguous(), bias.contiguous(), out, chosen, shape.images],
        shared,
    )
    return out, chosen


convolve, spread, rectified, pooled = convolution_launch.tasks(_apply)


def correlate(slope: Tensor, x: Tensor, shape: Shape, tile: Tile) -> Tensor:
    """Return the gradient with respect to the kernels, summed in a fixed order."""
    blocks = -(-shape.out_channels // tile.channels_of_block)
    chip = torch.cuda.get_device_properties(x.device).multi_processor_count
    parts, each = convolution_launch.shares(shape.images, _WAVES * chip // (shape.groups * blocks))
    out = convolution_launch.sums(parts, x, shape)
    shared, slices = _shared_by_correlate(tile, shape), _slices(tile, shape)
    _compiled("correlate", shape, tile, slices, shared)(
        (parts, shape.groups, blocks),
        (tile.threads, 1, 1),
        [slope.contiguous(), x.contiguous(), out, shape.images, each],
        shared,
    )
    return convolution_launch.total(out)


def _shared_by_convolve(task: str, tile: Tile, shape: Shape) -> int:
    """Count the bytes of shared memory: the block's kernels and the images it holds."""
    own = side(task, shape)
    taps = own.channels * shape.kernel_height * shape.kernel_width
    columns = up(own.out_width, tile.pixels) + shape.kernel_width - 1
    line = max(columns, own.width + 2 * own.padding)
    image = own.channels * (own.height + 2 * own.padding) * line
    return 4 * (taps * tile.channels_of_block + tile.images * image)


def _shared_by_correlate(tile: Tile, shape: Shape) -> int:
    """Count the bytes of shared memory: an image with its slopes, and at the end the slices."""
    taps = shape.channels * shape.kernel_height * shape.kernel_width
    columns = (shape.width + 2 * shape.padding) | 1
    image = shape.channels * (shape.height + 2 * shape.padding) * columns
    slopes = shape.out_height * shape.out_width * tile.channels_of_block
    return 4 * max(image + slopes, _slices(tile, shape) * tile.channels_of_block * taps)


def _slices(tile: Tile, shape: Shape) -> int:
    """Return how many threads share the rows of one sum; 0 where there are not enough for one."""
    units = shape.channels * shape.kernel_height * tile.channels_of_block // tile.channels
    return min(shape.out_height, tile.threads // units)


def _compiled(task: str, shape: Shape, tile: Tile, slices: int, shared: int) -> Any:
    """Return the function of `thin.cu` that does a task, for these sizes."""
    constants = {
        **convolution_launch.constants(task, shape), "PX": tile.pixels,
        "OCT": tile.channels, "OCB": tile.channels_of_block, "IMGS": tile.images,
        "THREADS": tile.threads, "SLICES": slices,
    }  # fmt: skip
    name = "correlate" if task == "correlate" else "convolve"
    return kernel("thin.cu", name, constants, shared)
