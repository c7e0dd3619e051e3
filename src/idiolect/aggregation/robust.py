"""Robust aggregation: rules that a few arbitrary clients cannot move far.

All weigh clients alike: a number of examples is what a client claims, and a liar claims many.
Rows of weight 0 are absent, and so are rows that hold infinity or NaN anywhere. Finite values may
be as large as the type allows: lengths are computed so that no square overflows. Where no row is
left, the result is the reference. Nothing here waits for the device: how many rows are present is
a tensor, and choices are masks.

Distances and norms are over parameters. A rule that weighs or chooses whole rows by them does the
same to the running statistics of batch normalisation, each first brought within ten median
absolute deviations of its median: else an attacker with harmless weights could report any.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from idiolect.aggregation.aggregator import Aggregator, beside, shortened
from idiolect.core import batchnorm, tree
from idiolect.core.method import setting
from idiolect.core.tree import Params, Tree
from idiolect.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Mean(Aggregator):
    """The plain mean, each client alike: what the other rules are compared with."""

    title: ClassVar[str] = "uniform mean"

    def combine(
        self, memory: Tree, reference: Params, params: Params, weight: Tensor
    ) -> tuple[Params, Tree]:
        """Average the rows."""
        params, present = _usable(params, weight)
        return _average(params, present, reference), memory


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
        params, present = _usable(params, weight)
        lower = self.middle == "lower"
        return _or_reference(_medians(params, present, lower), present, reference), memory


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
        params, present = _usable(params, weight)
        count = present.sum()
        # A share such as 0.2 of 10 clients is 2 of them, whatever rounding makes of the product.
        cut = (self.trim * count + 1e-6).floor()
        rank = torch.arange(len(weight), device=weight.device)
        inside = ((rank >= cut) & (rank < count - cut)).to(weight.dtype)

        def trimmed(leaf: Tensor) -> Tensor:
            kept = torch.where(beside(inside, leaf) > 0, _sorted(leaf, present), 0.0)
            mean: Tensor = tree.mean(kept, inside)
            return mean

        return _or_reference(tree.map(trimmed, params), present, reference), memory


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
        """Average with weights that fall with the distance from the last average.

        It starts at the median of every coordinate. Rows farther from there than a million times
        the median distance are moved in to that: the direction is what they count by.
        """
        params, present = _usable(params, weight)
        middle = _medians(params, present)
        offsets = tree.map(lambda leaf, mid: leaf - mid, params, middle)
        lengths = _lengths(offsets)
        offsets = shortened(offsets, lengths, _FAR * _median(lengths, present))
        counts = present.to(weight.dtype)
        shares, centre = counts, tree.zeros_like(middle)
        for _ in range(self.iterations):
            gaps = _lengths(tree.map(lambda leaf, mid: leaf - mid, offsets, centre))
            shares = counts / gaps.clamp(min=self.smooth)
            centre = tree.mean(offsets, shares)
        rows = _with_statistics(offsets, params, present)
        found = _swapped(tree.add(middle, centre), tree.mean(rows, shares))
        return _or_reference(found, present, reference), memory


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
        params, present = _usable(params, weight)
        count = present.sum()
        gaps = _gaps(params)
        absent = ~(present[:, None] & present[None, :])
        gaps = gaps.masked_fill(absent, float("inf")).fill_diagonal_(float("inf"))
        rank = torch.arange(rows, device=weight.device)
        last = (count - f - 2).clamp(min=1)  # the farthest neighbour that counts
        ordered = gaps.sort(1).values
        # In units of the least distance to that neighbour, in which no square is lost.
        unit = _at(ordered.T, last - 1).masked_fill(~present, float("inf")).amin()
        squares = (ordered / torch.where((unit > 0) & unit.isfinite(), unit, 1.0)).square()
        scores = torch.where(rank < last, squares, 0.0).sum(1).masked_fill(~present, float("inf"))
        kept = count - f if self.keep == 0 else count.clamp(max=self.keep)
        place = scores.argsort(stable=True).argsort()  # 0 for the best
        chosen = _with_statistics(params, params, present)
        return _average(chosen, (place < kept) & present, reference), memory


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
        params, present = _usable(params, weight)
        updates = tree.map(lambda leaf, sent: leaf - sent, params, reference)
        norms = _lengths(updates)
        bound: float | Tensor = self.bound
        if not self.bound:
            bound = _at(_sorted(norms, present), (present.sum() - 1).clamp(min=0) // 2)
        rows = _with_statistics(shortened(updates, norms, bound), params, present)
        mean = tree.mean(rows, present.to(weight.dtype))
        found = _swapped(tree.add(reference, mean), mean)
        return _or_reference(found, present, reference), memory


_FAR = 1e6  # median distances
_REACH = 10.0  # median absolute deviations


def _usable(params: Params, weight: Tensor) -> tuple[Params, Tensor]:
    """Say which rows are present and finite throughout; what the others hold becomes zero."""
    unsound = tree.unsound_rows(params, finite=True)
    present = weight > 0
    if unsound is not None:
        present = present & ~unsound

    def cleared(leaf: Tensor) -> Tensor:
        return torch.where(beside(present, leaf), leaf, torch.zeros_like(leaf))

    return tree.map(cleared, params), present


def _or_reference(found: Params, present: Tensor, reference: Params) -> Params:
    """Where nobody is present the result is what was sent."""
    some = present.any()
    chosen: Params = tree.map(
        lambda new, old: torch.where(some, new, old.to(new.dtype)), found, reference
    )
    return chosen


def _average(params: Params, kept: Tensor, reference: Params) -> Params:
    """Average some rows, each alike."""
    counts = kept.to(tree.leaves(params)[0].dtype)
    return _or_reference(tree.mean(params, counts), kept, reference)


def _swapped(rows: Params, others: Params) -> Params:
    """Take the running statistics of another tree of the same form."""
    taken = {n: leaf for n, leaf in tree.named(others).items() if batchnorm.is_statistic(n)}
    return tree.like(rows, {**tree.named(rows), **taken}) if taken else rows


def _with_statistics(rows: Params, params: Params, present: Tensor) -> Params:
    """Put every report's running statistics, kept within reach of their median, into rows."""

    def reached(leaf: Tensor) -> Tensor:
        middle = _median(leaf, present)
        reach = _REACH * _median((leaf - middle).abs(), present)
        return leaf.clamp(middle - reach, middle + reach)

    named = tree.named(params)
    held = {n: reached(leaf) for n, leaf in named.items() if batchnorm.is_statistic(n)}
    return _swapped(rows, tree.like(params, {**named, **held})) if held else rows


