"""Arithmetic on all leaves of two trees in one launch, for all clients.

A stack of small networks is bound by the number of kernels launched, and ordinary arithmetic
launches one for each leaf. Every leaf here has an axis of rows before its own axes: a row for each
client, or a single row that all share. All functions are differentiable any number of times.
"""

import functools
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd import Function

from idiolect.kernels import compiled
from idiolect.kernels.compiled import REALS, aligned, attempt, launch, memory_order
from idiolect.kernels.deferred import Deferred, DeferredTensor, Gap, computed, terms_of
from idiolect.kernels.vmap_rules import call

_LEAVES = 16  # of a launch, at most
_THREADS = 256
_SUM_THREADS = 1024  # of a block that sums up
_FULL = 264  # blocks that keep a GPU busy

Leaves = Sequence[Tensor]


def suit(xs: Leaves, ys: Leaves) -> bool:
    """Return whether pairs are better taken in one launch: several, on a GPU, of one real type."""
    return (
        len(xs) == len(ys) > 1
        and xs[0].is_cuda
        and xs[0].dtype in REALS
        and all(x.shape == y.shape for x, y in zip(xs, ys, strict=True))
        and all(leaf.is_cuda and leaf.dtype == xs[0].dtype for leaf in (*xs, *ys))
    )


def step(factor: float, xs: Leaves, ys: Leaves) -> Leaves:
    """Return y + factor · x for each pair."""
    return _without_row(call(_Step, factor, *_with_row(xs), *_with_row(ys)))


def choose(keep: Tensor, xs: Leaves, ys: Leaves) -> Leaves:
    """Return all of x where `keep` is true, else all of y."""
    return _without_row(call(_Choice, keep[None], *_with_row(xs), *_with_row(ys)))


def distance(xs: Leaves, ys: Leaves) -> Tensor:
    """Return the sum of (x - y)² over everything."""
    total: Tensor = call(_Distance, *_with_row(xs), *_with_row(ys))
    return total.squeeze(0)


def _with_row(leaves: Leaves) -> list[Tensor]:
    return [leaf[None] for leaf in leaves]


def _without_row(leaves: Leaves) -> list[Tensor]:
    return [leaf.squeeze(0) for leaf in leaves]  # the backward pass of an index allocates zeros


