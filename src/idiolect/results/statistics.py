"""Figures over clients and seeds. A client without test data has no score and is left out."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Figures = dict[str, float]


def over_clients(scores: NDArray[np.floating], sizes: Sequence[int]) -> Figures:
    """Summarise one seed: plain mean, mean by test examples, sample deviation and variance."""
    values, weights = np.asarray(scores, np.float64), np.asarray(sizes, np.float64)
    seen = ~np.isnan(values)
    values, weights = values[seen], weights[seen]
    total = float(weights.sum())
    weighted = float((values * weights).sum()) / total if total else math.nan
    return {
        "mean": mean(values),
        "weighted_mean": weighted,
        "std": deviation(values),
        "variance": deviation(values) ** 2,
    }


def over_seeds(scores: NDArray[np.floating]) -> dict[str, Figures]:
    """Summarise [seed, client] by two spreads.

    `seeds`: the mean of each seed, then mean and deviation over seeds. `clients`: the mean of each
    client, and `spread_over_clients`.
    """
    values = np.asarray(scores, np.float64)
    by_seed = np.array([mean(row) for row in values])
    by_client = np.array([mean(column) for column in values.T])
    return {
        "seeds": {"mean": mean(by_seed), "std": deviation(by_seed)},
        "clients": {"mean": mean(by_client), "std": spread_over_clients(values)},
    }


def spread_over_clients(scores: NDArray[np.floating]) -> float:
    """Say how uneven clients are, of [seed, client]: "± clients" wherever it stands.

    The sample deviation over the clients of one seed, averaged over seeds. It means the same where
    a client is the same person under every seed and where it is another one. A deviation of the
    clients' means over seeds would shrink with every seed that divides the data anew.
    """
    values = np.asarray(scores, np.float64)
    return mean(np.array([deviation(row) for row in values]))


def mean(values: NDArray[np.floating]) -> float:
    """Return the mean of what is there; NaN of nothing."""
    seen = values[~np.isnan(values)]
    return float(seen.mean()) if len(seen) else math.nan


def deviation(values: NDArray[np.floating]) -> float:
    """Return the sample standard deviation (n - 1); NaN for fewer than two values."""
    seen = values[~np.isnan(values)]
    return float(seen.std(ddof=1)) if len(seen) > 1 else math.nan
