"""Seconds and memory of several sides that do the same work."""

import ctypes
import gc
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch

_LEAST, _MOST = 3, 40  # timed turns of each side
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

    A turn that takes longer than the budget is done once.
    """
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    side = make()
    for _ in range(warm):
        side()
    torch.cuda.synchronize()
    seconds: list[float] = []
    began = time.perf_counter()
    while len(seconds) < _MOST and time.perf_counter() - began < budget:
        start = time.perf_counter()
        side()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated() / 2**20
    return Measured(median(seconds), len(seconds), peak)


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
