"""Who takes part in a round, as a pure function of the seed and the round.

There is no sampler state to save: a resumed run draws the cohort it would have drawn.
"""

from collections.abc import Callable

import numpy as np

_COHORT = 7  # keeps cohort draws apart from other uses of the same seed


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


DRAWS: dict[str, Callable[[int, int, np.ndarray, int], np.ndarray]] = {
    "fixed": cohort,
    "poisson": poisson,
}
