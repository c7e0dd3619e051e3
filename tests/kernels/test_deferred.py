"""A weights' gradient that is computed when it is read is the one that is computed at once."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import emulate
import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, vmap

from idiolect.bench.workloads import federation
from idiolect.core import graph_scan, tree
from idiolect.core.client import Local
from idiolect.engine.architecture import Architecture
from idiolect.engine.backend import Backend
from idiolect.engine.rounds import SeededRun, Simulation
from idiolect.kernels import compiled, convolution_cuda, fused_tree_ops, linear
from idiolect.kernels.deferred import Deferred, DeferredTensor, computed
from idiolect.kernels.linear import LinearSizes
from idiolect.kernels.vmap_rules import GroupedFunction, call
from idiolect.methods import METHODS

Params = dict[str, Tensor]
CLIENTS, EXAMPLES, INSIDE, HIDDEN, CLASSES = 4, 5, 7, 6, 3


class Seen(linear._WeightGradient):
    """Counts how often it was computed, and how often it was added."""

    computed = added_up = 0

    def make(self) -> Tensor:
        Seen.computed += 1
        return super().make()

    def added(self, factor: float, to: Tensor) -> Tensor | None:
        Seen.added_up += 1
        return super().added(factor, to)


@pytest.fixture
def put_off(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    monkeypatch.setattr(linear, "_WeightGradient", Seen)
    monkeypatch.setattr(linear, "_LARGE", 0)  # each is a launch of its own, or none
    monkeypatch.setattr(linear, "_RANK", 2)  # of the first layer two steps are no more than factors
    Seen.computed = Seen.added_up = 0

    def switch(on: bool) -> None:
        monkeypatch.setattr(linear, "_put_off", lambda gradient, x: on)

    return switch


def loss(params: Params, x: Tensor) -> Tensor:
    h = call(linear._LinearReLU, x[None], params["w"][None], params["b"][None]).squeeze(0)
    y: Tensor = call(linear._Linear, h[None], params["v"][None], params["c"][None]).squeeze(0)
    return y.tanh().pow(2).sum()


def stepped(params: Params, x: Tensor, count: int = 3) -> Params:
    for _ in range(count):
        gradients = grad(loss)(params, x)
        pairs = [gradients[name] for name in params], list(params.values())
        params = dict(zip(params, fused_tree_ops.step(-0.1, *pairs), strict=True))
    return params


def drawn() -> tuple[Params, Tensor]:
    torch.manual_seed(0)
    shapes = {"w": (HIDDEN, INSIDE), "b": (HIDDEN,), "v": (CLASSES, HIDDEN), "c": (CLASSES,)}
    params = {name: torch.randn(shape, dtype=torch.float64) for name, shape in shapes.items()}
    return params, torch.randn(CLIENTS, EXAMPLES, INSIDE, dtype=torch.float64)


def alike(left: Params, right: Params) -> None:
    for name, leaf in left.items():
        torch.testing.assert_close(computed(leaf), computed(right[name]), rtol=1e-9, atol=1e-12)


def swapped(params: Params, x: Tensor) -> Params:
    """Read gradients in other ways than a step does."""
    found = grad(loss)(params, x)
    norm = torch.stack([leaf.norm() for leaf in found.values()]).norm()
    return {name: leaf.clamp(max=0.1) / norm for name, leaf in found.items()}


def changed(params: Params, x: Tensor) -> Params:
    """Change a gradient in place before the step."""
    found = grad(loss)(params, x)
    for leaf in found.values():
        leaf.mul_(0.5)
    pairs = [found[name] for name in params], list(params.values())
    return dict(zip(params, fused_tree_ops.step(-0.1, *pairs), strict=True))


def through(params: Params, x: Tensor) -> Params:
    """Take the gradient through steps."""
    own: Params = grad(lambda params: loss(stepped(params, x, 2), x))(params)
    return own


def told(params: Params, x: Tensor) -> Params:
    """Return gradients themselves."""
    own: Params = grad(loss)(params, x)
    return own


@pytest.mark.parametrize("work", [stepped, swapped, changed, through, told])
def test_whoever_reads_it_sees_the_same(
    work: Callable[..., Params], put_off: Callable[[bool], None]
) -> None:
    ends = []
    for on in (False, True):
        put_off(on)
        ends.append(vmap(work, (None, 0))(*drawn()))
    alike(*ends)


def test_a_step_alone_does_not_compute_it(put_off: Callable[[bool], None]) -> None:
    put_off(True)
    vmap(stepped, (None, 0))(*drawn())
    assert (Seen.computed, Seen.added_up) == (0, 6)
    found = vmap(told, (None, 0))(*drawn())
    assert isinstance(found["w"], DeferredTensor)
    assert Seen.computed == 0


def test_weights_stay_factors_while_steps_are_few(
    put_off: Callable[[bool], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing computes them, and they are those of steps as usual."""
    put_off(False)
    expected = vmap(stepped, (None, 0))(*drawn())
    put_off(True)
    monkeypatch.setattr(linear, "_RANK", EXAMPLES)
    with monkeypatch.context() as patch:
        patch.setattr(linear, "_stepped", None)  # which nobody may call
        found = vmap(stepped, (None, 0))(*drawn())
    assert isinstance(found["w"], DeferredTensor) and isinstance(found["v"], DeferredTensor)
    alike(expected, found)


