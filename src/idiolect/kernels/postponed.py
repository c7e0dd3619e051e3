"""Background compilation: threads compile forms while rounds run in the plain one."""

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch

from idiolect.kernels.compiled import FAILURES, Kernel, compile_ahead, launched_by

_COMPILERS = 8


class Postponed:
    """A problem whose forms are being compiled."""

    def __init__(
        self,
        known: Mapping[str, Callable[..., Any]],
        wanted: Iterable[str],
        inputs: tuple[Any, ...],
    ) -> None:
        self.known = known
        self.like, self._device = (
            on_meta(inputs),
            inputs[0].device,
        )  # real ones would stay in memory
        self._left = {*wanted} - {"plain"}
        for name in sorted(self._left):
            _compilers.add(partial(self._compile, name))

    @property
    def compiled(self) -> bool:
        """Whether nothing is left to be compiled."""
        return not self._left

    def inputs(self) -> tuple[Any, ...]:
        """Return inputs of the same form, with any numbers."""
        return _alike(self.like, self._device)

    def _compile(self, name: str) -> None:
        try:
            for which in launched_by(self.known[name], *self.like):
                compile_ahead(which)
        except (*FAILURES, ImportError):
            pass  # it fails again, and is told, when its turn comes
        finally:
            self._left.discard(name)


class Compilation:
    """A kernel that is compiled before any problem: there is one form of it alone."""

    def __init__(self, which: Kernel) -> None:
        self.done = False
        self._which = which
        _compilers.add(self._compile, first=True)

    def _compile(self) -> None:
        with contextlib.suppress(*FAILURES, ImportError):  # it fails again when it is launched
            compile_ahead(self._which)
        self.done = True


def on_meta(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return inputs of the same form without numbers, enough to tell what would be launched."""
    return _alike(inputs, torch.device("meta"))


def _alike(inputs: tuple[Any, ...], device: torch.device) -> tuple[Any, ...]:
    *tensors, sizes = inputs
    return (*(torch.empty_like(one, device=device) for one in tensors), sizes)


class _Compilers:
    """Threads that do jobs in the order in which they come.

    At the interpreter's end, only those that have begun are waited for.
    """

    def __init__(self) -> None:
        self._jobs: deque[Callable[[], None]] = deque()
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._most = max(1, min(_COMPILERS, (os.cpu_count() or 1) - 1))
        self._busy = 0
        self._pool = ThreadPoolExecutor(self._most)

    def add(self, job: Callable[[], None], first: bool = False) -> None:
        with self._lock:
            (self._jobs.appendleft if first else self._jobs.append)(job)
            if self._busy == self._most:
                return
            self._busy += 1
        self._pool.submit(self._work)

    def drop(self) -> None:
        """Leave out jobs that have not begun, and wait for those that have."""
        with self._idle:
            self._jobs.clear()
            self._idle.wait_for(lambda: not self._busy)

    def _work(self) -> None:
        with self._lock:
            if not self._jobs:
                self._busy -= 1
                self._idle.notify_all()
                return
            job = self._jobs.popleft()
        try:
            job()
        finally:
            self._pool.submit(self._work)  # refused once the interpreter ends


_compilers = _Compilers()


def drop_jobs() -> None:
    """Compile nothing that has not begun."""
    _compilers.drop()
