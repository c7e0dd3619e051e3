"""ShuffleNetV2 for small images."""

from torch import Tensor, nn

from idiolect.errors import ModelError
from idiolect.kernels.halves import dealt, halves
from idiolect.models.layers import Norm, Pointwise, Shape, convolution, normalisation

_CHANNELS = {  # of the three stages and of the last convolution, by width: Table 5 of the paper
    0.5: (48, 96, 192, 1024),
    1.0: (116, 232, 464, 1024),
    1.5: (176, 352, 704, 1024),
    2.0: (244, 488, 976, 2048),
}
_UNITS = (4, 8, 4)  # of each stage


class ShuffleUnit(nn.Module):
    """Half of the channels go through a branch; the halves are then shuffled together.

    The first unit of a stage halves the image instead and sends all channels through both sides.
    """

    def __init__(self, inside: int, out: int, norm: Norm, groups: int) -> None:
        super().__init__()
        self.halves = inside != out
        half, taken = out // 2, inside if self.halves else inside // 2
        stride = 2 if self.halves else 1
        # The branch has as many channels throughout (the paper's first guideline).
        self.branch = nn.Sequential(
            Pointwise(taken, half),
            normalisation(norm, half, groups),
            nn.ReLU(),
            convolution(half, half, stride, groups=half),
            normalisation(norm, half, groups),
            Pointwise(half, half),
            normalisation(norm, half, groups),
            nn.ReLU(),
        )
        self.side = nn.Sequential()
        if self.halves:
            self.side = nn.Sequential(
                convolution(inside, inside, stride, groups=inside),
                normalisation(norm, inside, groups),
                Pointwise(inside, half),
                normalisation(norm, half, groups),
                nn.ReLU(),
            )

    def forward(self, x: Tensor) -> Tensor:
        """Join both sides so that the next unit's halves have channels of each in turn."""
        kept, taken = (x, x) if self.halves else halves(x)
        return dealt(self.side(kept), self.branch(taken))


class ShuffleNetV2(nn.Module):
    """ShuffleNetV2 for 28×28 and 32×32: 1,263,854 parameters at width 1, 3 channels, 10 classes.

    Ma et al., "ShuffleNet V2: Practical Guidelines for Efficient CNN Architecture Design", 2018,
    Table 5. The stem keeps the size (stride 1, no pooling), since images are small.
    """

    def __init__(
        self, shape: Shape, classes: int, width: float = 1.0, norm: Norm = "group", groups: int = 8
    ) -> None:
        super().__init__()
        if width not in _CHANNELS:
            known = ", ".join(map(str, _CHANNELS))
            raise ModelError(f"ShuffleNetV2: width is {width}, expected one of {known}")
        *stages, last = _CHANNELS[width]
        self.stem = nn.Sequential(
            convolution(shape[0], 24), normalisation(norm, 24, groups), nn.ReLU()
        )
        units, inside = [], 24
        for out, count in zip(stages, _UNITS, strict=True):
            units += [ShuffleUnit(inside, out, norm, groups)]
            units += [ShuffleUnit(out, out, norm, groups) for _ in range(count - 1)]
            inside = out
        self.units = nn.Sequential(*units)
        self.top = nn.Sequential(
            Pointwise(inside, last), normalisation(norm, last, groups), nn.ReLU()
        )
        self.fc = nn.Linear(last, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [example, class]."""
        logits: Tensor = self.fc(self.top(self.units(self.stem(x))).mean((2, 3)))
        return logits
