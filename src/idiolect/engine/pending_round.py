"""A round of which all was started: on a GPU the host need not wait for it to do other things."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from idiolect.core.capabilities import Privacy, has
from idiolect.core.method import Method
from idiolect.core.tree import Tree
from idiolect.engine import backend
from idiolect.engine.client_group import CohortRequest, GroupResult
from idiolect.engine.server_update import Crossing, ServerUpdate, Traffic, crossed
from idiolect.errors import Diverged


class PendingRound(NamedTuple):
    """What is known of a round before its end."""

    round: int
    before: Sequence[Tree]  # the servers' states that it began with
    calls: Sequence[CohortRequest]
    done: Sequence[GroupResult]
    served: Sequence[ServerUpdate]
    traffic: list[Traffic]
    examples: int
    broken: Callable[[], np.ndarray]  # waits for the end: a flag for each client of all cohorts

    @property
    def states(self) -> list[Tree]:
        """The servers' states that it ends with."""
        return [own.state for own in self.served]

    def left_out(self) -> list[np.ndarray]:
        """Return, for each run, which clients were broken; whoever calls waits for the end."""
        cohorts = [call.cohort for call in self.calls]
        ends = np.cumsum([len(cohort) for cohort in cohorts])
        flags = np.split(self.broken(), ends[:-1])
        return [cohort[mine] for cohort, mine in zip(cohorts, flags, strict=True)]

    def crossing(self) -> Crossing | None:
        """Say what crosses the network; None where nobody took part."""
        if not self.done:
            return None
        first = self.done[0]
        reports = first.sums[0] if first.sums else first.reports
        return crossed(self.calls[0], reports, first.personal, first.team.groups[0])


def begun(
    round: int,
    before: Sequence[Tree],
    calls: Sequence[CohortRequest],
    done: Sequence[GroupResult],
    served: Sequence[ServerUpdate],
    traffic: list[Traffic],
    examples: int,
) -> PendingRound:
    """Ask now for what will be read at the end: later requests would wait for later rounds."""
    flags = backend.fetch_async([own.bad for own in served])
    return PendingRound(round, before, calls, done, served, traffic, examples, flags)


def refuse_nobody(
    now: PendingRound, run: int, broken: np.ndarray, seed: int, names: Sequence[str], method: Method
) -> None:
    """Refuse to go on with a run in which nobody is left.

    Where clients are hidden the run goes on with noise alone: its end would tell on them.
    """
    cohort = now.calls[run].cohort
    if not has(method, Privacy) and len(cohort) and len(broken) == len(cohort):
        first = "all clients" if method.pooled else names[cohort[0]]
        raise Diverged(
            f"round {now.round + 1}, seed {seed}: {first} produced NaN or infinity "
            f"({len(cohort)} of {len(cohort)} clients did, so nobody is left); lower lr "
            f"(now {method.lr}) or set clip, and start again"
        )
