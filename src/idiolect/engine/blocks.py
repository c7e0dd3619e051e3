"""Blocks of clients: cut by the number of their examples, as wide as was measured to be fastest.

Stacking wins for small networks and loses for convolutions on a CPU, and by how much depends on
the machine. So a few widths are tried for a few steps each and the fastest per client is taken.
The choice is kept on disk: results agree between widths only up to rounding, so a run that is
resumed, or repeated, should not choose again.
"""

import hashlib
import time
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np

from idiolect.kernels.autotune import add_to_cache, read_cache

PADDING = 0.05  # share of padded work that is not worth another block; last batches add to it
_MOST_STARTS = 512  # of more distinct lengths some are taken together
_MOST_BLOCKS = 8  # each block is a round of its own; past this many, padding is cheaper


def cut(lengths: Sequence[int], span: int) -> list[tuple[int, int]]:
    """Return (first, last) of each block of at most `span` clients, given lengths, longest first.

    Each span is cut into the fewest pieces that keep its padding low.
    """
    cuts = []
    for first in range(0, len(lengths), span):
        piece = tuple(max(1, length) for length in lengths[first : first + span])
        cuts += [(first + low, first + high) for low, high in _pieces(piece)]
    return cuts


@lru_cache(maxsize=64)
def _pieces(lengths: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Cut one span, longest first, by dynamic programming over its distinct lengths."""
    line = np.array(lengths)
    starts = np.flatnonzero(np.append(True, line[1:] != line[:-1]))
    starts = starts[:: -(-len(starts) // _MOST_STARTS)]  # a block may begin at any of these
    ends = np.append(starts[1:], len(line))
    # work[low, high] = what a piece from starts[low] to ends[high] takes, padding and all
    span = ends - starts[:, None]
    work = np.where(span > 0, line[starts][:, None] * span, np.inf)
    best, history = work[0], [np.zeros(len(starts), int)]
    while best[-1] * (1 - PADDING) > line.sum() and len(history) < min(_MOST_BLOCKS, len(starts)):
        whole = np.append(np.inf, best[:-1])[:, None] + work  # one piece more, which begins at low
        history.append(whole.argmin(0))
        best = whole.min(0)
    pieces, high = [], len(starts) - 1
    for choice in reversed(history):
        low = int(choice[high])
        pieces.append((int(starts[low]), int(ends[high])))
        high = low - 1
    return tuple(reversed(pieces))


TRIAL_STEPS = 6
_WIDTHS = (1, 4, 16, 64, 256)
_REPEATS = 5
_SECONDS = 1.0  # enough of measuring, once every width was tried
_HOPELESS = 3.0  # times slower than the best so far: not tried again


def choose_width(trial: Callable[[int], int], most: int, key: str, cache: Path | None) -> int:
    """Return the width with the least time per client; `trial(width)` says how many it ran."""
    known = read_cache(cache)
    digest = hashlib.sha256(key.encode()).hexdigest()[:24]
    if isinstance(known.get(digest), int) and known[digest] > 0:
        return int(min(known[digest], most))
    # Interleaved and repeated, each width's best counts: other work on the machine disturbs all.
    seconds = {min(width, most): float("inf") for width in (*_WIDTHS, most)}
    began = time.perf_counter()
    for repeat in range(_REPEATS):
        if repeat and time.perf_counter() - began > _SECONDS:
            break
        for width in list(seconds):
            seconds[width] = min(seconds[width], _seconds_per_client(trial, width))
            if seconds[width] > _HOPELESS * min(seconds.values()):
                del seconds[width]
    best = min(seconds, key=lambda width: seconds[width])
    add_to_cache(cache, {digest: best})
    return best


def _seconds_per_client(trial: Callable[[int], int], width: int) -> float:
    start = time.perf_counter()
    clients = trial(width)
    return (time.perf_counter() - start) / clients
