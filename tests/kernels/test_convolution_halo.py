"""Convolutions by the matrix units of Hopper against the grouped convolution."""

import emulate
import pytest
import torch

from convolutions import operands
from idiolect.kernels import convolution_halo
from idiolect.kernels.convolution import PLAIN, forms
from idiolect.kernels.convolution_cuda import ConvShape

SHAPES = [
    ConvShape(2, 3, 64, 6, 5, 64, 3, 3, 1, 1),
    ConvShape(1, 2, 128, 4, 4, 72, 3, 3, 1, 1),  # several chunks of channels, a block not full
    ConvShape(1, 5, 64, 9, 8, 136, 3, 3, 1, 1),  # several blocks, each of several images
    ConvShape(1, 2, 64, 6, 6, 64, 5, 5, 1, 2),
    ConvShape(2, 3, 64, 6, 8, 72, 3, 3, 2, 1),  # planes of every other row and column
    ConvShape(1, 2, 128, 7, 5, 192, 3, 3, 2, 1),
    ConvShape(1, 9, 24, 8, 7, 64, 3, 3, 2, 1),  # fewer channels than a block makes
    ConvShape(1, 2, 64, 9, 8, 64, 5, 5, 2, 2),
    ConvShape(2, 3, 64, 7, 6, 72, 1, 1, 2, 0),  # pixels that no tap sees
    ConvShape(1, 5, 24, 9, 12, 128, 1, 1, 2, 0),
    ConvShape(1, 2, 64, 8, 9, 64, 2, 3, 3, 0),
]


@pytest.fixture(autouse=True)
def _hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convolution_halo, "is_hopper", lambda: True)


@pytest.mark.skipif(emulate.COMPILER is None, reason="needs g++ to run CUDA sources")
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES)
def test_kernels_equal_the_grouped_convolution(
    shape: ConvShape, kind: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As near as TF32, or the rounding of the result, allows; images stay with channels last."""
    emulate.use(monkeypatch)
    s, near = shape, 2e-3 if kind == torch.bfloat16 else 4e-4
    for task, given in operands(s, kind).items():
        exact = PLAIN[task](*(one.double() for one in given), s)
        found = convolution_halo.forms(task, s, kind)
        if task == "convolve" or (task == "weight_gradient" and kind == torch.bfloat16):
            assert found or s.kernel_height != 3 or s.channels % 64
        for name, form in found.items():
            got = form(*given, s)
            assert got.dtype == (torch.float32 if task == "weight_gradient" else kind)
            assert got.shape == exact.shape
            assert float((got - exact).norm() / exact.norm()) < near, (task, name)
            assert torch.equal(form(*form.arrange((*given, s))), got)
            assert got.is_contiguous() if task == "weight_gradient" else got.stride()[2] == 1


def test_only_where_they_can() -> None:
    """Channels that fill rows of shared memory; and results as large as images, or half."""
    shape = ConvShape(4, 8, 64, 8, 8, 64, 3, 3, 1, 1)
    for kind in (torch.bfloat16, torch.float32):
        found = convolution_halo.forms("convolve", shape, kind)
        assert {name.split()[0] for name in found} == {"halo", "gathered"}
        for other in (
            shape._replace(channels=40), shape._replace(depthwise=True),
            shape._replace(out_channels=12),
        ):  # fmt: skip
            assert not convolution_halo.forms("convolve", other, kind)
        for other in (
            shape._replace(stride=3), shape._replace(padding=0),
            shape._replace(kernel_height=1, kernel_width=1), shape._replace(height=900, width=900),
        ):  # fmt: skip
            found = convolution_halo.forms("convolve", other, kind)
            assert found and not any("halo" in name for name in found)
    assert not convolution_halo.forms("weight_gradient", shape, torch.float32)
    half = shape._replace(stride=2)
    found = {*convolution_halo.forms("input_gradient", half, torch.bfloat16)}
    assert {"planes 128", "planes 64"} < found
    deep = half._replace(out_channels=512)
    found = {*convolution_halo.forms("input_gradient", deep, torch.bfloat16)}
    assert "planes 64" not in found and "planes 128" in found
    for other in (shape, half._replace(out_channels=72), half._replace(padding=0)):
        found = convolution_halo.forms("input_gradient", other, torch.bfloat16)
        assert not any("planes" in name for name in found)
    found = convolution_halo.forms("input_gradient", half, torch.float32)
    assert not any("planes" in name for name in found)
    assert any("halo" in name for name in forms("convolve", shape, rounded=True))
    assert not any("halo" in name for name in forms("convolve", shape))


def test_other_chips_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convolution_halo, "is_hopper", lambda: False)
    shape = ConvShape(4, 8, 64, 8, 8, 64, 3, 3, 1, 1)
    assert not convolution_halo.forms("convolve", shape, torch.bfloat16)
