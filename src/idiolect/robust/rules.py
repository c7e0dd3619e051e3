"""Robust aggregation: rules that a few arbitrary clients cannot move far.

All weigh clients alike: a number of examples is what a client claims, and a liar claims many.
Rows of weight 0 are absent. Nothing here waits for the device: how many rows are present is a
tensor, and choices are masks.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from idiolect import tree
from idiolect.aggregate import Aggregator, beside, row_norms, shortened
from idiolect.errors import ConfigError
from idiolect.method import setting
from idiolect.tree import Params, Tree


@dataclass(frozen=True, kw_only=True)
class Mean(Aggregator):
    """The plain mean, each client alike: what the other rules are compared with."""

    title: ClassVar[str] = "uniform mean"

    def combine(
        self, memory: Tree, reference: Params, params: Params, weight: Tensor
    ) -> tuple[Params, Tree]:
        """Average the rows."""
        return tree.mean(params, _present(weight).to(weight.dtype)), memory


@dataclass(frozen=True, kw_only=True)
class Median(Aggregator):
    """The median of every coordinate by itself (Eq. 4 of Pye and Yu 2021).

    With fewer than half the clients arbitrary, every coordinate stays within the honest range.
    """

    title: ClassVar[str] = "median"
    source: ClassVar[str] = "Yin et al. 2018, Algorithm 1; Pye and Yu 2021, Eq. 4"

    middle: str = setting(
        "mean",
        "of an even number: the mean of the two in the middle, or the lower one",
        choices=("mean", "lower"),
    )

    def combine(
        self, memory: Tree, reference: Params, params: Params, weight: Tensor
    ) -> tuple[Params, Tree]:
        """Sort every coordinate and take the middle."""
        present = _present(weight)
        count = present.sum()
        lower, upper = (count - 1).clamp(min=0) // 2, count // 2

        def median(leaf: Tensor) -> Tensor:
            ordered = _sorted(leaf, present)
            low = _at(ordered, lower)
            return low if self.middle == "lower" else (low + _at(ordered, upper)) / 2

        return tree.map(median, params), memory


@dataclass(frozen=True, kw_only=True)
class TrimmedMean(Aggregator):
    """The mean of every coordinate without its largest and smallest values."""

    title: ClassVar[str] = "trimmed mean"
    source: ClassVar[str] = "Yin et al. 2018, Algorithm 1"

    trim: float = setting(0.2, "share of the clients cut off at each end", least=0, most=0.499)

    def combine(
        self, memory: Tree, reference: Params, params: Params, weight: Tensor
    ) -> tuple[Params, Tree]:
        """Sort every coordinate and average the middle."""
        present = _present(weight)
        count = present.sum()
        # A share such as 0.2 of 10 clients is 2 of them, whatever rounding makes of the product.
        cut = (self.trim * count + 1e-6).floor()
        rank = torch.arange(len(weight), device=weight.device)
        inside = ((rank >= cut) & (rank < count - cut)).to(weight.dtype)

        def trimmed(leaf: Tensor) -> Tensor:
            kept = torch.where(beside(inside, leaf) > 0, _sorted(leaf, present), 0.0)
            mean: Tensor = tree.mean(kept, inside)
            return mean

        return tree.map(trimmed, params), memory


@dataclass(frozen=True, kw_only=True)
class GeometricMedian(Aggregator):
    """The point with the least sum of distances to all clients, by smoothed Weiszfeld steps."""

    title: ClassVar[str] = "geometric median"
    source: ClassVar[str] = "Pillutla et al. 2022, Algorithm 2"

    iterations: int = setting(32, "steps of the iteration", least=1)
    smooth: float = setting(1e-6, "least distance that is divided by", above=0)

    def combine(
        self, memory: Tree, reference: Params, params: Params, weight: Tensor
    ) -> tuple[Params, Tree]:
        """Average with weights that fall with the distance from the last average."""
        present = _present(weight).to(weight.dtype)
        centre = tree.mean(params, present)
        for _ in range(self.iterations):
            gaps = row_norms(tree.map(lambda leaf, mid: leaf - mid, params, centre))
            centre = tree.mean(params, present / gaps.clamp(min=self.smooth))
        return centre, memory


@dataclass(frozen=True, kw_only=True)
class Krum(Aggregator):
    """The client nearest to its neighbours; or the mean of the several nearest (Multi-Krum)."""

    title: ClassVar[str] = "Krum"
    source: ClassVar[str] = "Blanchard et al. 2017"

    attackers: int = setting(1, "how many attackers in a cohort it must survive (f)", least=0)
    keep: int = setting(1, "how many of the best are averaged; 0: all but f", least=0)

    def combine(
        self, memory: Tree, reference: Params, params: Params, weight: Tensor
    ) -> tuple[Params, Tree]:
        """Score each client by the squared distances to its nearest n - f - 2 others."""
        rows, f = len(weight), self.attackers
        if rows < 2 * f + 3:
            raise ConfigError(
                f"{self.title} against {f} attackers needs a cohort of {2 * f + 3} or more, and "
                f"this one has {rows}; raise cohort or lower attackers"
            )
        present = _present(weight)
        count = present.sum()
        gaps = _squared_gaps(params)
        absent = ~(present[:, None] & present[None, :])
        gaps = gaps.masked_fill(absent, float("inf")).fill_diagonal_(float("inf"))
        rank = torch.arange(rows, device=weight.device)
        near = (rank < (count - f - 2).clamp(min=1)).to(gaps.dtype)
        ordered = gaps.sort(1).values
        scores = torch.where(near > 0, ordered, 0.0).sum(1).masked_fill(~present, float("inf"))
        kept = count - f if self.keep == 0 else count.clamp(max=self.keep)
        place = scores.argsort(stable=True).argsort()  # 0 for the best
        return tree.mean(params, ((place < kept) & present).to(weight.dtype)), memory


@dataclass(frozen=True, kw_only=True)
class MultiKrum(Krum):
    """The mean of all clients but the f that are farthest from their neighbours."""

    title: ClassVar[str] = "Multi-Krum"

    keep: int = setting(0, "how many of the best are averaged; 0: all but f", least=0)


@dataclass(frozen=True, kw_only=True)
class NormBound(Aggregator):
    """The mean of updates, each shortened to a largest norm: nobody speaks louder than that."""

    title: ClassVar[str] = "norm bound"
    source: ClassVar[str] = "Sun et al. 2019"

    bound: float = setting(0.0, "largest norm of an update; 0: the cohort's median norm", least=0)

    def combine(
        self, memory: Tree, reference: Params, params: Params, weight: Tensor
    ) -> tuple[Params, Tree]:
        """Shorten and average."""
        present = _present(weight)
        updates = tree.map(lambda leaf, sent: leaf - sent, params, reference)
        norms = row_norms(updates)
        bound: float | Tensor = self.bound
        if not self.bound:
            bound = _at(_sorted(norms, present), (present.sum() - 1).clamp(min=0) // 2)
        mean = tree.mean(shortened(updates, norms, bound), present.to(weight.dtype))
        return tree.add(reference, mean), memory


def _present(weight: Tensor) -> Tensor:
    return weight > 0


def _sorted(leaf: Tensor, present: Tensor) -> Tensor:
    """Sort every coordinate over the rows; absent rows come last."""
    return leaf.masked_fill(~beside(present, leaf), float("inf")).sort(0).values


def _at(ordered: Tensor, rank: Tensor) -> Tensor:
    picked: Tensor = tree.pick(ordered, rank)
    return picked


def _squared_gaps(params: Params) -> Tensor:
    """Return the squared distance of every pair of rows."""
    # Pair by pair rather than by the product of rows: that loses the digits that matter here.
    total: Tensor | None = None
    for leaf in tree.leaves(params):
        flat = leaf.reshape(len(leaf), -1)
        part = torch.stack([(flat - row).square().sum(1) for row in flat])
        total = part if total is None else total + part
    assert total is not None
    return total
