"""Tests of paired differences: over clients, over seeds, and over many pairs of methods at once."""

import math
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import numpy as np

from idiolect.analysis.sampled_clients import sampled
from idiolect.analysis.scores import Floats
from idiolect.errors import MissingExtra

_EXACT = 50  # differences; scipy's own bound
_DIGITS = 12  # 0.9 - 0.8 and 0.8 - 0.7 differ in the sixteenth digit, and are a tie


def stats() -> Any:
    """Import scipy's statistics, or say how to get them."""
    try:
        return import_module("scipy.stats")
    except ImportError as error:
        raise MissingExtra("the statistics of a comparison need scipy", "stats") from error


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
    moved = differences != 0
    chances = np.ones(1)
    for rank in ranks[moved]:
        none = np.zeros(rank)
        chances = (np.concatenate([chances, none]) + np.concatenate([none, chances])) / 2
    found = int(ranks[differences > 0].sum())
    return min(1.0, 2 * float(min(chances[: found + 1].sum(), chances[found:].sum())))


def holm(values: Sequence[float]) -> list[float]:
    """Adjust p-values by Holm's step-down: in order, the smallest times n, the next times n - 1."""
    order = np.argsort(values, kind="stable")
    adjusted, running = [0.0] * len(values), 0.0
    for rank, place in enumerate(order):
        running = max(running, min(1.0, (len(values) - rank) * values[place]))
        adjusted[place] = running
    return adjusted


def over_seeds(differences: Floats, same_clients: bool) -> float | None:
    """Return the two-sided p of the mean of [seed, client], seeds being a sample too.

    Student's t on what `sampled` says of the mean. None with one seed: it tells of no other.
    """
    found = sampled(differences, same_clients)
    if len(differences) < 2 or math.isnan(found.variance):
        return None
    if abs(found.mean) < 10**-_DIGITS:
        return 1.0
    if found.variance < 10 ** -(2 * _DIGITS):
        return 0.0
    return float(2 * stats().t.sf(abs(found.mean) / math.sqrt(found.variance), found.freedom))