def _median(leaf: Tensor, present: Tensor, lower: bool = False) -> Tensor:
    """Return the median of every coordinate over the rows that are present."""
    ordered, count = _sorted(leaf, present), present.sum()
    low = _at(ordered, (count - 1).clamp(min=0) // 2)
    return low if lower else low / 2 + _at(ordered, (count // 2).clamp(max=len(leaf) - 1)) / 2


def _medians(params: Params, present: Tensor, lower: bool = False) -> Params:
    found: Params = tree.map(lambda leaf: _median(leaf, present, lower), params)
    return found


def _lengths(params: Params) -> Tensor:
    """Return the norm of every row over its parameters; squares are of at most one, or infinite."""
    parts = [leaf.reshape(len(leaf), -1) for leaf in batchnorm.parameters(params).values()]
    if not (parts := [part for part in parts if part.numel()]):
        first = tree.leaves(params)[0]
        return first.new_zeros(len(first))
    largest = torch.stack([part.abs().amax(1) for part in parts]).amax(0)
    unit = torch.where((largest > 0) & largest.isfinite(), largest, 1.0)
    squares = [(part / unit.unsqueeze(1)).square().sum(1) for part in parts]
    length = unit * torch.stack(squares).sum(0).sqrt()
    return torch.where(largest.isfinite(), length, float("inf"))


def _sorted(leaf: Tensor, present: Tensor) -> Tensor:
    """Sort every coordinate over the rows; absent rows come last."""
    return leaf.masked_fill(~beside(present, leaf), float("inf")).sort(0).values


def _at(ordered: Tensor, rank: Tensor) -> Tensor:
    picked: Tensor = tree.pick(ordered, rank)
    return picked


def _gaps(params: Params) -> Tensor:
    """Return the distance of every pair of rows."""
    # Pair by pair rather than by the product of rows: that loses the digits that matter here.
    rows = range(len(tree.leaves(params)[0]))
    return torch.stack([_lengths(tree.map(lambda leaf, n=n: leaf - leaf[n], params)) for n in rows])
