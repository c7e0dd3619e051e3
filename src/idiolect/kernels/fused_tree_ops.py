"""Arithmetic on all leaves of two trees at once: one launch for all leaves of all clients.

A stack of small networks is bound by how many kernels are started, and the usual arithmetic starts
one for each leaf. Every leaf here has an axis of rows before its own axes, one for each client, or
a single row that all share. All functions are differentiable any number of times.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from idiolect.kernels.compiled import attempt, kernel

_MOST = 16  # leaves of a launch
_THREADS = 256
_WIDE = 1024  # threads of a block that sums up
REALS = {torch.float32: "float", torch.float64: "double"}


def suit(xs: Sequence[Tensor], ys: Sequence[Tensor]) -> bool:
    """Say whether pairs are better taken all at once: several, on a GPU, of one real type."""
    return (
        len(xs) == len(ys) > 1
        and xs[0].is_cuda
        and xs[0].dtype in REALS
        and all(x.shape == y.shape for x, y in zip(xs, ys, strict=True))
        and all(leaf.is_cuda and leaf.dtype == xs[0].dtype for leaf in (*xs, *ys))
    )


def step(factor: float, xs: Sequence[Tensor], ys: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return y + factor · x for each pair."""
    return _one_row(_Step, factor, *_rows(xs), *_rows(ys))


