"""Means over clients' rows without those that are left out, in one pass over large leaves."""

import torch
from torch import Tensor

from idiolect.kernels import compiled
from idiolect.kernels.compiled import REALS, attempt, launch
from idiolect.kernels.deferred import Deferred, DeferredTensor

_LARGE = 1 << 24  # numbers of all rows, more than a GPU's cache holds
_THREADS = 256
_BYTES = 16  # that a thread reads at once


def without(rows: Tensor, leaf: Tensor) -> Tensor:
    """Return a leaf [row, ...] with zeros in the rows that are marked: perhaps when it is read."""
    late = _Without(rows, leaf)
    packed = leaf.numel() // max(1, len(leaf)) * leaf.element_size() % _BYTES == 0
    if leaf.numel() < _LARGE or not packed or not compiled.has_kernels(leaf):
        return late.make()
    return DeferredTensor(late)


def average(share: Tensor, leaf: Tensor) -> Tensor:
    """Return the sum of share [row] times leaf [row, ...] over the rows."""
    if isinstance(leaf, DeferredTensor) and isinstance(leaf.deferred, _Without):
        return leaf.deferred.average(share)
    return _summed(share, leaf)


def _summed(share: Tensor, leaf: Tensor) -> Tensor:
    total: Tensor = torch.tensordot(share, leaf, dims=1)
    return total


class _Without(Deferred):
    """Rows, and which of them are left out."""

    def __init__(self, rows: Tensor, leaf: Tensor) -> None:
        super().__init__(leaf.shape, leaf)
        self._rows, self._leaf = rows, leaf

    def make(self) -> Tensor:
        """Return a copy with zeros in the rows left out."""
        leaf = self._leaf
        return torch.where(self._rows.reshape(-1, *[1] * (leaf.dim() - 1)), 0.0, leaf)

    def average(self, share: Tensor) -> Tensor:
        """Return the sum of shares of the rows that are not left out."""

        def plain() -> Tensor:
            return _summed(share, self.made)

        def own() -> Tensor:
            leaf = self._leaf.contiguous()
            out = torch.empty_like(leaf[0])
            constants: dict[str, int | str] = {"AVERAGE": 1, "THREADS": _THREADS}
            constants["REAL"] = REALS[leaf.dtype]
            blocks = -(-out.numel() * leaf.element_size() // (_BYTES * _THREADS))
            given = [leaf, share.contiguous(), self._rows.contiguous(), out, out.numel(), len(leaf)]
            launch("fused.cu", "average", constants, (blocks, 1, 1), _THREADS, given)
            return out

        return attempt("means", own, plain) if self.waits else plain()
