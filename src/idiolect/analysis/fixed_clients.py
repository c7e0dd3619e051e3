"""How sure a mean or a difference is for a fixed set of clients: over their test rows and seeds.

Four hospitals are all the clients there are; what would hold for a fifth is not asked. What could
have come out otherwise is the training (seeds) and which of a client's examples were the test rows.

The mean over clients is taken under each seed, and the variance of its mean over seeds is that of
training, and of the test rows as far as they change with the seed. What seeds cannot show is that a
client's rows are themselves a sample: σ²/N is added for each client, with σ² the variance over
examples of what is averaged and N the rows there are. Where the test rows are the same under all
seeds N is their number. Where every seed draws them anew from the client's rows, N is the number of
those: with f = n/N the share tested, Var(mean) = σ²(1/(Sn) + (S - 1)f/(Sn)), of which seeds show
σ²(1 - f)/(Sn), and the rest is σ²/N.
"""

import math
from importlib import import_module
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from idiolect.analysis.scores import ComparedScores, Floats

_TINY = 1e-12  # a difference that is rounding
_GRADED = 0.2  # rows added where a metric is graded: methods seldom agree entirely


class FixedMean(NamedTuple):
    """A mean for these clients, and how sure it is; of one seed, of its trained models alone."""

    mean: float
    of_seeds: float  # the part of the mean's variance that seeds show
    seeds_freedom: float
    of_rows: float  # the part that they cannot show
    rows_freedom: float

    def bound(self, p: float) -> float:
        """Return how far from zero a mean would lie by chance with probability p at most.

        Cochran and Cox weigh Student's bounds of both parts. It errs to the safe side, where one
        joint number of degrees of freedom is a guess from few seeds.
        """
        total = self.of_seeds + self.of_rows
        quantile = import_module("scipy.special").stdtrit
        weighed = sum(
            share * float(quantile(freedom, 1 - p / 2))
            for share, freedom in (
                (self.of_seeds, self.seeds_freedom),
                (self.of_rows, self.rows_freedom),
            )
            if share
        )
        return weighed / math.sqrt(total)

    @property
    def p(self) -> float:
        """Return the two-sided p of a mean of zero."""
        if math.isnan(self.mean) or abs(self.mean) < _TINY or not self.of_rows > 0:
            return 1.0
        low, high = -300.0, 0.0  # the logarithm of p
        for _ in range(40):
            middle = (low + high) / 2
            if self.bound(10**middle) > abs(self.mean):
                low = middle
            else:
                high = middle
        return float(10**high)

    def interval(self, confidence: float) -> tuple[float, float]:
        """Return where the mean lies with some confidence."""
        if math.isnan(self.mean) or not self.of_rows > 0:
            return math.nan, math.nan
        wide = self.bound(1 - confidence)
        return self.mean - wide, self.mean + wide


def difference(held: ComparedScores, one: str, other: str) -> FixedMean:
    """Compare two methods on these clients, by pairs of the same test rows."""
    apart = held.method(one) - held.method(other)
    return _combined(apart, *_paired(held, one, other), held)


def average(held: ComparedScores, label: str) -> FixedMean:
    """Estimate one method's mean over these clients."""
    own = held.method(label)
    rows = _tested(held)
    if held.metric.name != "accuracy":
        return _combined(own, *_jackknifed(held, _without(held, label)), held)
    return _combined(own, _smoothed(own * (1 - own), rows), np.maximum(rows - 1, 1), held)


def _combined(values: Floats, spread: Floats, freedom: Floats, held: ComparedScores) -> FixedMean:
    """Join what seeds show and what they cannot; arrays are [seed, client], `spread` of a row."""
    rows = _tested(held)
    if not held.same_test and len(values) > 1:  # one seed shows nothing of other rows
        rows = np.maximum(held.rows, rows)
    scored = ~np.isnan(values) & (rows > 0)
    if held.same_clients:
        scored &= scored.all(axis=0)
    seen = scored.any(axis=1)
    if not seen.any():
        return FixedMean(math.nan, math.nan, math.nan, math.nan, math.nan)
    count = np.maximum(scored.sum(axis=1), 1)
    means = (np.where(scored, values, 0).sum(axis=1) / count)[seen]
    # Each client's part of the variance of the mean, the same under every seed but for chance.
    parts = np.where(scored, spread / np.maximum(rows, 1), 0) / count[:, None] ** 2
    parts, free = parts[seen].mean(axis=0), np.maximum(freedom[seen].mean(axis=0), 1)
    of_rows, seeds = float(parts.sum()), len(means)
    return FixedMean(
        float(means.mean()),
        float(means.var(ddof=1)) / seeds if seeds > 1 else 0.0,
        max(seeds - 1.0, 1.0),
        of_rows,
        of_rows**2 / float((parts**2 / free).sum()),  # Satterthwaite's
    )


