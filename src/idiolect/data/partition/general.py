"""Partitions that belong to no single paper, and the steps that partitions by class are made of.

A partition by class decides counts [client, class] and then assigns rows by them.
"""

from typing import NamedTuple

import numpy as np

from idiolect.data.dataset import AnyArray, Rows, check_positive, check_value
from idiolect.errors import DataError

Seed = tuple[int, ...]
"""A tuple, so that a stage can extend it: (seed, stage, client)."""


class Candidates(NamedTuple):
    """The rows to divide among clients, the label of every row of the dataset, and a seed."""

    labels: Rows  # for partition natural: the client codes
    rows: Rows
    seed: Seed

    def class_sizes(self) -> Rows:
        """Count the candidates of each class, up to the highest label of the whole dataset."""
        width = int(self.labels.max()) + 1 if len(self.labels) else 0
        return np.bincount(self.labels[self.rows], minlength=width).astype(np.int64)

    def draws(self, *use: int) -> np.random.Generator:
        """Make a generator that depends on the seed and on this use of it alone."""
        return np.random.default_rng((*self.seed, *use))

    def need(self, wanted: int, why: str, lower: str) -> None:
        """Refuse to divide fewer rows than are wanted."""
        if wanted > len(self.rows):
            raise DataError(
                f"{why} need {wanted} rows and there are {len(self.rows)}; lower {lower}"
            )

    def assign(self, counts: Rows) -> list[Rows]:
        """Give each client its count of each class [client, class], from shuffled rows.

        One sort by owner instead of a slice per cell: 80,000 clients take a second, not minutes.
        """
        rng = self.draws()
        taken, owners = [], []
        for label in range(counts.shape[1]):
            of_class = rng.permutation(self.rows[self.labels[self.rows] == label])
            wanted = int(counts[:, label].sum())
            if wanted > len(of_class):
                raise DataError(
                    f"the partition asks for {wanted} rows of class {label} and there are "
                    f"{len(of_class)}; use fewer clients or fewer rows per client"
                )
            taken.append(of_class[:wanted])
            owners.append(np.repeat(np.arange(len(counts)), counts[:, label]))
        order = np.argsort(np.concatenate(owners), kind="stable")
        return _cut(np.concatenate(taken)[order], counts.sum(axis=1))


def iid(candidates: Candidates, *, clients: int = 10, per_client: int | None = None) -> list[Rows]:
    """Rows at random in equal shares: every row, or per_client rows each."""
    check_positive(clients=clients, per_client=1 if per_client is None else per_client)
    wanted = clients * (per_client or 1)
    why = f"{clients} clients with {per_client or 'at least 1'} rows each"
    candidates.need(wanted, why, "clients or per_client")
    shuffled = candidates.draws().permutation(candidates.rows)
    return np.array_split(shuffled if per_client is None else shuffled[:wanted], clients)


def dirichlet(
    candidates: Candidates, *, clients: int = 10, alpha: float = 0.5, min_size: int = 1
) -> list[Rows]:
    """Each class divided among clients by Dirichlet(alpha) shares; every row is used.

    A client below min_size is raised by rows of the largest clients, which bends the law for it.
    """
    check_positive(clients=clients, alpha=alpha)
    why = f"{clients} clients with at least {min_size} rows each"
    candidates.need(clients * min_size, why, "clients or min_size")
    rng = candidates.draws(0)
    sizes = candidates.class_sizes()
    shares = [rng.dirichlet(np.full(clients, alpha)) for _ in sizes]
    counts = np.stack([apportion(int(n), s) for n, s in zip(sizes, shares, strict=True)], axis=1)
    return candidates.assign(_raise_small_clients(counts, min_size))


def shards(
    candidates: Candidates, *, clients: int = 10, shards_per_client: int = 2, shard_rows: int = 0
) -> list[Rows]:
    """McMahan's: sort by label, cut into equal shards, give each client some at random.

    By default all rows are dealt out; with `shard_rows` shards have so many, and some are left.
    """
    check_positive(clients=clients, shards_per_client=shards_per_client)
    dealt = clients * shards_per_client
    why = f"{clients} clients x {shards_per_client} shards"
    if shard_rows:
        why += f" of {shard_rows} rows"
    candidates.need(dealt * max(1, shard_rows), why, "clients, shards_per_client or shard_rows")
    rng = candidates.draws()
    shuffled = rng.permutation(candidates.rows)
    order = shuffled[np.argsort(candidates.labels[shuffled], kind="stable")]
    pieces = len(order) // shard_rows if shard_rows else dealt
    cuts = np.array_split(order[: pieces * shard_rows] if shard_rows else order, pieces)
    given = rng.permutation(pieces)[:dealt].reshape(clients, shards_per_client)
    return [np.concatenate([cuts[piece] for piece in mine]) for mine in given]


def natural(candidates: Candidates) -> list[Rows]:
    """Each client holds the rows the source says are its own; takes client codes, not labels."""
    order = np.argsort(candidates.labels[candidates.rows], kind="stable")
    return _cut(candidates.rows[order], candidates.class_sizes())


