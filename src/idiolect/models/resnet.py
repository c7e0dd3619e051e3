"""ResNet-18 for small images."""

from typing import Literal, get_args

from torch import Tensor, nn
from torch.nn import functional as F

from idiolect.errors import ModelError
from idiolect.kernels.group_norm import norm_relu
from idiolect.models.layers import (
    CropAndMirror,
    Norm,
    Pointwise,
    Shape,
    convolution,
    normalisation,
)

Stem = Literal["small", "photograph"]


class ResidualBlock(nn.Module):
    """Two 3×3 convolutions around which the input is carried."""

    def __init__(self, inside: int, out: int, stride: int, norm: Norm, groups: int) -> None:
        super().__init__()
        self.conv1 = convolution(inside, out, stride)
        self.norm1 = normalisation(norm, out, groups)
        self.conv2 = convolution(out, out)
        self.norm2 = normalisation(norm, out, groups)
        self.shortcut = nn.Sequential()
        if stride > 1 or inside != out:
            self.shortcut = nn.Sequential(
                Pointwise(inside, out, stride), normalisation(norm, out, groups)
            )

    def forward(self, x: Tensor) -> Tensor:
        """Add what the block found to what came in."""
        found = self.norm2(self.conv2(norm_relu(self.norm1, self.conv1(x))))
        added: Tensor = (found + self.shortcut(x)).relu()
        return added


class ResNet18(nn.Module):
    """ResNet-18 in the form for 32×32: 11,173,962 parameters at 3 channels and 10 classes.

    He et al., "Deep Residual Learning for Image Recognition", 2016, Table 1, with its CIFAR stem: a
    3×3 convolution of stride 1 and no pooling, since images are small. `stem = "photograph"` is
    Table 1's own, for larger ones: a 7×7 convolution of stride 2, then 3×3 max-pooling of stride 2.
    `width` is the channels of the first stage; each later stage has twice those of the one before.
    """

    def __init__(
        self,
        shape: Shape,
        classes: int,
        norm: Norm = "group",
        groups: int = 8,
        width: int = 64,
        stem: Stem = "small",
        augment: bool = False,
    ) -> None:
        """`augment` crops and mirrors images in training, each anew in every step."""
        super().__init__()
        self.augment = CropAndMirror() if augment else nn.Identity()
        if stem not in get_args(Stem):
            raise ModelError(f"stem is {stem!r}, expected 'small' or 'photograph'")
        self.shrinks = stem == "photograph"
        self.conv = (
            nn.Conv2d(shape[0], width, 7, 2, padding=3, bias=False)
            if self.shrinks
            else convolution(shape[0], width)
        )
        self.norm = normalisation(norm, width, groups)
        blocks, inside = [], width
        for stage in range(4):
            out = width * 2**stage
            for stride in (2 if stage else 1, 1):
                blocks.append(ResidualBlock(inside, out, stride, norm, groups))
                inside = out
        self.blocks = nn.Sequential(*blocks)
        self.fc = nn.Linear(inside, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [example, class]."""
        x = norm_relu(self.norm, self.conv(self.augment(x)))
        if self.shrinks:
            x = F.max_pool2d(x, 3, 2, padding=1)
        x = self.blocks(x)
        logits: Tensor = self.fc(x.mean((2, 3)))
        return logits
