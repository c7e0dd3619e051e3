"""Who takes part in a round, as a pure function of the seed and the round.

There is no sampler state to save: a resumed run draws the cohort it would have drawn.
"""

from collections.abc import Callable

import numpy as np

from idiolect.data.federation import Lessons
from idiolect.errors import DataError

_COHORT, _WATCHED = 7, 19  # keep these draws apart from other uses of the same seed


def eligible(lessons: Lessons) -> np.ndarray:
    """Return the clients that have something to train on: the others cannot change anything."""
    able = np.array([n for n, rows in enumerate(lessons.train) if len(rows)])
    if not len(able):
        raise DataError("no client has a training example; check the partition and the split")
    return able


def cohort(seed: int, round: int, clients: np.ndarray, size: int) -> np.ndarray:
    """Draw `size` of the given clients without replacement, in ascending order."""
    if size >= len(clients):
        return clients
    chosen = np.random.default_rng((seed, _COHORT, round)).choice(clients, size, replace=False)
    return np.sort(chosen)


def poisson(seed: int, round: int, clients: np.ndarray, size: int) -> np.ndarray:
    """Let every client take part by itself with probability size / clients; maybe nobody does."""
    if size >= len(clients):
        return clients
    coins = np.random.default_rng((seed, _COHORT, round)).random(len(clients))
    return clients[coins < size / len(clients)]


def watched(seed: int, clients: int, size: int) -> np.ndarray:
    """Draw the clients that stand for all when models are scored, in ascending order."""
    chosen = np.random.default_rng((seed, _WATCHED)).choice(clients, size, replace=False)
    return np.sort(chosen)


DRAWS: dict[str, Callable[[int, int, np.ndarray, int], np.ndarray]] = {
    "fixed": cohort,
    "poisson": poisson,
}
