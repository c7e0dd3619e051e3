"""Dividing each client's rows into training, validation and test rows."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from idiolect.data.arrays import Rows, Seed, random_numbers
from idiolect.errors import ConfigError

Parts = tuple[tuple[Rows, ...], tuple[Rows, ...], tuple[Rows, ...]]


def sizes(total: int, ratios: Sequence[float]) -> tuple[int, int, int]:
    """Exact sizes of train, val and test for this many rows.

    Test rounds up, as in the splits PersFL was run with (its DS-3 has a test size of 415 for 2071
    rows, which the largest remainder misses), but never takes a client's only row; train and val
    share the rest by the largest remainder, train first.
    """
    train, val, test = ratios
    # A product such as 0.2 * 15 may exceed its true value in the last bit: no row may follow it.
    for_test = min(math.ceil(total * test - 1e-9), max(total - 1, 0)) if test > 0 else 0
    rest = total - for_test
    for_train = math.floor(rest * train / (train + val) + 0.5 + 1e-9)
    return for_train, rest - for_train, for_test


def check_ratios(ratios: Sequence[float]) -> None:
    """Refuse ratios that are not three shares of one whole."""
    whole = len(ratios) == 3 and all(math.isfinite(r) and 0 <= r <= 1 for r in ratios)
    if not whole or abs(sum(ratios) - 1) > 1e-6:
        raise ConfigError(
            f"split {tuple(ratios)} is not a division; expected three shares (train, val, test) "
            "that sum to 1, such as (0.6, 0.2, 0.2) or (0.75, 0, 0.25)"
        )
    if ratios[0] <= 0:
        raise ConfigError(
            f"split {tuple(ratios)} leaves nothing to train on; raise the first share"
        )


def split(
    rows_per_client: Sequence[Rows],
    labels: Rows,
    ratios: Sequence[float] = (0.6, 0.2, 0.2),
    *,
    seed: Seed,
    stratify: bool = False,
    ordered: bool = False,
    first: int = 0,
) -> Parts:
    """Train, val and test rows of each client, drawn with a seed of the client's own.

    Because the seed is (seed, client), a client's parts do not change when others come or go; a
    node that holds one client's rows gives that client's number as `first`. With `ordered` nothing
    is drawn: a client's first rows are its train, its last ones its test rows.
    """
    check_ratios(ratios)
    if ordered and stratify:
        raise ConfigError("ordered and stratify were both asked for; a split can be one of them")
    cut = []
    for client, rows in enumerate(rows_per_client, first):
        shuffled = rows if ordered else random_numbers(seed, client).permutation(rows)
        wanted = sizes(len(rows), ratios)
        cut.append(_stratified(shuffled, labels, wanted) if stratify else _plain(shuffled, wanted))
    train, val, test = (tuple(parts[i] for parts in cut) for i in range(3))
    return train, val, test


def _plain(shuffled: Rows, wanted: tuple[int, int, int]) -> tuple[Rows, Rows, Rows]:
    train, val, _ = wanted
    return shuffled[:train], shuffled[train : train + val], shuffled[train + val :]


def _stratified(
    shuffled: Rows, labels: Rows, wanted: tuple[int, int, int]
) -> tuple[Rows, Rows, Rows]:
    """Lay the rows out class by class and deal them in an evenly mixed order of parts.

    Any stretch of that order, so any class, holds each part in its share give or take one or two,
    and the totals stay exact, which rounding class by class would not give.
    """
    by_class = shuffled[np.argsort(labels[shuffled], kind="stable")]
    place = np.concatenate([(np.arange(n) + 0.5) / max(n, 1) for n in wanted])
    part = np.repeat(np.arange(3), wanted)[np.argsort(place, kind="stable")]
    return by_class[part == 0], by_class[part == 1], by_class[part == 2]
