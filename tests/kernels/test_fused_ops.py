"""Losses and leaves taken at once against the same written out, plain and as the kernels do it.

Without a GPU the functions run in their plain form; with `emulated` the CUDA source runs, thread
by thread, on a CPU. Both are mapped, differentiated, and differentiated again.
"""

from collections.abc import Callable

import emulate
import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap

from idiolect.core import losses
from idiolect.kernels import cross_entropy, fused_tree_ops

CLIENTS, ROWS, CLASSES = 3, 5, 37
Fn = Callable[..., Tensor]


@pytest.fixture(params=["plain", "kernels"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Take either branch; the tests' numbers are double, as are the kernels then."""
    if request.param == "plain":
        return
    if emulate.COMPILER is None:
        pytest.skip("needs g++ to run CUDA sources")
    emulate.use(monkeypatch)


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def alike(ours: object, theirs: object) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)


# The loss.


def taken(logits: Tensor, labels: Tensor, weight: Tensor) -> Tensor:
    """Bend the loss, so that the incoming gradient is not 1."""
    return cross_entropy.cross_entropy(logits, labels, weight).square()


def written(logits: Tensor, labels: Tensor, weight: Tensor) -> Tensor:
    return losses.cross_entropy(logits, labels, weight).square()


def batch(*shape: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    labels = torch.randint(CLASSES, (CLIENTS, *shape))
    weight = (torch.rand(CLIENTS, *shape, dtype=torch.float64) < 0.7).double()
    weight[1] = 0  # a client whose batch is padding alone
    return 3 * draw(CLIENTS, *shape, CLASSES), labels, weight


@pytest.mark.parametrize("shape", [(ROWS,), (2, 3)])
def test_the_loss_and_its_gradients(way: None, shape: tuple[int, ...]) -> None:
    given = batch(*shape)
    alike(vmap(taken)(*given), vmap(written)(*given))
    alike(vmap(grad(taken))(*given), vmap(grad(written))(*given))
    assert vmap(grad(taken))(*given)[0].abs().max() > 0.01


def test_the_loss_of_many_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a large vocabulary each row's loss is a warp's, of several blocks."""
    if emulate.COMPILER is None:
        pytest.skip("needs g++ to run CUDA sources")
    emulate.use(monkeypatch)
    monkeypatch.setattr(cross_entropy, "_MANY", 0)
    given = batch(40)
    alike(vmap(taken)(*given), vmap(written)(*given))


def test_the_gradient_by_the_weights() -> None:
    logits, labels, weight = batch(ROWS)
    given = (logits, labels, weight + 0.5)
    alike(vmap(grad(taken, 2))(*given), vmap(grad(written, 2))(*given))


def test_the_bend_of_the_loss(way: None) -> None:
    """Exact Per-FedAvg differentiates a gradient."""

    def bend(fn: Fn) -> Fn:
        return grad(lambda *given: grad(fn)(*given).pow(3).sum())

    given = batch(ROWS)
    alike(vmap(bend(taken))(*given), vmap(bend(written))(*given))


def test_logits_of_all_with_labels_that_all_share(way: None) -> None:
    """Public examples are the same for everyone, and a grid of students may share a batch."""
    logits, labels, weight = batch(ROWS)

    def grid(fn: Fn) -> Tensor:
        inner = vmap(grad(fn), (0, None, None))
        return vmap(inner, (0, None, 0))(
            logits[:, None] * torch.ones(1, 2, 1, 1), labels[0], weight
        )

    alike(grid(taken), grid(written))


def test_a_broken_logit_is_seen(way: None) -> None:
    logits, labels, weight = batch(ROWS)
    logits[0, 0, 3] = float("nan")
    logits[2, 0, labels[2, 0]], weight[2, 0] = float("inf"), 1
    assert vmap(taken)(logits, labels, weight).isnan().tolist() == [True, False, True]


# Leaves.

SHAPES = ((1100,), (7, 3), (1,), ())


def trees() -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    torch.manual_seed(1)
    many, other = ([draw(CLIENTS, *shape) for shape in SHAPES] for _ in range(2))
    return many, other, [draw(*shape) for shape in SHAPES]


def bent(made: object) -> Tensor:
    parts = [made] if isinstance(made, Tensor) else list(made)  # type: ignore[call-overload]
    return torch.stack([(part.tanh() * (n + 1)).pow(2).sum() for n, part in enumerate(parts)]).sum()


def both(task: str) -> list[Fn]:
    """Give a curved function of two lists of leaves, taken at once and written out."""
    if task == "step":
        return [
            lambda xs, ys: bent(fused_tree_ops.step(-0.3, xs, ys)),
            lambda xs, ys: bent([y - 0.3 * x for x, y in zip(xs, ys, strict=True)]),
        ]
    if task == "choose":  # each client by the sign of its first number
        return [
            lambda xs, ys: bent(fused_tree_ops.choose(xs[0][0] > 0, xs, ys)),
            lambda xs, ys: bent(
                [torch.where(xs[0][0] > 0, x, y) for x, y in zip(xs, ys, strict=True)]
            ),
        ]
    return [
        lambda xs, ys: bent(1e-3 * fused_tree_ops.distance(xs, ys)),
        lambda xs, ys: bent(
            1e-3 * sum((x - y).square().sum() for x, y in zip(xs, ys, strict=True))
        ),
    ]


TASKS = pytest.mark.parametrize("task", ["step", "choose", "distance"])


@TASKS
@pytest.mark.parametrize("dims", [(0, 0), (0, None), (None, 0)])
def test_leaves_and_their_gradients(way: None, task: str, dims: tuple[int | None, ...]) -> None:
    """Where one tree is shared by all, it is not copied for each, and the result is the same."""
    xs, ys, shared = trees()
    given = (xs if dims[0] == 0 else shared, ys if dims[1] == 0 else shared)
    ours, theirs = both(task)
    alike(vmap(ours, dims)(*given), vmap(theirs, dims)(*given))
    for argument in (0, 1):
        gradients = [vmap(grad(fn, argument), dims)(*given) for fn in (ours, theirs)]
        alike(*gradients)


@pytest.mark.parametrize("task", ["choose", "distance"])
def test_trees_that_all_share_and_a_number_of_everyones_own(way: None, task: str) -> None:
    """As in the first step of a round: what was sent is one tree, and only a factor differs."""
    _, _, shared = trees()
    other = [leaf + 1 for leaf in shared]
    factors = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)

    def ours(factor: Tensor, xs: list[Tensor]) -> Tensor:
        if task == "choose":
            return bent(fused_tree_ops.choose(factor > 0, xs, other))
        return bent(1e-3 * factor * fused_tree_ops.distance(xs, other))

    def theirs(factor: Tensor, xs: list[Tensor]) -> Tensor:
        pairs = list(zip(xs, other, strict=True))
        if task == "choose":
            return bent([torch.where(factor > 0, x, y) for x, y in pairs])
        return bent(1e-3 * factor * sum((x - y).square().sum() for x, y in pairs))

    for fn in (lambda f: f, lambda f: grad(f, 1)):
        alike(*(vmap(fn(own), (0, None))(factors, shared) for own in (ours, theirs)))
    cells = torch.stack([factors, factors.flip(0)])
    grids = [
        vmap(vmap(grad(own, 1), (0, None)), (0, None))(cells, shared) for own in (ours, theirs)
    ]
    alike(*grids)
    grids = [
        vmap(vmap(grad(own, 1), (0, None)), (0, 0))(cells, [torch.stack([x, x]) for x in shared])
        for own in (ours, theirs)
    ]
    alike(*grids)


@TASKS
def test_gradients_of_a_whole_stack(task: str) -> None:
    """Differentiated from outside the map, what all shared gathers the gradients of all."""
    xs, _, shared = trees()
    ours, theirs = both(task)
    gradients = [
        grad(lambda xs, ys, fn=fn: vmap(fn, (0, None))(xs, ys).sum(), (0, 1))(xs, shared)
        for fn in (ours, theirs)
    ]
    alike(*gradients)


@TASKS
def test_second_gradients_and_grids(way: None, task: str) -> None:
    xs, ys, shared = trees()

    def bend(fn: Fn) -> Fn:
        return grad(lambda xs, ys: bent(grad(fn)(xs, ys)))

    ours, theirs = both(task)
    alike(vmap(bend(ours))(xs, ys), vmap(bend(theirs))(xs, ys))
    cells = [x.unsqueeze(1) * torch.ones(2, *[1] * (x.dim() - 1)) for x in xs]
    grids = [vmap(vmap(grad(fn), (0, None)), (0, None))(cells, shared) for fn in (ours, theirs)]
    alike(*grids)


def test_more_leaves_than_one_launch_takes(way: None) -> None:
    torch.manual_seed(2)
    xs, ys = ([draw(CLIENTS, n + 1) for n in range(19)] for _ in range(2))
    for task in ("step", "distance"):
        ours, theirs = both(task)
        alike(vmap(grad(ours))(xs, ys), vmap(grad(theirs))(xs, ys))


def test_a_choice_lies_as_what_was_stepped(way: None) -> None:
    """Steps leave some weights with channels last; old ones may be shared, in torch's order."""
    torch.manual_seed(0)
    keep, other = torch.tensor([True, False, True]), draw(3, 4)
    new, old = draw(3, 5, 3, 3, 8).permute(0, 1, 4, 2, 3), draw(5, 8, 3, 3)

    def chosen(keep: Tensor, new: Tensor, other: Tensor) -> Tensor:
        return fused_tree_ops.choose(keep, [new, other], [old, other])[0]

    made = vmap(chosen)(keep, new, other)
    alike(made, torch.where(keep[:, None, None, None, None], new, old))
    assert made.permute(0, 1, 3, 4, 2).is_contiguous()
