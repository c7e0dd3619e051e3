"""Fairness as PersFL defines it (Eq. 6): a method is fairer whose clients' accuracies vary less."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from idiolect.results import statistics

FAIRER, LESS, EQUAL = "fairer", "less fair", "equal"


def fairness(accuracies: Mapping[str, NDArray[np.floating]]) -> dict[str, Any]:
    """Compare methods by the spread of accuracy over clients; each is [seed, client].

    `pairs[t][t']` says how t stands beside t', and by which factor its deviation is smaller.
    """
    spreads = {label: _spread(np.asarray(own, np.float64)) for label, own in accuracies.items()}
    return {
        "methods": spreads,
        "pairs": {
            label: {
                other: _pair(own["std"], spreads[other]["std"])
                for other in spreads
                if other != label
            }
            for label, own in spreads.items()
        },
    }


def _spread(accuracy: NDArray[np.float64]) -> dict[str, Any]:
    """Give the spread over clients, "± clients", and the variance of each seed's clients."""
    std = statistics.spread_over_clients(accuracy)
    return {
        "variance": std**2,
        "std": std,
        "variance_of_seeds": [statistics.deviation(row) ** 2 for row in accuracy],
    }


def _pair(own: float, other: float) -> dict[str, Any]:
    if math.isnan(own) or math.isnan(other):
        return {"verdict": None, "ratio": None}
    # Sums in another order differ in the last digits; that is no difference between methods.
    if math.isclose(own, other, rel_tol=1e-9, abs_tol=1e-12):
        return {"verdict": EQUAL, "ratio": 1.0}
    verdict = FAIRER if own < other else LESS
    return {"verdict": verdict, "ratio": other / own if own else math.inf}
