"""Group normalisation of many clients: in torch's operations, and by `norm.cu` on CUDA."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from idiolect.kernels.autotune import Form
from idiolect.kernels.compiled import kernel

_WARP = 32
_MOST = 8  # warps of a block


class Norm(NamedTuple):
    """The sizes of a stack of images [group, image, channel, pixel], and what is done with them."""

    groups: int
    images: int
    channels: int
    pixels: int
    parts: int  # groups of channels that are normalised together
    eps: float
    relu: bool  # whether what is below 0 is cut off afterwards


def plain_normalise(x: Tensor, w: Tensor, b: Tensor, sizes: Norm) -> tuple[Tensor, Tensor, Tensor]:
    """Return y = (x − mean) · scale · w + b, perhaps cut off below 0, with means and scales."""
    pieces = _pieces(x, sizes)
    variance, mean = torch.var_mean(pieces, -1, correction=0)
    scale = (variance + sizes.eps).rsqrt()
    y = _normal(x, mean, scale, sizes) * w[:, None, :, None] + b[:, None, :, None]
    return y.relu() if sizes.relu else y, mean, scale


def plain_slopes(
    slope: Tensor, x: Tensor, w: Tensor, mean: Tensor, scale: Tensor, y: Tensor, sizes: Norm
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients with respect to x, w and b."""
    if sizes.relu:
        slope = torch.ops.aten.threshold_backward(slope, y, 0)
    normal = _normal(x, mean, scale, sizes)
    pull = _pieces(slope * w[:, None, :, None], sizes)
    level = pull.mean(-1, keepdim=True)
    pieces = _pieces(normal, sizes)
    tilt = (pull * pieces).mean(-1, keepdim=True)
    dx = (scale[..., None] * (pull - level - pieces * tilt)).reshape(x.shape)
    return dx, (slope * normal).sum((1, 3)), slope.sum((1, 3))


def _pieces(x: Tensor, sizes: Norm) -> Tensor:
    """View what is normalised together as the last axis."""
    return x.reshape(*x.shape[:2], sizes.parts, -1)


def _normal(x: Tensor, mean: Tensor, scale: Tensor, sizes: Norm) -> Tensor:
    normal = (_pieces(x, sizes) - mean[..., None]) * scale[..., None]
    return normal.reshape(x.shape)


def normalise(x: Tensor, w: Tensor, b: Tensor, sizes: Norm) -> tuple[Tensor, Tensor, Tensor]:
    """Do the same in one launch."""
    x, y = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
    mean, scale = (x.new_empty(*x.shape[:2], sizes.parts) for _ in range(2))
    _launch("normalise", sizes, [x, w.contiguous(), b.contiguous(), y, mean, scale])
    return y, mean, scale


def slopes(
    slope: Tensor, x: Tensor, w: Tensor, mean: Tensor, scale: Tensor, y: Tensor, sizes: Norm
) -> tuple[Tensor, Tensor, Tensor]:
    """Do the same in one launch, and one that adds up over images."""
    given = [part.contiguous() for part in (slope, x, w, mean, scale, y)]
    dx = torch.empty_like(given[1])
    parts = x.new_empty(2, *x.shape[:3])
    _launch("slopes", sizes, [*given, dx, parts[0], parts[1]])
    dw, db = parts.sum(2)
    return dx, dw, db


def _launch(task: str, sizes: Norm, tensors: list[Tensor]) -> None:
    each = sizes.channels // sizes.parts
    # The slopes want a warp for each channel; without them, threads enough for the numbers.
    warps = each if task == "slopes" else each * sizes.pixels // (_WARP * 4)
    threads = _WARP * max(1, min(_MOST, warps))
    constants: dict[str, Any] = {
        "C": sizes.channels, "PARTS": sizes.parts, "PIXELS": sizes.pixels, "THREADS": threads,
        "EPS": f"{sizes.eps!r}f", **({"RELU": 1} if sizes.relu else {}),
    }  # fmt: skip
    shared = 4 * threads // _WARP
    kernel("norm.cu", task, constants, shared)(
        (sizes.groups * sizes.images * sizes.parts, 1, 1),
        (threads, 1, 1),
        [*tensors, sizes.images],
        shared,
    )


_FORMS: dict[str, dict[str, Form]] = {
    "normalise": {"plain": plain_normalise, "norm": normalise},
    "slopes": {"plain": plain_slopes, "norm": slopes},
}


def forms(task: str) -> dict[str, Form]:
    """All ways to do a task on a GPU, by name."""
    return _FORMS[task]
