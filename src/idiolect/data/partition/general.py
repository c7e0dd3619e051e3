"""Partitions that belong to no single paper, and the steps that partitions by class are made of.

A partition by class decides counts [client, class] and then assigns rows by them.
"""

from typing import TypeAlias

import numpy as np

from idiolect.data.dataset import AnyArray, Rows, check_positive, check_value
from idiolect.errors import DataError

# A seed may be a tuple, so that a stage can extend it: (seed, stage, client).
Seed: TypeAlias = int | tuple[int, ...]


def extended(seed: Seed, *more: int) -> tuple[int, ...]:
    """Derive the seed of a stage below this one."""
    return (*seed, *more) if isinstance(seed, tuple) else (seed, *more)


def random_numbers(seed: Seed, *more: int) -> np.random.Generator:
    """Make a generator that depends on the seed and on nothing else."""
    return np.random.default_rng(extended(seed, *more))


def iid(
    labels: Rows,
    seed: Seed,
    rows: Rows,
    *,
    clients: int = 10,
    per_client: int | None = None,
) -> list[Rows]:
    """Rows at random in equal shares: every row, or per_client rows each."""
    check_positive(clients=clients, per_client=1 if per_client is None else per_client)
    wanted = clients * (per_client or 1)
    if wanted > len(rows):
        raise DataError(
            f"{clients} clients with {per_client or 'at least 1'} rows each need {wanted} rows and "
            f"there are {len(rows)}; lower clients or per_client"
        )
    shuffled = random_numbers(seed).permutation(rows)
    return np.array_split(shuffled if per_client is None else shuffled[:wanted], clients)


def dirichlet(
    labels: Rows,
    seed: Seed,
    rows: Rows,
    *,
    clients: int = 10,
    alpha: float = 0.5,
    min_size: int = 1,
) -> list[Rows]:
    """Each class divided among clients by Dirichlet(alpha) shares; every row is used.

    A client below min_size is raised by rows of the largest clients, which bends the law for it.
    """
    check_positive(clients=clients, alpha=alpha)
    rng = random_numbers(seed, 0)
    sizes = class_sizes(labels, rows)
    shares = [rng.dirichlet(np.full(clients, alpha)) for _ in sizes]
    counts = np.stack([apportion(int(n), s) for n, s in zip(sizes, shares, strict=True)], axis=1)
    counts = raise_small_clients(counts, min_size)
    return assign_rows(labels, rows, counts, seed)


def shards(
    labels: Rows,
    seed: Seed,
    rows: Rows,
    *,
    clients: int = 10,
    shards_per_client: int = 2,
) -> list[Rows]:
    """McMahan's: sort by label, cut into equal shards, give each client some at random."""
    check_positive(clients=clients, shards_per_client=shards_per_client)
    pieces = clients * shards_per_client
    if pieces > len(rows):
        raise DataError(
            f"{clients} clients x {shards_per_client} shards need {pieces} rows and there are "
            f"{len(rows)}; lower clients or shards_per_client"
        )
    rng = random_numbers(seed)
    shuffled = rng.permutation(rows)
    cuts = np.array_split(shuffled[np.argsort(labels[shuffled], kind="stable")], pieces)
    given = rng.permutation(pieces).reshape(clients, shards_per_client)
    return [np.concatenate([cuts[piece] for piece in mine]) for mine in given]


def natural(codes: Rows, seed: Seed, rows: Rows) -> list[Rows]:
    """Each client holds the rows the source says are its own; takes client codes, not labels."""
    order = np.argsort(codes[rows], kind="stable")
    width = int(codes.max()) + 1 if len(codes) else 0
    return cut(rows[order], np.bincount(codes[rows], minlength=width))


def classes(
    labels: Rows,
    seed: Seed,
    rows: Rows,
    *,
    clients: int = 10,
    classes_per_client: int = 2,
    scheme: str = "cyclic",
    sizes: str = "equal",
    sigma: float = 2.0,
    least: int = 1,
) -> list[Rows]:
    """Deal a few classes to each client: scheme pairs, cyclic or random; sizes equal or lognormal.

    Each class is divided completely among its holders, who get at least `least` rows of it; a class
    that no client holds stays unused.
    """
    check_positive(clients=clients, classes_per_client=classes_per_client, least=least)
    available = class_sizes(labels, rows)
    # A class nobody has is passed over: the scheme counts the classes that have rows.
    present = np.flatnonzero(available)
    held = np.zeros((clients, len(available)), np.int64)
    held[:, present] = holders(len(present), clients, classes_per_client, scheme, seed)
    counts = divide(available, held, sizes, sigma, least, seed)
    return assign_rows(labels, rows, counts, seed)


