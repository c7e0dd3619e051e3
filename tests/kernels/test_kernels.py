"""The CUDA sources, run thread by thread on a CPU, against torch's own convolutions."""

from pathlib import Path
from types import SimpleNamespace

import emulate
import pytest
import torch

from idiolect.kernels import conv_relu_pool, depthwise, grouped_convolution, tensor, thin, wide
from idiolect.kernels.convolution_shape import Shape

pytestmark = pytest.mark.skipif(emulate.COMPILER is None, reason="needs g++ to run CUDA sources")

TASKS = ["convolve", "rectified", "spread", "correlate", "pooled"]


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Compile for the CPU what would be compiled for the GPU, which then has 3 processors."""
    for part in (thin, wide, tensor, depthwise):
        monkeypatch.setattr(
            part, "kernel", lambda *which: emulate.Kernel(tmp_path, which[0], which[1], which[2])
        )
    chip = SimpleNamespace(multi_processor_count=3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: chip)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize(
    "kind, shape",
    [
        (wide, Shape(2, 3, 16, 10, 13, 32, 3, 3, 1, 0)),
        (wide, Shape(2, 2, 24, 9, 9, 16, 3, 3, 1, 1)),
        (wide, Shape(1, 2, 40, 7, 8, 16, 5, 5, 1, 2)),
        (tensor, Shape(2, 3, 16, 10, 13, 32, 3, 3, 1, 0)),
        (tensor, Shape(1, 1, 48, 12, 14, 32, 5, 5, 1, 2)),
        (thin, Shape(2, 3, 3, 9, 8, 6, 5, 5, 1, 0)),
        (thin, Shape(2, 2, 4, 7, 7, 10, 3, 3, 1, 1)),
    ],
)
def test_kernels_equal_the_plain_form(
    emulated: None, kind: object, shape: Shape, task: str
) -> None:
    torch.manual_seed(0)
    s = shape
    x = torch.randn(s.groups, s.images, s.channels, s.height, s.width)
    w = torch.randn(s.groups, s.out_channels, s.channels, s.kernel_height, s.kernel_width)
    bias = torch.randn(s.groups, s.out_channels)
    slope = torch.randn_like(grouped_convolution.convolve(x, w, s))
    inputs = {
        "convolve": (x, w), "rectified": (x, w, bias), "spread": (slope, w),
        "correlate": (slope, x), "pooled": (x, w, bias),
    }[task]  # fmt: skip
    exact = getattr(grouped_convolution, task)(*(t.double() for t in inputs), s)
    cuts = list(kind.tiles(task, s))  # type: ignore[attr-defined]
    assert cuts
    for tile in {cuts[0], cuts[-1]}:
        got = getattr(kind, task)(*inputs, s, tile=tile)
        if task == "pooled":
            assert torch.equal(got[1], exact[1]), tile
        ours, theirs = (r[0] if isinstance(r, tuple) else r for r in (got, exact))
        assert (ours - theirs).norm() / theirs.norm() < 2e-6, tile


@pytest.mark.parametrize("task", ["convolve", "spread", "correlate"])
@pytest.mark.parametrize(
    "shape",
    [
        Shape(2, 3, 5, 7, 9, 5, 3, 3, 1, 1, depthwise=True),
        Shape(1, 4, 30, 8, 7, 30, 3, 3, 2, 1, depthwise=True),
        Shape(3, 2, 2, 9, 9, 2, 5, 5, 2, 0, depthwise=True),
    ],
)
def test_depthwise_kernels_equal_the_plain_form(emulated: None, shape: Shape, task: str) -> None:
    torch.manual_seed(0)
    s = shape
    x = torch.randn(s.groups, s.images, s.channels, s.height, s.width)
    w = torch.randn(s.groups, s.channels, 1, s.kernel_height, s.kernel_width)
    slope = torch.randn_like(grouped_convolution.convolve(x, w, s))
    inputs = {"convolve": (x, w), "spread": (slope, w), "correlate": (slope, x)}[task]
    exact = getattr(grouped_convolution, task)(*(t.double() for t in inputs), s)
    got = getattr(depthwise, task)(*inputs, s)
    assert got.shape == exact.shape
    assert (got - exact).norm() / exact.norm() < 2e-6


@pytest.mark.parametrize("size", [(6, 8), (7, 5)])
def test_slopes_of_what_was_rectified(
    size: tuple[int, int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(
        conv_relu_pool,
        "kernel",
        lambda *which: emulate.Kernel(tmp_path, which[0], which[1], which[2]),
    )
    torch.manual_seed(0)
    y = torch.randn(2, 3, 4, *size)
    y[0, 0, 0, 0, 0] = float("nan")
    half = (2, 3, 4, size[0] // 2, size[1] // 2)
    chosen = torch.randint(5, half, dtype=torch.uint8)
    for function, given in (
        (conv_relu_pool._Mask, (torch.randn_like(y), y)),
        (conv_relu_pool._Unpool, (torch.randn(half), chosen, size)),
    ):
        expected = function.forward(*given)
        with monkeypatch.context() as patch:
            patch.setattr(conv_relu_pool, "_ours", lambda slope: True)
            got = function.forward(*given)
        assert torch.equal(got[0], expected[0])
        torch.testing.assert_close(got[1], expected[1])
