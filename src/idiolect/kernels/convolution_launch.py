"""What the files of convolution kernels have in common: what goes in, and what comes out."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from idiolect.kernels.compiled import side
from idiolect.kernels.convolution_shape import Shape

Made = tuple[Tensor, Tensor]
Apply = Callable[[str, Tensor, Tensor, Tensor, Shape, Any], Made]
Once = Callable[[Tensor, Tensor, Shape, Any], Tensor]
Biased = Callable[[Tensor, Tensor, Tensor, Shape, Any], Tensor]
Pooled = Callable[[Tensor, Tensor, Tensor, Shape, Any], Made]


def tasks(apply: Apply) -> tuple[Once, Once, Biased, Pooled]:
    """Return what a kernel that reads images and makes images is used for, each as a function."""

    def convolve(x: Tensor, w: Tensor, shape: Shape, tile: Any) -> Tensor:
        """Apply every client's kernels to its images."""
        return apply("convolve", x, w, w, shape, tile)[0]

    def spread(slope: Tensor, w: Tensor, shape: Shape, tile: Any) -> Tensor:
        """Return the gradient with respect to the images: the convolution's transpose."""
        return apply("spread", slope, w, w, shape, tile)[0]

    def rectified(x: Tensor, w: Tensor, bias: Tensor, shape: Shape, tile: Any) -> Tensor:
        """Convolve, add the bias and cut off below 0."""
        return apply("rectified", x, w, bias, shape, tile)[0]

    def pooled(x: Tensor, w: Tensor, bias: Tensor, shape: Shape, tile: Any) -> Made:
        """Convolve, add the bias, cut off below 0 and pool: the result, and which pixel it was."""
        return apply("pooled", x, w, bias, shape, tile)

    return convolve, spread, rectified, pooled


def window(task: str) -> int:
    """Return the side of the pixels that are pooled."""
    return 2 if task == "pooled" else 1


def room(task: str, x: Tensor, shape: Shape) -> Made:
    """Return where a task puts its images, and the pixels that pooling chose (else anywhere)."""
    own, pool = side(task, shape), window(task)
    made = (own.out_channels, own.out_height // pool, own.out_width // pool)
    out = x.new_empty(shape.groups, shape.images, *made)
    return out, torch.empty_like(out, dtype=torch.uint8) if pool == 2 else out


def constants(task: str, shape: Shape) -> dict[str, int]:
    """Name what all sources need to know of a task."""
    return {
        **side(task, shape).constants,
        "KH": shape.kernel_height, "KW": shape.kernel_width, "POOL": window(task),
        "SPREAD": int(task == "spread"), "RELU": int(task == "rectified"),
        "CORRELATE": int(task == "correlate"),
    }  # fmt: skip


def by_source(task: str, w: Tensor) -> Tensor:
    """Lay kernels out as [group, what is read, tap, what is made]: a block's share in one piece."""
    return w.permute((0, 1, 3, 4, 2) if task == "spread" else (0, 2, 3, 4, 1)).contiguous()


def shares(steps: int, most: int) -> tuple[int, int]:
    """Return into how many parts steps are cut, at most so many, and the steps of each."""
    each = -(-steps // max(1, min(steps, most)))
    return -(-steps // each), each


def sums(parts: int, x: Tensor, shape: Shape) -> Tensor:
    """Return where the parts of the kernels' gradient go; `total` adds them, in a fixed order."""
    taps = (shape.kernel_height, shape.kernel_width)
    return x.new_empty(parts, shape.groups, shape.out_channels, shape.inputs, *taps)


def total(parts: Tensor) -> Tensor:
    """Add the parts of the kernels' gradient."""
    return parts[0] if len(parts) == 1 else parts.sum(0)
