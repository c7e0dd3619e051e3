"""Convolutions of pictures of a few channels against the grouped convolution."""

import emulate
import pytest
import torch

from convolutions import operands
from idiolect.kernels import convolution_stem
from idiolect.kernels.convolution import PLAIN, forms
from idiolect.kernels.convolution_cuda import ConvShape

SHAPES = [
    ConvShape(2, 3, 3, 9, 6, 64, 3, 3, 1, 1),
    ConvShape(1, 1, 3, 8, 8, 72, 3, 3, 1, 1),  # a second block, not full
    ConvShape(3, 2, 2, 7, 9, 16, 3, 3, 2, 1),  # odd pictures, every other row and column
    ConvShape(1, 5, 4, 5, 4, 8, 2, 3, 1, 0),  # no zeros around
    ConvShape(2, 2, 1, 30, 29, 40, 3, 3, 1, 1),  # several bands of a picture
    ConvShape(1, 1, 3, 3, 290, 24, 3, 3, 1, 1),  # rows longer than a band
    ConvShape(2, 1, 3, 6, 5, 32, 1, 1, 1, 0),
]


@pytest.mark.skipif(emulate.COMPILER is None, reason="needs g++ to run CUDA sources")
@pytest.mark.parametrize("many", [1, 4])
@pytest.mark.parametrize("shape", SHAPES)
def test_kernels_equal_the_grouped_convolution(
    shape: ConvShape, many: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As near as bfloat16 is, in one part or several, however pictures lie."""
    emulate.use(monkeypatch)
    monkeypatch.setattr(convolution_stem, "processors", lambda x: many)
    s, pairs = shape, operands(shape, torch.bfloat16)
    (x, w), (g, _) = pairs["convolve"], pairs["weight_gradient"]
    last = x.permute(1, 3, 4, 0, 2).contiguous().permute(3, 0, 4, 1, 2)
    for task in ("convolve", "weight_gradient"):
        one, other = pairs[task]
        given = (one, other, s)
        exact = PLAIN[task](one.double(), other.double(), s)
        form = convolution_stem.forms(task, s)["stem"]
        got = form(*given)
        assert got.dtype == (torch.float32 if task == "weight_gradient" else torch.bfloat16)
        assert float((got - exact).norm() / exact.norm()) < 2e-3, task
        assert torch.equal(form(*form.arrange(given)), got)
        assert torch.equal(form(*((one, last, s) if one is g else (last, other, s))), got)
        if task == "convolve":
            assert got.stride()[2] == 1
            shared = form(x, w[:1].expand_as(w), s)
            assert torch.equal(shared[0], got[0])
        else:
            assert got.is_contiguous()


def test_only_pictures_that_fit() -> None:
    """Of up to four channels, in bfloat16; and they are timed as data lie in memory."""
    shape = SHAPES[0]._replace(groups=20)
    for task in ("convolve", "weight_gradient"):
        assert "stem" in forms(task, shape, own=False, rounded=True)
        assert "stem" not in forms(task, shape, own=True, rounded=True)
        assert "stem" not in forms(task, shape)
        for other in (
            shape._replace(channels=5), shape._replace(out_channels=20),
            shape._replace(kernel_height=7, kernel_width=7, padding=3),
            shape._replace(height=3, width=20000),
        ):  # fmt: skip
            assert not convolution_stem.forms(task, other)
    assert not convolution_stem.forms("input_gradient", shape)
    x = torch.zeros(2, 3, 3, 4, 4)
    assert convolution_stem._as_neighbours(x) is x
