"""The clients of one architecture over all runs: what they are asked to do, and what they keep.

Where they are run is up to the subclasses: `LocalGroup` in this process, `RayGroup` on a cluster.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from idiolect.core import tree
from idiolect.core.capabilities import (
    ArchitectureState,
    NewcomerHistory,
    Preparation,
    given,
    has,
)
from idiolect.core.client import Local
from idiolect.core.method import Method, Report, Sent
from idiolect.core.tree import Tree
from idiolect.engine.backend import device_ints
from idiolect.engine.batch_plan import ClientRows
from idiolect.engine.state_store import DiskStore, MemoryStore

if TYPE_CHECKING:
    from idiolect.engine.stage_progress import StageProgress

SERVER = 1 << 40  # the server's client number where it draws batches: no client has it

Members = Sequence[ClientRows] | Mapping[int, ClientRows]
"""Clients' rows by number: of all clients, or of those called."""


@dataclass(frozen=True)
class ClientTask:
    """What a client is asked to do, as a value that can be sent to another process."""

    name: ClassVar[str] = ""
    keeps: ClassVar[bool] = False  # whether the last result is the client's new personal state

    method: Method

    @property
    def kind(self) -> str:
        """Tasks of one kind share block widths and batch plans."""
        return self.name

    def __call__(self, sent: Sent, personal: Tree, local: Local, test: Local) -> Tree:
        """Run it for one client; `test` holds what is scored and is never given to training."""
        raise NotImplementedError


class Train(ClientTask):
    """A client's round; returns its report, what the server reads in it, its personal state."""

    name = "step"
    keeps = True

    def __call__(self, sent: Sent, personal: Tree, local: Local, test: Local) -> Tree:
        """Train and report."""
        report, personal = self.method.client_step(sent, personal, given(self.method, local))
        read = self.method.read(report, local) if has(self.method, ArchitectureState) else ()
        return report, read, personal


class Prepare(ClientTask):
    """What a client does once, before its first round."""

    name = "prepare"
    keeps = True

    def __call__(self, sent: Sent, personal: Tree, local: Local, test: Local) -> Tree:
        """Return its personal state alone."""
        assert has(self.method, Preparation)
        return (self.method.prepare(sent, personal, given(self.method, local)),)


class Meet(ClientTask):
    """A newcomer takes in the server's state without training."""

    name = "meet"
    keeps = True

    def __call__(self, sent: Sent, personal: Tree, local: Local, test: Local) -> Tree:
        """Return its personal state alone."""
        if not has(self.method, NewcomerHistory):
            return (personal,)
        return (self.method.meet(sent, personal, given(self.method, local)),)


class Fuse(ClientTask):
    """The server trains its model of an architecture on its public examples."""

    name = "serve"

    def __call__(self, sent: Sent, personal: Tree, local: Local, test: Local) -> Tree:
        """Return the new state of the architecture."""
        assert has(self.method, ArchitectureState)
        return self.method.fuse(sent.group, sent.shared, local)


class ClientKey(NamedTuple):
    """A client of a run."""

    run: int
    client: int


class CohortRequest(NamedTuple):
    """What one run asks of its cohort; `sent.own` has a row for each client of it."""

    cohort: np.ndarray
    sent: Sent
    members: Members
    tests: Members = ()  # rows to score on
    even: bool = False  # all clients take equally many steps, however many examples they have
    afresh: bool = False  # clients are given the parameters that training started from
    reporting: np.ndarray | None = None  # clients whose reports count; None: the whole cohort
    sample: int | None = None  # number of the public sample; None: the round's

    @property
    def counted(self) -> np.ndarray:
        """The clients whose reports count."""
        return self.cohort if self.reporting is None else self.reporting


class GroupResult(NamedTuple):
    """The results of a group's round, a row for each key."""

    group: "ClientGroup"
    keys: Sequence[ClientKey]
    reports: Tree  # () where they were summed
    read: Tree  # what the server reads in them with public examples
    personal: Tree
    sums: Sequence[Report] = ()  # of each run: weighted sum of parameters, sum of weights
    broken: Tensor | None = None  # [key] left out of the sums: holds NaN or infinity


Answer = Callable[[], tuple[Sequence[ClientKey], Tree]]
"""A future; calling it returns (clients, stacked results)."""


class ClientGroup:
    """Clients, their personal state, and what the servers keep for their architecture."""

    def __init__(
        self, clients: np.ndarray, store: MemoryStore | DiskStore, runs: int, device: torch.device
    ) -> None:
        self.clients = clients
        self.store = store
        self.groups: list[Tree] = [() for _ in range(runs)]  # each server's state for them
        self.device = device  # of reports
        self.widths: dict[str, int] = {}  # of blocks, measured
        self.stage: StageProgress | None = None  # hears how far a task is
        self._place = {int(client): place for place, client in enumerate(clients)}

    def rows(self, keys: Sequence[ClientKey]) -> Tensor:
        """Return the rows of some clients in the store."""
        places = [key.run * len(self.clients) + self._place[key.client] for key in keys]
        return device_ints(places, self.device)

    def keys(self, requests: Sequence[CohortRequest]) -> list[ClientKey]:
        """List the clients of this group in the cohorts of all runs."""
        return [
            ClientKey(run, int(client))
            for run, request in enumerate(requests)
            for client in request.cohort
            if int(client) in self._place
        ]

    def keep(
        self, keys: Sequence[ClientKey], personal: Tree, but: Sequence[ClientKey] = ()
    ) -> None:
        """Store new personal state; the clients in `but` keep their old one."""
        left = set(but)
        back = [place for place, key in enumerate(keys) if key in left]
        if back and tree.leaves(personal):
            old = self.store.take(self.rows([keys[place] for place in back]))
            personal = tree.put(personal, torch.tensor(back, device=self.device), old)
        self.store.put(self.rows(keys), personal)

    def restore(self, rows: Tree) -> None:
        """Put back all clients' personal state from a checkpoint."""
        self.store.rows = rows if isinstance(self.store, DiskStore) else tree.to(rows, self.device)

    # What depends on where they are run.

    def begin(self, task: ClientTask, requests: Sequence[CohortRequest], round: int) -> Answer:
        """Start a task for every client of the requests."""
        raise NotImplementedError

    def train(
        self, task: Train, requests: Sequence[CohortRequest], round: int
    ) -> Callable[[], GroupResult]:
        """Start a round of training; calling what is returned waits for it."""
        answer = self.begin(task, requests, round)

        def result() -> GroupResult:
            keys, results = answer()
            return GroupResult(self, keys, *(results if keys else ((), (), ())))

        return result

    def serve(self, task: ClientTask, requests: Sequence[CohortRequest], round: int) -> list[Tree]:
        """Run a task of the servers with this architecture; return each run's result."""
        raise NotImplementedError

    def prefetch_state(self, requests: Sequence[CohortRequest]) -> None:
        """Start to read the personal state of the next cohorts, where it is on disk."""

    def prefetch_batches(self, requests: Sequence[CohortRequest], round: int) -> None:
        """Draw the batches of the next round, while a GPU still works on this one."""

    def examples(self, kind: str) -> int:
        """Return how many examples the last tasks of a kind trained on."""
        raise NotImplementedError

    def planned(self, kind: str) -> int:
        """Return the same with padding."""
        raise NotImplementedError

    def padding(self, kind: str) -> float:
        """Return the share of padding in the examples of the last tasks of a kind."""
        planned = self.planned(kind)
        return 1 - self.examples(kind) / planned if planned else 0.0