def _paired(held: ComparedScores, one: str, other: str) -> tuple[Floats, Floats]:
    """Estimate the variance over examples of a paired difference, and degrees of freedom.

    From counts of right answers in groups of rows, where they are known: methods that err on the
    same rows then need fewer rows to differ. Else as if methods erred independently, which is more
    than the truth unless they err on different rows. Of other metrics than accuracy it comes from
    leaving out groups of rows.
    """
    if held.metric.name != "accuracy":
        return _jackknifed(held, _without(held, one) - _without(held, other))
    rows = _tested(held)
    first, second = held.method(one), held.method(other)
    if held.right is None:
        apart = first * (1 - first) + second * (1 - second)
        return _smoothed(apart, rows), np.maximum(rows - 1, 1)
    places = held.labels.index(one), held.labels.index(other)
    moved = held.right[places[0]] - held.right[places[1]]  # [seed, client, group]
    sizes = _sizes(rows, moved.shape[2])
    if held.same_test:  # what differs from seed to seed is training, which seeds show
        moved = np.broadcast_to(moved.mean(axis=0), moved.shape)
    total = sizes.sum(axis=2)
    middle = moved.sum(axis=2) / np.maximum(total, 1)
    squares = (moved - sizes * middle[..., None]) ** 2 / np.maximum(sizes, 1)
    groups = (sizes > 0).sum(axis=2)
    freedom = np.maximum(groups - 1, 1)
    found = np.where(sizes > 0, squares, 0).sum(axis=2) / freedom
    return _smoothed(found, rows), freedom.astype(np.float64)


def _without(held: ComparedScores, label: str) -> Floats:
    assert held.without is not None
    return np.asarray(held.without[held.labels.index(label)])


def _jackknifed(held: ComparedScores, left: Floats) -> tuple[Floats, Floats]:
    """Estimate the variance over examples, and degrees of freedom, from leaving out groups.

    With G groups left out in turn, [seed, client, group], the variance of a client's value is
    (G - 1)/G Σ (value - mean)². Times its test rows it is a variance over examples, as that of a
    mean would be. Few rows that agree prove little here too: half a row of those that decide the
    metric, such as the rarer class's, is added to each way of differing, where the metric counts
    decisions, and a tenth where it is a share of another kind.
    """
    if held.same_test:
        left = np.broadcast_to(_known_mean(left, 0), left.shape)
    groups = (~np.isnan(left)).sum(axis=2)
    apart = left - _known_mean(left, 2)[..., None]
    found = np.nansum(apart**2, axis=2) * (groups - 1) / np.maximum(groups, 1)
    rows = _tested(held)
    decide = rows if held.effective is None else np.nan_to_num(held.effective)
    if held.metric.percent:
        decide = np.maximum(decide, 1)
        added = 1.0 if held.metric.decides else _GRADED
        found = _smoothed(found * decide, decide, added) / decide
    return found * rows, np.maximum(np.minimum(groups, decide) - 1, 1).astype(np.float64)


def _known_mean(values: Floats, axis: int) -> Floats:
    seen = ~np.isnan(values)
    total = np.where(seen, values, 0).sum(axis)
    return np.asarray(np.where(seen.any(axis), total / np.maximum(seen.sum(axis), 1), np.nan))


def _smoothed(variance: Floats, rows: Floats, added: float = 1.0) -> Floats:
    """Add half a row to each of the two ways to differ: few rows that agree prove little.

    Agresti and Min (Biometrics 61, 2005) do so for matched pairs.
    """
    return np.asarray((np.nan_to_num(variance) * rows + added) / (rows + 2 * added))


def _tested(held: ComparedScores) -> Floats:
    return np.zeros(held.accuracy.shape[1:]) if held.tested is None else held.tested


def _sizes(rows: Floats, groups: int) -> NDArray[np.float64]:
    """Return how many rows each group has: row n is in group n % groups."""
    places = np.arange(groups)
    return np.asarray(rows[..., None] // groups + (places < rows[..., None] % groups), np.float64)
