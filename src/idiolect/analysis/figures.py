"""What is told of one method: how good, how even over clients, how good for the worst off."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from idiolect.analysis.scores import Floats, Scores
from idiolect.results import statistics


@dataclass(frozen=True)
class Figures:
    """One method's test accuracy. Each is computed seed by seed, then averaged over seeds."""

    mean: float  # of the clients' accuracies, each client alike
    interval: tuple[float, float]  # of the mean, over seeds and clients
    std_clients: float  # sample deviation over a seed's clients: "± clients" everywhere
    std_seeds: float  # sample deviation of the seeds' means
    worst_decile: float  # mean of the worst tenth of the clients, at least one
    below_local: float | None  # share of clients below their own local model
    jain: float  # Jain's index, 1 where all clients are alike
    variance: float  # the square of std_clients: PersFL's Eq. 6


def figures(held: Scores, label: str, interval: tuple[float, float], local: str | None) -> Figures:
    """Describe one method; `local` is the label of the model that clients train alone."""
    own = held.method(label)
    reference = None if local is None else held.method(local)
    spread = statistics.spread_over_clients(own)
    return Figures(
        mean=_over(own, statistics.mean),
        interval=interval,
        std_clients=spread,
        std_seeds=statistics.deviation(np.array([statistics.mean(row) for row in own])),
        worst_decile=_over(own, worst_decile),
        below_local=None if reference is None else below(own, reference),
        jain=_over(own, jain),
        variance=spread**2,
    )


def worst_decile(values: Floats) -> float:
    """Return the mean of the worst tenth of the clients, rounded up to whole clients."""
    seen = np.sort(values[~np.isnan(values)])
    return float(seen[: math.ceil(len(seen) / 10)].mean()) if len(seen) else math.nan


def jain(values: Floats) -> float:
    """Return Jain's index (Σx)² / (n Σx²): 1 where all are alike, 1/n where one has it all."""
    seen = values[~np.isnan(values)]
    squares = float((seen**2).sum())
    return float(seen.sum()) ** 2 / (len(seen) * squares) if squares else math.nan


def below(own: Floats, local: Floats) -> float:
    """Return the share of clients, of all seeds together, whose own model does worse than alone."""
    seen = ~np.isnan(own) & ~np.isnan(local)
    worse = np.round(own, 12) < np.round(local, 12)
    return float(worse[seen].mean()) if seen.any() else math.nan


def _over(values: Floats, figure: Any) -> float:
    """Average a figure of each seed over the seeds that have it."""
    return statistics.mean(np.array([figure(row) for row in values]))
