"""Convolutions on matrix units with channels last against the grouped convolution."""

import emulate
import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap

from convolutions import operands
from idiolect.kernels import convolution, convolution_last, group_norm, weight_order
from idiolect.kernels.convolution import PLAIN, forms
from idiolect.kernels.convolution_cuda import ConvShape
from idiolect.kernels.vmap_rules import call

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
    shape: ConvShape, kind: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As near as TF32, or the rounding of the result, allows; images stay with channels last."""
    emulate.use(monkeypatch)
    s, near = shape, 2e-3 if kind == torch.bfloat16 else 4e-4
    for task, given in operands(s, kind).items():
        exact = PLAIN[task](*(one.double() for one in given), s)
        found = list(convolution_last.forms(task, s).values())
        assert found or (task == "input_gradient" and s.channels == 3)
        for form in found if kind == torch.bfloat16 else found[-1:]:
            got = form(*given, s)
            assert got.dtype == (torch.float32 if task == "weight_gradient" else kind)
            assert got.shape == exact.shape
            assert float((got - exact).norm() / exact.norm()) < near, task
            if task == "convolve":
                assert torch.equal(form(*form.arrange((*given, s))), got)
                assert got.stride()[2] == 1


def test_all_layers_of_a_network_are_few_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiling takes longest: for each task and precision there are four kernels at most."""
    seen = set()

    def launch(file: str, name: str, constants: dict[str, int | str], *_: object) -> None:
        seen.add((name, *constants.items()))

    monkeypatch.setattr(convolution_last, "launch", launch)
    monkeypatch.setattr(weight_order, "launch", lambda *_: None)
    for s in SHAPES:
        for task, given in operands(s, torch.float32).items():
            for form in convolution_last.forms(task, s).values():
                form(*given, s)
    assert len(seen) == 10 - 2  # no layer here has more than 64 input channels


def test_clients_stay_groups_where_all_share_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the first step, so that what is copied for none of the later ones is not for it."""
    seen, own = [], convolution.fastest_form
    for module, name in ((convolution, "fastest_form"), (group_norm, "_fastest")):
        own = getattr(module, name)
        monkeypatch.setattr(
            module, name, lambda task, s, *given, own=own: seen.append(s) or own(task, s, *given)
        )
    torch.manual_seed(0)
    x, w = torch.randn(3, 2, 16, 4, 4), torch.randn(16, 16, 3, 3)

    def loss(w: Tensor, x: Tensor) -> Tensor:
        step = (1, 1, False, False)
        y = call(convolution._Convolve, x[None], w[None], *step)
        ones = torch.ones(1, 16)
        y = call(group_norm._Normalise, y.flatten(3), ones, ones, 4, 1e-5, True)[0]
        y = call(convolution._Convolve, y.view(1, *x.shape), w[None], *step)
        return y.pow(2).sum()

    found = []
    for rounded in (False, True):
        monkeypatch.setattr(convolution, "_rounded", lambda images, own=rounded: own)
        seen.clear()
        found.append(vmap(grad(loss), (None, 0))(w, x))
        many = {s.groups for s in seen[:3]}  # going forward
        assert many == ({3} if rounded else {1})
    torch.testing.assert_close(*found)


def test_only_where_products_may_be_rounded() -> None:
    shape = ConvShape(4, 8, 64, 8, 8, 64, 3, 3, 1, 1)
    assert not any("matrix" in name for name in forms("convolve", shape))
    assert any("matrix" in name for name in forms("convolve", shape, rounded=True))
    assert not any("tensor" in name for name in forms("convolve", shape, rounded=True))
    depthwise = ConvShape(4, 8, 64, 8, 8, 64, 3, 3, 1, 1, True)
    assert convolution_last.forms("convolve", depthwise) == {}
    assert convolution_last.forms("conv_relu", shape) == {}
    assert convolution_last.forms("convolve", shape._replace(out_channels=20)) == {}


@pytest.mark.skipif(emulate.COMPILER is None, reason="needs g++ to run CUDA sources")
@pytest.mark.parametrize("task", ["convolve", "weight_gradient"])
def test_rounded_products_see_nan_of_all_bits(task: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a GPU makes it: adding half a unit to its bits would make it -0."""
    emulate.use(monkeypatch)
    s = ConvShape(1, 1, 16, 5, 5, 16, 3, 3, 1, 1)
    x, w = torch.ones(1, 1, 16, 5, 5), torch.ones(1, 16, 16, 3, 3)
    x.view(torch.int32)[0, 0, 0, 2, 2] = 0x7FFFFFFF
    form = list(convolution_last.forms(task, s).values())[-1]
    made = form(x, w if task == "convolve" else torch.ones_like(x), s)
    assert made.isnan().any()
