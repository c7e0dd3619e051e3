"""Partitions that belong to no single paper."""

from __future__ import annotations

import numpy as np

from idiolect.data.arrays import AnyArray, Rows, Seed, random_numbers
from idiolect.data.partition import deal
from idiolect.errors import ConfigError, DataError


def iid(
    labels: Rows,
    seed: Seed,
    rows: Rows | None = None,
    *,
    clients: int = 10,
    per_client: int | None = None,
) -> list[Rows]:
    """Rows at random in equal shares: every row, or per_client rows each."""
    rows = deal.candidates(labels, rows)
    deal.positive(clients=clients, per_client=1 if per_client is None else per_client)
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
    rows: Rows | None = None,
    *,
    clients: int = 10,
    alpha: float = 0.5,
    min_size: int = 1,
) -> list[Rows]:
    """Each class divided among clients by Dirichlet(alpha) shares; every row is used.

    A client below min_size is raised by rows of the largest clients, which bends the law for it.
    """
    rows = deal.candidates(labels, rows)
    deal.positive(clients=clients, alpha=alpha)
    rng = random_numbers(seed, 0)
    sizes = deal.class_sizes(labels, rows)
    shares = [rng.dirichlet(np.full(clients, alpha)) for _ in sizes]
    counts = np.stack(
        [deal.apportion(int(n), s) for n, s in zip(sizes, shares, strict=True)], axis=1
    )
    counts = deal.raise_small_clients(counts, min_size)
    return deal.deal(labels, rows, counts, seed)


def shards(
    labels: Rows,
    seed: Seed,
    rows: Rows | None = None,
    *,
    clients: int = 10,
    shards_per_client: int = 2,
) -> list[Rows]:
    """McMahan's: sort by label, cut into equal shards, give each client some at random."""
    rows = deal.candidates(labels, rows)
    deal.positive(clients=clients, shards_per_client=shards_per_client)
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


def natural(codes: Rows, seed: Seed, rows: Rows | None = None) -> list[Rows]:
    """Each client holds the rows the source says are its own; takes client codes, not labels."""
    rows = deal.candidates(codes, rows)
    order = np.argsort(codes[rows], kind="stable")
    width = int(codes.max()) + 1 if len(codes) else 0
    return deal.cut(rows[order], np.bincount(codes[rows], minlength=width))


def classes(
    labels: Rows,
    seed: Seed,
    rows: Rows | None = None,
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
    rows = deal.candidates(labels, rows)
    deal.positive(clients=clients, classes_per_client=classes_per_client, least=least)
    available = deal.class_sizes(labels, rows)
    # A class nobody has is passed over: the scheme counts the classes that have rows.
    present = np.flatnonzero(available)
    held = np.zeros((clients, len(available)), np.int64)
    held[:, present] = holders(len(present), clients, classes_per_client, scheme, seed)
    counts = divide(available, held, sizes, sigma, least, seed)
    return deal.deal(labels, rows, counts, seed)


def holders(width: int, clients: int, each: int, scheme: str, seed: Seed) -> Rows:
    """Which classes each client holds: [client, class], 0 or 1."""
    if each > width:
        raise DataError(
            f"classes_per_client is {each} and the data has {width} classes; lower it to {width}"
        )
    user, place = np.arange(clients)[:, None], np.arange(each)[None, :]
    if scheme == "pairs":
        chosen = (each * user + place) % width
    elif scheme == "cyclic":
        chosen = (user + place) % width
    elif scheme == "random":
        chosen = _balanced_choice(width, clients, each, seed)
    else:
        raise ConfigError(f"scheme '{scheme}' is unknown; expected pairs, cyclic or random")
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
    if sizes not in ("equal", "lognormal"):
        raise ConfigError(f"sizes '{sizes}' is unknown; expected equal or lognormal")
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
        counts[who, label] += deal.apportion(int(available[label] - crowd[label] * least), weights)
    return counts