def choose(keep: Tensor, xs: Sequence[Tensor], ys: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return all of one or all of the other, as a truth value says."""
    return _one_row(_Choice, keep[None], *_rows(xs), *_rows(ys))


def distance(xs: Sequence[Tensor], ys: Sequence[Tensor]) -> Tensor:
    """Return the sum of (x - y)² over everything."""
    total: Tensor = _Distance.apply(*_rows(xs), *_rows(ys))  # type: ignore[no-untyped-call]
    return total.squeeze(0)


def _rows(leaves: Sequence[Tensor]) -> list[Tensor]:
    return [leaf[None] for leaf in leaves]


def _one_row(function: type[Function], *inputs: Any) -> list[Tensor]:
    # An index would be filled up with zeros going back.
    return [leaf.squeeze(0) for leaf in function.apply(*inputs)]  # type: ignore[no-untyped-call]


def _halves(both: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    return both[: len(both) // 2], both[len(both) // 2 :]


class _Step(Function):
    """y + factor · x."""

    @staticmethod
    def forward(factor: float, *both: Tensor) -> Any:
        xs, ys = _halves(both)

        def plain() -> tuple[Tensor, ...]:
            return tuple(torch.add(y, x, alpha=factor) for x, y in zip(xs, ys, strict=True))

        if not own(both[0]):
            return plain()
        return attempt("steps", lambda: _mix("STEP", factor, None, None, xs, ys), plain)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.factor, ctx.rows = inputs[0], [len(leaf) for leaf in inputs[1:]]

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> Any:
        pairs = [*(ctx.factor * slope for slope in slopes), *slopes]
        wanted = ctx.needs_input_grad[1:]
        return None, *map(_gathered, pairs, ctx.rows, wanted)

    @staticmethod
    def vmap(info: Any, dims: Any, factor: float, *both: Tensor) -> Any:
        both = _grouped(info.batch_size, dims[1:], both)
        return _apart(info.batch_size, _Step.apply(factor, *both))  # type: ignore[no-untyped-call]


class _Choice(Function):
    """x where `keep`, else y."""

    @staticmethod
    def forward(keep: Tensor, *both: Tensor) -> Any:
        xs, ys = _halves(both)

        def plain() -> tuple[Tensor, ...]:
            return tuple(torch.where(_against(keep, x), x, y) for x, y in zip(xs, ys, strict=True))

        if not own(both[0]):
            return plain()
        return attempt("choices", lambda: _mix("CHOICE", 0.0, None, keep, xs, ys), plain)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(inputs[0])
        ctx.rows = [len(leaf) for leaf in inputs[1:]]

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> Any:
        (keep,) = ctx.saved_tensors
        kept = [torch.where(_against(keep, slope), slope, 0.0) for slope in slopes]
        left = [torch.where(_against(keep, slope), 0.0, slope) for slope in slopes]
        return None, *map(_gathered, [*kept, *left], ctx.rows, ctx.needs_input_grad[1:])

    @staticmethod
    def vmap(info: Any, dims: Any, *inputs: Tensor) -> Any:
        keep, *both = _grouped(info.batch_size, dims, inputs)
        rows = max(map(len, (keep, *both)))
        made = _Choice.apply(keep.expand(rows), *both)  # type: ignore[no-untyped-call]
        return _apart(info.batch_size, made)


class _Distance(Function):
    """The sum of (x - y)², for each row."""

    @staticmethod
    def forward(*both: Tensor) -> Tensor:
        xs, ys = _halves(both)

        def plain() -> Tensor:
            gaps = [_sums((x - y).square()) for x, y in zip(xs, ys, strict=True)]
            return torch.stack(gaps).sum(0)

        return attempt("distances", lambda: _summed(xs, ys), plain) if own(both[0]) else plain()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, pull: Tensor) -> Any:
        both = ctx.saved_tensors
        wanted, half = ctx.needs_input_grad, len(both) // 2
        if not any(wanted):
            return (None,) * len(both)
        gaps = _Gap.apply(pull, *both)  # type: ignore[no-untyped-call]
        signed = [
            *gaps,
            *(-gap if want else gap for gap, want in zip(gaps, wanted[half:], strict=True)),
        ]
        return tuple(map(_gathered, signed, map(len, both), wanted))

    @staticmethod
    def vmap(info: Any, dims: Any, *both: Tensor) -> Any:
        both = _grouped(info.batch_size, dims, both)
        made = _Distance.apply(*both)  # type: ignore[no-untyped-call]
        return made.unflatten(0, (info.batch_size, -1)), 0


class _Gap(Function):
    """2 · pull · (x - y): the derivative of the distance."""

    @staticmethod
    def forward(pull: Tensor, *both: Tensor) -> Any:
        xs, ys = _halves(both)

        def plain() -> tuple[Tensor, ...]:
            return tuple(2 * _against(pull, x) * (x - y) for x, y in zip(xs, ys, strict=True))

        if not own(both[0]):
            return plain()
        return attempt("gaps", lambda: _mix("GAP", 2.0, pull, None, xs, ys), plain)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> Any:
        pull, *both = ctx.saved_tensors
        xs, ys = _halves(both)
        along = [_sums(2 * (x - y) * slope) for x, y, slope in zip(xs, ys, slopes, strict=True)]
        by_pull = _gathered(torch.stack(along).sum(0), len(pull), ctx.needs_input_grad[0])
        moved = [2 * _against(pull, slope) * slope for slope in slopes]
        signed = [*moved, *(-move for move in moved)]
        return by_pull, *map(_gathered, signed, map(len, both), ctx.needs_input_grad[1:])

    @staticmethod
    def vmap(info: Any, dims: Any, *inputs: Tensor) -> Any:
        pull, *both = _grouped(info.batch_size, dims, inputs)
        rows = max(map(len, (pull, *both)))
        made = _Gap.apply(pull.expand(rows), *both)  # type: ignore[no-untyped-call]
        return _apart(info.batch_size, made)


# Rows of clients.


def _grouped(size: int, dims: Any, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Make the mapped axis part of the rows; what all share stays a single row."""
    pairs = list(zip(inputs, dims, strict=True))
    moved = [t if dim is None else t.movedim(dim, 0) for t, dim in pairs]
    inner = max(t.shape[dim is not None] for t, (_, dim) in zip(moved, pairs, strict=True))

    def laid(t: Tensor, dim: int | None) -> Tensor:
        if dim is None:
            return t if len(t) == 1 else t.expand(size, *t.shape).flatten(0, 1)
        return t.expand(size, inner, *t.shape[2:]).flatten(0, 1)

    return tuple(laid(t, dim) for t, (_, dim) in zip(moved, pairs, strict=True))


def _apart(size: int, made: Sequence[Tensor]) -> Any:
    return tuple(leaf.reshape(size, -1, *leaf.shape[1:]) for leaf in made), (0,) * len(made)


def _gathered(slope: Tensor, rows: int, wanted: bool) -> Tensor | None:
    """Sum the slopes of a row that many shared."""
    if not wanted:
        return None
    return slope.sum(0, keepdim=True) if rows == 1 and len(slope) > 1 else slope


def _sums(leaf: Tensor) -> Tensor:
    return leaf.reshape(len(leaf), -1).sum(1)


def _against(rows: Tensor, leaf: Tensor) -> Tensor:
    """Line a number for each row up with a leaf."""
    return rows.reshape(-1, *[1] * (leaf.dim() - 1))


# Launches.


def own(leaf: Tensor) -> bool:
    """Say whether our kernels can take a tensor."""
    return leaf.is_cuda and leaf.dtype in REALS


def _mix(
    task: str,
    factor: float,
    pull: Tensor | None,
    keep: Tensor | None,
    xs: Sequence[Tensor],
    ys: Sequence[Tensor],
) -> tuple[Tensor, ...]:
    told = [rows for rows in (pull, keep) if rows is not None]
    rows, made = max(map(len, [*told, *xs, *ys])), []
    # A row for each client, also where it is told for all at once or not asked for.
    pull = xs[0] if pull is None else pull.expand(rows).contiguous()
    keep = xs[0] if keep is None else keep.expand(rows).contiguous()
    for some in range(0, len(xs), _MOST):
        left, right = xs[some : some + _MOST], ys[some : some + _MOST]
        outs = [x.new_empty(rows, *x.shape[1:]) for x in left]
        names, args = _parameters(left, right, outs)
        span = 4 * _THREADS
        blocks = sum(-(-out[0].numel() // span) for out in outs)
        constants = {task: 1, "THREADS": _THREADS, **_kinds(xs[0], names, len(outs))}
        if blocks:
            kernel("fused.cu", "mix", constants)(
                (blocks, rows, 1), (_THREADS, 1, 1), [float(factor), pull, keep, *args]
            )
        made += outs
    return tuple(made)


def _summed(xs: Sequence[Tensor], ys: Sequence[Tensor]) -> Tensor:
    parts = []
    for some in range(0, len(xs), _MOST):
        part = xs[0].new_empty(max(map(len, [*xs, *ys])))
        names, args = _parameters(xs[some : some + _MOST], ys[some : some + _MOST])
        constants = {"DISTANCE": 1, "THREADS": _WIDE, **_kinds(part, names, len(args) // 6)}
        kernel("fused.cu", "distance", constants, 8 * _WIDE // 32)(
            (len(part), 1, 1), (_WIDE, 1, 1), [part, *args], 8 * _WIDE // 32
        )
        parts.append(part)
    return parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)


def _kinds(like: Tensor, names: str, count: int) -> dict[str, int | str]:
    each = " ".join(f"TRY({n})" for n in range(count))
    return {"REAL": REALS[like.dtype], "LEAVES": names, "EACH": each}


def _parameters(
    xs: Sequence[Tensor], ys: Sequence[Tensor], outs: Sequence[Tensor] | None = None
) -> tuple[str, list[Any]]:
    """Return the parameters of some leaves as the source names them, and what is passed."""
    names: list[str] = []
    args: list[Any] = []
    for n, (x, y) in enumerate(zip(xs, ys, strict=True)):
        size = x[0].numel()
        names.append(
            f"const REAL* x{n}, const REAL* y{n}, REAL* o{n}, int n{n}, int a{n}, int b{n}"
        )
        args += [x.contiguous(), y.contiguous(), outs[n] if outs else x.contiguous()]
        args += [size, size * (len(x) > 1), size * (len(y) > 1)]
    return ", ".join(names), args
