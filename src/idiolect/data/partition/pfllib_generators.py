"""PFLlib's partitions, draw by draw: the same clients, training rows and test rows as its scripts.

Its generators seed NumPy's global generator with 1 and draw from it in a fixed order; the same
draws are made here from a generator of our own. Rows are the training file's, then the test file's.
"""

from collections.abc import Callable
from typing import TypeVar

import numpy as np

from idiolect.data.dataset import AnyArray, Rows, check_positive, check_value
from idiolect.data.partition.general import Candidates
from idiolect.errors import ConfigError, DataError

Drawn = TypeVar("Drawn")

_TRAIN = 0.75  # of a client's rows, as its scripts have it
_TRIES = 50_000  # after which a draw that never fits is given up: a minute or two


def pfllib(
    candidates: Candidates,
    *,
    kind: str = "dir",
    clients: int = 20,
    classes_per_client: int = 2,
    alpha: float = 0.1,
    balance: bool = False,
    batch: int = 10,
    generator_seed: int = 1,
) -> list[Rows]:
    """PFLlib's generators: kind dir, pat, exdir or iid; its rows, its 75/25, whatever the seed.

    Each client's rows are in the order of its train_test_split, training rows first, so that a
    split in order with a test share of 0.25 takes PFLlib's test rows. `batch` is the one of its
    scripts: a client of kind dir has at least batch / 0.25 rows.
    """
    check_value("kind", kind, ("dir", "pat", "exdir", "iid"))
    check_positive(clients=clients, classes_per_client=classes_per_client, alpha=alpha, batch=batch)
    if not 0 <= generator_seed < 2**32:
        raise ConfigError(f"generator_seed is {generator_seed}; expected 0 to {2**32 - 1}")
    candidates.need(clients, f"{clients} clients with at least 1 row each", "clients")
    rng = np.random.RandomState(generator_seed)
    labels = candidates.labels[candidates.rows]
    places = [np.flatnonzero(labels == label) for label in np.unique(labels)]
    least = int(min(batch / (1 - _TRAIN), len(labels) / clients / 2))
    if kind != "iid" and classes_per_client > len(places):
        raise DataError(
            f"classes_per_client is {classes_per_client} and the data has {len(places)} classes; "
            f"lower it to {len(places)}"
        )
    if kind in ("pat", "iid"):
        each = classes_per_client if kind == "pat" else len(places)
        held = _pathological(rng, places, clients, each, balance, least)
    elif kind == "dir":
        everyone = [list(range(clients))] * len(places)
        held = _dirichlet(rng, places, everyone, clients, alpha, least)
    else:
        holders = _holders(rng, len(places), clients, classes_per_client)
        held = _dirichlet(rng, places, holders, clients, alpha, least=10)
        for mine in held:
            rng.shuffle(mine)
    return [candidates.rows[mine[_split(rng, len(mine))]] for mine in held]


def _pathological(
    rng: np.random.RandomState,
    places: list[Rows],
    clients: int,
    each: int,
    balance: bool,
    least: int,
) -> list[Rows]:
    """Cut every class among the first clients that still want one."""
    wanted = np.full(clients, each)
    crowd = int(np.ceil(clients / len(places) * each))
    pieces: list[list[Rows]] = [[] for _ in range(clients)]
    for label, mine in enumerate(places):
        chosen = np.flatnonzero(wanted > 0)[:crowd].tolist()
        if not chosen:
            break
        share = len(mine) / len(chosen)
        low, high = int(max(share / 10, least / len(places))), int(share)
        if balance:
            sizes = [high] * (len(chosen) - 1)
        elif len(chosen) == 1:
            sizes = []
        elif low < high:
            sizes = rng.randint(low, high, len(chosen) - 1).tolist()
        else:
            raise DataError(
                f"class {label} has {len(mine)} rows for {len(chosen)} clients, whose sizes are "
                f"drawn from {low} to {high - 1}; use fewer clients or balance = true"
            )
        for client, piece in zip(chosen, np.split(mine, np.cumsum(sizes, dtype=int)), strict=True):
            pieces[client].append(piece)
            wanted[client] -= 1
    return [np.concatenate([np.empty(0, np.int64), *mine]) for mine in pieces]


def _dirichlet(
    rng: np.random.RandomState,
    places: list[Rows],
    holders: list[list[int]],
    clients: int,
    alpha: float,
    least: int,
) -> list[Rows]:
    """Draw shares of each class, none for a client that has its part; again until all have some."""
    even = sum(map(len, places)) / clients

    def draw() -> list[Rows]:
        held: list[list[Rows]] = [[] for _ in range(clients)]
        sizes = np.zeros(clients)
        for mine, who in zip(places, holders, strict=True):
            shuffled = mine.copy()
            rng.shuffle(shuffled)
            open_to = np.isin(np.arange(clients), who) & (sizes < even)
            ends = _ends(rng.dirichlet(np.repeat(alpha, clients)) * open_to, len(mine), who[-1])
            for client, piece in enumerate(np.split(shuffled, ends)):
                held[client].append(piece)
                sizes[client] += len(piece)
        return [np.concatenate(mine) for mine in held]

    return _again(draw, lambda held: min(map(len, held)) >= least, f"at least {least} rows each")


def _ends(shares: AnyArray, rows: int, last: int) -> Rows:
    """Where each client's piece of a class ends; the last holder takes what rounding leaves."""
    total = shares.sum()
    if not total > 0:  # every holder has its part, or all shares are too small to be numbers
        shares, total = np.eye(len(shares))[last], 1.0
    ends = (np.cumsum(shares / total) * rows).astype(int)[:-1]
    if last < len(ends) and ends[-1] != rows:
        ends[last:] = rows
    return np.asarray(ends, np.int64)


def _holders(rng: np.random.RandomState, width: int, clients: int, each: int) -> list[list[int]]:
    """Draw the classes of every client until each class has enough holders; list them by class."""
    least = max(each * clients // width // 2, 1)

    def draw() -> list[list[int]]:
        chosen = [rng.choice(width, each, replace=False) for _ in range(clients)]
        return [[c for c, own in enumerate(chosen) if k in own] for k in range(width)]

    return _again(draw, lambda found: min(map(len, found)) >= least, f"{least} holders of a class")


def _again(draw: Callable[[], Drawn], fits: Callable[[Drawn], bool], what: str) -> Drawn:
    """Draw until it fits; PFLlib would go on for ever."""
    for _ in range(_TRIES):
        found = draw()
        if fits(found):
            return found
    raise DataError(
        f"{_TRIES} draws of PFLlib's generator gave no division with {what}; use fewer clients, "
        "more classes_per_client or a larger alpha"
    )


def _split(rng: np.random.RandomState, size: int) -> Rows:
    """Order rows as train_test_split(train_size=0.75) draws them, the training rows first."""
    drawn = rng.permutation(size)
    return np.roll(drawn, int(_TRAIN * size) - size)
