"""Tests of paired differences: over clients, over seeds, and over many pairs of methods at once."""

import math
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import numpy as np

from idiolect.errors import MissingExtra
from idiolect.evaluate.sampling import sampled
from idiolect.evaluate.scores import Floats

_DIGITS = 12  # 0.9 - 0.8 and 0.8 - 0.7 differ in the sixteenth digit, and are a tie


def stats() -> Any:
    """Import scipy's statistics, or say how to get them."""
    try:
        return import_module("scipy.stats")
    except ImportError as error:
        raise MissingExtra("the statistics of a comparison need scipy", "stats") from error


def signed_rank(differences: Floats) -> float:
    """Return the two-sided p of Wilcoxon's signed-rank test; zeros by Pratt.

    Exact for up to 50 differences without ties, or 13 with; the normal approximation beyond.
    """
    rounded = np.round(np.asarray(differences, np.float64), _DIGITS)
    if not np.any(rounded):
        return 1.0
    return float(stats().wilcoxon(rounded, zero_method="pratt").pvalue)


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
