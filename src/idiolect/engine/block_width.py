"""How many clients to train at once: measured, not assumed.

Stacking wins for small networks and loses for convolutions on a CPU, and by how much depends on
the machine. So a few widths are tried for a few steps each and the fastest per client is taken.
The choice is kept on disk: results agree between widths only up to rounding, so a run that is
resumed, or repeated, should not choose again.
"""

import hashlib
import time
from collections.abc import Callable
from pathlib import Path

from idiolect.kernels.autotune import add_to_cache, read_cache

TRIAL_STEPS = 6
_WIDTHS = (1, 4, 16, 64, 256)
_REPEATS = 5
_SECONDS = 1.0  # enough of measuring, once every width was tried
_HOPELESS = 3.0  # times slower than the best so far: not tried again


def choose(trial: Callable[[int], int], most: int, key: str, cache: Path | None) -> int:
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
