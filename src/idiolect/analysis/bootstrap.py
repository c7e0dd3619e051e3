"""Intervals by resampling seeds and clients, as they were drawn."""

import math

import numpy as np

from idiolect.analysis.paired_tests import stats
from idiolect.analysis.sampled_clients import Sampled
from idiolect.analysis.scores import Floats, Scores

RESAMPLES = 10_000
_DRAWS = 7  # keeps these draws apart from other uses of a seed
_AT_ONCE = 4_000_000  # counts held in memory


def resampled(held: Scores, resamples: int = RESAMPLES, seed: int = 0) -> Floats:
    """Return every method's mean in each resample, [method, resample]; draws are shared.

    Seeds are drawn with replacement. Where each seed has clients of its own, clients are then drawn
    within every seed drawn; where clients are the same under all seeds, one draw of clients serves
    all of them. All methods meet the same draws, so that differences between them stay paired.
    """
    generator = np.random.default_rng((seed, _DRAWS))
    draw = _crossed if held.same_clients else _nested
    return draw(held.accuracy, resamples, generator)


def interval(means: Floats, found: Sampled, confidence: float = 0.95) -> tuple[float, float]:
    """Return the percentile interval of resampled means, rescaled to what `sampled` says of them.

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


def _nested(accuracy: Floats, resamples: int, generator: np.random.Generator) -> Floats:
    """Draw seeds, and clients anew for every place a seed is drawn to."""
    methods, seeds, _ = accuracy.shape
    each = [_scored(accuracy[:, seed]) for seed in range(seeds)]
    filled = [values for values in each if values.shape[1]]
    if not filled:
        return np.full((methods, resamples), np.nan)
    means = np.empty((methods, resamples, len(filled)))
    chosen = generator.integers(len(filled), size=(resamples, len(filled)))
    for place, values in enumerate(filled):
        rows, columns = np.nonzero(chosen == place)
        for part in _parts(len(rows), values.shape[1]):
            weights = _counts(values.shape[1], part.stop - part.start, generator)
            means[:, rows[part], columns[part]] = values @ weights.T
    return np.asarray(means.mean(axis=2))


def _crossed(accuracy: Floats, resamples: int, generator: np.random.Generator) -> Floats:
    """Draw seeds and, apart from them, clients."""
    held = accuracy[:, :, np.isfinite(accuracy.sum(axis=(0, 1)))]
    methods, seeds, clients = held.shape
    means = np.full((methods, resamples), np.nan)
    for part in _parts(resamples, clients) if clients else ():
        count = part.stop - part.start
        rows, columns = _counts(seeds, count, generator), _counts(clients, count, generator)
        means[:, part] = np.einsum("rs,msc,rc->mr", rows, held, columns, optimize=True)
    return means


def _scored(accuracy: Floats) -> Floats:
    """Leave out clients without a score, of [method, client]."""
    return np.asarray(accuracy[:, np.isfinite(accuracy.sum(axis=0))])


def _counts(things: int, times: int, generator: np.random.Generator) -> Floats:
    """Say how often each thing is drawn, as a share, in each of so many resamples of all."""
    return generator.multinomial(things, np.full(things, 1 / things), size=times) / things


def _parts(rows: int, width: int) -> list[slice]:
    size = max(1, _AT_ONCE // max(width, 1))
    return [slice(first, min(first + size, rows)) for first in range(0, rows, size)]
