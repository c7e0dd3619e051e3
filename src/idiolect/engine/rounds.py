"""The loop of rounds: sample, send, train every client, update the server; evaluate when asked.

Runs of several seeds advance together: their clients share blocks, each with its own server state,
data and batches, so that a run's result does not depend on its company. (Networks with dropout are
the exception: layers draw for a block as a whole, repeatably, but not the same at another width.)
"""

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from idiolect.core.capabilities import ArchitectureState, Averaging, Preparation, Privacy, has
from idiolect.core.method import Sent
from idiolect.core.tree import Tree
from idiolect.engine import evaluation
from idiolect.engine.backend import fetch_async
from idiolect.engine.client_group import (
    ClientKey,
    ClientTask,
    CohortRequest,
    GroupResult,
    Meet,
    Prepare,
    Train,
)
from idiolect.engine.server_update import (
    Crossing,
    ServerUpdate,
    Traffic,
    crossed,
    server_request,
    update_architectures,
    update_servers,
)
from idiolect.engine.simulation_state import SeededRun as SeededRun
from idiolect.engine.simulation_state import SimulationState
from idiolect.errors import Diverged

_SHORT = 0.05  # seconds of a round that is worth starting before it is known to be wanted


class Round(NamedTuple):
    """What one round did: traffic of each run, and the examples trained on by all together."""

    traffic: list[Traffic]
    examples: int
    left_out: Sequence[np.ndarray] = ()  # per run, clients left out for NaN or infinity
    crossing: Crossing | None = None  # the leaves on the network, in the first round