def test_two_steps_from_the_same_weights_do_not_meet(put_off: Callable[[bool], None]) -> None:
    """Each adds to the factors before it; what was written once stays."""

    def forked(params: Params, x: Tensor) -> Params:
        start = stepped(params, x, 1)
        one, other = stepped(start, x, 1), stepped(start, 2 * x, 1)
        return {name: leaf - 3 * other[name] + start[name] for name, leaf in one.items()}

    ends = []
    for on in (False, True):
        put_off(on)
        ends.append(vmap(forked, (None, 0))(*drawn()))
    alike(*ends)


def test_what_all_clients_share_alone_is_a_base(put_off: Callable[[bool], None]) -> None:
    """With weights of each client's own a step adds to them at once."""
    put_off(True)
    params, x = drawn()
    own = {name: leaf.expand(CLIENTS, *leaf.shape).clone() for name, leaf in params.items()}
    found = vmap(lambda params, x: stepped(params, x, 1))(own, x)
    assert not any(isinstance(leaf, DeferredTensor) for leaf in found.values())


def test_a_carry_holds_it_computed(put_off: Callable[[bool], None]) -> None:
    put_off(True)
    expected = computed(vmap(told, (None, 0))(*drawn())["w"])

    def piece(params: Params, x: Tensor, held: Tensor) -> Tensor:
        graph_scan.overwrite([held], [told(params, x)["w"]])
        return held

    held = vmap(piece, (None, 0, 0))(*drawn(), torch.zeros_like(expected))
    assert type(held) is Tensor
    assert torch.equal(held, expected)


class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(12, 8), nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc2(linear.linear_relu(self.fc1, x.flatten(1)))
        return y


