"""How many clients to train at once: measured, not assumed.

Stacking wins for small networks and loses for convolutions on a CPU, and by how much depends on
the machine. So a few widths are tried for a few steps each and the fastest per client is taken.
The choice is kept on disk: results agree between widths only up to rounding, so a run that is
resumed, or repeated, should not choose again.
"""

import hashlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

TRIAL_STEPS = 3
_WIDTHS = (1, 4, 16, 64, 256)


def choose(trial: Callable[[int], Any], most: int, key: str, cache: Path | None) -> int:
    """Return the width with the least time per client; `trial(width)` runs a short block."""
    known = _read(cache)
    digest = hashlib.sha256(key.encode()).hexdigest()[:24]
    if digest in known:
        return min(known[digest], most)
    best, best_seconds = 1, float("inf")
    for width in sorted({min(width, most) for width in (*_WIDTHS, most)}):
        trial(width)
        seconds = min(_seconds(trial, width) for _ in range(2)) / width
        if seconds > 2 * best_seconds:
            break
        if seconds < best_seconds:
            best, best_seconds = width, seconds
    _write(cache, {**_read(cache), digest: best})
    return best


def _seconds(trial: Callable[[int], Any], width: int) -> float:
    start = time.perf_counter()
    trial(width)
    return time.perf_counter() - start


def _read(cache: Path | None) -> dict[str, int]:
    if cache is None or not cache.is_file():
        return {}
    try:
        known: dict[str, int] = json.loads(cache.read_text())
        return known
    except ValueError:  # a damaged cache costs one measurement, not the run
        return {}


def _write(cache: Path | None, known: dict[str, int]) -> None:
    if cache is None:
        return
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
        part = cache.with_suffix(f".{os.getpid()}.part")
        part.write_text(json.dumps(known, indent=1, sort_keys=True))
        part.replace(cache)
    except OSError:  # a cache that cannot be written costs one measurement, not the run
        pass
