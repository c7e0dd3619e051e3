"""Stacked group normalisation against torch's own, plain and as the kernels do it."""

from collections.abc import Callable
from typing import Any

import emulate
import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.nn import functional as F

from idiolect.core import network
from idiolect.kernels import autotune, group_norm
from idiolect.kernels.group_norm import GroupNormSizes
from idiolect.kernels.vmap_rules import call
from idiolect.models import MODELS

CLIENTS, IMAGES, CHANNELS, PIXELS, PARTS = 3, 4, 6, 5, 2
Fn = Callable[..., Tensor]


def pair(relu: bool) -> tuple[Fn, Fn]:
    """The layer by our function and by torch's, bent so that all gradients differ."""

    def ours(w: Tensor, b: Tensor, x: Tensor) -> Tensor:
        y = call(group_norm._Normalise, x[None], w[None], b[None], PARTS, 1e-3, relu)[0][0]
        return y.tanh().pow(2).sum()  # type: ignore[no-any-return]

    def theirs(w: Tensor, b: Tensor, x: Tensor) -> Tensor:
        y = F.group_norm(x, PARTS, w, b, 1e-3)
        return (y.relu() if relu else y).tanh().pow(2).sum()

    return ours, theirs


def draw() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    sizes = ((CLIENTS, CHANNELS), (CLIENTS, CHANNELS), (CLIENTS, IMAGES, CHANNELS, PIXELS))
    w, b, x = (torch.randn(size, dtype=torch.float64) for size in sizes)
    return w, b, x


