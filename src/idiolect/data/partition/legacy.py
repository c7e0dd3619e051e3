"""The sizes of pFedMe's generators, recomputed so that published client sizes come out again.

Only sizes follow the historical generators (and their global `random` and `numpy.random` seeds,
here private ones); which rows of a class a client gets follows our own seed.
"""

from __future__ import annotations

import random

import numpy as np

from idiolect.data.arrays import Rows
from idiolect.errors import DataError

# The seeds under which the MNIST generator gives PersFL's client sizes of runs 0..4.
PERSFL_MNIST_SEEDS = (7975, 5044, 8858, 3229, 9462)

_FIRST = 10  # images of each label that every user gets before the ragged rest


def ragged_counts(available: Rows, clients: int, each: int, generator_seed: int, era: str) -> Rows:
    """Log-normal sizes of the CIFAR-10 generator, [client, class].

    era "2020" (PersFL's DS-3) draws per cell first the offset in 10..200, then the factor in 1..10;
    swapped, other sizes come out. era "2021" draws one offset in 300..600. A share that would
    exhaust its class is skipped, so that client keeps ten images of the label.
    """
    width = len(available)
    if clients % 10:
        raise DataError(f"clients is {clients}; this generator needs a multiple of 10")
    if width < clients // 10 or each > width:
        raise DataError(
            f"this generator needs at least {max(each, clients // 10)} classes; there are {width}"
        )
    draws = random.Random(generator_seed)
    shares = np.random.RandomState(generator_seed).lognormal(0, 2.0, (width, clients, each))
    shares *= (available - clients)[:, None, None] / shares.sum((1, 2), keepdims=True)
    counts = np.zeros((clients, width), np.int64)
    cells = [
        (user, place, (user + place) % width) for user in range(clients) for place in range(each)
    ]
    for user, _, label in cells:
        counts[user, label] += _FIRST
    short = np.flatnonzero(counts.sum(axis=0) > available)
    if len(short):
        label = int(short[0])
        raise DataError(
            f"class {label} has {int(available[label])} rows and this generator gives out "
            f"{int(counts[:, label].sum())} to begin with; use fewer clients or a larger dataset"
        )
    used = counts.sum(axis=0)
    for user, place, label in cells:
        share = int(shares[label, user // (clients // 10), place])
        if era == "2020":
            offset, factor = draws.randint(10, 200), draws.randint(1, 10)
            wanted = share * factor + offset + 200
        else:
            wanted = share + draws.randint(300, 600)
        if clients <= 20:
            wanted *= 2
        if used[label] + wanted < available[label]:
            counts[user, label] += wanted
            used[label] += wanted
    return counts


def halved_counts(available: Rows, generator_seed: int) -> Rows:
    """Sizes of the early MNIST generator, two labels a user, [client, class].

    Each class is cut at v = randint(n // 3, n // 2); first pieces of all classes, then second ones,
    are handed out two by two. The script labelled them (u + j) % 10 with overlapping slices, and no
    disjoint slices can have both those labels and those sizes: each piece here is of its own class,
    so the sizes stand, every image is used once, and the labels are (2u, 2u + 1) % 10.
    """
    width = len(available)
    if width != 10 or int(available.min()) < 6:
        raise DataError(
            f"this generator halves ten classes for ten clients; there are {width} classes, the "
            f"smallest of {int(available.min())} rows: expected 10, of 6 rows or more"
        )
    draws = np.random.RandomState(generator_seed)
    first = np.array([draws.randint(n // 3, n // 2) for n in available])
    pieces = np.concatenate([first, available - first])
    counts = np.zeros((width, width), np.int64)
    piece = np.arange(2 * width)
    counts[piece // 2, piece % width] = pieces
    return counts
