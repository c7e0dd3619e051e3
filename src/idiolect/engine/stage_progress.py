"""How far the clients of a run are in a stage: told in clients, a few times a second at most."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from idiolect.core.batches import Request
from idiolect.core.capabilities import FinalExchange, has
from idiolect.engine.client_group import ClientTask
from idiolect.engine.outcome import Stage

_PAUSE = 0.2  # seconds between two reports
_ALMOST = 0.98  # of a block that has not returned yet


class StageProgress:
    """Follows the blocks of clients through what they do after the rounds, or in a long one.

    A block of clients says how many steps of its scans are done. How many scans it makes is known
    once the first block is through; until then the scans begun are taken for all.
    """

    def __init__(
        self,
        tell: Callable[[Stage], None],
        label: str,
        clients: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`clients` is how many are scored at the end, over all seeds."""
        self._tell, self._label, self._clients, self._clock = tell, label, clients, clock
        self._lock = threading.Lock()
        self._name, self._told, self._due = "", "", 0.0
        self._passes, self._pass, self._of = 1, 0, clients
        self._finished, self._highest = 0.0, 0.0
        self._running: dict[int, BlockPulse] = {}
        self.scans = 1.0  # of a block, in units of its first

    def begin(self, task: ClientTask, clients: int) -> None:
        """Begin a task of so many clients; the parts of one stage follow each other."""
        kind = task.kind.partition(" ")[0]
        name, number, passes, whole = kind, 0, 1, clients
        if kind in ("step", "prepare", "meet"):
            name = {"step": "rounds", "prepare": "preparing"}.get(kind, "preparing")
        else:
            hears = bool(getattr(task, "hears", False))
            tells = has(task.method, FinalExchange) and not getattr(task, "newcomers", False)
            passes = 2 if tells and (hears or kind == "tell") else 1
            number = passes - 1 if kind != "tell" else 0
            adapts = task.method.tunes or getattr(task, "newcomers", False) or kind == "tell"
            adapts &= not getattr(task, "only_global", False)
            name = "exchanging" if hears and passes == 2 else "adapting" if adapts else "scoring"
            whole = self._clients
        with self._lock:
            if (name, number) != (self._name, self._pass) or kind == "step":
                self._finished = self._highest = 0.0
            self._name, self._pass, self._passes, self._of = name, number, passes, whole
            self.scans = 1.0
            if name != "rounds":
                self._report(name)

    @contextmanager
    def block(self, clients: int) -> "Iterator[BlockPulse | None]":
        """Follow a block of clients until it returns; one that fails has done nothing.

        In an ordinary round its end alone is reported: looking at every step would slow it down.
        """
        pulse = BlockPulse(self, clients)
        with self._lock:
            self._running[id(pulse)] = pulse
        try:
            yield None if self._name == "rounds" else pulse
        except BaseException:
            with self._lock:
                del self._running[id(pulse)]
            raise
        with self._lock:
            del self._running[id(pulse)]
            self._finished += clients
            self.scans = max(self.scans, pulse.scans)
            self._report(self._name)

    def report(self, name: str = "") -> None:
        """Report progress a few times a second at most; a new `name` is reported at once."""
        if self._clock() >= self._due or (name and name != self._told):
            with self._lock:
                self._report(name or self._name)

    def _report(self, name: str) -> None:
        now = self._clock()
        if now < self._due and name == self._told:
            return
        self._due, self._told = now + _PAUSE, name
        done = self._finished + sum(own.share * own.clients for own in self._running.values())
        self._highest = max(self._highest, min(done, self._of))
        part = self._highest / self._of if self._of else 1.0
        share = (self._pass + part) / self._passes
        self._tell(Stage(name, self._label, share, self._highest, self._of))


class BlockPulse:
    """Counts the steps of one block; scoring marks the end of its training."""

    def __init__(self, stage: StageProgress, clients: int) -> None:
        self.clients = clients
        self._stage = stage
        self._before, self._scan, self._first = 0, 0, 0  # steps: of scans done, this one, the first
        self._at = 0
        self._turn, self._turns = 0, 1

    @property
    def scans(self) -> float:
        """How many scans there were, in units of the first."""
        return (self._before + self._scan) / self._first if self._first else 1.0

    @property
    def share(self) -> float:
        """How much of the block is done."""
        known = max(self._before + self._scan, self._first * self._stage.scans)
        return min((self._before + self._at) / known, _ALMOST) if known else 0.0

    def turn(self, number: int, turns: int) -> None:
        """Begin a repetition, numbered, of work that is done several times."""
        self._turn, self._turns = number, turns

    def step(self, number: int, steps: int) -> None:
        """So many steps of a scan are done."""
        if number == 1 and not self._turn:
            self._before, self._scan = self._before + self._scan, steps * self._turns
            self._first = self._first or self._scan
        self._at = self._turn * steps + number
        if self._turn == self._turns - 1 and number == steps:
            self._turn, self._turns = 0, 1
        self._stage.report()

    def scores(self, request: Request) -> None:
        """Hear that test rows are asked for."""
        self._stage.report("scoring")