def close(left: Tensor, right: Tensor) -> None:
    assert right.abs().max() > 0.01
    torch.testing.assert_close(left, right, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("argument", [0, 1, 2])
@pytest.mark.parametrize("shared", [(), (0, 1), (2,), (1,)])
@pytest.mark.parametrize("relu", [False, True])
def test_gradients(relu: bool, argument: int, shared: tuple[int, ...]) -> None:
    """Factors and images may each be everyone's own or the same for all."""
    given = [t[0] if n in shared else t for n, t in enumerate(draw())]
    dims = tuple(None if n in shared else 0 for n in range(3))
    close(*(vmap(grad(fn, argument), dims)(*given) for fn in pair(relu)))
    close(*(vmap(fn, dims)(*given) for fn in pair(relu)))


@pytest.mark.parametrize("argument", [0, 1, 2])
@pytest.mark.parametrize("relu", [False, True])
def test_second_derivatives(relu: bool, argument: int) -> None:
    def bend(fn: Fn) -> Fn:
        def curved(*given: Tensor) -> Tensor:
            return sum((s.pow(3).sum() for s in grad(fn, (0, 1, 2))(*given)), torch.zeros(()))

        return grad(curved, argument)

    close(*(vmap(bend(fn))(*draw()) for fn in pair(relu)))


@pytest.fixture
def everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the layers do on a CPU what they do in single precision on CUDA, in the plain form."""
    monkeypatch.setattr(group_norm, "float32_on_cuda", lambda x: True)


@pytest.mark.usefixtures("everywhere")
@pytest.mark.parametrize("name", ["resnet18", "shufflenet"])
def test_networks_are_the_same(name: str) -> None:
    """Alone and followed by ReLU, in a row and not; the logits and gradients are torch's."""
    torch.manual_seed(0)
    options = {"width": 8} if name == "resnet18" else {"width": 0.5}
    model = MODELS[name]((1, 8, 8), 3, **options).double()
    for layer in model.modules():
        if isinstance(layer, nn.GroupNorm):
            layer.weight.data.normal_()
            layer.bias.data.normal_()
    x = torch.randn(2, 1, 8, 8, dtype=torch.float64)

    def seen() -> list[Tensor]:
        gradients = torch.autograd.grad(model(x).pow(2).sum(), list(model.parameters()))
        return [model(x), *gradients]

    expected = seen()
    network.replace_layers(model)
    assert any(isinstance(layer, group_norm.StackedGroupNorm) for layer in model.modules())
    for left, right in zip(seen(), expected, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-7, atol=1e-9)


@pytest.mark.usefixtures("everywhere")
def test_relu_is_part_of_it() -> None:
    model = nn.Sequential(nn.GroupNorm(2, 4), nn.ReLU(), nn.GroupNorm(1, 4))
    x = torch.randn(3, 4, 5, 5)
    expected = model(x)
    met: list[bool] = []
    network.replace_layers(model)

    def note(
        layer: nn.GroupNorm, x: Tensor, relu: bool, own: Fn = group_norm._normalised
    ) -> Tensor:
        met.append(relu)
        return own(layer, x, relu)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(group_norm, "_normalised", note)
        torch.testing.assert_close(model(x), expected)
    assert met == [True, False]


def test_plain_layers_alone_are_replaced() -> None:
    class Own(nn.GroupNorm):
        pass

    model = nn.Sequential(nn.GroupNorm(2, 4), nn.GroupNorm(2, 4, affine=False), Own(2, 4))
    quick = [type(layer) is group_norm.StackedGroupNorm for layer in network.replace_layers(model)]
    assert quick == [True, False, False]


SHAPES = [
    GroupNormSizes(2, 3, 8, 49, 8, 1e-5, False),  # a channel by itself
    GroupNormSizes(2, 2, 6, 64, 2, 1e-5, True),
    GroupNormSizes(1, 2, 20, 3, 1, 1e-2, True),  # more channels than warps, few pixels
    GroupNormSizes(3, 1, 4, 700, 2, 1e-5, False),
]


@pytest.mark.skipif(emulate.COMPILER is None, reason="needs g++ to run CUDA sources")
@pytest.mark.parametrize("least", [0, 1])
@pytest.mark.parametrize("sizes", SHAPES)
def test_kernels_equal_the_plain_form(
    sizes: GroupNormSizes, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a block holds what it has read."""
    emulate.use(monkeypatch)
    torch.manual_seed(0)
    images = (sizes.groups, sizes.images, sizes.channels, sizes.pixels)
    x, gradient = torch.randn(images) + 3, torch.randn(images)
    w, b = torch.randn(2, sizes.groups, sizes.channels)
    got = group_norm.cuda_normalise(x, w, b, sizes, least=least)
    exact = group_norm.plain_normalise(x.double(), w.double(), b.double(), sizes)
    own = (gradient, x, w, got[1], got[2], got[0], b)
    further = group_norm.cuda_gradient(*own, sizes, least=least)
    doubles = (t.double() for t in own)
    for left, right in zip(
        (*got, *further), (*exact, *group_norm.plain_gradient(*doubles, sizes)), strict=True
    ):
        assert (left - right).norm() / right.norm() < 2e-6
    assert not sizes.relu or 0 < float((got[0] == 0).float().mean()) < 1


@pytest.mark.skipif(emulate.COMPILER is None, reason="needs g++ to run CUDA sources")
@pytest.mark.parametrize("least", [0, 1])
def test_a_gradient_is_read_where_it_is(least: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every other channel of larger images, as after a shuffle of channels."""
    emulate.use(monkeypatch)
    torch.manual_seed(0)
    sizes = GroupNormSizes(2, 3, 6, 64, 2, 1e-5, True)
    x, whole = torch.randn(2, 3, 6, 64), torch.randn(2, 3, 6, 2, 64)
    w, b = torch.randn(2, 2, 6)
    y, mean, scale = group_norm.plain_normalise(x, w, b, sizes)
    for gradient in (
        whole[:, :, :, 1],
        whole[:, :, :3].flatten(2, 3),
        whole[:, :1, :, 0].expand_as(x),
    ):
        made = group_norm.cuda_gradient(gradient, x, w, mean, scale, y, b, sizes, least=least)
        exact = group_norm.plain_gradient(gradient, x, w, mean, scale, y, b, sizes)
        for left, right in zip(made, exact, strict=True):
            torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-4)
    assert group_norm._readable(whole[:, :, :, 1])
    assert not group_norm._readable(whole[:, :1, :, 0].expand_as(x))


@pytest.mark.skipif(emulate.COMPILER is None, reason="needs g++ to run CUDA sources")
def test_what_is_no_number_stays_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken client must be found out, and leave the others alone."""
    emulate.use(monkeypatch)
    sizes = GroupNormSizes(2, 1, 2, 4, 1, 1e-5, True)
    x = torch.randn(2, 1, 2, 4)
    x[0, 0, 0, 0] = torch.nan
    y, _, _ = group_norm.cuda_normalise(x, torch.ones(2, 2), torch.zeros(2, 2), sizes)
    assert y[0].isnan().all() and y[1].isfinite().all()


@pytest.mark.skipif(emulate.COMPILER is None, reason="needs g++ to run CUDA sources")
@pytest.mark.parametrize("least", [0, 32])
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize(
    "sizes",
    [
        GroupNormSizes(3, 2, 8, 49, 2, 1e-5, True),
        GroupNormSizes(2, 1, 32, 70, 1, 1e-5, False),
        GroupNormSizes(2, 2, 6, 20, 2, 1e-5, True),  # a channel for a thread
        GroupNormSizes(2, 2, 64, 80, 4, 1e-5, True),  # 8, or 4, for a thread
        GroupNormSizes(1, 1, 290, 4, 2, 1e-5, True),  # no block has so many threads
    ],
)
def test_kernels_with_channels_last_and_bfloat16(
    sizes: GroupNormSizes, half: bool, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order in memory is kept where the kernels suit it, and precision that of the images.

    A block has all of an image, or some pieces that it holds (`least` bytes of a pixel).
    """
    emulate.use(monkeypatch)
    torch.manual_seed(0)
    groups, images, channels, pixels, *_ = sizes
    x = group_norm._ordered_last(torch.randn(groups, images, channels, pixels))
    x = x.bfloat16() if half else x
    w, b = torch.randn(groups, channels), torch.randn(groups, channels)
    suits = groups > 1
    made = group_norm.cuda_normalise(x, w, b, sizes, least=least)
    exact = group_norm.plain_normalise(x, w, b, sizes)
    assert (made[0].stride() == x.stride()) is suits and made[0].dtype == x.dtype
    for left, right in zip(made, exact, strict=True):
        near = 1e-2 if left.dtype == torch.bfloat16 else 1e-4
        torch.testing.assert_close(left, right, rtol=near, atol=near / 10)
    given = (torch.randn_like(exact[0]), x, w, *made[1:], made[0], b)
    got = group_norm.cuda_gradient(*given, sizes, least=least)
    wanted = group_norm.plain_gradient(*given, sizes)
    assert got[0].dtype == wanted[0].dtype == x.dtype
    assert (got[0].stride() == x.stride()) is suits
    for left, right in zip(got, wanted, strict=True):
        near = 1e-2 if left.dtype == torch.bfloat16 else 1e-4
        torch.testing.assert_close(left, right, rtol=near, atol=near)


def test_bfloat16_is_rounded_to_the_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    """To the bit as torch rounds: factors of one and pieces of one leave the gradient's own."""
    if emulate.COMPILER is None:
        pytest.skip("needs g++ to run CUDA sources")
    emulate.use(monkeypatch)
    torch.manual_seed(0)
    sizes = GroupNormSizes(1, 1, 2, 600, 1, 1e-5, False)
    x, g = torch.zeros(1, 1, 2, 600).bfloat16(), torch.randn(1, 1, 2, 600)
    g[0, 0, 0, :3] = torch.tensor([float("nan"), float("inf"), 1.0])
    mean, scale = torch.zeros(1, 1, 1), torch.ones(1, 1, 1)
    given = (x, torch.ones(1, 2), mean, scale, x.float(), torch.zeros(1, 2), sizes)
    got = group_norm.cuda_gradient(g, *given)[0]
    assert bool(got.isnan().all())  # what is no number is not lost
    g = torch.randn(1, 1, 2, 600).bfloat16()
    got = group_norm.cuda_gradient(g, *given)[0]
    level = g.double().mean().float()
    assert (
        float((got != (g.float() - level).bfloat16()).float().mean()) < 0.02
    )  # the mean's own rounding


def test_the_kernel_for_channels_last_is_compared_for_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A form that is right in the plain order says nothing about the other order's kernel."""
    emulate.use(monkeypatch)
    sizes, asked = GroupNormSizes(3, 2, 8, 49, 2, 1e-5, True), list[str]()

    def by_kernel(task: str, sizes: GroupNormSizes, forms: Any, *inputs: Any) -> Any:
        asked.append(task)
        return forms()["norm"](*autotune.random_like((*inputs, sizes)))

    monkeypatch.setattr(group_norm, "fastest", by_kernel)
    x, w, b = torch.randn(3, 2, 8, 49), torch.randn(3, 8), torch.randn(3, 8)
    for images in (x, group_norm._ordered_last(x)):
        y, mean, scale = group_norm._fastest("normalise", sizes, images, w, b)
        dx, *_ = group_norm._fastest("gradient", sizes, y, images, w, mean, scale, y, b)
        assert dx.stride() == y.stride() == images.stride()
    last = ["normalise, channels last", "gradient, channels last"]
    assert asked == ["normalise", "gradient", *last]


def test_what_relu_cut_off_is_seen_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel makes y anew, the plain form reads it: of random inputs it is what it would be."""
    emulate.use(monkeypatch)
    sizes = GroupNormSizes(2, 3, 6, 64, 2, 1e-5, True)
    images, factors, pieces = torch.empty(2, 3, 6, 64), torch.empty(2, 6), torch.empty(2, 3, 2)
    given = (images, images, factors, pieces, pieces, images.clone(), factors, sizes)
    known = group_norm.forms("gradient", sizes, images, False)
    assert autotune._holds(known, "norm", given) and autotune._holds(known, "held", given)
    drawn = autotune.random_like(given)
    assert 0.2 < float((drawn[5] == 0).float().mean()) < 0.8
    assert autotune.random_like((images, factors, sizes))[1].shape == factors.shape
    monkeypatch.setattr(GroupNormSizes, "related", lambda self, inputs: inputs)
    assert not autotune._holds(known, "norm", given)


def test_which_blocks_hold_their_pixels() -> None:
    """Those of few pixels, of as many pieces as fill the bytes that memory gives at once."""
    x = group_norm._ordered_last(torch.randn(2, 1, 64, 1024)).bfloat16()
    sizes = GroupNormSizes(2, 1, 64, 1024, 8, 1e-5, True)
    assert group_norm._block(x, sizes) == (64, 8)
    assert group_norm._block(x, sizes, 32) == (256, 2)
    assert list(group_norm.forms("gradient", sizes, x, True)) == [
        "plain", "norm", "held 32", "held 64"
    ]  # fmt: skip
    assert list(group_norm.forms("gradient", sizes, x, False)) == ["plain", "norm", "held"]
    long = sizes._replace(pixels=4096)
    assert list(group_norm.forms("gradient", long, x, True)) == ["plain", "norm"]
    one = sizes._replace(channels=512, pixels=16)  # a piece has 128 bytes
    assert list(group_norm.forms("gradient", one, x, True)) == ["plain", "norm", "held 32"]
