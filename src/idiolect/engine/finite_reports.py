"""What must never reach the global model: NaN and infinity, whoever sent them.

A client that reports either, or whose new personal state holds NaN, is left out of the round: its
report counts for nothing and it keeps the personal state it had. Where the server averages, this is
a weight of zero on the device, and nobody waits for the figure until the round is over.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from idiolect.core import tree
from idiolect.core.method import Method, Report
from idiolect.core.tree import Tree


def broken_personal(parts: Sequence[Tree]) -> Tensor | None:
    """Say of each seat whether its personal state holds NaN; infinity may stand for "not yet"."""
    found = [tree.rows_where(_nan, part) for part in parts]
    told = [rows for rows in found if rows is not None]
    return torch.cat(told) if told else None


def broken(reports: Tree, stale: Tensor | None, rows: int, device: torch.device) -> Tensor:
    """Say of each row of a cohort whether it must be left out."""
    bad = tree.rows_where(_not_finite, reports)
    told = [flags for flags in (bad, stale) if flags is not None]
    if not told:
        return torch.zeros(rows, dtype=torch.bool, device=device)
    return torch.stack(told).any(0)


def _nan(least: Tensor, most: Tensor) -> Tensor:
    return least.isnan() | most.isnan()


def _not_finite(least: Tensor, most: Tensor) -> Tensor:
    return ~(least.isfinite() & most.isfinite())


def guarded_step(method: Method, state: Tree, cohort: Tensor, reports: Tree, bad: Tensor) -> Tree:
    """Take the server's step without the broken rows; with none left, as if nobody had come."""
    if method.aggregates == "mean" and isinstance(reports, Report):
        new = method.server_step(state, cohort, without(reports, bad))
        # Where noise hides who came, it is in the step on no rows at all as well.
        return new if method.hides else tree.where(bad.all(), method.idle(state), new)
    if not tree.leaves(reports):
        return method.server_step(state, cohort, reports)
    kept = (~bad).nonzero().squeeze(1)
    if not len(kept):
        return method.idle(state)
    if len(kept) == len(bad):
        return method.server_step(state, cohort, reports)
    return method.server_step(state, cohort[kept], tree.take(reports, kept))


def without(reports: Report, bad: Tensor) -> Report:
    """Give broken rows no weight, and numbers that a weight of zero makes nothing of."""

    def cleared(leaf: Tensor) -> Tensor:
        return torch.where(bad.reshape(-1, *[1] * (leaf.dim() - 1)), 0.0, leaf)

    cleaned: Report = tree.map(cleared, reports)
    return cleaned
