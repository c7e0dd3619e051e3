"""The clients of one architecture over all runs: who they are, and what they keep.

Where and how they work is for those who derive from it: a `Crew` works in this process, workers of
a cluster work elsewhere.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from idiolect.core import tree
from idiolect.core.capabilities import ArchitectureState, NewcomerHistory, Preparation, has
from idiolect.core.client import Local
from idiolect.core.method import Method, Report, Sent
from idiolect.core.tree import Tree
from idiolect.engine import backend
from idiolect.engine.batch_plan import ClientRows
from idiolect.engine.state_store import DiskStore, MemoryStore


@dataclass(frozen=True)
class ClientTask:
    """A method's part in something: the engine calls it for one client at a time, or for many."""

    keeps: ClassVar[bool] = False  # the last of what it returns is the client's to keep

    method: Method

    def __call__(self, sent: Sent, personal: Tree, local: Local, exam: Local) -> Tree:
        """Do it. `exam` holds what is scored and is never given to a method's training code."""
        raise TypeError(f"{type(self).__name__} does nothing")


@dataclass(frozen=True)
class Train(ClientTask):
    """A client's round: what it reports, what the server reads in that, what it keeps."""

    keeps: ClassVar[bool] = True

    def __call__(self, sent: Sent, personal: Tree, local: Local, exam: Local) -> Tree:
        """Train and report."""
        report, personal = self.method.client_step(sent, personal, local)
        read = self.method.read(report, local) if has(self.method, ArchitectureState) else ()
        return report, read, personal


@dataclass(frozen=True)
class Prepare(ClientTask):
    """A client does what it does once, before its first round."""

    keeps: ClassVar[bool] = True

    def __call__(self, sent: Sent, personal: Tree, local: Local, exam: Local) -> Tree:
        """Return what it keeps, and nothing else."""
        assert has(self.method, Preparation)
        return (self.method.prepare(sent, personal, local),)


@dataclass(frozen=True)
class Meet(ClientTask):
    """A newcomer looks at a state of the server without training."""

    keeps: ClassVar[bool] = True

    def __call__(self, sent: Sent, personal: Tree, local: Local, exam: Local) -> Tree:
        """Return what it keeps, and nothing else."""
        if not has(self.method, NewcomerHistory):
            return (personal,)
        return (self.method.meet(sent, personal, local),)


@dataclass(frozen=True)
class Fuse(ClientTask):
    """The server trains what it keeps for an architecture on its public examples."""

    def __call__(self, sent: Sent, personal: Tree, local: Local, exam: Local) -> Tree:
        """Return what it keeps from now on."""
        assert has(self.method, ArchitectureState)
        return self.method.fuse(sent.group, sent.shared, local)


class ClientKey(NamedTuple):
    """A client of a run."""

    run: int
    client: int


class CohortRequest(NamedTuple):
    """What one run asks of its cohort: `own` of the sent tree has a row for each of the cohort."""

    cohort: np.ndarray
    sent: Sent
    members: Sequence[ClientRows] | Mapping[int, ClientRows]  # of all clients, or of those called
    exams: Sequence[ClientRows] | Mapping[int, ClientRows] = ()  # likewise, when they are scored
    even: bool = False  # everyone takes as many steps, however many examples it has
    afresh: bool = False  # clients are given the parameters that training started from
    heard: np.ndarray | None = None  # whose reports count; None: all of the cohort
    sample: int | None = None  # number of the public sample; None: the round's


class GroupResult(NamedTuple):
    """What came of a team's round, a row for each seat."""

    team: "ClientGroup"
    seats: Sequence[ClientKey]
    reports: Tree  # () where they were added up
    read: Tree  # what the server makes of them with public examples
    personal: Tree
    sums: Sequence[Report] = ()  # of each run: weights times parameters, added up, and weights
    broken: Tensor | None = None  # [seat] who is in no sum, since it holds NaN or infinity


Answer = Callable[[], tuple[Sequence[ClientKey], Tree]]
"""Who was there and what came of it, rows in their order; to call is to wait for it."""


class ClientGroup:
    """Clients, their personal state, and what the servers keep for their architecture."""

    def __init__(
        self, clients: np.ndarray, store: MemoryStore | DiskStore, runs: int, device: torch.device
    ) -> None:
        self.clients = clients
        self.store = store
        self.groups: list[Tree] = [() for _ in range(runs)]  # what each run's server keeps for them
        self.device = device  # where what they report is wanted
        self.widths: dict[str, int] = {}  # of blocks, measured
        self._place = {int(client): place for place, client in enumerate(clients)}

    def rows(self, seats: Sequence[ClientKey]) -> Tensor:
        """Return the store's rows of some seats."""
        places = [seat.run * len(self.clients) + self._place[seat.client] for seat in seats]
        return backend.device_ints(places, self.device)

    def called(self, cohorts: Sequence[np.ndarray]) -> list[ClientKey]:
        """List the seats of this architecture in a cohort of each run."""
        return [
            ClientKey(run, int(client))
            for run, cohort in enumerate(cohorts)
            for client in cohort
            if int(client) in self._place
        ]

    def keep(
        self, seats: Sequence[ClientKey], personal: Tree, but: Sequence[ClientKey] = ()
    ) -> None:
        """Keep clients' new personal state, `but` of some, who keep what they had."""
        left = set(but)
        back = [place for place, seat in enumerate(seats) if seat in left]
        if back and tree.leaves(personal):
            old = self.store.take(self.rows([seats[place] for place in back]))
            personal = tree.put(personal, torch.tensor(back, device=self.device), old)
        self.store.put(self.rows(seats), personal)

    def restore(self, rows: Tree) -> None:
        """Put back what all clients had kept when a checkpoint was made."""
        self.store.rows = rows if isinstance(self.store, DiskStore) else tree.to(rows, self.device)

    # What depends on where they work.

    def begin(
        self, kind: str, work: ClientTask, calls: Sequence[CohortRequest], round: int
    ) -> Answer:
        """Have work done for every called client; works of equal `kind` are planned alike."""
        raise TypeError(f"{type(self).__name__} does not work")

    def train(
        self, step: Train, calls: Sequence[CohortRequest], round: int
    ) -> Callable[[], GroupResult]:
        """Have a round done; whoever calls waits for it."""
        answer = self.begin("step", step, calls, round)

        def harvest() -> GroupResult:
            seats, results = answer()
            return GroupResult(self, seats, *(results if seats else ((), (), ())))

        return harvest

    def serve(
        self,
        work: ClientTask,
        servers: Sequence[ClientRows],
        states: Sequence[Tree],
        round: int,
        samples: Sequence[int] | None = None,
    ) -> list[Tree]:
        """Do work for the servers of all runs, on this architecture.

        `samples` gives each run's number of the public sample, where that is not the round's.
        """
        raise TypeError(f"{type(self).__name__} does not work")

    def look_ahead(self, cohorts: Sequence[np.ndarray]) -> None:
        """Have the personal state of the next cohorts read, where that takes its time."""

    def prepare(
        self,
        cohorts: Sequence[np.ndarray],
        members: Sequence[Sequence[ClientRows]],
        even: bool,
        round: int,
        samples: Sequence[int] | None = None,
    ) -> None:
        """Make ready for the coming round of these cohorts, while this one is being worked on."""

    def examples(self, kind: str) -> int:
        """Return how many examples the last round of a kind trained on."""
        raise TypeError(f"{type(self).__name__} does not work")

    def padding(self, kind: str) -> float:
        """Return the share of a round's examples that were padding."""
        raise TypeError(f"{type(self).__name__} does not work")
