"""Rows of clients: which of them hold NaN, and means without those; a launch for all leaves.

Rows that consist of factors are looked at, and averaged, without being computed.
"""

from collections.abc import Sequence, Set
from typing import Any

import torch
from torch import Tensor

from idiolect.kernels.compiled import REALS, aligned, attempt, launch, memory_order
from idiolect.kernels.deferred import Deferred, DeferredTensor, factored

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
        made = torch.where(self.rows.reshape(-1, *[1] * (leaf.dim() - 1)), 0.0, leaf)
        return made.contiguous()  # steps leave some weights in other orders


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
        made = {
            n: found.mean(share, late[0].rows)
            for n, leaf in enumerate(whole)
            if (found := factored(leaf)) is not None
        }
        rest = iter(_launched_average(share, late[0].rows, whole, {*range(len(whole))} - {*made}))
        return [made[n] if n in made else next(rest) for n in range(len(whole))]

    return attempt("means", own, plain)


def _launched_average(
    share: Tensor, rows: Tensor, leaves: Sequence[Tensor], which: Set[int]
) -> list[Tensor]:
    """Launch `average` on some leaves."""
    some = [leaf for n, leaf in enumerate(leaves) if n in which]
    orders = [*map(memory_order, some)]
    lain = [leaf.permute(order) for leaf, order in zip(some, orders, strict=True)]
    made = [leaf.new_empty(leaf.shape[1:]) for leaf in lain]
    each = _BYTES // share.element_size() * _THREADS

    def declared(leaf: Tensor, out: Tensor) -> tuple[int, list[Any]]:
        numbers = leaf.shape[1:].numel()
        return -(-numbers // each), [aligned(leaf), out, numbers]

    given = [share.contiguous(), rows.contiguous(), len(share)]
    parts = [declared(*pair) for pair in zip(lain, made, strict=True)]
    _launch_some("average", given, "const REAL* x{0}, REAL* o{0}, int n{0}", parts, 1, share.dtype)
    back = ([order.index(axis) - 1 for axis in range(1, len(order))] for order in orders)
    return [leaf.permute(axes).contiguous() for leaf, axes in zip(made, back, strict=True)]


def unsound(leaves: Sequence[Tensor], finite: bool) -> Tensor:
    """Say of each row of all leaves whether it holds NaN or, if it is to be `finite`, infinity."""

    def plain() -> Tensor:
        ends = [leaf.reshape(len(leaf), -1).aminmax(dim=1) for leaf in leaves]
        sound = [
            least.isfinite() & most.isfinite() if finite else ~(least.isnan() | most.isnan())
            for least, most in ends
        ]
        return ~torch.stack(sound).all(0)

    def own() -> Tensor:
        parts = list[tuple[int, list[Any]]]()
        for leaf in leaves:
            found = factored(leaf)
            if found is not None:
                products = found.largest().contiguous()
                parts.append(_looked_at(products.unsqueeze(1), found.LARGEST))
            else:
                largest = torch.finfo(leaf.dtype).max if finite else float("inf")
                lain = aligned(leaf.permute(memory_order(leaf)))
                parts.append(_looked_at(lain.reshape(len(leaf), 1, -1), largest))
        marks = torch.zeros(len(leaves[0]), dtype=torch.bool, device=leaves[0].device)
        names = "const REAL* x{0}, int n{0}, int r{0}, int s{0}, double l{0}"
        _launch_some("unsound", [marks], names, parts, len(marks), leaves[0].dtype)
        return marks

    if len({leaf.dtype for leaf in leaves}) > 1 or not _has_kernels(leaves[0]):
        return plain()
    return attempt("unsound rows", own, plain)


def _looked_at(leaf: Tensor, largest: float) -> tuple[int, list[Any]]:
    """Return the blocks that rows [row, piece, number] take, and what tells of them."""
    _, pieces, numbers = leaf.shape
    given = [leaf, numbers, leaf.stride(0), leaf.stride(1), largest]
    return pieces * -(-numbers // _CHUNK), given


def _launch_some(
    name: str,
    given: list[Any],
    names: str,
    parts: Sequence[tuple[int, list[Any]]],
    rows: int,
    kind: torch.dtype,
) -> None:
    """Launch a function of `fused.cu` on up to so many leaves at a time: blocks and arguments."""
    for some in range(0, len(parts), _LEAVES):
        own = parts[some : some + _LEAVES]
        declared = [names.format(n) + f", int m{n}" for n in range(len(own))]
        constants: dict[str, int | str] = {name.upper(): 1, "THREADS": _THREADS, "CHUNK": _CHUNK}
        constants |= {"REAL": REALS[kind], "LEAVES": ", ".join(declared)}
        constants["EACH"] = " ".join(f"TRY({n})" for n in range(len(own)))
        arguments = [one for blocks, told in own for one in (*told, blocks)]
        if blocks := sum(many for many, _ in own):
            all_given = [*given, *arguments]
            launch("fused.cu", name, constants, (blocks, rows, 1), _THREADS, all_given)
