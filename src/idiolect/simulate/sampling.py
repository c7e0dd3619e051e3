"""Who takes part in a round, as a pure function of the seed and the round.

There is no sampler state to save: a resumed run draws the cohort it would have drawn.
"""

import numpy as np

_COHORT = 7  # keeps cohort draws apart from other uses of the same seed


def cohort(seed: int, round: int, clients: np.ndarray, size: int) -> np.ndarray:
    """Draw `size` of the given clients without replacement, in ascending order."""
    if size >= len(clients):
        return clients
    chosen = np.random.default_rng((seed, _COHORT, round)).choice(clients, size, replace=False)
    return np.sort(chosen)
