"""How sure means and differences are when clients and seeds are a sample of those there could be.

Variance of a mean, intervals by resampling, tests of paired differences, average ranks.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np

from idiolect.analysis.scores import ComparedScores, Floats
from idiolect.errors import MissingExtra
from idiolect.results import statistics

RESAMPLES = 10_000
_STREAM = 7  # keeps these draws apart from other uses of a seed
_AT_ONCE = 4_000_000  # counts held in memory
_EXACT = 50  # differences; scipy's own bound
_DIGITS = 12  # 0.9 - 0.8 and 0.8 - 0.7 differ in the sixteenth digit, and are a tie


def stats() -> Any:
    """Import scipy's statistics; the error says how to install them."""
    try:
        return import_module("scipy.stats")
    except ImportError as error:
        raise MissingExtra("the statistics of a comparison need scipy", "stats") from error


class SampledMean(NamedTuple):
    """A mean, the variance of that mean, and the degrees of freedom of the variance."""

    mean: float
    variance: float
    freedom: float


def sampled(values: Floats, same_clients: bool) -> SampledMean:
    """Estimate the mean of [seed, client].

    Clients of one seed share a model, so their scores rise and fall together: however many clients
    there are, a mean is only as sure as its seeds let it be. With other clients under every seed,
    the seeds' means are the sample. With the same clients, the layout is crossed with both effects
    random: the variance is (MS of clients + MS of seeds - MS of the rest) / cells, with
    Satterthwaite's degrees of freedom. With one seed only clients are a sample, and the mean is one
    of that run. Where there is not enough data, the variance is NaN.
    """
    held = np.asarray(values, np.float64)
    if len(held) > 1 and same_clients:
        held = held[:, ~np.isnan(held).any(axis=0)]
        if held.shape[1] > 1:
            return _crossed_mean(held)
        return SampledMean(statistics.mean(held.ravel()), math.nan, math.nan)
    each = held[0] if len(held) == 1 else np.array([statistics.mean(row) for row in held])
    each = each[~np.isnan(each)]
    if len(each) < 2:
        return SampledMean(statistics.mean(each), math.nan, math.nan)
    return SampledMean(float(each.mean()), float(each.var(ddof=1)) / len(each), len(each) - 1.0)


def _crossed_mean(held: Floats) -> SampledMean:
    """Estimate the grand mean of [seed, client] with both effects random."""
    seeds, clients = held.shape
    grand, by_seed, by_client = held.mean(), held.mean(axis=1), held.mean(axis=0)
    rest = held - by_seed[:, None] - by_client[None, :] + grand
    ms_seeds = clients * float(by_seed.var(ddof=1))
    ms_clients = seeds * float(by_client.var(ddof=1))
    ms_rest = float((rest**2).sum()) / ((seeds - 1) * (clients - 1))
    # An effect whose estimate is not positive is taken as zero; the other one remains.
    if ms_clients <= ms_rest or ms_seeds <= ms_rest:
        largest, freedom = max((ms_seeds, seeds - 1.0), (ms_clients, clients - 1.0))
        return SampledMean(float(grand), largest / held.size, freedom)
    total = ms_seeds + ms_clients - ms_rest
    freedom = total**2 / (
        ms_seeds**2 / (seeds - 1)
        + ms_clients**2 / (clients - 1)
        + ms_rest**2 / ((seeds - 1) * (clients - 1))
    )
    return SampledMean(float(grand), total / held.size, freedom)


def resampled(held: ComparedScores, resamples: int = RESAMPLES, seed: int = 0) -> Floats:
    """Return every method's mean in each bootstrap resample, [method, resample].

    Seeds are drawn with replacement. Where each seed has clients of its own, clients are then drawn
    within every seed drawn; where clients are the same under all seeds, one draw of clients serves
    all of them. All methods share the same draws, so that differences between them stay paired.
    """
    generator = np.random.default_rng((seed, _STREAM))
    draw = _crossed_resamples if held.same_clients else _nested_resamples
    return draw(held.accuracy, resamples, generator)


def interval(means: Floats, found: SampledMean, confidence: float = 0.95) -> tuple[float, float]:
    """Return the percentile interval of resampled means, rescaled to what `sampled` estimated.

    Resampling few seeds varies less than as many new seeds would, and resampling clients within
    them counts chance twice. So the resamples give the interval its shape, and its width is set
    to the unbiased variance of the mean and to Student's t.
    """
    means = means[~np.isnan(means)]
    if not len(means) or math.isnan(found.variance):
        return math.nan, math.nan
    tail = (1 - confidence) / 2
    spread = float(means.std())
    if spread == 0:
        return found.mean, found.mean
    wider = float(stats().t.isf(tail, found.freedom) / stats().norm.isf(tail))
    low, high = np.quantile(means - means.mean(), [tail, 1 - tail])
    scale = math.sqrt(found.variance) / spread * wider
    return found.mean + scale * float(low), found.mean + scale * float(high)


def _nested_resamples(accuracy: Floats, resamples: int, generator: np.random.Generator) -> Floats:
    """Draw seeds, and clients anew for every place a seed is drawn to."""
    each = [rows[:, np.isfinite(rows.sum(axis=0))] for rows in accuracy.swapaxes(0, 1)]
    filled = [values for values in each if values.shape[1]]
    if not filled:
        return np.full((len(accuracy), resamples), np.nan)
    means = np.empty((len(accuracy), resamples, len(filled)))
    chosen = generator.integers(len(filled), size=(resamples, len(filled)))
    for place, values in enumerate(filled):
        rows, columns = np.nonzero(chosen == place)
        for part in _parts(len(rows), values.shape[1]):
            weights = _shares(values.shape[1], part.stop - part.start, generator)
            means[:, rows[part], columns[part]] = values @ weights.T
    return np.asarray(means.mean(axis=2))


