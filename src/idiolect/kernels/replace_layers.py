"""Replaces layers of a network by those that are fast for many clients at once."""

from typing import Any

from torch import Tensor, nn

from idiolect.kernels.conv_relu_pool import conv_relu, conv_relu_pool
from idiolect.kernels.convolution import StackedConv2d
from idiolect.kernels.group_norm import StackedGroupNorm, norm_relu
from idiolect.kernels.linear import StackedLinear, linear_relu


class StackedSequential(nn.Sequential):
    """A sequence whose convolutions, dense layers and normalisations run with what follows."""

    def forward(self, x: Tensor) -> Tensor:
        """Run the layers, each with the ReLU, or ReLU and 2×2 max-pooling, after it."""
        layers = list(self)
        while layers:
            first, relu = layers[0], [type(layer) for layer in layers[1:2]] == [nn.ReLU]
            if isinstance(first, StackedLinear) and relu:
                x, layers = linear_relu(first, x), layers[2:]
            elif isinstance(first, StackedGroupNorm) and relu:
                x, layers = norm_relu(first, x), layers[2:]
            elif not isinstance(first, StackedConv2d) or not relu:
                x, layers = first(x), layers[1:]
            elif len(layers) > 2 and _halves(layers[2]):
                x, layers = conv_relu_pool(first, x), layers[3:]
            else:
                x, layers = conv_relu(first, x), layers[2:]
        return x


def _halves(layer: nn.Module) -> bool:
    """Return whether a layer is plain max-pooling of 2×2 windows."""
    if type(layer) is not nn.MaxPool2d:
        return False
    pool: Any = layer
    sizes = (pool.kernel_size, pool.stride, pool.padding, pool.dilation)
    usual = ((2, (2, 2)), (2, (2, 2)), (0, (0, 0)), (1, (1, 1)))
    fits = all(size in known for size, known in zip(sizes, usual, strict=True))
    return fits and not pool.ceil_mode and not pool.return_indices


_STACKED: dict[type[nn.Module], type[StackedConv2d | StackedLinear | StackedGroupNorm]] = {
    nn.Conv2d: StackedConv2d,
    nn.Linear: StackedLinear,
    nn.GroupNorm: StackedGroupNorm,
}


def replace_layers(model: nn.Module) -> nn.Module:
    """Replace plain layers and sequences of them in place; parameters and names stay."""
    for layer in model.modules():
        stacked = _STACKED.get(type(layer))
        if stacked is not None and stacked.suits(layer):
            layer.__class__ = stacked
        if type(layer) is nn.Sequential:
            layer.__class__ = StackedSequential
    return model
