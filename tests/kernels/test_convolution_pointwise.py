"""1×1 convolutions on matrix units with channels first against the grouped convolution."""

import emulate
import pytest
import torch

from idiolect.kernels import convolution_pointwise
from idiolect.kernels.convolution import PLAIN, forms
from idiolect.kernels.convolution_cuda import ConvShape

SHAPES = [
    ConvShape(2, 3, 24, 4, 6, 58, 1, 1, 1, 0),  # two images in a block
    ConvShape(1, 2, 58, 10, 10, 30, 1, 1, 1, 0),  # a block ends within an image
    ConvShape(2, 5, 140, 2, 2, 134, 1, 1, 1, 0),  # several rows of blocks, many steps
]


@pytest.mark.skipif(emulate.COMPILER is None, reason="needs g++ to run CUDA sources")
@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_kernels_equal_the_grouped_convolution(
    shape: ConvShape, rounded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To single precision, or to that of TF32 where products may be rounded."""
    emulate.use(monkeypatch)
    monkeypatch.setattr(convolution_pointwise, "_rounded", lambda: rounded)
    torch.manual_seed(0)
    s, near = shape, 4e-4 if rounded else 2e-6
    whole = torch.randn(s.groups, s.images, 2 * s.channels, s.height, s.width)
    x = whole[:, :, s.channels :]  # some channels of larger images: not copied
    assert convolution_pointwise._as_read(x) is x
    w = torch.randn(s.groups, s.out_channels, s.channels, 1, 1)
    g = torch.randn(s.groups, s.images, s.out_channels, s.height, s.width)
    tasks = {"convolve": (x, w), "input_gradient": (g, w), "weight_gradient": (g, x)}
    for task, given in tasks.items():
        exact = PLAIN[task](*(one.double() for one in given), s)
        found = convolution_pointwise.forms(task, s)
        assert len(found) == 3
        for name, form in found.items():
            got = form(*given, s)
            assert got.shape == exact.shape and got.is_contiguous()
            assert float((got - exact).norm() / exact.norm()) < near, (task, name)
    monkeypatch.setattr(convolution_pointwise, "processors", lambda x: 3)  # sums in parts
    for form in found.values():
        got = form(g, x, s)
        assert float((got - exact).norm() / exact.norm()) < near


def test_only_where_they_can() -> None:
    shape = ConvShape(4, 8, 64, 8, 8, 64, 1, 1, 1, 0)
    assert "pointwise 256x2" in forms("convolve", shape)
    assert "pointwise 256x2" not in forms("convolve", shape, own=False)
    for other in (
        shape._replace(channels=8), shape._replace(height=7, width=7), shape._replace(stride=2),
        shape._replace(kernel_height=3, kernel_width=3), shape._replace(depthwise=True),
    ):  # fmt: skip
        assert not convolution_pointwise.forms("convolve", other)
    assert not convolution_pointwise.forms("conv_relu", shape)
