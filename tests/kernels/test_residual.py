"""Residual sums merged with the normalisations beside them, against torch's own networks."""

import copy
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import emulate
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

from idiolect.core.network import Network
from idiolect.kernels import convolution, convolution_library, group_norm, residual
from idiolect.kernels.deferred import DeferredTensor, computed
from idiolect.kernels.group_norm import GroupNormSizes

CLIENTS, IMAGES, CHANNELS, SIDE = 3, 2, 4, 6
Join = Callable[[Tensor, Tensor], Tensor]


@pytest.fixture
def tasks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Let networks on a CPU do what they do on a GPU, with channels last; note normalisations.

    So in double precision and in the plain forms.
    """
    done: list[str] = []
    own, normal = convolution.fastest_form, group_norm._fastest

    def last(task: str, *given: Any) -> Tensor:
        made: Tensor = own(task, *given)
        return made if task == "weight_gradient" else convolution_library.all_last(made)

    def noted(task: str, *given: Any) -> Any:
        done.append(task)
        first, *rest = normal(task, *given)
        return group_norm._ordered_last(first), *rest

    for module in (group_norm, convolution):
        monkeypatch.setattr(module, "float32_on_cuda", lambda x: True)
    monkeypatch.setattr(residual, "_suits", lambda x: True)
    monkeypatch.setattr("idiolect.core.network.merges_on", lambda x: residual._ON)
    monkeypatch.setattr(convolution, "fastest_form", last)
    monkeypatch.setattr(group_norm, "_fastest", noted)
    yield done


class Block(nn.Module):
    """A residual block in one of the ways in which people write them."""

    def __init__(
        self, joined: Join, carried: nn.Module, stride: int, inside: int = CHANNELS
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, CHANNELS, 3, stride, 1, bias=False)
        self.norm1 = nn.GroupNorm(2, CHANNELS)
        self.conv2 = nn.Conv2d(CHANNELS, CHANNELS, 3, 1, 1, bias=False)
        self.norm2 = nn.GroupNorm(2, CHANNELS)
        self.carried, self.joined = carried, joined

    def forward(self, x: Tensor) -> Tensor:
        found = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return self.joined(found, self.carried(x))


class PreActivated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(2, CHANNELS), nn.GroupNorm(2, CHANNELS)
        self.conv1 = nn.Conv2d(CHANNELS, CHANNELS, 3, 1, 1)
        self.conv2 = nn.Conv2d(CHANNELS, CHANNELS, 3, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv2(self.norm2(self.conv1(self.norm1(x).relu())).relu())


def in_place(found: Tensor, carried: Tensor) -> Tensor:
    found += carried
    return F.relu(found, inplace=True)


def changed(found: Tensor, carried: Tensor) -> Tensor:
    """What waits is made of something that is changed before it is read."""
    carried = carried * 1
    both = found + carried
    carried.mul_(2)
    return both.relu() + carried


JOINS: dict[str, Join] = {
    "plain": lambda found, carried: (found + carried).relu(),
    "turned": lambda found, carried: F.relu(torch.add(carried, found)),
    "in place": in_place,
    "no relu": lambda found, carried: found + carried,
    "used twice": lambda found, carried: (found + carried).relu() * found.sigmoid() + found,
    "twice the same": lambda found, carried: (found + found).relu() + carried,
    "both sums": lambda found, carried: (found + carried).relu() + (found + carried),
    "twice": lambda found, carried: (found + carried + carried).relu(),
    "relu first": lambda found, carried: found.relu() + carried,
    "relu in place": lambda found, carried: carried + found.relu_(),
    "into carried": lambda found, carried: (carried * 1).add_(found).relu(),
    "weighed": lambda found, carried: torch.add(found, carried, alpha=0.5).relu(),
    "broadcast": lambda found, carried: (
        (found + carried[:, :1]).relu() + carried.mean((2, 3), True)
    ),
    "other order": lambda found, carried: (found + carried.contiguous()).relu(),
    "part": lambda found, carried: F.pad(
        (found[:, 1:] + carried[:, 1:]).relu(), (0, 0, 0, 0, 0, 1)
    ),
    "clamped": lambda found, carried: (found + carried).clamp(min=0, max=2),
    "changed": changed,
}


def network(join: Join, kind: str) -> nn.Module:
    def carried(stride: int) -> nn.Module:
        conv = nn.Conv2d(CHANNELS, CHANNELS, 1, stride, bias=False)
        if kind == "identity" or (kind != "norm" and stride == 1):
            return nn.Identity()
        return conv if kind == "conv" else nn.Sequential(conv, nn.GroupNorm(2, CHANNELS))

    strides = (1, 1) if kind == "identity" else (1, 2)
    blocks = [Block(join, carried(stride), stride) for stride in strides]
    enter = [nn.Conv2d(1, CHANNELS, 3, 1, 1), nn.GroupNorm(2, CHANNELS), nn.ReLU()]
    return nn.Sequential(*enter, *blocks, nn.Flatten(), nn.LazyLinear(3))


def compare(model: nn.Module, merged: Callable[[], None] = lambda: None) -> None:
    """A network's logits and gradients are those of torch's, of each client by itself."""
    torch.manual_seed(0)
    model.double()
    x = torch.randn(CLIENTS, IMAGES, 1, SIDE, SIDE, dtype=torch.float64)
    model(x[0])
    ours = Network(copy.deepcopy(model))
    params = {
        name: torch.randn(CLIENTS, *leaf.shape, dtype=torch.float64)
        for name, leaf in ours.params.items()
    }

    def loss(own: dict[str, Tensor], x: Tensor) -> Tensor:
        return ours(own, x, training=True).sin().sum()

    def exact(own: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(model, own, (x,)).sin().sum()

    for mine, theirs in ((loss, exact), (grad(loss), grad(exact)), (grad(loss, 1), grad(exact, 1))):
        made = vmap(mine)(params, x)
        for n in range(CLIENTS):
            own = theirs({name: leaf[n] for name, leaf in params.items()}, x[n])
            some = (
                {name: leaf[n] for name, leaf in made.items()}
                if isinstance(made, dict)
                else made[n]
            )
            torch.testing.assert_close(some, own, rtol=1e-10, atol=1e-10)
    with torch.no_grad():
        logits = vmap(lambda own, x: ours(own, x, training=False))(params, x)
    for n in range(CLIENTS):
        own = functional_call(
            model.eval(), {name: leaf[n] for name, leaf in params.items()}, (x[n],)
        )
        torch.testing.assert_close(logits[n], own, rtol=1e-10, atol=1e-10)


CASES = [(join, "conv") for join in JOINS] + [
    (join, kind) for join in ("plain", "in place", "used twice") for kind in ("identity", "norm")
]


@pytest.mark.parametrize(("join", "kind"), CASES)
def test_networks_are_the_same(join: str, kind: str, tasks: list[str]) -> None:
    compare(network(JOINS[join], kind))


def test_pre_activation_is_the_same(tasks: list[str]) -> None:
    """The sum, of no normalisation, goes to one and to the next sum."""
    enter = nn.Conv2d(1, CHANNELS, 3, 1, 1)
    blocks = [PreActivated(), PreActivated()]
    compare(
        nn.Sequential(enter, *blocks, nn.GroupNorm(2, CHANNELS), nn.Flatten(), nn.LazyLinear(3))
    )
    assert "cut gradient" in tasks


@pytest.mark.parametrize("join", ["plain", "in place"])
def test_second_derivatives(join: str, tasks: list[str]) -> None:
    torch.manual_seed(0)
    model = network(JOINS[join], "conv").double()
    x = torch.randn(CLIENTS, IMAGES, 1, SIDE, SIDE, dtype=torch.float64)
    model(x[0])
    ours = Network(copy.deepcopy(model))
    params = {name: leaf.expand(CLIENTS, *leaf.shape) for name, leaf in ours.params.items()}

    def bend(run: Callable[..., Tensor]) -> Callable[..., dict[str, Tensor]]:
        def curved(own: dict[str, Tensor], x: Tensor) -> Tensor:
            slopes = grad(lambda own: run(own, x).sin().sum())(own)
            return sum((one.pow(2).sum() for one in slopes.values()), torch.zeros(()))

        return grad(curved)

    made = vmap(bend(lambda own, x: ours(own, x, training=True)))(params, x)
    for n in range(CLIENTS):
        own = {name: leaf[n] for name, leaf in params.items()}
        exact = bend(lambda own, x: functional_call(model, own, (x,)))(own, x[n])
        for name, leaf in exact.items():
            torch.testing.assert_close(made[name][n], leaf, rtol=1e-8, atol=1e-9)
    assert "cut gradient of a sum" in tasks


def test_it_can_be_switched_off(tasks: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residual, "_ON", False)
    compare(network(JOINS["plain"], "conv"))
    compare(network(in_place, "conv"))
    assert {*tasks} == {"normalise", "gradient"}


def test_nothing_waits_when_a_network_has_run(tasks: list[str]) -> None:
    """Not even where it fails, or keeps what it has made."""
    kept: list[Tensor] = []

    def keeping(found: Tensor, carried: Tensor) -> Tensor:
        kept.append(found)
        return found + carried

    ours = Network(nn.Sequential(*[*network(keeping, "identity")][:4]))
    x = torch.randn(CLIENTS, IMAGES, 1, SIDE, SIDE)
    params = {name: leaf.expand(CLIENTS, *leaf.shape) for name, leaf in ours.params.items()}
    made = vmap(lambda own, x: ours(own, x, training=False))(params, x)
    assert isinstance(made, DeferredTensor) and not made.deferred.waits
    below = torch._C._functorch.get_unwrapped(kept[0])
    assert isinstance(below, DeferredTensor) and not below.deferred.waits
    with pytest.raises(ZeroDivisionError), residual.Residuals():
        raise ZeroDivisionError
    assert residual._within.now is None


def test_what_waits_where_a_network_fails_can_still_be_read(tasks: list[str]) -> None:
    """And added to: there is no network any more in which the sum could wait."""
    kept: list[Tensor] = []

    def failing(found: Tensor, carried: Tensor) -> Tensor:
        kept.append(found)
        raise ZeroDivisionError

    ours = Network(nn.Sequential(*[*network(failing, "identity")][:4]))
    x = torch.randn(CLIENTS, IMAGES, 1, SIDE, SIDE)
    params = {name: leaf.expand(CLIENTS, *leaf.shape) for name, leaf in ours.params.items()}
    with pytest.raises(ZeroDivisionError):
        vmap(lambda own, x: ours(own, x, training=False))(params, x)
    found = torch._C._functorch.get_unwrapped(kept[0])
    assert isinstance(found, DeferredTensor) and found.deferred.waits
    other = convolution_library.all_last(torch.randn(found.shape))
    torch.testing.assert_close((found + other).relu(), (found * 1 + other).relu())


def test_only_networks_of_many_clients_are_watched() -> None:
    """A client by itself has nothing to merge, and operators of higher order fail if watched."""
    x: Any = SimpleNamespace(is_cuda=True)
    asked: list[bool] = []

    def network(given: Tensor) -> Tensor:
        asked.append(residual.merges_on(x))
        return given * 1

    vmap(network)(torch.zeros(2))
    grad(network)(torch.zeros(()))
    network(torch.zeros(2))
    assert asked == [True, False, False]


def test_sums_and_relu_are_merged(tasks: list[str]) -> None:
    """Of two blocks: forward each has a sum; back there are the masks and sums of gradients."""
    model = network(JOINS["plain"], "identity").double()
    x = torch.randn(CLIENTS, IMAGES, 1, SIDE, SIDE, dtype=torch.float64)
    model(x[0])
    ours = Network(model)
    params = {name: leaf.expand(CLIENTS, *leaf.shape) for name, leaf in ours.params.items()}
    vmap(grad(lambda own, x: ours(own, x, training=True).sum()))(params, x)
    assert tasks == [
        "normalise", *["normalise", "normalise and add"] * 2, "gradient",  # of a dense layer's
        "cut gradient", "cut gradient of a sum", "cut gradient", "gradient of a sum",
    ]  # fmt: skip


SHAPES = [
    GroupNormSizes(3, 2, 8, 49, 2, 1e-5, True),
    GroupNormSizes(2, 1, 64, 192, 4, 1e-5, False),  # three pixels for a thread
    GroupNormSizes(2, 2, 6, 20, 2, 1e-5, True),  # a channel for a thread
]


def drawn(sizes: GroupNormSizes, kind: torch.dtype) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    images = (sizes.groups, sizes.images, sizes.channels, sizes.pixels)
    return tuple(group_norm._ordered_last(torch.randn(images)).to(kind) for _ in range(4))


def near(made: tuple[Tensor, ...], exact: tuple[Tensor, ...]) -> None:
    for left, right in zip(made, exact, strict=True):
        assert left.dtype == right.dtype
        off = 1e-2 if left.dtype == torch.bfloat16 else 1e-4
        torch.testing.assert_close(left, right, rtol=off, atol=off)


@pytest.mark.skipif(emulate.COMPILER is None, reason="needs g++ to run CUDA sources")
@pytest.mark.parametrize(
    ("sizes", "kind", "least"),
    [
        (SHAPES[0], torch.bfloat16, 0),
        (SHAPES[0], torch.float32, 32),
        (SHAPES[1], torch.bfloat16, 0),
        (SHAPES[1], torch.bfloat16, 32),
        (SHAPES[2], torch.bfloat16, 32),
        (SHAPES[2], torch.float32, 0),
    ],
)
def test_kernels_equal_the_plain_form(
    sizes: GroupNormSizes,
    kind: torch.dtype,
    least: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rounded once, where torch rounds after each operation."""
    emulate.use(monkeypatch)
    x, gradient, second, seen = drawn(sizes, kind)
    w, b = torch.randn(2, sizes.groups, sizes.channels)
    exact = group_norm.plain_normalise_and_add(x, w, b, second, sizes)
    made = group_norm.cuda_normalise(x, w, b, second, sizes, least=least)
    near(made, exact)
    assert made[0].stride() == x.stride()
    assert (0.2 < float((made[0] == 0).float().mean()) < 0.8) is sizes.relu
    given = (gradient, x, w, *made[1:], made[0] if sizes.relu else x, b)
    if sizes.relu:  # which is made anew
        given = (*given[:5], group_norm.plain_normalise(x, w, b, sizes)[0], b)
    for (plus, masked), others in {
        (True, False): [second], (False, True): [seen], (True, True): [second, seen]
    }.items():  # fmt: skip
        how = {"plus": plus, "masked": masked}
        wanted = group_norm.plain_merged_gradient(*given, *others, sizes, **how)
        got = group_norm.cuda_gradient(*given, *others, sizes, least=least, **how)
        near(got, wanted)
        assert got[0].stride() == x.stride()
        if masked:
            assert torch.equal(got[3], wanted[3]) and got[3].stride() == x.stride()


