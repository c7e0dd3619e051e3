"""Seconds and memory of several sides that do the same work."""

import ctypes
import gc
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch

_LEAST, _MOST = 3, 40  # timed turns of each side; on a GPU each may be several
_TOGETHER = 0.05  # seconds of short turns that are timed together on a GPU
_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class Measured(NamedTuple):
    """What one side took for a turn."""

    seconds: float  # the best turn on a CPU, whose other work disturbs; the median on CUDA
    turns: int
    peak_mib: float | None  # on a CPU above what stood before; on CUDA of everything


def interleaved(sides: Mapping[str, Callable[[], object]], budget: float) -> dict[str, Measured]:
    """Time sides on a CPU in turn, over and over, so that a busy machine hurts all alike."""
    for side in sides.values():
        side()  # warms up: plans, widths
    peaks = {name: _peak_on_cpu(side) for name, side in sides.items()}
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    began = time.perf_counter()
    for turn in range(_MOST):
        if turn >= _LEAST and time.perf_counter() - began > budget:
            break
        for name, side in sides.items():
            start = time.perf_counter()
            side()
            seconds[name].append(time.perf_counter() - start)
    return {name: Measured(min(own), len(own), peaks[name]) for name, own in seconds.items()}


def on_cuda(make: Callable[[], Callable[[], object]], budget: float, warm: int = 3) -> Measured:
    """Time one side on a GPU that nobody else uses; `make` puts its data there.

    Short turns are timed several together, as they follow each other in a run. A turn that takes
    longer than the budget is done once.
    """
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    side = make()
    for _ in range(warm - 1):
        side()
    several = max(1, round(_TOGETHER / _seconds(side, 1)))
    seconds: list[float] = []
    began = time.perf_counter()
    while len(seconds) < _MOST and time.perf_counter() - began < budget:
        seconds.append(_seconds(side, several))
    peak = torch.cuda.max_memory_allocated() / 2**20
    return Measured(median(seconds), len(seconds) * several, peak)


def _seconds(side: Callable[[], object], turns: int) -> float:
    """Time turns on a GPU, which may overlap: it is waited for once, when all were asked for."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(turns):
        side()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / turns


def _peak_on_cpu(side: Callable[[], object]) -> float | None:
    """Return how far a turn raises the memory of this process; None where Linux does not tell."""
    try:
        ctypes.CDLL(None).malloc_trim(0)  # else what was freed before would be used unseen
        _RESET.write_text("5")
        before = _resident("VmRSS")
        side()
        return max(0.0, _resident("VmHWM") - before)
    except (OSError, AttributeError, StopIteration):
        return None


def _resident(field: str) -> float:
    line = next(own for own in _STATUS.read_text().splitlines() if own.startswith(field))
    return int(line.split()[1]) / 1024
