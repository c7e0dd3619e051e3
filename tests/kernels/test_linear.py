"""Stacked dense layers against torch's own, plain and as the kernels do it."""

from collections.abc import Callable

import emulate
import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.nn import functional as F

from idiolect.core import network
from idiolect.kernels import linear
from idiolect.kernels.linear import LinearSizes
from idiolect.kernels.vmap_rules import call

CLIENTS, EXAMPLES, INSIDE, OUTSIDE = 3, 4, 6, 5
Fn = Callable[..., Tensor]


def ours(w: Tensor, b: Tensor, x: Tensor) -> Tensor:
    y = call(linear._Linear, x[None], w[None], b[None])[0]
    return y.tanh().pow(2).sum()  # type: ignore[no-any-return]


def theirs(w: Tensor, b: Tensor, x: Tensor) -> Tensor:
    return F.linear(x, w, b).tanh().pow(2).sum()


def ours_relu(w: Tensor, b: Tensor, x: Tensor) -> Tensor:
    y = call(linear._LinearReLU, x[None], w[None], b[None])[0]
    return y.tanh().pow(2).sum()  # type: ignore[no-any-return]


def theirs_relu(w: Tensor, b: Tensor, x: Tensor) -> Tensor:
    return F.linear(x, w, b).relu().tanh().pow(2).sum()


PAIRS = [(ours, theirs), (ours_relu, theirs_relu)]


def draw() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    sizes = ((CLIENTS, OUTSIDE, INSIDE), (CLIENTS, OUTSIDE), (CLIENTS, EXAMPLES, INSIDE))
    w, b, x = (torch.randn(size, dtype=torch.float64) for size in sizes)
    return w, b, x


