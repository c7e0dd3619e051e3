"""Layers that the larger networks share: normalisation by choice, and 1×1 convolutions."""

from typing import Literal

import torch
from torch import Tensor, nn

from idiolect.batchnorm import BatchNorm
from idiolect.errors import ModelError

Norm = Literal["group", "batch"]


def normalisation(kind: Norm, channels: int, groups: int) -> nn.Module:
    """Make a normalisation layer; `groups` is lowered where it does not divide the channels."""
    if kind == "group":
        return nn.GroupNorm(dividing(groups, channels), channels)
    if kind == "batch":
        return BatchNorm(channels)
    raise ModelError(f"norm is {kind!r}, expected 'group' or 'batch'")


def dividing(groups: int, channels: int) -> int:
    """Return the largest number of groups, at most as many as asked, that divides the channels."""
    if groups < 1:
        raise ModelError(f"groups is {groups}, expected 1 or more")
    return next(n for n in range(min(groups, channels), 0, -1) if channels % n == 0)


class Pointwise(nn.Conv2d):
    """A 1×1 convolution, done as one matrix product.

    vmap makes one product for each client of it, where a convolution would become a grouped one,
    several times slower.
    """

    def __init__(self, inside: int, out: int, stride: int = 1) -> None:
        super().__init__(inside, out, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Mix the channels of every place that the stride keeps."""
        step = self.stride[0]
        mixed: Tensor = torch.einsum(
            "oc,nchw->nohw", self.weight.flatten(1), x[..., ::step, ::step]
        )
        return mixed


def convolution(inside: int, out: int, stride: int = 1, groups: int = 1) -> nn.Conv2d:
    """Make a 3×3 convolution that keeps the size but for its stride; the norm after it shifts."""
    return nn.Conv2d(inside, out, 3, stride, padding=1, groups=groups, bias=False)
