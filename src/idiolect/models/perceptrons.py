"""Multinomial logistic regression and the one-hidden-layer network of the papers."""

import math

from torch import Tensor, nn

from idiolect.kernels.linear import linear_relu


class MLR(nn.Module):
    """Multinomial logistic regression: one linear layer on the flattened example."""

    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.fc = nn.Linear(math.prod(shape), classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [example, class]."""
        logits: Tensor = self.fc(x.flatten(1))
        return logits


class DNN(nn.Module):
    """One hidden ReLU layer: 100 units for MNIST, 20 for Synthetic in the papers."""

    def __init__(self, shape: tuple[int, ...], classes: int, hidden: int = 100) -> None:
        super().__init__()
        self.fc1 = nn.Linear(math.prod(shape), hidden)
        self.fc2 = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [example, class]."""
        logits: Tensor = self.fc2(linear_relu(self.fc1, x.flatten(1)))
        return logits