def close(left: Tensor, right: Tensor) -> None:
    assert right.abs().max() > 0.01
    torch.testing.assert_close(left, right, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("argument", [0, 1, 2])
@pytest.mark.parametrize("shared", [(), (0, 1), (2,), (1,)])
@pytest.mark.parametrize("pair", PAIRS)
def test_gradients(pair: tuple[Fn, Fn], argument: int, shared: tuple[int, ...]) -> None:
    """Weights, biases and examples may each be everyone's own or the same for all."""
    given = [t[0] if n in shared else t for n, t in enumerate(draw())]
    dims = tuple(None if n in shared else 0 for n in range(3))
    close(*(vmap(grad(fn, argument), dims)(*given) for fn in pair))


@pytest.mark.parametrize("argument", [0, 1, 2])
@pytest.mark.parametrize("pair", PAIRS)
def test_second_derivatives(pair: tuple[Fn, Fn], argument: int) -> None:
    def bend(fn: Fn) -> Fn:
        def curved(*given: Tensor) -> Tensor:
            return sum((s.pow(3).sum() for s in grad(fn, (0, 1, 2))(*given)), torch.zeros(()))

        return grad(curved, argument)

    close(*(vmap(bend(fn))(*draw()) for fn in pair))


def test_a_grid_inside_the_stack() -> None:
    _, b, x = draw()
    cells = torch.randn(CLIENTS, 2, OUTSIDE, INSIDE, dtype=torch.float64)

    def grid(fn: Fn) -> Tensor:
        return vmap(lambda w, b, x: vmap(grad(fn), (0, None, None))(w, b, x))(cells, b, x)

    close(grid(ours), grid(theirs))


def test_a_layer_and_relu_at_once() -> None:
    """In a row they are found; alone, shapes of any kind are torch's own."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    x = torch.randn(5, 3)
    expected, deep = model(x), model(x[None])
    network.replace_layers(model)
    assert torch.equal(model(x), expected) and torch.equal(model(x[None]), deep)
    first = model[0]
    together = vmap(lambda x: linear.linear_relu(first, x))(x[None].expand(2, 5, 3))  # type: ignore[arg-type]
    torch.testing.assert_close(together[1], first(x).relu())
    assert (together == 0).any() and (together > 0).any()


def test_plain_layers_alone_are_replaced() -> None:
    class Own(nn.Linear):
        pass

    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2, bias=False), Own(2, 2))
    x = torch.randn(4, 5, 3)
    expected = model(x)
    quick = [type(layer) is linear.StackedLinear for layer in network.replace_layers(model)]
    assert quick == [True, False, False]
    assert torch.equal(model(x), expected)


@pytest.mark.skipif(emulate.COMPILER is None, reason="needs g++ to run CUDA sources")
@pytest.mark.parametrize(
    "task",
    ["forward", "relu", "products", "input_gradient", "added_gradient", "weight_gradient"],
)
@pytest.mark.parametrize(
    "sizes",
    [
        LinearSizes(2, 5, 136, 9),
        LinearSizes(2, 23, 37, 10),
        LinearSizes(1, 3, 516, 1),
        LinearSizes(2, 5, 196, 133),
        LinearSizes(1, 12, 37, 130),
    ],
)
def test_kernels_equal_the_plain_form(
    sizes: LinearSizes, task: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulate.use(monkeypatch)
    torch.manual_seed(0)
    groups, examples, inside, outside = sizes
    many = torch.randn(groups, 2, examples, inside)
    x = many[:, 1]  # a step of several that were taken at once: groups lie apart
    w, b = torch.randn(groups, outside, inside), torch.randn(groups, outside)
    gradient = torch.randn(groups, examples, outside)
    lines = torch.randn(outside + 1, groups, inside)[:outside].transpose(0, 1)  # groups in between
    inputs = {
        "forward": (x, w, b),
        "relu": (x, w, b),
        "products": (x, lines),
        "input_gradient": (gradient, w),
        "added_gradient": (gradient, lines, torch.randn(groups, examples, inside)),
        "weight_gradient": (gradient, x),
    }[task]
    forms = linear.forms(task, sizes)
    exact = forms.pop("plain")(*(t.double() for t in inputs), sizes)
    assert forms
    for name, form in forms.items():
        got = form(*inputs, sizes)
        pairs = zip(got, exact, strict=True) if task == "weight_gradient" else [(got, exact)]
        for left, right in pairs:
            assert (left - right).norm() / right.norm() < 1e-6, name


@pytest.mark.skipif(emulate.COMPILER is None, reason="needs g++ to run CUDA sources")
def test_what_is_no_number_stays_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch's ReLU does: a broken client must be found out."""
    emulate.use(monkeypatch)
    sizes = LinearSizes(1, 2, 8, 3)
    x, w, b = torch.randn(1, 2, 8), torch.randn(1, 3, 8), torch.randn(1, 3)
    x[0, 1, 4] = float("nan")
    for name, form in linear.forms("relu", sizes).items():
        broken = form(x, w, b, sizes).isnan()
        assert not broken[0, 0].any() and broken[0, 1].all(), name


@pytest.mark.parametrize("examples", [4, 65])
def test_with_few_examples_weights_are_not_rounded_to_bfloat16(
    examples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading them is what takes time; with many, products are as torch's autocast has them."""
    for name in ("_on_cuda", "halved_on_cuda"):
        monkeypatch.setattr(linear, name, lambda x: True)
    torch.manual_seed(0)
    layer, x = linear.StackedLinear(INSIDE, OUTSIDE), torch.randn(CLIENTS, examples, INSIDE)
    kind = torch.bfloat16 if examples > 64 else torch.float32
    half = x.bfloat16()
    for run, plain in ((layer, layer), (lambda x: linear.linear_relu(layer, x), nn.ReLU())):
        y = vmap(run)(half)
        assert y.dtype == kind
        exact = F.linear(half.double(), layer.weight.double(), layer.bias.double())
        exact = exact if plain is layer else exact.relu()
        assert (y.double() - exact).norm() < (
            1e-2 if kind == torch.bfloat16 else 1e-6
        ) * exact.norm()
    slope = grad(lambda w: linear.stacked_linear(x[0], w, layer.bias).float().square().sum())
    assert slope(layer.weight.detach()).dtype == torch.float32
