"""Stacked convolutions against torch's own, through every transformation that methods use.

The functions run here in their plain form; the CUDA kernels are compared with it on a GPU, by the
last test and by `benchmarks/convolutions.py`.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.nn import functional as F

from idiolect.core import network
from idiolect.kernels import conv_relu_pool, convolution, convolution_cuda
from idiolect.kernels.convolution import PLAIN
from idiolect.kernels.convolution_cuda import ConvShape
from idiolect.kernels.vmap_rules import call

CLIENTS, IMAGES, CHANNELS, OUT = 3, 2, 2, 4


Pool = bool | str  # what follows: pooling, or nothing; "relu", or nothing of a "depthwise" one


def draw(side: int, pool: Pool = False) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    channels, reads = (OUT, 1) if pool == "depthwise" else (CHANNELS, CHANNELS)
    x = torch.randn(CLIENTS, IMAGES, channels, side, side, dtype=torch.float64)
    w = torch.randn(CLIENTS, OUT, reads, 3, 3, dtype=torch.float64)
    return x, w, torch.randn(CLIENTS, OUT, dtype=torch.float64)


def pair(stride: int, padding: int, pool: Pool) -> list[Callable[..., Tensor]]:
    """Give a curved function of kernels, bias and images: ours, and torch's."""
    relu, depthwise = pool == "relu", pool == "depthwise"

    def ours(w: Tensor, b: Tensor, x: Tensor) -> Tensor:
        if pool is True:
            y = call(conv_relu_pool._ConvReLUPool, x[None], w[None], b[None], padding)[0][0]
        elif relu:
            y = call(conv_relu_pool._ConvReLU, x[None], w[None], b[None], padding)[0]
        else:
            y = call(convolution._Convolve, x[None], w[None], stride, padding, depthwise, False)[0]
            y = y + b[:, None, None]
        total: Tensor = y.tanh().pow(2).sum()
        return total

    def theirs(w: Tensor, b: Tensor, x: Tensor) -> Tensor:
        y = F.conv2d(x, w, b, stride, padding, groups=OUT if depthwise else 1)
        if pool is True:
            y = F.max_pool2d(y.relu(), 2)
        return (y.relu() if relu else y).tanh().pow(2).sum()

    return [ours, theirs]


def close(results: list[Tensor]) -> None:
    ours, theirs = results
    assert theirs.abs().max() > 0.01
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)


FORMS = pytest.mark.parametrize(
    "stride, padding, side, pool",
    [
        (1, 0, 6, False),
        (1, 1, 7, False),
        (2, 1, 7, False),
        (1, 0, 6, True),
        (1, 2, 9, True),
        (1, 1, 6, "relu"),
        (1, 1, 6, "depthwise"),
        (2, 1, 7, "depthwise"),
    ],
)


@FORMS
@pytest.mark.parametrize("argument", [0, 1, 2])
def test_gradients_of_own_kernels(
    stride: int, padding: int, side: int, pool: Pool, argument: int
) -> None:
    x, w, b = draw(side, pool)
    close([vmap(grad(f, argument))(w, b, x) for f in pair(stride, padding, pool)])


@FORMS
def test_gradients_of_kernels_that_all_share(
    stride: int, padding: int, side: int, pool: Pool
) -> None:
    """What was sent is the same for everyone in the first step: dims are None for the kernels."""
    x, w, b = draw(side, pool)
    shared = (None, None, 0)
    close([vmap(grad(f), shared)(w[0], b[0], x) for f in pair(stride, padding, pool)])


@FORMS
def test_gradients_of_images_that_all_share(
    stride: int, padding: int, side: int, pool: Pool
) -> None:
    x, w, b = draw(side, pool)
    close([vmap(grad(f), (0, 0, None))(w, b, x[0]) for f in pair(stride, padding, pool)])


