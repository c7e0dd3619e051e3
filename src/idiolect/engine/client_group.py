"""The clients of one architecture over all runs: who they are, and what they keep.

Where and how they work is for those who derive from it: a `Crew` works in this process, workers of
a cluster work elsewhere.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from idiolect.core import tree
from idiolect.core.method import Report, Sent
from idiolect.core.tree import Tree
from idiolect.engine import device_lists
from idiolect.engine.batch_layout import Member
from idiolect.engine.client_tasks import Step, Work
from idiolect.engine.disk_state import Shelf
from idiolect.engine.state_store import Store


class ClientKey(NamedTuple):
    """A client of a run."""

    run: int
    client: int


class CohortRequest(NamedTuple):
    """What one run asks of its cohort: `own` of the sent tree has a row for each of the cohort."""

    cohort: np.ndarray
    sent: Sent
    members: Sequence[Member] | Mapping[int, Member]  # of all clients, or of those called
    exams: Sequence[Member] | Mapping[int, Member] = ()  # likewise, when they are scored
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
        self, clients: np.ndarray, store: Store | Shelf, runs: int, device: torch.device
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
        return device_lists.whole(places, self.device)

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
        self.store.rows = rows if isinstance(self.store, Shelf) else tree.to(rows, self.device)

    # What depends on where they work.

    def begin(self, kind: str, work: Work, calls: Sequence[CohortRequest], round: int) -> Answer:
        """Have work done for every called client; works of equal `kind` are planned alike."""
        raise TypeError(f"{type(self).__name__} does not work")

    def train(
        self, step: Step, calls: Sequence[CohortRequest], round: int
    ) -> Callable[[], GroupResult]:
        """Have a round done; whoever calls waits for it."""
        answer = self.begin("step", step, calls, round)

        def harvest() -> GroupResult:
            seats, results = answer()
            return GroupResult(self, seats, *(results if seats else ((), (), ())))

        return harvest

    def serve(
        self,
        work: Work,
        servers: Sequence[Member],
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
        members: Sequence[Sequence[Member]],
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
