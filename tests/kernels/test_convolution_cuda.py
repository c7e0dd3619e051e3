"""The CUDA sources, run thread by thread on a CPU, against torch's own convolutions."""

from types import SimpleNamespace

import emulate
import pytest
import torch

from idiolect.kernels import conv_relu_pool, convolution_cuda
from idiolect.kernels.convolution import PLAIN
from idiolect.kernels.convolution_cuda import ConvShape

pytestmark = pytest.mark.skipif(emulate.COMPILER is None, reason="needs g++ to run CUDA sources")

TASKS = ["convolve", "conv_relu", "input_gradient", "weight_gradient", "conv_relu_pool"]


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile for the CPU what would be compiled for the GPU, which then has 3 processors."""
    emulate.use(monkeypatch)
    chip = SimpleNamespace(multi_processor_count=3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: chip)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize(
    "kind, sizes",
    [
        ("wide", (2, 3, 24, 10, 13, 40, 3, 3, 1, 0)),
        ("wide", (2, 2, 24, 9, 9, 24, 3, 3, 1, 1)),
        ("wide", (1, 2, 40, 7, 8, 24, 5, 5, 1, 2)),
        ("tensor", (2, 3, 16, 10, 13, 32, 3, 3, 1, 0)),
        ("tensor", (1, 1, 48, 12, 14, 32, 5, 5, 1, 2)),
        ("tensor", (1, 3, 16, 7, 7, 16, 3, 3, 1, 1)),
        ("runs", (2, 5, 16, 12, 12, 32, 5, 5, 1, 0)),
        ("runs", (1, 2, 32, 9, 28, 64, 3, 3, 1, 1)),
        ("runs", (2, 2, 16, 7, 9, 16, 3, 3, 1, 1)),
        ("columns", (2, 3, 3, 11, 12, 32, 3, 3, 1, 0)),
        ("columns", (1, 2, 1, 9, 10, 16, 5, 5, 1, 2)),
        ("thin", (2, 3, 3, 9, 8, 6, 5, 5, 1, 0)),
        ("thin", (2, 2, 4, 7, 7, 10, 3, 3, 1, 1)),
    ],
)
def test_kernels_equal_the_plain_form(
    emulated: None, kind: str, sizes: tuple[int, ...], task: str
) -> None:
    torch.manual_seed(0)
    s = ConvShape(*sizes)
    x = torch.randn(s.groups, s.images, s.channels, s.height, s.width)
    w = torch.randn(s.groups, s.out_channels, s.channels, s.kernel_height, s.kernel_width)
    bias = torch.randn(s.groups, s.out_channels)
    gradient = torch.randn_like(PLAIN["convolve"](x, w, s))
    inputs = {
        "convolve": (x, w), "conv_relu": (x, w, bias), "input_gradient": (gradient, w),
        "weight_gradient": (gradient, x), "conv_relu_pool": (x, w, bias),
    }[task]  # fmt: skip
    exact = PLAIN[task](*(t.double() for t in inputs), s)
    forms = convolution_cuda.forms(task, s).items()
    ours = [(name, form) for name, form in forms if name.startswith(kind)]
    if (kind, task == "weight_gradient") in (("columns", False), ("tensor", True)):
        pytest.skip("`columns` is for weights' gradients alone, `tensor` for all else")
    assert ours
    half = [pair for pair in ours[1:-1] if kind == "tensor" and "x128" in pair[0]]  # fewer threads
    for name, form in (*ours[:: max(1, len(ours) - 1)], *half[:1]):
        got = form(*inputs, s)
        if task == "conv_relu_pool":
            assert torch.equal(got[1], exact[1]), name
        left, right = (r[0] if isinstance(r, tuple) else r for r in (got, exact))
        assert (left - right).norm() / right.norm() < 2e-6, name


@pytest.mark.parametrize("task", ["convolve", "input_gradient", "weight_gradient"])
def test_one_product_on_matrix_units_is_rounded_to_nearest_but_sees_nan(
    emulated: None, monkeypatch: pytest.MonkeyPatch, task: str
) -> None:
    """Numbers of 11 bits stay what they are; others err to both sides. NaN of all bits stays."""
    monkeypatch.setattr(
        convolution_cuda,
        "_rounding",
        lambda tile: tile._replace(constants=tile.constants | {"ROUNDED": 1}),
    )
    torch.manual_seed(0)
    s = ConvShape(1, 1, 16, 6, 6, 16, 3, 3, 1, 1)
    x, w = torch.rand(1, 1, 16, 6, 6) + 1, torch.rand(1, 16, 16, 3, 3) + 1
    inputs = (x, w) if task != "weight_gradient" else (x, x.flip(1))
    kind = "runs" if task == "weight_gradient" else "tensor"
    name, form = next(
        pair for pair in convolution_cuda.forms(task, s).items() if pair[0].startswith(kind)
    )

    def error(*given: torch.Tensor) -> torch.Tensor:
        exact: torch.Tensor = PLAIN[task](*(one.double() for one in given), s)
        far: torch.Tensor = (form(*given, s) - exact) / exact.norm() * exact.numel() ** 0.5
        return far

    assert 1e-6 < error(*inputs).norm() / error(*inputs).numel() ** 0.5 < 5e-4, name
    assert error(*inputs).mean().abs() < 1e-4, name  # all numbers are above 0
    short = [(one * 1024).round() / 1024 for one in inputs]
    assert error(*short).abs().max() < 1e-6, name
    inputs[0].view(torch.int32)[0, 0, 0, 3, 3] = 0x7FFFFFFF  # as a GPU makes it
    assert form(*inputs, s).isnan().any(), name


@pytest.mark.parametrize("task", ["convolve", "input_gradient", "weight_gradient"])
@pytest.mark.parametrize(
    "shape",
    [
        ConvShape(2, 3, 5, 7, 9, 5, 3, 3, 1, 1, depthwise=True),
        ConvShape(1, 4, 30, 8, 7, 30, 3, 3, 2, 1, depthwise=True),
        ConvShape(2, 3, 5, 5, 8, 5, 3, 3, 1, 1, depthwise=True),  # four pixels for a thread
        ConvShape(1, 2, 6, 8, 8, 6, 3, 3, 2, 1, depthwise=True),
        ConvShape(1, 2, 3, 7, 12, 3, 5, 5, 2, 2, depthwise=True),
        ConvShape(1, 2, 3, 7, 12, 3, 1, 1, 3, 0, depthwise=True),
        ConvShape(3, 2, 2, 9, 9, 2, 5, 5, 2, 0, depthwise=True),
    ],
)
def test_depthwise_kernels_equal_the_plain_form(
    emulated: None, shape: ConvShape, task: str
) -> None:
    torch.manual_seed(0)
    s = shape
    x = torch.randn(s.groups, s.images, s.channels, s.height, s.width)
    w = torch.randn(s.groups, s.channels, 1, s.kernel_height, s.kernel_width)
    gradient = torch.randn_like(PLAIN["convolve"](x, w, s))
    inputs = {
        "convolve": (x, w), "input_gradient": (gradient, w), "weight_gradient": (gradient, x)
    }[task]  # fmt: skip
    exact = PLAIN[task](*(t.double() for t in inputs), s)
    got = convolution_cuda.forms(task, s)["depthwise"](*inputs, s)
    assert got.shape == exact.shape
    assert (got - exact).norm() / exact.norm() < 2e-6


@pytest.mark.parametrize("size", [(6, 8), (7, 5), (5, 6)])
def test_gradients_through_relu_and_pooling(
    size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    emulate.use(monkeypatch)
    torch.manual_seed(0)
    y = torch.randn(2, 3, 4, *size)
    y[0, 0, 0, 0, 0] = float("nan")
    half = (2, 3, 4, size[0] // 2, size[1] // 2)
    chosen = torch.randint(5, half, dtype=torch.uint8)
    for function, given in (
        (conv_relu_pool._ReLUGradient, (torch.randn_like(y), y)),
        (conv_relu_pool._PoolGradient, (torch.randn(half), chosen, size)),
    ):
        expected = function.forward(*given)
        with monkeypatch.context() as patch:
            patch.setattr(conv_relu_pool, "float32_on_cuda", lambda x: True)
            got = function.forward(*given)
        assert torch.equal(got[0], expected[0])
        torch.testing.assert_close(got[1], expected[1])
