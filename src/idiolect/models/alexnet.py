"""AlexNet for small images."""

from torch import Tensor, nn
from torch.nn import functional as F

from idiolect.errors import ModelError
from idiolect.models.layers import Init, initialise


class AlexNet(nn.Module):
    """AlexNet at 28×28 and 32×32, as KT-pFL runs it: 23,272,266 parameters at 3×32×32, 10 classes.

    Krizhevsky, Sutskever, Hinton, "ImageNet Classification with Deep Convolutional Neural
    Networks", 2012: five convolutions (3×3 here, the first with stride 2), two hidden layers of
    4,096 units behind dropout. `dropout = 0` makes results independent of how clients are blocked.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        classes: int,
        hidden: int = 4096,
        dropout: float = 0.5,
        init: Init = "torch",
    ) -> None:
        super().__init__()
        channels, height, width = shape
        left = [((side + 1) // 2) // 8 for side in (height, width)]
        if min(left) < 1:
            raise ModelError(
                f"AlexNet halves an image four times and {height}×{width} is too small; use "
                "images of 15×15 or more, or lenet5"
            )
        self.conv1 = nn.Conv2d(channels, 64, 3, stride=2, padding=1)
        self.conv2 = nn.Conv2d(64, 192, 3, padding=1)
        self.conv3 = nn.Conv2d(192, 384, 3, padding=1)
        self.conv4 = nn.Conv2d(384, 256, 3, padding=1)
        self.conv5 = nn.Conv2d(256, 256, 3, padding=1)
        self.drop = nn.Dropout(dropout)
        self.fc1 = nn.Linear(256 * left[0] * left[1], hidden)
        self.fc2 = nn.Linear(hidden, hidden)
        self.fc3 = nn.Linear(hidden, classes)
        initialise(self, init)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [example, class]."""
        x = F.max_pool2d(self.conv1(x).relu(), 2)
        x = F.max_pool2d(self.conv2(x).relu(), 2)
        x = self.conv4(self.conv3(x).relu()).relu()
        x = F.max_pool2d(self.conv5(x).relu(), 2)
        x = self.fc1(self.drop(x.flatten(1))).relu()
        logits: Tensor = self.fc3(self.fc2(self.drop(x)).relu())
        return logits
