"""Stacked depthwise convolutions on CUDA: `depthwise.cu`, compiled for each shape when met.

torch does them too, as one convolution of as many groups as all clients have channels; what takes
it long are the slopes of the kernels.
"""

import torch
from torch import Tensor

from idiolect.kernels.compiled import kernel
from idiolect.kernels.convolution_launch import shares, sums, total
from idiolect.kernels.convolution_shape import Shape

_THREADS = 256
_WAVES = 8  # blocks for each multiprocessor, so that some load while others compute


def convolve(x: Tensor, w: Tensor, shape: Shape) -> Tensor:
    """Apply every client's kernels to its images, channel by channel."""
    sizes = (shape.out_height, shape.out_width)
    y = x.new_empty(shape.groups, shape.images, shape.channels, *sizes)
    return _filled("convolve", y, x, w, shape)


def spread(slope: Tensor, w: Tensor, shape: Shape) -> Tensor:
    """Return the gradient with respect to the images."""
    sizes = (shape.height, shape.width)
    dx = slope.new_empty(shape.groups, shape.images, shape.channels, *sizes)
    return _filled("spread", dx, slope, w, shape)


def _filled(task: str, out: Tensor, images: Tensor, w: Tensor, shape: Shape) -> Tensor:
    kernel("depthwise.cu", task, _constants(shape))(
        (-(-out.numel() // _THREADS), 1, 1),
        (_THREADS, 1, 1),
        [images.contiguous(), w.contiguous(), out, shape.images, shape.groups],
    )
    return out


def correlate(slope: Tensor, x: Tensor, shape: Shape) -> Tensor:
    """Return the gradient with respect to the kernels, summed in a fixed order."""
    chip = torch.cuda.get_device_properties(x.device).multi_processor_count
    parts, each = shares(shape.images, _WAVES * chip // (shape.groups * shape.channels))
    out = sums(parts, x, shape)
    room = 4 * _THREADS // 32 * shape.kernel_height * shape.kernel_width
    kernel("depthwise.cu", "correlate", _constants(shape), room)(
        (shape.channels, shape.groups, parts),
        (_THREADS, 1, 1),
        [slope.contiguous(), x.contiguous(), out, shape.images, each],
        room,
    )
    return total(out)


def _constants(shape: Shape) -> dict[str, int]:
    return {
        "C": shape.channels, "H": shape.height, "W": shape.width, "OH": shape.out_height,
        "OW": shape.out_width, "KH": shape.kernel_height, "KW": shape.kernel_width,
        "PAD": shape.padding, "STRIDE": shape.stride, "THREADS": _THREADS,
    }  # fmt: skip