def classes(
    candidates: Candidates,
    *,
    clients: int = 10,
    classes_per_client: int = 2,
    scheme: str = "cyclic",
    sizes: str = "equal",
    sigma: float = 2.0,
    least: int = 1,
    even: float = 0.0,
) -> list[Rows]:
    """A few classes for each client: scheme pairs, cyclic or random; sizes equal or lognormal.

    Each class is divided completely among its holders, who get at least `least` rows of it; a class
    that no client holds stays unused. Of each class the share `even` goes to all clients alike
    instead.
    """
    check_positive(clients=clients, classes_per_client=classes_per_client, least=least)
    if not 0 <= even < 1:
        raise DataError(f"even is {even}; expected 0 or more and less than 1")
    available = candidates.class_sizes()
    alike = np.floor(available * even).astype(np.int64)
    everyone = np.stack([apportion(int(n), np.ones(clients)) for n in alike], axis=1)
    # A class nobody has is passed over: the scheme counts the classes that have rows.
    present = np.flatnonzero(available)
    held = np.zeros((clients, len(available)), np.int64)
    held[:, present] = _holders(candidates, len(present), clients, classes_per_client, scheme)
    return candidates.assign(
        everyone + divide(candidates, held, sizes, sigma, least, without=everyone.sum(axis=0))
    )


def _holders(candidates: Candidates, width: int, clients: int, each: int, scheme: str) -> Rows:
    """Choose which classes each client holds: [client, class], 0 or 1."""
    if each > width:
        raise DataError(
            f"classes_per_client is {each} and the data has {width} classes; lower it to {width}"
        )
    check_value("scheme", scheme, ("pairs", "cyclic", "random"))
    user, place = np.arange(clients)[:, None], np.arange(each)[None, :]
    if scheme == "random":
        chosen = _balanced_choice(candidates.draws(1), width, clients, each)
    else:
        chosen = ((each if scheme == "pairs" else 1) * user + place) % width
    held = np.zeros((clients, width), np.int64)
    held[user, chosen] = 1
    return held


def _balanced_choice(rng: np.random.Generator, width: int, clients: int, each: int) -> Rows:
    """Choose distinct classes per client, the least used first, so that all are used alike."""
    used = np.zeros(width, np.int64)
    chosen = np.empty((clients, each), np.int64)
    for client in range(clients):
        order = np.lexsort((rng.random(width), used))
        chosen[client] = order[:each]
        used[chosen[client]] += 1
    return chosen


def divide(
    candidates: Candidates,
    held: Rows,
    sizes: str = "equal",
    sigma: float = 1.0,
    least: int = 1,
    without: Rows | int = 0,
) -> Rows:
    """Count rows per client and class [client, class], each class in full among its holders.

    So many rows of each class are kept back: `without`.
    """
    check_value("sizes", sizes, ("equal", "lognormal"))
    available, crowd = candidates.class_sizes() - without, held.sum(axis=0)
    check_least(available, crowd, least)
    rng = candidates.draws(2)
    counts = held * least
    for label in np.flatnonzero(crowd).tolist():
        who = np.flatnonzero(held[:, label])
        weights: AnyArray = np.ones(len(who))
        if sizes == "lognormal":
            weights = rng.lognormal(0.0, sigma, len(who))
        counts[who, label] += apportion(int(available[label] - crowd[label] * least), weights)
    return counts


def check_least(available: Rows, holders: Rows, least: int) -> None:
    """Refuse counts by which a class has fewer rows than `least` for each of its holders."""
    short = np.flatnonzero(holders * least > available)
    if len(short):
        label = int(short[0])
        raise DataError(
            f"class {label} has {int(available[label])} rows for {int(holders[label])} clients "
            f"with at least {least} each; use fewer clients or fewer classes per client"
        )


def apportion(total: int, shares: AnyArray) -> Rows:
    """Whole numbers that sum to exactly `total`, in proportion to shares, by largest remainder."""
    whole = float(shares.sum())
    # Extreme Dirichlet draws can underflow to all zeros; nothing is then preferred to anything.
    quota = total * (shares / whole if whole > 0 else np.full(len(shares), 1 / len(shares)))
    counts = np.floor(quota).astype(np.int64)
    order = np.argsort(-(quota - counts).round(9), kind="stable")
    counts[order[: total - int(counts.sum())]] += 1
    return counts


def _cut(rows: Rows, sizes: Rows) -> list[Rows]:
    """Cut rows into consecutive pieces of these sizes."""
    ends = np.cumsum(sizes)
    return [rows[end - size : end] for end, size in zip(ends, sizes, strict=True)]


def _raise_small_clients(counts: Rows, min_size: int) -> Rows:
    """Move rows from the largest clients until every client holds min_size.

    Deterministic and finite, where drawing again until the sizes fit may never end.
    """
    counts = counts.copy()
    held = counts.sum(axis=1)
    for client in np.flatnonzero(held < min_size):
        while held[client] < min_size:
            donor = int(np.argmax(held))
            label = int(np.argmax(counts[donor]))
            # Half the surplus at most, so that one donor is not drained while others are larger.
            spare = max(1, int(held[donor] - min_size) // 2)
            moved = min(int(min_size - held[client]), spare, int(counts[donor, label]))
            counts[donor, label] -= moved
            counts[client, label] += moved
            held[donor] -= moved
            held[client] += moved
    return counts