def holders(width: int, clients: int, each: int, scheme: str, seed: Seed) -> Rows:
    """Which classes each client holds: [client, class], 0 or 1."""
    if each > width:
        raise DataError(
            f"classes_per_client is {each} and the data has {width} classes; lower it to {width}"
        )
    user, place = np.arange(clients)[:, None], np.arange(each)[None, :]
    check_value("scheme", scheme, ("pairs", "cyclic", "random"))
    if scheme == "pairs":
        chosen = (each * user + place) % width
    elif scheme == "cyclic":
        chosen = (user + place) % width
    else:
        chosen = _balanced_choice(width, clients, each, seed)
    held = np.zeros((clients, width), np.int64)
    held[user, chosen] = 1
    return held


def _balanced_choice(width: int, clients: int, each: int, seed: Seed) -> Rows:
    """Random distinct classes per client, the least used first, so that all are used alike."""
    rng = random_numbers(seed, 1)
    used = np.zeros(width, np.int64)
    chosen = np.empty((clients, each), np.int64)
    for client in range(clients):
        order = np.lexsort((rng.random(width), used))
        chosen[client] = order[:each]
        used[chosen[client]] += 1
    return chosen


def divide(available: Rows, held: Rows, sizes: str, sigma: float, least: int, seed: Seed) -> Rows:
    """Rows per client and class [client, class], each class in full among its holders."""
    check_value("sizes", sizes, ("equal", "lognormal"))
    crowd = held.sum(axis=0)
    short = np.flatnonzero(crowd * least > available)
    if len(short):
        label = int(short[0])
        raise DataError(
            f"class {label} has {int(available[label])} rows for {int(crowd[label])} clients with "
            f"at least {least} each; use fewer clients or fewer classes per client"
        )
    rng = random_numbers(seed, 2)
    counts = held * least
    for label in np.flatnonzero(crowd).tolist():
        who = np.flatnonzero(held[:, label])
        weights: AnyArray = np.ones(len(who))
        if sizes == "lognormal":
            weights = rng.lognormal(0.0, sigma, len(who))
        counts[who, label] += apportion(int(available[label] - crowd[label] * least), weights)
    return counts


def class_sizes(labels: Rows, rows: Rows) -> Rows:
    """Rows per class among the candidates, up to the highest label of the whole pool."""
    width = int(labels.max()) + 1 if len(labels) else 0
    return np.bincount(labels[rows], minlength=width).astype(np.int64)


def apportion(total: int, shares: AnyArray) -> Rows:
    """Whole numbers that sum to exactly `total`, in proportion to shares, by largest remainder."""
    whole = float(shares.sum())
    # Extreme Dirichlet draws can underflow to all zeros; nothing is then preferred to anything.
    quota = total * (shares / whole if whole > 0 else np.full(len(shares), 1 / len(shares)))
    counts = np.floor(quota).astype(np.int64)
    order = np.argsort(-(quota - counts).round(9), kind="stable")
    counts[order[: total - int(counts.sum())]] += 1
    return counts


def assign_rows(labels: Rows, rows: Rows, counts: Rows, seed: Seed) -> list[Rows]:
    """Give each client its count of each class [client, class], from rows shuffled by the seed.

    One sort by owner instead of a slice per cell: 80,000 clients take a second, not minutes.
    """
    rng = random_numbers(seed)
    clients = len(counts)
    taken, owners = [], []
    for label in range(counts.shape[1]):
        of_class = rng.permutation(rows[labels[rows] == label])
        wanted = int(counts[:, label].sum())
        if wanted > len(of_class):
            raise DataError(
                f"the partition asks for {wanted} rows of class {label} and there are "
                f"{len(of_class)}; use fewer clients or fewer rows per client"
            )
        taken.append(of_class[:wanted])
        owners.append(np.repeat(np.arange(clients), counts[:, label]))
    order = np.argsort(np.concatenate(owners), kind="stable")
    dealt = np.concatenate(taken)[order]
    return cut(dealt, counts.sum(axis=1))


def cut(rows: Rows, sizes: Rows) -> list[Rows]:
    """Cut a line of rows into consecutive pieces of these sizes."""
    ends = np.cumsum(sizes)
    return [rows[end - size : end] for end, size in zip(ends, sizes, strict=True)]


def raise_small_clients(counts: Rows, min_size: int) -> Rows:
    """Move rows from the largest clients until every client holds min_size.

    Deterministic and finite, where drawing again until the sizes fit may never end.
    """
    counts = counts.copy()
    clients, total = len(counts), int(counts.sum())
    if clients * min_size > total:
        raise DataError(
            f"{clients} clients with at least {min_size} rows each need {clients * min_size} rows "
            f"and there are {total}; lower clients or min_size"
        )
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