@pytest.mark.parametrize(
    ("name", "options", "only"),
    [
        ("fedavg", {}, "added"),
        ("fedavg", {"clip": 0.5}, "computed"),
        ("scaffold", {}, "computed"),
        ("per-fedavg", {}, "added"),
        ("ditto", {}, "both"),
    ],
)
def test_methods_need_not_know(
    name: str,
    options: dict[str, float],
    only: str,
    put_off: Callable[[bool], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on a GPU, where our layers are used and steps are one launch."""

    def at_once(xs: list[Tensor], ys: list[Tensor]) -> bool:
        return tree.transformed() and len(xs) > 1

    for where, function, stand_in in (
        (linear, "_on_cuda", lambda x: True),
        (linear, "float32_on_cuda", lambda x: x.dtype == torch.float32),
        (tree, "_in_one_launch", at_once),
        (Local, "_clients_beneath", lambda local: None),
    ):
        monkeypatch.setattr(where, function, stand_in)
    fed, ends = federation([20, 13, 7], (1, 3, 4), held_out=4), []
    for on in (False, True):
        put_off(on)
        sim = Simulation(
            METHODS[name](batch=5, lr=0.05, **options),
            [SeededRun(0, fed.train_data)],
            {"all": Architecture(Dense)},
            backend=Backend("vectorised", "cpu", width=3),
        )
        Seen.computed = Seen.added_up = 0  # a network's trial computes its gradients
        for _ in range(3):
            sim.advance()
        ends.append([leaf for leaf in tree.leaves(sim.tree) if leaf.is_floating_point()])
    assert not any(isinstance(leaf, DeferredTensor) for leaf in ends[1])
    torch.testing.assert_close(*ends, rtol=1e-5, atol=1e-6)
    assert (Seen.added_up > 0, Seen.computed > 0) == (only != "computed", only != "added")


@pytest.mark.skipif(emulate.COMPILER is None, reason="needs g++ to run CUDA sources")
@pytest.mark.parametrize("shared", [True, False])
def test_kernels_add_it_to_weights(shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights may be the same for all clients, as in the first step of a round."""
    emulate.use(monkeypatch)
    torch.manual_seed(0)
    for sizes in (LinearSizes(3, 5, 136, 9), LinearSizes(2, 7, 37, 10), LinearSizes(2, 5, 516, 70)):
        groups, examples, inside, outside = sizes
        x, gradient = torch.randn(groups, examples, inside), torch.randn(groups, examples, outside)
        w = torch.randn(1 if shared else groups, outside, inside).expand(groups, -1, -1)
        exact = w.double() + gradient.double().mT @ x.double()
        for name, form in linear.forms("weight_step", sizes).items():
            got = form(gradient, x, w, sizes)
            assert (got - exact).norm() / exact.norm() < 1e-6, name


@pytest.mark.skipif(emulate.COMPILER is None, reason="needs g++ to run CUDA sources")
def test_a_kernel_that_is_given_it_gets_it_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Known(Deferred):
        def make(self) -> Tensor:
            return torch.arange(12.0).view(2, 6)

    emulate.use(monkeypatch)
    late: Tensor = DeferredTensor(Known((2, 6), torch.zeros(1)))
    zeros = torch.zeros(2, 6)
    far = fused_tree_ops._launched_distance([late, zeros], [zeros, zeros])
    assert far.tolist() == [55.0, 451.0]


class InParts(GroupedFunction):
    """Makes something as the weights' gradient of a convolution is made: in parts."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return convolution_cuda._summed(torch.stack([x, 2 * x, x.square()]))


class Linked(GroupedFunction):
    """Has that as its gradient."""

    @staticmethod
    def forward(k: Tensor, x: Tensor) -> Tensor:
        return (k * (3 * x + x.square())).flatten(1).sum(1)

    @staticmethod
    def backward(ctx: Any, factor: Tensor) -> Any:
        return call(InParts, ctx.saved_tensors[1]), None


class Unread(Deferred):
    """A loss that nobody may read."""

    def make(self) -> Tensor:
        raise AssertionError


class Late(GroupedFunction):
    """Puts a loss off, as cross-entropy does."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return DeferredTensor(Unread(x.shape, x)) if compiled.has_kernels(x) else x.clone()

    @staticmethod
    def backward(ctx: Any, factor: Tensor) -> Any:
        return factor


def steps_of_a_network(params: Params, x: Tensor, more: Tensor) -> Params:
    """Take steps of two dense layers and of what is made in parts, then some towards the start."""
    start = params
    for pull in (0.0, 0.0, 0.3, 0.7):

        def objective(params: Params, pull: float = pull) -> Tensor:
            value = loss({name: params[name] for name in "wbvc"}, x)
            value = value + call(Linked, params["k"][None], more[None]).squeeze(0)
            value = call(Late, value[None]).squeeze(0)
            return value + pull / 2 * tree.sqdist(params, start) if pull else value

        gradients = grad(objective)(params)
        pairs = [gradients[name] for name in params], list(params.values())
        params = dict(zip(params, fused_tree_ops.step(-0.1, *pairs), strict=True))
    return params


@pytest.mark.skipif(emulate.COMPILER is None, reason="needs g++ to run CUDA sources")
@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
@pytest.mark.parametrize("full", [1, 10**6])
def test_one_launch_adds_all_gradients_up(
    kind: torch.dtype, full: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products of dense layers, sums over examples and over parts, all in the step."""
    torch.manual_seed(0)
    wide = {"w": (HIDDEN, 12), "b": (HIDDEN,), "v": (CLASSES, HIDDEN), "c": (CLASSES,)}
    params = {name: torch.randn(shape, dtype=kind) for name, shape in wide.items()}
    params["k"] = torch.randn(2, 517, dtype=kind)
    given = torch.randn(CLIENTS, EXAMPLES, 12), torch.randn(CLIENTS, 2, 517)
    work = vmap(steps_of_a_network, (None, 0, 0))
    monkeypatch.setattr(linear, "_put_off", lambda gradient, x: False)
    exact = work({name: leaf.double() for name, leaf in params.items()}, *map(Tensor.double, given))
    launched = []

    def counted(file: str, name: str, *given: Any) -> None:
        launched.append(name)
        compiled.launch(file, name, *given)

    monkeypatch.setattr(linear, "_put_off", lambda gradient, x: True)
    monkeypatch.setattr(fused_tree_ops, "_FULL", full)
    monkeypatch.setattr(linear._Gradients, "made", None)  # which nobody may read
    emulate.use(monkeypatch)
    monkeypatch.setattr(fused_tree_ops, "launch", counted)
    monkeypatch.setattr(tree, "_in_one_launch", lambda xs, ys: True)
    found = work(params, *(one.to(kind) for one in given))
    assert launched == ["add_leaves"] * 4
    near = 1e-5 if kind == torch.float32 else 1e-12
    for name, leaf in exact.items():
        assert (found[name] - leaf).norm() / leaf.norm() < near, name


@pytest.mark.skipif(emulate.COMPILER is None, reason="needs g++ to run CUDA sources")
def test_what_is_deferred_may_be_stepped_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where weight decay is added to a gradient."""
    emulate.use(monkeypatch)
    x, gradient = torch.randn(2, 3, 8), torch.randn(2, 3, 5)
    late = DeferredTensor(linear._WeightGradient(linear._Gradients(gradient, x)))
    w = torch.randn(2, 5, 8)
    (found,) = fused_tree_ops._Step.forward(0.5, w, late)
    torch.testing.assert_close(found, gradient.mT @ x + 0.5 * w)


class Copy(Deferred):
    """A copy, when it is read."""

    def __init__(self, x: Tensor) -> None:
        super().__init__(x.shape, x)
        self.x = x

    def make(self) -> Tensor:
        return self.x.clone()


def changed_part(g: Tensor) -> Tensor:
    g[1] = 7.0
    return g


def changed_column(g: Tensor) -> Tensor:
    g[:, 1].zero_()
    return g


def changed_after_a_product(g: Tensor) -> Tensor:
    twice = 2.0 * g
    g.zero_()
    return twice


def changed_in_part_after_a_sum(g: Tensor) -> Tensor:
    total = g + 2.0 * g
    g[0].zero_()
    return total + g


def changed_by_way_of_a_part(g: Tensor) -> Tensor:
    first, twice = g[0], 2.0 * g
    first.zero_()
    return twice + g


def changed_after_a_part(g: Tensor) -> Tensor:
    first = g[0]
    g.view(-1).mul_(3.0)
    return first * g


def product_of_a_part(g: Tensor) -> Tensor:
    column = g[:, 0]
    twice = 2.0 * g
    column.zero_()
    return twice


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize(
    "work",
    [
        changed_part, changed_column, changed_after_a_product, changed_in_part_after_a_sum,
        changed_by_way_of_a_part, changed_after_a_part, product_of_a_part,
    ],
)  # fmt: skip
def test_it_may_be_changed_in_place(work: Callable[[Tensor], Tensor], mapped: bool) -> None:
    """What waits is computed before, and parts of it are views."""
    x = torch.arange(1.0, 25.0).reshape(2, 3, 4)
    exact, found = (
        vmap(work)(given) if mapped else work(given)
        for given in (x.clone(), DeferredTensor(Copy(x)))
    )
    assert torch.equal(computed(found), exact)


def test_it_is_shown_copied_and_saved_as_what_it_stands_for() -> None:
    x = torch.arange(6.0).reshape(2, 3)
    late = DeferredTensor(Copy(x)).view(3, 2)
    assert repr(late) == repr(x.view(3, 2))
    for found in (copy.deepcopy(late), pickle.loads(pickle.dumps(late))):
        assert type(found) is Tensor and torch.equal(found, x.view(3, 2))
