"""The sizes of a stack of convolutions."""

from typing import NamedTuple


class Shape(NamedTuple):
    """A stack of clients, each with its own kernels: [group, image, channel, height, width]."""

    groups: int
    images: int
    channels: int
    height: int
    width: int
    out_channels: int
    kernel_height: int
    kernel_width: int
    stride: int
    padding: int
    depthwise: bool = False  # each channel has a kernel of its own, [group, channel, 1, ...]

    @property
    def inputs(self) -> int:
        """Channels that a kernel reads."""
        return 1 if self.depthwise else self.channels

    @property
    def convolutions(self) -> int:
        """Groups of the one convolution that does the same for all."""
        return self.groups * self.channels if self.depthwise else self.groups

    @property
    def out_height(self) -> int:
        """Rows of the result."""
        return (self.height + 2 * self.padding - self.kernel_height) // self.stride + 1

    @property
    def out_width(self) -> int:
        """Columns of the result."""
        return (self.width + 2 * self.padding - self.kernel_width) // self.stride + 1