@FORMS
def test_second_derivatives(stride: int, padding: int, side: int, pool: Pool) -> None:
    """Exact Per-FedAvg differentiates a gradient: through kernels, bias and images alike."""
    x, w, b = draw(side, pool)

    def curved(f: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def bend(w: Tensor, b: Tensor, x: Tensor) -> Tensor:
            gradients = grad(f, (0, 1, 2))(w, b, x)
            return sum((one.pow(3).sum() for one in gradients), torch.zeros(()))

        return grad(bend)

    close([vmap(curved(f))(w, b, x) for f in pair(stride, padding, pool)])


@FORMS
def test_a_grid_inside_the_stack(stride: int, padding: int, side: int, pool: Pool) -> None:
    x, _, b = draw(side, pool)
    reads = 1 if pool == "depthwise" else CHANNELS
    cells = torch.randn(CLIENTS, 5, OUT, reads, 3, 3, dtype=torch.float64)

    def grid(f: Callable[..., Tensor]) -> Tensor:
        return vmap(lambda w, b, x: vmap(grad(f), (0, None, None))(w, b, x))(cells, b, x)

    close([grid(f) for f in pair(stride, padding, pool)])


def test_pooling_keeps_nan_in_sight_and_cuts_at_zero() -> None:
    """A broken client must be seen: NaN wins its window, as in torch."""
    x = torch.tensor([[[[[1.0, float("nan"), -1, -2], [3, 2, -3, -4]]]]], dtype=torch.float64)
    w, b = torch.ones(1, 1, 1, 1, 1, dtype=torch.float64), torch.zeros(1, 1, dtype=torch.float64)
    value, chosen = PLAIN["conv_relu_pool"](x, w, b, ConvShape(1, 1, 1, 2, 4, 1, 1, 1, 1, 0))
    assert value[0, 0, 0, 0, 0].isnan() and value[0, 0, 0, 0, 1] == 0
    assert chosen.flatten().tolist() == [1, 4]


def test_quicken_replaces_plain_layers_alone() -> None:
    class Own(nn.Conv2d):
        pass

    every: list[Any] = [
        nn.Conv2d(4, 4, 3),
        nn.Conv2d(4, 4, 3, groups=4),
        nn.Conv2d(4, 4, 3, groups=2),
        nn.Conv2d(4, 8, 3, groups=4),
        nn.Conv2d(4, 4, 3, dilation=2),
        nn.Conv2d(4, 4, 3, padding="same"),
        nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular"),
        Own(4, 4, 3),
    ]
    model = nn.Sequential(*every)
    names = list(model.state_dict())
    quick = [type(layer) is convolution.StackedConv2d for layer in network.replace_layers(model)]
    assert quick == [True, True, False, False, False, False, False, False]
    assert list(model.state_dict()) == names


def test_layers_in_a_row_are_run_as_one_where_they_are_plain() -> None:
    """Spies stand for the fused forms; what they are given and what is left over is told apart."""
    every = [
        nn.Conv2d(1, 2, 3), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(2, 2, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2, stride=1),
        nn.Conv2d(2, 2, 3), nn.MaxPool2d(2), nn.Flatten(),
    ]  # fmt: skip
    model, x = nn.Sequential(*every), torch.randn(2, 1, 18, 18)
    expected, names = model(x), list(model.state_dict())
    seen: list[tuple[str, nn.Module]] = []

    def pooled(layer: nn.Conv2d, x: Tensor) -> Tensor:
        seen.append(("pooled", layer))
        return F.max_pool2d(layer(x).relu(), 2)

    def cut(layer: nn.Conv2d, x: Tensor) -> Tensor:
        seen.append(("cut", layer))
        return layer(x).relu()  # type: ignore[no-any-return]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(network, "conv_relu_pool", pooled)
        patch.setattr(network, "conv_relu", cut)
        torch.testing.assert_close(network.replace_layers(model)(x), expected)
    assert seen == [("pooled", every[0]), ("cut", every[3])]
    assert list(model.state_dict()) == names


@pytest.mark.parametrize(
    "shape",
    [
        ConvShape(50, 128, 3, 32, 32, 6, 5, 5, 1, 0),
        ConvShape(50, 10, 32, 30, 30, 64, 3, 3, 1, 0),
        ConvShape(20, 64, 512, 4, 4, 512, 3, 3, 1, 1),
    ],
)
@pytest.mark.parametrize("task", PLAIN)
def test_proposed_tiles_can_be_launched(task: str, shape: ConvShape) -> None:
    """A tile fits the chip's shared memory and covers whole windows and channel groups."""
    names = list(convolution_cuda.forms(task, shape))
    assert len(names) == len(convolution_cuda.tiles(task, shape)), "every tile has its own name"
    for tile in convolution_cuda.tiles(task, shape):
        assert 0 < tile.shared <= 227 * 1024
        if tile.file == "thin.cu":
            assert tile.own["OCB"] % tile.own["OCT"] == 0 < tile.own["SLICES"]
            assert task == "weight_gradient" or tile.own["PX"] % 2 == 0


def test_no_tile_where_the_kernels_cannot_do_it() -> None:
    assert not convolution_cuda.tiles("convolve", ConvShape(2, 2, 3, 8, 8, 4, 3, 3, 2, 1))
    oblong = ConvShape(2, 2, 3, 8, 8, 4, 3, 5, 1, 1)
    assert convolution_cuda.tiles("convolve", oblong)
    assert not convolution_cuda.tiles("input_gradient", oblong)
    assert not convolution_cuda.tiles("conv_relu_pool", ConvShape(2, 2, 16, 3, 3, 16, 3, 3, 1, 0))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("task", PLAIN)
@pytest.mark.parametrize(
    "shape",
    [ConvShape(4, 5, 3, 13, 12, 6, 5, 5, 1, 0), ConvShape(3, 2, 6, 9, 9, 20, 3, 3, 1, 1)],
)
def test_cuda_kernels_equal_the_plain_form(
    task: str, shape: ConvShape, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    s = shape
    x = torch.randn(s.groups, s.images, s.channels, s.height, s.width, device="cuda")
    w = torch.randn(s.groups, s.out_channels, s.channels, s.kernel_height, s.kernel_width)
    w = w.to("cuda")
    bias = torch.randn(s.groups, s.out_channels, device="cuda")
    gradient = torch.randn_like(PLAIN["convolve"](x, w, s))
    inputs = {
        "convolve": (x, w), "conv_relu": (x, w, bias), "input_gradient": (gradient, w),
        "weight_gradient": (gradient, x), "conv_relu_pool": (x, w, bias),
    }[task]  # fmt: skip
    exact = PLAIN[task](*(t.double() for t in inputs), s)
    for name, form in convolution.forms(task, s).items():
        result = form(*inputs, s)
        ours, theirs = (r[0] if isinstance(r, tuple) else r for r in (result, exact))
        assert (ours - theirs).norm() / theirs.norm() < 1e-6, name


@pytest.mark.parametrize("task", ["input_gradient", "weight_gradient"])
def test_among_fused_kernels_a_form_is_timed_with_the_copies_that_it_needs(task: str) -> None:
    """Elsewhere neighbours use the same order in memory, so it is given images in that."""
    shape = ConvShape(2, 3, 32, 8, 8, 32, 3, 3, 1, 1)
    alone = convolution.forms(task, shape, rounded=True)
    among = convolution.forms(task, shape._replace(fused=True), rounded=True)
    assert {"plain", "last", "matrix"} <= alone.keys() < among.keys()  # alone, these are fastest
    assert {name for name, form in alone.items() if hasattr(form, "arrange")} > {"last"}
    assert not any(hasattr(form, "arrange") for form in among.values())
    images, w = torch.randn(2, 3, 32, 8, 8), torch.randn(2, 32, 32, 3, 3)
    given = (images, w if task == "input_gradient" else images.flip(0), shape)
    made = among["last"](*given)
    assert made.is_contiguous()
    torch.testing.assert_close(made, among["plain"](*given), rtol=1e-4, atol=1e-4)


def test_under_bfloat16_thin_convolutions_are_in_single_precision(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those of many channels are left to the forms for bfloat16."""
    monkeypatch.setattr(conv_relu_pool, "halved_on_cuda", lambda x: True)
    monkeypatch.setattr(conv_relu_pool, "float32_on_cuda", lambda x: False)
    torch.manual_seed(0)
    x = torch.randn(2, 3, 8, 8).bfloat16()
    layer = convolution.StackedConv2d(3, 6, 3)
    exact = F.conv2d(x.float(), layer.weight, layer.bias).relu()
    for run, wanted in (
        (conv_relu_pool.conv_relu, exact),
        (conv_relu_pool.conv_relu_pool, F.max_pool2d(exact, 2)),
    ):
        y = run(layer, x)
        assert y.dtype == torch.float32
        torch.testing.assert_close(y, wanted, rtol=1e-5, atol=1e-5)
    many = convolution.StackedConv2d(64, 64, 3)
    assert conv_relu_pool._fused_padding("conv_relu", many, torch.zeros(2, 64, 8, 8)) is None
    few = convolution.StackedConv2d(32, 64, 3)
    assert conv_relu_pool._fused_padding("conv_relu", few, torch.zeros(2, 32, 8, 8)) == 0
