"""The two halves every partition by class is made of: decide counts, then deal rows."""

from __future__ import annotations

import numpy as np

from idiolect.data.arrays import AnyArray, Rows, Seed, random_numbers
from idiolect.errors import ConfigError, DataError


def candidates(labels: Rows, rows: Rows | None) -> Rows:
    """List the rows that may be dealt: those given, or all."""
    return np.arange(len(labels), dtype=np.int64) if rows is None else rows


def class_sizes(labels: Rows, rows: Rows) -> Rows:
    """Rows per class among the candidates, up to the highest label of the whole pool."""
    width = int(labels.max()) + 1 if len(labels) else 0
    return np.bincount(labels[rows], minlength=width).astype(np.int64)


def positive(**options: int | float) -> None:
    """Refuse options that must be above zero."""
    for name, value in options.items():
        if not value > 0 or not np.isfinite(value):
            raise ConfigError(f"{name} is {value}; expected a number above 0")


def apportion(total: int, shares: AnyArray) -> Rows:
    """Whole numbers that sum to exactly `total`, in proportion to shares, by largest remainder."""
    whole = float(shares.sum())
    # Extreme Dirichlet draws can underflow to all zeros; nothing is then preferred to anything.
    quota = total * (shares / whole if whole > 0 else np.full(len(shares), 1 / len(shares)))
    counts = np.floor(quota).astype(np.int64)
    order = np.argsort(-(quota - counts).round(9), kind="stable")
    counts[order[: total - int(counts.sum())]] += 1
    return counts


def deal(labels: Rows, rows: Rows, counts: Rows, seed: Seed) -> list[Rows]:
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
