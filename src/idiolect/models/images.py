"""The convolutional networks of the papers."""

from torch import Tensor, nn

from idiolect.kernels.conv_relu_pool import conv_relu_pool
from idiolect.kernels.linear import linear_relu
from idiolect.models.layers import Init, initialise


class LeNet5(nn.Module):
    """LeNet-5 as PersFL and PFML use it on CIFAR-10: 62,006 parameters at 3×32×32, 10 classes."""

    def __init__(self, shape: tuple[int, ...], classes: int, init: Init = "torch") -> None:
        super().__init__()
        channels, height, width = shape
        self.conv1 = nn.Conv2d(channels, 6, 5)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(16 * _after(height) * _after(width), 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, classes)
        initialise(self, init)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [example, class]."""
        x = conv_relu_pool(self.conv2, conv_relu_pool(self.conv1, x))
        logits: Tensor = self.fc3(linear_relu(self.fc2, linear_relu(self.fc1, x.flatten(1))))
        return logits


class McMahanCNN(nn.Module):
    """The CNN of the FedAvg paper as KT-pFL's baselines run it: 582,026 parameters at 1×28×28."""

    def __init__(self, shape: tuple[int, ...], classes: int, hidden: int = 512) -> None:
        super().__init__()
        channels, height, width = shape
        self.conv1 = nn.Conv2d(channels, 32, 5)
        self.conv2 = nn.Conv2d(32, 64, 5)
        self.fc1 = nn.Linear(64 * _after(height) * _after(width), hidden)
        self.fc2 = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [example, class]."""
        x = conv_relu_pool(self.conv2, conv_relu_pool(self.conv1, x))
        logits: Tensor = self.fc2(linear_relu(self.fc1, x.flatten(1)))
        return logits


def _after(side: int) -> int:
    """Return what two rounds of 5×5 convolution and 2×2 pooling leave of a side."""
    return ((side - 4) // 2 - 4) // 2
