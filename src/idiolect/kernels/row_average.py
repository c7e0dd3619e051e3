"""Rows of clients: which of them hold NaN, and means without those; a launch for all leaves."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from idiolect.kernels.compiled import REALS, aligned, attempt, launch, memory_order
from idiolect.kernels.deferred import Deferred, DeferredTensor

_THREADS = 256
_BYTES = 16  # that a thread reads at once
_CHUNK = 1 << 14  # numbers of a row that a block looks at
_LEAVES = 64  # of a launch, at most


def without(rows: Tensor, leaf: Tensor) -> Tensor:
    """Return a leaf [row, ...] with zeros in the rows that are marked: perhaps when it is read."""
    late = _Without(rows, leaf)
    return DeferredTensor(late) if _has_kernels(leaf) else late.make()


def _has_kernels(leaf: Tensor) -> bool:
    return leaf.is_cuda and leaf.dtype in REALS


class _Without(Deferred):
    """Rows, and which of them are left out."""

    def __init__(self, rows: Tensor, leaf: Tensor) -> None:
        super().__init__(leaf.shape, leaf)
        self.rows, self.leaf = rows, leaf

    def make(self) -> Tensor:
        """Return a copy with zeros in the rows left out."""
        leaf = self.leaf
        return torch.where(self.rows.reshape(-1, *[1] * (leaf.dim() - 1)), 0.0, leaf)


def averages(share: Tensor, leaves: Sequence[Tensor]) -> list[Tensor]:
    """Return the sum of share [row] times leaf [row, ...] over the rows, for each leaf."""

    def plain() -> list[Tensor]:
        return [torch.tensordot(share.to(leaf.dtype), leaf, dims=1) for leaf in leaves]

    late = [
        leaf.deferred
        for leaf in leaves
        if isinstance(leaf, DeferredTensor) and isinstance(leaf.deferred, _Without)
    ]
    whole = [one.leaf for one in late if one.waits and one.rows is late[0].rows]
    if not late or len(whole) < len(leaves) or any(leaf.dtype != share.dtype for leaf in whole):
        return plain()

    def own() -> list[Tensor]:
        orders = [*map(memory_order, whole)]
        lain = [leaf.permute(order) for leaf, order in zip(whole, orders, strict=True)]
        made = [leaf.new_empty(leaf.shape[1:]) for leaf in lain]
        numbers = _BYTES // share.element_size() * _THREADS
        given = [share.contiguous(), late[0].rows.contiguous(), len(share)]
        _launch_some("average", given, lain, made, lambda n: -(-n // numbers), 1)
        back = ([order.index(axis) - 1 for axis in range(1, len(order))] for order in orders)
        return [leaf.permute(axes).contiguous() for leaf, axes in zip(made, back, strict=True)]

    return attempt("means", own, plain)


def extremes(leaves: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the least and the largest number of each row of all leaves; a NaN in it is both."""

    def plain() -> tuple[Tensor, Tensor]:
        return _outermost([leaf.reshape(len(leaf), -1).aminmax(dim=1) for leaf in leaves])

    def own() -> tuple[Tensor, Tensor]:
        blocks = sum(_chunks(leaf[0].numel()) for leaf in leaves)
        parts = leaves[0].new_empty(len(leaves[0]), 2 * blocks)
        lain = [leaf.permute(memory_order(leaf)) for leaf in leaves]
        _launch_some("extremes", [parts, 2 * blocks], lain, lain, _chunks, len(parts))
        found = parts.aminmax(dim=1)
        return found.min, found.max

    if len({leaf.dtype for leaf in leaves}) > 1 or not _has_kernels(leaves[0]):
        return plain()
    if len(leaves) > _LEAVES:
        some = [leaves[n : n + _LEAVES] for n in range(0, len(leaves), _LEAVES)]
        return _outermost([extremes(own) for own in some])
    return attempt("extremes", own, plain)


def _outermost(pairs: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    least, most = zip(*pairs, strict=True)
    return torch.stack(least).amin(0), torch.stack(most).amax(0)


def _chunks(numbers: int) -> int:
    return -(-numbers // _CHUNK)


def _launch_some(
    name: str,
    given: list[Any],
    leaves: Sequence[Tensor],
    made: Sequence[Tensor],
    cut: Callable[[int], int],
    rows: int,
) -> None:
    """Launch a function of `fused.cu` on up to so many leaves at a time."""
    for some in range(0, len(leaves), _LEAVES):
        pairs = [*zip(leaves[some : some + _LEAVES], made[some : some + _LEAVES], strict=True)]
        declared = [f"const REAL* x{n}, REAL* o{n}, int n{n}, int m{n}" for n in range(len(pairs))]
        arguments, blocks = list[Any](), 0
        for leaf, out in pairs:
            numbers = leaf.shape[1:].numel()
            arguments += [aligned(leaf), out, numbers, cut(numbers)]
            blocks += cut(numbers)
        constants: dict[str, int | str] = {name.upper(): 1, "THREADS": _THREADS, "CHUNK": _CHUNK}
        constants["REAL"] = REALS[leaves[0].dtype]
        constants["LEAVES"] = ", ".join(declared)
        constants["EACH"] = " ".join(f"TRY({n})" for n in range(len(pairs)))
        if blocks:
            all_given = [*given, *arguments]
            shared = 2 * 8 * _THREADS // 32
            launch("fused.cu", name, constants, (blocks, rows, 1), _THREADS, all_given, shared)
