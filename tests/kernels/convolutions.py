"""Inputs of stacked convolutions, for the tests of their forms."""

import torch
from torch import Tensor

from idiolect.kernels.convolution_cuda import ConvShape


def operands(s: ConvShape, kind: torch.dtype) -> dict[str, tuple[Tensor, Tensor]]:
    """Draw the two operands of each task; weights are in single precision, exact in bfloat16."""
    torch.manual_seed(0)
    x = torch.randn(s.groups, s.images, s.channels, s.height, s.width).to(kind)
    w = torch.randn(s.groups, s.out_channels, s.channels, s.kernel_height, s.kernel_width)
    w = w.bfloat16().float()
    g = torch.randn(s.groups, s.images, s.out_channels, s.out_height, s.out_width).to(kind)
    return {"convolve": (x, w), "input_gradient": (g, w), "weight_gradient": (g, x)}