def _halves(both: Leaves) -> tuple[Leaves, Leaves]:
    return both[: len(both) // 2], both[len(both) // 2 :]


class _TreeFunction(Function):
    """A function of two trees' leaves [row, ...], perhaps after a number or a tensor [row]."""

    per_row: ClassVar[bool] = False  # whether a tensor [row] comes first

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @classmethod
    def vmap(cls, info: Any, dims: Any, *inputs: Any) -> Any:
        """Make the mapped axis part of the rows; what all clients share stays a single row."""
        numbers = [one for one in inputs if not isinstance(one, Tensor)]
        tensors = _grouped(info.batch_size, dims[len(numbers) :], inputs[len(numbers) :])
        if cls.per_row:
            rows = max(map(len, tensors))
            tensors = [tensors[0].expand(rows), *tensors[1:]]
        made = call(cls, *numbers, *tensors)
        if isinstance(made, Tensor):
            return made.reshape(info.batch_size, -1), 0
        split = tuple(leaf.reshape(info.batch_size, -1, *leaf.shape[1:]) for leaf in made)
        return split, (0,) * len(split)


def _grouped(size: int, dims: Any, inputs: Leaves) -> list[Tensor]:
    pairs = list(zip(inputs, dims, strict=True))
    moved = [t if dim is None else t.movedim(dim, 0) for t, dim in pairs]
    inner = max(t.shape[dim is not None] for t, (_, dim) in zip(moved, pairs, strict=True))

    def grouped(t: Tensor, dim: int | None) -> Tensor:
        if dim is None:
            return t if len(t) == 1 else t.expand(size, *t.shape).flatten(0, 1)
        return t.expand(size, inner, *t.shape[2:]).flatten(0, 1)

    return [grouped(t, dim) for t, (_, dim) in zip(moved, pairs, strict=True)]


class _Step(_TreeFunction):
    """y + factor · x."""

    @staticmethod
    def forward(factor: float, *both: Tensor) -> Any:
        made: dict[int, Tensor] = {}  # leaves that are a launch of their own
        for n, (x, y) in enumerate(zip(*_halves(both), strict=True)):
            if isinstance(x, DeferredTensor) and x.deferred.waits:
                if (added := x.deferred.added(factor, y)) is not None:
                    made[n] = added.view(-1, *y.shape[1:])
        xs, ys = ([one for n, one in enumerate(side) if n not in made] for side in _halves(both))

        def plain() -> tuple[Tensor, ...]:
            return tuple(torch.add(y, x, alpha=factor) for x, y in zip(xs, ys, strict=True))

        def own() -> tuple[Tensor, ...]:
            return _launched_step(factor, xs, ys)

        rest = iter(attempt("steps", own, plain, on=xs[0]) if xs else ())
        return tuple(made[n] if n in made else next(rest) for n in range(len(both) // 2))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.factor, ctx.rows = inputs[0], [len(leaf) for leaf in inputs[1:]]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        pairs = [*(ctx.factor * gradient for gradient in gradients), *gradients]
        return None, *map(_summed_to, ctx.rows, pairs, ctx.needs_input_grad[1:])


class _Choice(_TreeFunction):
    """x where `keep`, else y."""

    per_row = True

    @staticmethod
    def forward(keep: Tensor, *both: Tensor) -> Any:
        xs, ys = _halves(both)

        def plain() -> tuple[Tensor, ...]:
            pairs = zip(xs, ys, strict=True)
            return tuple(torch.where(_broadcast(keep, x), x, y) for x, y in pairs)

        return attempt("choices", lambda: _mix("CHOICE", 0.0, keep, xs, ys), plain, on=both[0])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(inputs[0])
        ctx.rows = [len(leaf) for leaf in inputs[1:]]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (keep,) = ctx.saved_tensors
        kept = [torch.where(_broadcast(keep, one), one, 0.0) for one in gradients]
        left = [torch.where(_broadcast(keep, one), 0.0, one) for one in gradients]
        return None, *map(_summed_to, ctx.rows, [*kept, *left], ctx.needs_input_grad[1:])


class _Distance(_TreeFunction):
    """The sum of (x - y)², for each row."""

    @staticmethod
    def forward(*both: Tensor) -> Tensor:
        late = _LateDistance(both)
        return DeferredTensor(late) if compiled.has_kernels(both[0]) else late.make()

    @staticmethod
    def backward(ctx: Any, factor: Tensor) -> Any:
        both, wanted = ctx.saved_tensors, ctx.needs_input_grad
        if not any(wanted):
            return (None,) * len(both)
        by_x = call(_DistanceGradient, factor, *both)
        second = zip(by_x, _halves(wanted)[1], strict=True)
        by_y = [-one if want else one for one, want in second]
        return tuple(map(_summed_to, map(len, both), [*by_x, *by_y], wanted))


class _LateDistance(Deferred):
    """A distance, if anybody wants it: a step needs its gradient alone."""

    def __init__(self, both: Leaves) -> None:
        super().__init__((max(map(len, both)),), both[0])
        self._both = both

    def make(self) -> Tensor:
        """Return it for each row."""
        xs, ys = _halves(self._both)

        def plain() -> Tensor:
            pairs = zip(xs, ys, strict=True)
            return torch.stack([_sum_rows((x - y).square()) for x, y in pairs]).sum(0)

        return attempt("distances", lambda: _launched_distance(xs, ys), plain, on=xs[0])


class _DistanceGradient(_TreeFunction):
    """2 · factor · (x - y), for each row's factor."""

    per_row = True

    @staticmethod
    def forward(factor: Tensor, *both: Tensor) -> Any:
        gaps = _Gaps(factor, both)
        if not compiled.has_kernels(both[0]):
            return gaps.made
        return tuple(DeferredTensor(_LateGap(gaps, n)) for n in range(len(both) // 2))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        factor, *both = ctx.saved_tensors
        triples = zip(*_halves(both), gradients, strict=True)
        along = [_sum_rows(2 * (x - y) * one) for x, y, one in triples]
        by_factor = _summed_to(len(factor), torch.stack(along).sum(0), ctx.needs_input_grad[0])
        by_x = [2 * _broadcast(factor, one) * one for one in gradients]
        signed = [*by_x, *(-one for one in by_x)]
        return by_factor, *map(_summed_to, map(len, both), signed, ctx.needs_input_grad[1:])


class _Gaps:
    """The gradient of a distance, of all leaves."""

    def __init__(self, factor: Tensor, both: Leaves) -> None:
        self.factor, (self.xs, self.ys) = factor, _halves(both)
        self.rows = max(map(len, [factor, *both]))

    @functools.cached_property
    def made(self) -> tuple[Tensor, ...]:
        """It, in one launch."""
        factor, xs, ys = computed(self.factor), self.xs, self.ys

        def plain() -> tuple[Tensor, ...]:
            pairs = zip(xs, ys, strict=True)
            return tuple(2 * _broadcast(factor, x) * (x - y) for x, y in pairs)

        return attempt("gaps", lambda: _mix("GAP", 2.0, factor, xs, ys), plain, on=xs[0])


class _LateGap(Deferred):
    """One leaf of it: a step takes the gap itself."""

    def __init__(self, gaps: _Gaps, place: int) -> None:
        super().__init__((gaps.rows, *gaps.xs[place].shape[1:]), gaps.xs[place])
        self._gaps, self._place = gaps, place

    def make(self) -> Tensor:
        """Return it."""
        return self._gaps.made[self._place].expand(self.shape).contiguous()

    def gap(self) -> Gap:
        """Return from where to where it is."""
        gaps, place = self._gaps, self._place
        return Gap(computed(gaps.factor), gaps.xs[place], gaps.ys[place])


def _summed_to(rows: int, gradient: Tensor, wanted: bool) -> Tensor | None:
    """Sum the gradients of a row that many shared."""
    if not wanted:
        return None
    return gradient.sum(0, keepdim=True) if rows == 1 and len(gradient) > 1 else gradient


def _sum_rows(leaf: Tensor) -> Tensor:
    return leaf.reshape(len(leaf), -1).sum(1)


def _broadcast(rows: Tensor, leaf: Tensor) -> Tensor:
    """Give a number for each row the axes of a leaf."""
    return rows.reshape(-1, *[1] * (leaf.dim() - 1))


# Launches.


def _launched_step(factor: float, xs: Leaves, ys: Leaves) -> tuple[Tensor, ...]:
    """Launch `add_leaves`: what gradients are sums of is added up there."""
    rows = max(map(len, [*xs, *ys]))
    made: list[Tensor] = []
    for some in range(0, len(xs), _LEAVES):
        pairs = [*zip(xs[some : some + _LEAVES], ys[some : some + _LEAVES], strict=True)]
        declared, each, arguments, blocks = list[str](), list[str](), list[Any](), 0
        for n, (x, y) in enumerate(pairs):
            out, size, terms = y.new_empty(rows, *y.shape[1:]), y.shape[1:].numel(), terms_of(x)
            assert terms is not None
            several, other = terms.second is not None, terms.first
            many = -(-size // (4 * _THREADS))
            if terms.second is not None:
                other = terms.second
                many, told = _products(terms.first, other, rows)
            pulled = int(terms.gap is not None)
            each.append(f"PRODUCTS({n}, {pulled}, {told})" if several else f"TERMS({n}, {pulled})")
            declared.append(
                f"const REAL* x{n}, const REAL* z{n}, const REAL* y{n}, REAL* o{n}, "
                f"int m{n}, int n{n}, int a{n}, int c{n}, int b{n}, int k{n}, int s{n}, "
                f"const REAL* t{n}, const REAL* p{n}, const REAL* q{n}, int d{n}, int e{n}"
            )
            shared = len(x) == 1  # by all rows
            arguments += [terms.first, other, aligned(y), out, many, size]
            arguments += [0 if shared else terms.stride, 0 if shared else other.stride(0)]
            arguments += [size * (len(y) > 1), terms.many, terms.apart]
            scales, here, there = terms.gap or Gap(y, y, y)  # where there is none, none is read
            scales = scales if terms.gap is None else scales.expand(rows).contiguous()
            arguments += [scales, aligned(here), aligned(there)]
            arguments += [size * (len(here) > 1), size * (len(there) > 1)]
            blocks += many
            made.append(out)
        constants: dict[str, int | str] = {"STEP": 1, "THREADS": _THREADS}
        constants |= {"LEAVES": ", ".join(declared), "EACH": " ".join(each)}
        constants["REAL"] = REALS[xs[0].dtype]
        if blocks:
            given = [float(factor), *arguments]
            launch("fused.cu", "add_leaves", constants, (blocks, rows, 1), _THREADS, given)
    return tuple(made)


def _products(gradient: Tensor, inputs: Tensor, rows: int) -> tuple[int, str]:
    """Return the blocks that a row of outputs' products with inputs takes, and its sizes."""
    examples, outputs, side = *gradient.shape[1:], inputs.shape[2]
    several = 16 // gradient.element_size()
    across = side // (several if side % several == 0 else 1)

    def blocks(lines: int) -> int:
        return -(-(-(-outputs // lines) * across) // _THREADS)

    lines = next((n for n in (8, 4) if rows * blocks(n) >= _FULL), 2)
    return blocks(lines), f"{examples}, {side}, {outputs}, {lines}"


def _mix(
    task: str, factor: float, per_row: Tensor | None, xs: Leaves, ys: Leaves
) -> tuple[Tensor, ...]:
    """Launch `mix`; `per_row` is a number or a truth value for each row, as the task has it.

    What is made lies in memory as the first of each pair does.
    """
    xs, ys = (computed([*side], laid=True) for side in (xs, ys))
    orders = [*map(memory_order, xs)]
    xs, ys = ([leaf.permute(order) for leaf, order in zip(side, orders, strict=True)]
              for side in (xs, ys))  # fmt: skip
    rows = max(map(len, [*([] if per_row is None else [per_row]), *xs, *ys]))
    # The kernel reads one entry for each row, also where all rows share it; unused without a task.
    given = xs[0] if per_row is None else per_row.expand(rows).contiguous()
    made: list[Tensor] = []
    for some in range(0, len(xs), _LEAVES):
        left, right = xs[some : some + _LEAVES], ys[some : some + _LEAVES]
        outs = [x.new_empty(rows, *x.shape[1:]) for x in left]
        constants, arguments = _parameters(left, right, outs)
        constants |= {task: 1, "THREADS": _THREADS}
        blocks = sum(-(-out[0].numel() // (4 * _THREADS)) for out in outs)
        if blocks:
            given_all = [float(factor), given, given, *arguments]
            launch("fused.cu", "mix", constants, (blocks, rows, 1), _THREADS, given_all)
        made += outs
    back = ([order.index(axis) for axis in range(len(order))] for order in orders)
    return tuple(leaf.permute(axes) for leaf, axes in zip(made, back, strict=True))


def _launched_distance(xs: Leaves, ys: Leaves) -> Tensor:
    parts = []
    for some in range(0, len(xs), _LEAVES):
        part = xs[0].new_empty(max(map(len, [*xs, *ys])))
        left, right = xs[some : some + _LEAVES], ys[some : some + _LEAVES]
        constants, arguments = _parameters(left, right, left)
        constants |= {"DISTANCE": 1, "THREADS": _SUM_THREADS}
        grid, shared = (len(part), 1, 1), 8 * _SUM_THREADS // 32
        launch("fused.cu", "distance", constants, grid, _SUM_THREADS, [part, *arguments], shared)
        parts.append(part)
    return parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)


def _parameters(xs: Leaves, ys: Leaves, outs: Leaves) -> tuple[dict[str, int | str], list[Any]]:
    """Return the constants that declare some leaves as parameters, and the arguments for them."""
    declared: list[str] = []
    arguments: list[Any] = []
    for n, (x, y, out) in enumerate(zip(xs, ys, outs, strict=True)):
        declared.append(
            f"const REAL* x{n}, const REAL* y{n}, REAL* o{n}, int n{n}, int a{n}, int b{n}"
        )
        size = x[0].numel()
        arguments += [x.contiguous(), y.contiguous(), out.contiguous()]
        arguments += [size, size * (len(x) > 1), size * (len(y) > 1)]
    each = " ".join(f"TRY({n})" for n in range(len(xs)))
    return {"REAL": REALS[xs[0].dtype], "LEAVES": ", ".join(declared), "EACH": each}, arguments
