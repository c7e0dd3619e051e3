"""Average ranks over clients, and which methods they cannot tell apart (Demšar, JMLR 7, 2006)."""

import math
from dataclasses import dataclass

import numpy as np

from idiolect.analysis.paired_tests import stats
from idiolect.analysis.scores import Floats


@dataclass(frozen=True)
class Ranks:
    """Average ranks, 1 the best, and groups whose ranks lie within the critical difference."""

    average: dict[str, float]  # by label, best first
    blocks: int  # clients, or clients and seeds, that were ranked
    friedman: float | None  # p of all methods being alike; None with fewer than three
    critical_difference: float | None
    cliques: list[list[str]]  # largest groups that are not told apart; best first


def ranks(labels: tuple[str, ...], units: Floats, alpha: float = 0.05) -> Ranks:
    """Rank methods within every unit of [method, unit]; ties share their mean rank."""
    blocks = units.shape[1]
    rounded = np.round(units, 12)
    if not blocks:
        average = np.full(len(labels), np.nan)
    else:
        average = stats().rankdata(-rounded, axis=0).mean(axis=1)
    order = np.argsort(average, kind="stable")
    sorted_labels = [labels[place] for place in order]
    difference = critical_difference(len(labels), blocks, alpha) if blocks else None
    return Ranks(
        {labels[place]: float(average[place]) for place in order},
        blocks,
        _friedman(rounded),
        difference,
        cliques(sorted_labels, [float(average[place]) for place in order], difference),
    )


def critical_difference(methods: int, blocks: int, alpha: float = 0.05) -> float | None:
    """Return Nemenyi's critical difference of average ranks; None with one method."""
    if methods < 2:
        return None
    q = float(stats().studentized_range.isf(alpha, methods, np.inf)) / math.sqrt(2)
    return q * math.sqrt(methods * (methods + 1) / (6 * blocks))


def cliques(labels: list[str], average: list[float], difference: float | None) -> list[list[str]]:
    """Find the largest runs of sorted ranks that span less than the critical difference."""
    if difference is None:
        return []
    found: list[list[str]] = []
    reached = 0
    for first in range(len(labels)):
        last = first
        while last + 1 < len(labels) and average[last + 1] - average[first] < difference:
            last += 1
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
