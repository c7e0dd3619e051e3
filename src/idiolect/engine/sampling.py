"""Who takes part in a round, as a pure function of the seed and the round.

There is no sampler state to save: a resumed run draws the cohort it would have drawn.
"""

import secrets
from collections.abc import Callable

import numpy as np

from idiolect.data.federation import TrainData
from idiolect.errors import DataError

_COHORT, _WATCHED, _UNSEEN = 7, 19, 23  # keep these draws apart from other uses of the same seed


def eligible(train_data: TrainData, seed: int = 0, unseen: int = 0) -> np.ndarray:
    """Return who may take part: clients that have something to train on, but for `kept_out`."""
    able = np.array([n for n, rows in enumerate(train_data.train) if len(rows)])
    if not len(able):
        raise DataError("no client has a training example; check the partition and the split")
    return np.setdiff1d(able, kept_out(seed, able, unseen))


def kept_out(seed: int, able: np.ndarray, unseen: int) -> np.ndarray:
    """Draw the clients that take part in no round, from those that could."""
    return np.random.default_rng((seed, _UNSEEN)).choice(able, unseen, replace=False)


def cohort(seed: int, round: int, clients: np.ndarray, size: int) -> np.ndarray:
    """Draw `size` of the given clients without replacement, in ascending order."""
    if size >= len(clients):
        return clients
    chosen = np.random.default_rng((seed, _COHORT, round)).choice(clients, size, replace=False)
    return np.sort(chosen)


def poisson(seed: int, round: int, clients: np.ndarray, size: int) -> np.ndarray:
    """Let every client take part with probability size / clients, independently."""
    if size >= len(clients):
        return clients
    coins = np.random.default_rng((seed, _COHORT, round)).random(len(clients))
    return clients[coins < size / len(clients)]


def watched(seed: int, clients: int, size: int) -> np.ndarray:
    """Draw the clients on which curves are evaluated, in ascending order."""
    chosen = np.random.default_rng((seed, _WATCHED)).choice(clients, size, replace=False)
    return np.sort(chosen)


class Attendance:
    """Who takes part in the rounds of one run: who trains, and whose reports count."""

    def __init__(
        self, seed: int, eligible: np.ndarray, size: int | None, draw: str, all_train: bool
    ) -> None:
        self._seed, self._eligible, self._draw = seed, eligible, DRAWS[draw]
        self._size = len(eligible) if size is None else size
        self._all_train = all_train

    def reporting(self, round: int) -> np.ndarray:
        """Return whose reports reach the server: the cohort."""
        return self._draw(self._seed, round, self._eligible, self._size)

    def training(self, round: int) -> np.ndarray:
        """Return the cohort, and the bystanders where they train too."""
        return self._eligible if self._all_train else self.reporting(round)

    def strangers(self, clients: int, rounds: int, since: int = 0) -> np.ndarray:
        """Return which of the clients trained in none of the first rounds, or `since` one."""
        met = np.zeros(clients, bool)
        for round in range(since, rounds):
            met[self.training(round)] = True
            if self._all_train or self._size >= len(self._eligible):
                break  # everyone who can, at once
        return np.flatnonzero(~met)


class SecretCohort(Attendance):
    """Who takes part in one round, drawn by the operating system, so that it cannot be repeated.

    Differential privacy may rely on a secret cohort, and the run's seed is known to all who take
    part.
    """

    def __init__(self, eligible: np.ndarray, size: int | None, draw: str, all_train: bool) -> None:
        super().__init__(0, eligible, size, draw, all_train)
        self._reporting = _SECRET[draw](eligible, self._size)

    def reporting(self, round: int) -> np.ndarray:
        """Return the cohort; there is an object for each round."""
        return self._reporting


def _secret_cohort(clients: np.ndarray, size: int) -> np.ndarray:
    if size >= len(clients):
        return clients
    return np.sort(secrets.SystemRandom().sample(clients.tolist(), size)).astype(clients.dtype)


def _secret_poisson(clients: np.ndarray, size: int) -> np.ndarray:
    if size >= len(clients):
        return clients
    coins = np.frombuffer(secrets.token_bytes(8 * len(clients)), np.uint64)
    return clients[coins < np.uint64((size << 64) // len(clients))]


_SECRET: dict[str, Callable[[np.ndarray, int], np.ndarray]] = {
    "fixed": _secret_cohort,
    "poisson": _secret_poisson,
}

DRAWS: dict[str, Callable[[int, int, np.ndarray, int], np.ndarray]] = {
    "fixed": cohort,
    "poisson": poisson,
}