class Simulation(SimulationState):
    """A method on one or several seeded runs, round by round."""

    _crossed = False  # whether a round has reported its crossing
    _next: "PendingRound | None" = None  # a round that was started early
    _pace, _ended = float("inf"), float("-inf")  # seconds of the last round, and when it ended

    evaluate = evaluation.evaluate

    def advance(self) -> Round:
        """Run one round of every run.

        Where rounds are short, the next one is started on the GPU before this one has ended, so
        that neither waits for the other; it is discarded if stale.
        """
        now, self._next = self._next, None
        if now is None or now.round != self.round or now.before is not self.states:
            now = self._start(self.round, self.states)
        states = now.states
        if self._starts_early:
            self._next = self._start(self.round + 1, states)
        left_out = now.left_out()  # waits for the end of the round
        self._finish(now, left_out)
        self.states = states
        self.round += 1
        ended = time.perf_counter()
        self._pace, self._ended = ended - self._ended, ended
        crossing = None if self._crossed or self.method.pooled else now.crossing()
        self._crossed |= crossing is not None
        return Round(now.traffic, now.examples, left_out, crossing)

    def _start(self, round: int, states: list[Tree]) -> "PendingRound":
        """Start a round: on a GPU nothing is waited for, unless the server's step does."""
        method, groups = self.method, self.groups
        requests = [self._request(run, state, round) for run, state in enumerate(states)]
        if has(method, Preparation) and round >= method.first_preparation:
            self._run_apart(Prepare(method), self._unprepared(requests, states))
        coming = [self._request(run, None, round + 1) for run in range(len(states))]
        for group in groups:
            group.prefetch_state(coming)
        training = [group.train(Train(method), requests, round) for group in groups]
        results = [result for result in [wait() for wait in training] if result.keys]
        updates = update_servers(method, requests, states, results, self.device)
        examples = sum(group.examples("step") for group in groups)
        traffic = self._public_traffic.add(
            [own.traffic for own in updates], requests, round, self._attendance
        )
        for group in groups:
            group.prefetch_batches(coming, round + 1)
        # Asked for now: later requests would wait for later rounds.
        broken = fetch_async([own.bad for own in updates])
        return PendingRound(round, states, requests, results, updates, traffic, examples, broken)

    def _finish(self, now: "PendingRound", left_out: Sequence[np.ndarray]) -> None:
        """Keep what clients and servers made of a round, but for clients that were left out."""
        self._refuse_nobody(now, left_out)
        heard = [  # whether the server could use anybody's report
            len(_without(request.counted, broken)) > 0
            for request, broken in zip(now.requests, left_out, strict=True)
        ]
        gone = [ClientKey(run, int(c)) for run, clients in enumerate(left_out) for c in clients]
        if has(self.method, ArchitectureState):
            parts = zip(self._trained, now.states, self._samples(self.round), strict=True)
            servers = [server_request(own[0], state, sample) for own, state, sample in parts]
            update_architectures(
                self.method, self.groups, now.results, gone, heard, servers, self.round
            )
        for result in now.results:
            result.group.keep(result.keys, result.personal, gone)
        present = [self._present(run) for run in range(len(self.runs))]
        if not self.method.pooled:
            for there, request, broken in zip(present, now.requests, left_out, strict=True):
                there[_without(request.cohort, broken)] = True
        self._took_part = np.stack(present)
        self._idle = [n + (not one) for n, one in zip(self._idle, heard, strict=True)]

    def _request(self, run: int, state: Tree | None, round: int) -> CohortRequest:
        """Sample a run's cohort; with the server's state also what is sent to it."""
        attendance = self._attendance[run]
        reporting = self.cohort(run) if round == self.round else attendance.reporting(round)
        cohort = attendance.training(round) if self._all_train else reporting
        return CohortRequest(
            cohort,
            Sent() if state is None else self.send(state, cohort),
            self._trained[run],
            even=self.method.steps > 0,
            reporting=reporting if self._all_train else None,
            sample=self._samples(round)[run],
        )

    @property
    def _starts_early(self) -> bool:
        """Whether the next round may start now: it needs nothing that waits for this one's end."""
        return (
            self.device.type == "cuda"
            and self._backend.kind == "vectorised"
            and self._pace < _SHORT
            and has(self.method, Averaging)
            and not has(self.method, ArchitectureState)
            and not has(self.method, Preparation)
            and not self.method.public
            and not self._personal
        )

    def _refuse_nobody(self, now: "PendingRound", left_out: Sequence[np.ndarray]) -> None:
        """Refuse to go on with a run in which nobody is left.

        A drawn cohort may be small: if all of it is broken, the round is an empty one. Where
        clients are hidden the run goes on with noise alone: its end would give them away.
        """
        method = self.method
        for run, broken in enumerate(left_out):
            cohort = now.requests[run].cohort
            small = self._draw != "fixed" and len(cohort) != self._able[run]
            if small or has(method, Privacy) or not len(cohort) or len(broken) != len(cohort):
                continue
            seed, train_data = self.runs[run]
            first = "all clients" if method.pooled else train_data.names[cohort[0]]
            raise Diverged(
                f"round {now.round + 1}, seed {seed}: {first} produced NaN or infinity "
                f"({len(cohort)} of {len(cohort)} clients did, so nobody is left); lower lr "
                f"(now {method.lr}) or set clip, and start again"
            )

    def _unprepared(
        self, requests: Sequence[CohortRequest], states: Sequence[Tree]
    ) -> list[CohortRequest]:
        """Of the clients of a round, address those that have not prepared yet."""
        since = self.method.first_preparation if has(self.method, Preparation) else 0
        found = []
        for own, request, state in zip(self._attendance, requests, states, strict=True):
            before = own.strangers(self._clients, self.round, since)
            new = np.intersect1d(request.cohort, before[:0] if self.method.pooled else before)
            found.append(CohortRequest(new, self.send(state, new), request.members))
        return found

    def meet(self) -> None:
        """Let every client take in the present state without training: newcomers catching up."""
        for requests in self.everyone(newcomers=True):
            self._run_apart(Meet(self.method), requests)

    def _run_apart(self, task: ClientTask, requests: Sequence[CohortRequest]) -> None:
        """Run a task outside of training; clients keep the personal state it returns."""
        started = [group.begin(task, requests, self.round) for group in self.groups]
        for group, wait in zip(self.groups, started, strict=True):
            keys, results = wait()
            if keys:
                group.keep(keys, results[-1])


class PendingRound(NamedTuple):
    """A round all of whose work was started; on a GPU the host need not wait for its end."""

    round: int
    before: Sequence[Tree]  # the servers' states that it started from
    requests: Sequence[CohortRequest]
    results: Sequence[GroupResult]
    updates: Sequence[ServerUpdate]
    traffic: list[Traffic]
    examples: int
    broken: Callable[[], np.ndarray]  # waits for the end: a flag for each client of all cohorts

    @property
    def states(self) -> list[Tree]:
        """The servers' states that it ends with."""
        return [own.state for own in self.updates]

    def left_out(self) -> list[np.ndarray]:
        """Wait for the end; return each run's clients that are left out."""
        cohorts = [request.cohort for request in self.requests]
        ends = np.cumsum([len(cohort) for cohort in cohorts])
        flags = np.split(self.broken(), ends[:-1])
        return [cohort[mine] for cohort, mine in zip(cohorts, flags, strict=True)]

    def crossing(self) -> Crossing | None:
        """Return what crosses the network; None where nobody took part."""
        if not self.results:
            return None
        first = self.results[0]
        reports = first.sums[0] if first.sums else first.reports
        return crossed(self.requests[0], reports, first.personal, first.group.groups[0])


def _without(clients: np.ndarray, left_out: np.ndarray) -> np.ndarray:
    return np.setdiff1d(clients, left_out) if len(left_out) else clients