def _crossed_resamples(accuracy: Floats, resamples: int, generator: np.random.Generator) -> Floats:
    """Draw seeds and, independently, clients."""
    held = accuracy[:, :, np.isfinite(accuracy.sum(axis=(0, 1)))]
    methods, seeds, clients = held.shape
    means = np.full((methods, resamples), np.nan)
    for part in _parts(resamples, clients) if clients else ():
        count = part.stop - part.start
        rows, columns = _shares(seeds, count, generator), _shares(clients, count, generator)
        means[:, part] = np.einsum("rs,msc,rc->mr", rows, held, columns, optimize=True)
    return means


def _shares(things: int, times: int, generator: np.random.Generator) -> Floats:
    """Return the share of draws that each thing gets in each resample, [resample, thing]."""
    return generator.multinomial(things, np.full(things, 1 / things), size=times) / things


def _parts(rows: int, width: int) -> list[slice]:
    size = max(1, _AT_ONCE // max(width, 1))
    return [slice(first, min(first + size, rows)) for first in range(0, rows, size)]


def signed_rank(differences: Floats) -> float:
    """Return the two-sided p of Wilcoxon's signed-rank test; zeros by Pratt.

    Exact for up to 50 differences, the normal approximation beyond. scipy has the exact one without
    ties and zeros; with them it goes through all signs one by one, which takes seconds.
    """
    rounded: Floats = np.asarray(np.round(differences, _DIGITS), np.float64)
    if not np.any(rounded):
        return 1.0
    sizes = np.abs(rounded)
    if len(rounded) <= _EXACT and (0 in sizes or len(set(sizes)) < len(sizes)):
        return _exact_with_ties(rounded)
    return float(stats().wilcoxon(rounded, zero_method="pratt").pvalue)


def _exact_with_ties(differences: Floats) -> float:
    """Count, of all choices of signs, those as far out; ranks are doubled, for ties have halves.

    Adding a rank r to the sums there are shifts their distribution by r, or leaves it.
    """
    ranks = np.rint(2 * stats().rankdata(np.abs(differences))).astype(int)
    chances = np.ones(1)
    for rank in ranks[differences != 0]:
        none = np.zeros(rank)
        chances = (np.concatenate([chances, none]) + np.concatenate([none, chances])) / 2
    found = int(ranks[differences > 0].sum())
    return min(1.0, 2 * float(min(chances[: found + 1].sum(), chances[found:].sum())))


def over_seeds(differences: Floats, same_clients: bool) -> float | None:
    """Return the two-sided p of the mean of [seed, client], seeds being a sample too.

    Student's t on the estimate of `sampled`. None with one seed, which shows nothing of others.
    """
    found = sampled(differences, same_clients)
    if len(differences) < 2 or math.isnan(found.variance):
        return None
    if abs(found.mean) < 10**-_DIGITS:
        return 1.0
    if found.variance < 10 ** -(2 * _DIGITS):
        return 0.0
    return float(2 * stats().t.sf(abs(found.mean) / math.sqrt(found.variance), found.freedom))


def holm(values: Sequence[float]) -> list[float]:
    """Adjust p-values by Holm's step-down: in order, the smallest times n, the next times n - 1."""
    order = np.argsort(values, kind="stable")
    adjusted, running = [0.0] * len(values), 0.0
    for rank, place in enumerate(order):
        running = max(running, min(1.0, (len(values) - rank) * values[place]))
        adjusted[place] = running
    return adjusted


@dataclass(frozen=True)
class Ranks:
    """Average ranks, 1 the best, and groups within the critical difference (Demšar, JMLR 2006)."""

    average: dict[str, float]  # by label, best first
    blocks: int  # clients, or clients and seeds, that were ranked
    friedman: float | None  # p of all methods being alike; None with fewer than three
    critical_difference: float | None
    cliques: list[list[str]]  # largest groups that do not differ by rank; best first


def ranks(labels: tuple[str, ...], units: Floats, alpha: float = 0.05) -> Ranks:
    """Rank methods within every unit of [method, unit]; ties share their mean rank."""
    blocks = units.shape[1]
    rounded = np.round(units, _DIGITS)
    average = np.full(len(labels), np.nan)
    difference = None
    if blocks:
        average = stats().rankdata(-rounded, axis=0).mean(axis=1)
        difference = critical_difference(len(labels), blocks, alpha)
    by_label = {labels[i]: float(average[i]) for i in np.argsort(average, kind="stable")}
    groups = cliques(list(by_label), list(by_label.values()), difference)
    return Ranks(by_label, blocks, _friedman(rounded), difference, groups)


def critical_difference(methods: int, blocks: int, alpha: float = 0.05) -> float | None:
    """Return Nemenyi's critical difference of average ranks; None with one method."""
    if methods < 2:
        return None
    q = float(stats().studentized_range.isf(alpha, methods, np.inf)) / math.sqrt(2)
    return q * math.sqrt(methods * (methods + 1) / (6 * blocks))


def cliques(labels: list[str], average: list[float], difference: float | None) -> list[list[str]]:
    """Return the largest runs of sorted ranks that span less than the critical difference."""
    if difference is None:
        return []
    found: list[list[str]] = []
    reached = 0
    for first in range(len(labels)):
        last = first + sum(rank - average[first] < difference for rank in average[first + 1 :])
        if last > first and last + 1 > reached:
            found.append(labels[first : last + 1])
            reached = last + 1
    return found


def _friedman(units: Floats) -> float | None:
    methods, blocks = units.shape
    if methods < 3 or blocks < 2:
        return None
    if np.all(units == units[0]):
        return 1.0  # scipy divides zero by zero where every unit is a tie
    return float(stats().friedmanchisquare(*units).pvalue)
