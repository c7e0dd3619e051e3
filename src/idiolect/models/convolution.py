"""A convolution as one matrix product, the faster form when many clients are stacked on a GPU.

vmap turns a convolution with a kernel per client into a grouped one, which uses a small part of the
chip; unfolded patches times kernels become one batched product instead.
"""

from torch import Tensor, nn
from torch.nn import functional as F


class UnfoldedConv2d(nn.Conv2d):
    """`nn.Conv2d` computed by unfolding; same parameters, same result up to rounding."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the convolution of [example, channel, height, width]."""
        patches = F.unfold(
            input,
            self.kernel_size,
            self.dilation,
            self.padding,  # type: ignore[arg-type]
            self.stride,
        )  # [example, channel · kernel, place]
        out = self.weight.flatten(1) @ patches
        if self.bias is not None:
            out = out + self.bias.unsqueeze(-1)
        height = _places(input.shape[-2], self, 0)
        return out.unflatten(-1, (height, -1))


def _places(side: int, layer: nn.Conv2d, axis: int) -> int:
    reach = layer.dilation[axis] * (layer.kernel_size[axis] - 1) + 1
    padding = layer.padding[axis]
    return (side + 2 * int(padding) - reach) // layer.stride[axis] + 1


def unfold_convolutions(model: nn.Module) -> None:
    """Change every plain convolution of a network to the unfolded form, in place."""
    for layer in model.modules():
        plain = type(layer) is nn.Conv2d and layer.groups == 1
        if plain and not isinstance(layer.padding, str) and layer.padding_mode == "zeros":
            layer.__class__ = UnfoldedConv2d
