"""What networks share: normalisation, first weights, 1×1 convolutions, images moved at random."""

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from idiolect.core.batchnorm import BatchNorm, with_layers_replaced
from idiolect.errors import ModelError
from idiolect.kernels.convolution import StackedConv2d
from idiolect.kernels.vmap_rules import float32_on_cuda, halved_on_cuda

Norm = Literal["group", "batch"]
Init = Literal["torch", "he"]
Shape = tuple[int, ...]  # of one example


def normalisation(kind: Norm, channels: int, groups: int) -> nn.Module:
    """Make a normalisation layer; `groups` is lowered where it does not divide the channels."""
    if kind == "group":
        return nn.GroupNorm(dividing(groups, channels), channels)
    if kind == "batch":
        return BatchNorm(channels)
    raise ModelError(f"norm is {kind!r}, expected 'group' or 'batch'")


def initialise(model: nn.Module, kind: Init) -> None:
    """Draw first weights: torch's own, or He's for rectifiers (2015), with biases of zero.

    Torch's shrink what passes a layer to 1/√6 or so: without normalisation a deep network gets
    hardly a gradient for hundreds of steps, which is all that a small federation takes.
    """
    if kind not in ("torch", "he"):
        raise ModelError(f"init is {kind!r}, expected 'torch' or 'he'")
    if kind == "he":
        for layer in model.modules():
            if isinstance(layer, nn.Conv2d | nn.Linear):
                nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
                if layer.bias is not None:
                    nn.init.zeros_(layer.bias)


def dividing(groups: int, channels: int) -> int:
    """Return the largest number of groups, at most as many as asked, that divides the channels."""
    if groups < 1:
        raise ModelError(f"groups is {groups}, expected 1 or more")
    return next(n for n in range(min(groups, channels), 0, -1) if channels % n == 0)


class Pointwise(StackedConv2d):
    """A 1×1 convolution, done as matrix products.

    vmap makes one product for each client of it, where a convolution would become a grouped one,
    several times slower. On CUDA the fastest form is chosen, as for other convolutions.
    """

    def __init__(self, inside: int, out: int, stride: int = 1) -> None:
        super().__init__(inside, out, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Mix the channels of every place that the stride keeps."""
        if float32_on_cuda(x) or halved_on_cuda(x):
            return super().forward(x)
        step = self.stride[0]
        mixed: Tensor = torch.einsum(
            "oc,nchw->nohw", self.weight.flatten(1), x[..., ::step, ::step]
        )
        return mixed


class CropAndMirror(nn.Module):
    """In training, shows a window of each image, shifted by up to `border` pixels, mirrored or not.

    What lies beyond the image's edge is 0. In evaluation an image passes as it is.
    """

    draws = True

    def __init__(self, border: int = 4) -> None:
        super().__init__()
        self.border = border

    def forward(self, x: Tensor) -> Tensor:
        """Return images of the same size; each draws its own window."""
        if not self.training:
            return x
        count, channels, height, width = x.shape
        drawn = torch.rand(count, 3, device=x.device)
        top, left = ((2 * self.border + 1) * drawn[:, :2]).long().unbind(1)
        across = torch.arange(width, device=x.device)
        mirrored = (drawn[:, 2:] < 0.5).long()
        columns = left.unsqueeze(1) + mirrored * (width - 1) + (1 - 2 * mirrored) * across
        rows = top.unsqueeze(1) + torch.arange(height, device=x.device)
        places = rows.unsqueeze(2) * (width + 2 * self.border) + columns.unsqueeze(1)
        wide = nn.functional.pad(x, (self.border,) * 4).flatten(2)
        seen = wide.gather(2, places.reshape(count, 1, -1).expand(-1, channels, -1))
        return seen.reshape(x.shape)


def convolution(inside: int, out: int, stride: int = 1, groups: int = 1) -> nn.Conv2d:
    """Make a 3×3 convolution that keeps the size but for its stride; the norm after it shifts."""
    return nn.Conv2d(inside, out, 3, stride, padding=1, groups=groups, bias=False)


def group_norm_instead(model: nn.Module, groups: int = 8) -> nn.Module:
    """Return a copy with each batch normalisation replaced by group normalisation.

    Group normalisation looks at one example at a time, so neither padding nor averaging over
    clients can disturb it. `groups` is lowered where it does not divide a layer's channels.
    """
    return with_layers_replaced(model, _NormBase, lambda layer: _group_norm(layer, groups))


def _group_norm(layer: _NormBase, groups: int) -> nn.GroupNorm:
    channels = layer.num_features
    return nn.GroupNorm(dividing(groups, channels), channels, affine=layer.affine)
