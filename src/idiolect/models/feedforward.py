"""The plain networks of the papers: logistic regression, perceptron, small convolutional ones."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from idiolect.errors import ModelError
from idiolect.kernels.conv_relu_pool import conv_relu_pool
from idiolect.kernels.linear import linear_relu
from idiolect.models.layers import Init, Shape, initialise


class MLR(nn.Module):
    """Multinomial logistic regression: one linear layer on the flattened example."""

    def __init__(self, shape: Shape, classes: int) -> None:
        super().__init__()
        self.fc = nn.Linear(math.prod(shape), classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [example, class]."""
        logits: Tensor = self.fc(x.flatten(1))
        return logits


class DNN(nn.Module):
    """One hidden ReLU layer: 100 units for MNIST, 20 for Synthetic in the papers."""

    def __init__(self, shape: Shape, classes: int, hidden: int = 100) -> None:
        super().__init__()
        self.fc1 = nn.Linear(math.prod(shape), hidden)
        self.fc2 = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [example, class]."""
        logits: Tensor = self.fc2(linear_relu(self.fc1, torch.flatten(x, 1)))
        return logits


class LeNet5(nn.Module):
    """LeNet-5 as PersFL and PFML use it on CIFAR-10: 62,006 parameters at 3×32×32, 10 classes."""

    def __init__(self, shape: Shape, classes: int, init: Init = "torch") -> None:
        super().__init__()
        channels, height, width = shape
        self.conv1 = nn.Conv2d(channels, 6, 5)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(16 * _pooled_twice(height) * _pooled_twice(width), 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, classes)
        initialise(self, init)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [example, class]."""
        x = conv_relu_pool(self.conv2, conv_relu_pool(self.conv1, x))
        logits: Tensor = self.fc3(linear_relu(self.fc2, linear_relu(self.fc1, torch.flatten(x, 1))))
        return logits


class McMahanCNN(nn.Module):
    """The CNN of the FedAvg paper as KT-pFL's baselines run it: 582,026 parameters at 1×28×28."""

    def __init__(self, shape: Shape, classes: int, hidden: int = 512) -> None:
        super().__init__()
        channels, height, width = shape
        self.conv1 = nn.Conv2d(channels, 32, 5)
        self.conv2 = nn.Conv2d(32, 64, 5)
        self.fc1 = nn.Linear(64 * _pooled_twice(height) * _pooled_twice(width), hidden)
        self.fc2 = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [example, class]."""
        x = conv_relu_pool(self.conv2, conv_relu_pool(self.conv1, x))
        logits: Tensor = self.fc2(linear_relu(self.fc1, torch.flatten(x, 1)))
        return logits


def _pooled_twice(side: int) -> int:
    """Return what two rounds of 5×5 convolution and 2×2 pooling leave of a side."""
    return ((side - 4) // 2 - 4) // 2


class AlexNet(nn.Module):
    """AlexNet at 28×28 and 32×32, as KT-pFL runs it: 23,272,266 parameters at 3×32×32, 10 classes.

    Krizhevsky, Sutskever, Hinton, "ImageNet Classification with Deep Convolutional Neural
    Networks", 2012: five convolutions (3×3 here, the first with stride 2), two hidden layers of
    4,096 units behind dropout. `dropout = 0` makes results independent of how clients are blocked.
    """

    def __init__(
        self,
        shape: Shape,
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
