"""Convolutions on matrix units with channels last against the grouped convolution."""

from pathlib import Path

import emulate
import pytest
import torch

from idiolect.kernels import convolution_last
from idiolect.kernels.convolution import PLAIN, forms
from idiolect.kernels.convolution_cuda import ConvShape

SHAPES = [
    ConvShape(2, 2, 32, 6, 5, 40, 3, 3, 1, 1),
    ConvShape(2, 3, 16, 7, 8, 32, 3, 3, 2, 1),  # rows and columns of the input: each other taps
    ConvShape(2, 2, 3, 6, 6, 16, 3, 3, 1, 1),  # colours are filled up to 16 bytes
    ConvShape(1, 3, 24, 6, 6, 72, 1, 1, 2, 0),
    ConvShape(2, 1, 24, 5, 5, 136, 5, 5, 1, 2),  # wider than a block
]


@pytest.mark.skipif(emulate.COMPILER is None, reason="needs g++ to run CUDA sources")
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES)
def test_kernels_equal_the_grouped_convolution(
    shape: ConvShape, kind: torch.dtype, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As near as TF32, or the rounding of the result, allows; images stay with channels last."""
    emulate.use(monkeypatch, tmp_path)
    torch.manual_seed(0)
    s, near = shape, 2e-3 if kind == torch.bfloat16 else 4e-4
    x = torch.randn(s.groups, s.images, s.channels, s.height, s.width).to(kind)
    w = torch.randn(s.groups, s.out_channels, s.channels, s.kernel_height, s.kernel_width)
    w = w.bfloat16().float()
    g = torch.randn(s.groups, s.images, s.out_channels, s.out_height, s.out_width).to(kind)
    tasks = {"convolve": (x, w), "input_gradient": (g, w), "weight_gradient": (g, x)}
    for task, given in tasks.items():
        exact = PLAIN[task](*(one.double() for one in given), s)
        found = list(convolution_last.forms(task, s).values())
        assert found or (task == "input_gradient" and s.channels == 3)
        for form in found[-1:] if s is not SHAPES[4] else found[:1]:
            got = form(*given, s)
            assert got.dtype == (torch.float32 if task == "weight_gradient" else kind)
            assert got.shape == exact.shape
            assert float((got - exact).norm() / exact.norm()) < near, task
            if task == "convolve":
                assert torch.equal(form(*form.arrange((*given, s))), got)
                assert got.stride()[2] == 1


def test_only_where_products_may_be_rounded() -> None:
    shape = ConvShape(4, 8, 64, 8, 8, 64, 3, 3, 1, 1)
    assert not any("matrix" in name for name in forms("convolve", shape))
    assert any("matrix" in name for name in forms("convolve", shape, rounded=True))
    depthwise = ConvShape(4, 8, 64, 8, 8, 64, 3, 3, 1, 1, True)
    assert convolution_last.forms("convolve", depthwise) == {}
    assert convolution_last.forms("conv_relu", shape) == {}
    assert convolution_last.forms("convolve", shape._replace(out_channels=20)) == {}