@pytest.mark.skipif(emulate.COMPILER is None, reason="needs g++ to run CUDA sources")
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32])
def test_a_sum_that_others_read_first(kind: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    emulate.use(monkeypatch)
    one, other, seen, _ = drawn(SHAPES[0]._replace(pixels=50), kind)
    seen[0, 0, 0, :3] = torch.tensor([0.0, -0.0, float("nan")])
    made = residual._masked_sum(one, other, seen)
    assert torch.equal(made, residual._plain_sum((one, other), seen))
    assert made.stride() == one.stride() and 0.3 < float((made == 0).float().mean()) < 0.7


@pytest.mark.skipif(emulate.COMPILER is None, reason="needs g++ to run CUDA sources")
def test_networks_run_by_the_kernels(tasks: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """In single precision, near torch's."""
    emulate.use(monkeypatch)
    used: list[str] = []

    def by_kernel(task: str, sizes: GroupNormSizes, forms: Any, *inputs: Any) -> Any:
        used.append(task)
        return forms()["norm"](*inputs, sizes)

    torch.manual_seed(0)
    model = network(JOINS["in place"], "conv")
    x = torch.randn(CLIENTS, IMAGES, 1, SIDE, SIDE)
    model(x[0])
    ours = Network(copy.deepcopy(model))
    monkeypatch.setattr(group_norm, "fastest", by_kernel)
    params = {n: torch.randn(CLIENTS, *leaf.shape) for n, leaf in ours.params.items()}
    made = vmap(grad(lambda own, x: ours(own, x, training=True).sin().sum()))(params, x)
    for n in range(CLIENTS):
        given = {name: leaf[n] for name, leaf in params.items()}
        exact = grad(lambda own, x: functional_call(model, own, (x,)).sin().sum())(given, x[n])
        for name, leaf in exact.items():
            assert (made[name][n] - leaf).norm() < 1e-3 * leaf.norm()
    assert {one.partition(",")[0] for one in used} == {
        "normalise", "normalise and add", "gradient", "cut gradient",
        "gradient of a sum", "cut gradient of a sum",
    }  # fmt: skip


def test_what_was_made_of_a_gradient_is_done_before_that_is_changed() -> None:
    x, other = torch.randn(2, 2, 3, 4, 4), torch.randn(2, 2, 3, 4, 4)
    for seen in (x.clone(), DeferredTensor(residual.Gradient((x.clone(),), None, x))):
        total = seen + other
        cut = torch.ops.aten.threshold_backward(seen, other, 0)
        seen.mul_(3.0)
        assert torch.equal(computed(seen), 3 * x) and torch.equal(computed(total), x + other)
        assert torch.equal(computed(cut), torch.where(other <= 0, 0.0, x))
