"""The loop of rounds: sample, send, train every client, aggregate; and judge when asked.

Runs of several seeds advance together: their clients share blocks, each with its own server state,
data and batches, so that a run's result does not depend on its company. (Networks with dropout are
the exception: layers draw for a block as a whole, repeatably, but not the same at another width.)
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from idiolect.core import capabilities, tree
from idiolect.core.capabilities import ArchitectureState, Averaging, FinalExchange, Preparation, has
from idiolect.core.method import Method
from idiolect.core.tree import Tree
from idiolect.data.federation import TestData, TrainData
from idiolect.engine import backend, sampling
from idiolect.engine import server_update as groups
from idiolect.engine.architecture import Architecture, blank
from idiolect.engine.backend import Backend
from idiolect.engine.client_group import ClientKey, ClientTask, CohortRequest, Meet, Prepare, Train
from idiolect.engine.data_pools import DataPools
from idiolect.engine.evaluation import ClientScores, ScoreTask, joined, mixed, run_scores
from idiolect.engine.final_exchange import Exchange, Sums, held, holds, welcomed
from idiolect.engine.pending_round import PendingRound, begun, refuse_nobody
from idiolect.engine.ray_backend.ray_group import RayJob
from idiolect.engine.server_update import Crossing, PublicTraffic, Traffic, gathered, summable
from idiolect.engine.state_store import DiskStore
from idiolect.engine.worker_groups import LocalBackend, StatePlacement, hired
from idiolect.errors import ConfigError

_GROUP = 2048  # clients scored at a time
_SHORT = 0.05  # seconds of a round that is worth beginning before it is known to be wanted


class SeededRun(NamedTuple):
    """One run: a seed and what the clients may learn from."""

    seed: int
    train_data: TrainData


class Round(NamedTuple):
    """What one round did: traffic of each run, and the examples trained on by all together."""

    traffic: list[Traffic]
    examples: int
    left_out: Sequence[np.ndarray] = ()  # per run, whose NaN or infinity went no further
    crossing: Crossing | None = None  # what went where, told once


class Simulation:
    """A method on one or several seeded runs, round by round."""

    def __init__(
        self,
        method: Method,
        runs: Sequence[SeededRun],
        architectures: Mapping[str, Architecture],
        *,
        cohort: int | None = None,
        draw: str = "fixed",
        bystanders: str = "rest",
        backend: Backend | None = None,
        newcomers: bool = False,
        shelf: Path | None = None,
    ) -> None:
        """`draw` says how a cohort is drawn, by its name in `sampling.DRAWS`.

        `bystanders`, clients outside the cohort, rest, or train as well without being heard.
        Of `newcomers`, who come to a state that is there already, only its form is made. `shelf` is
        the folder for personal state on disk; without one it goes when the simulation does.
        """
        if method.alone:
            cohort, draw = None, "fixed"
        self.method = method
        self.round = 0
        self.runs = runs
        self.told: Sequence[Sums] = ()  # for newcomers: what those told who were there before
        self._draw = draw
        self._idle = [0 for _ in runs]  # rounds in which no report reached the server
        self._crossed = False  # whether a round has told what crosses the network
        self._next: PendingRound | None = None  # a round that was begun early
        self._pace, self._ended = float("inf"), float("-inf")  # seconds of the last round
        backend = backend or Backend()
        self._device = backend.place
        self._backend = backend
        self._library = DataPools([run.train_data for run in runs], self._device)
        self._clients = len(runs[0].train_data.names)
        if any(len(run.train_data.names) != self._clients for run in runs):
            raise ConfigError(
                f"runs have {sorted({len(run.train_data.names) for run in runs})} clients; runs "
                "that are trained together need equally many"
            )
        trained = [run.train_data.pooled() if method.pooled else run.train_data for run in runs]
        self._trained = [
            self._library.members(n, runs[n].seed, own) for n, own in enumerate(trained)
        ]
        self._judged = self._trained
        if method.pooled:
            self._judged = [
                self._library.members(n, r.seed, r.train_data) for n, r in enumerate(runs)
            ]
        self._handout = PublicTraffic(method, trained)
        touched = None if bystanders == "train" else cohort
        self._office: LocalBackend | RayJob = LocalBackend(backend, self._library)
        if backend.kind == "ray":
            self._office = RayJob(backend, self._library, trained, self._clients, touched)
        self._room = StatePlacement(backend, shelf, touched, self._clients)
        seeds = [run.seed for run in runs]
        self._crews, setups, self.notices = hired(
            method,
            architectures,
            seeds,
            trained,
            self._library,
            self._office,
            self._room,
            newcomers,
        )
        if newcomers:
            self.states = [method.init_server(blank(setup)) for setup in setups]
        else:
            self.states = [tree.to(method.init_server(own), self._device) for own in setups]
            self._office.sums = backend.kind == "ray" and summable(method, self.states[0])
        if bystanders == "train" and has(method, ArchitectureState):
            raise ConfigError(
                f"bystanders = 'train' does not go with {method.title}, whose groups hear all who "
                "train; leave it at 'rest'"
            )
        # Training that leaves no trace need not be done.
        self._all_train = bystanders == "train" and self._personal
        able = [sampling.eligible(own) for own in trained]
        self._able = [len(own) for own in able]
        # Whose training was used in some round; None: not known, so all who were called.
        self._took_part: np.ndarray | None = np.zeros((len(runs), self._clients), bool)
        self._attendance = [
            sampling.Attendance(run.seed, own, cohort, draw, self._all_train)
            for run, own in zip(runs, able, strict=True)
        ]

    def stored_as(self, named: Mapping[str, torch.Tensor]) -> None:
        """Keep personal state where a checkpoint, of which the leaves are given, had it."""
        for place, crew in enumerate(self._crews):
            disk = f"personal.{place}.slots" in named
            if disk != isinstance(crew.store, DiskStore) and tree.leaves(crew.store.example):
                starts = [(start, len(crew.clients)) for start in crew.store.starts]
                crew.store = self._room.store(starts, place, disk)

    def flush(self) -> None:
        """See to it that personal state which a checkpoint only points to is on disk."""
        for crew in self._crews:
            crew.store.flush()

    @property
    def widths(self) -> dict[str, int]:
        """Measured block widths, to be kept with a checkpoint: rounding depends on them."""
        return {
            f"{place} {kind}": width
            for place, crew in enumerate(self._crews)
            for kind, width in crew.widths.items()
        }

    @widths.setter
    def widths(self, known: Mapping[str, int]) -> None:
        for key, width in known.items():
            place, kind = key.split(" ", 1)
            self._crews[int(place)].widths[kind] = width

    @property
    def tree(self) -> Tree:
        """All state there is between rounds, as one tree: servers' and personal.

        Of personal state on disk it has the table of who has which record, which stays true.
        """
        kept: dict[str, Tree] = {"server": tuple(self.states)}
        kept["personal"] = tuple(c.store.rows for c in self._crews)
        if has(self.method, ArchitectureState):
            kept["groups"] = tuple(tuple(crew.groups) for crew in self._crews)
        present = np.stack([self._present(run) for run in range(len(self.runs))])
        kept["attended"] = {
            "idle": torch.tensor(self._idle),
            "clients": torch.from_numpy(present),
        }
        return kept

    @tree.setter
    def tree(self, kept: Tree) -> None:
        self.states = list(tree.to(kept["server"], self._device))
        for crew, rows in zip(self._crews, kept["personal"], strict=True):
            crew.restore(rows)
        groups_of = tree.to(kept.get("groups", ()), self._device)
        for crew, own in zip(self._crews, groups_of, strict=False):
            crew.groups = list(own)
        attended = kept.get("attended", {})
        if "idle" in attended:
            self._idle = attended["idle"].tolist()
        self._took_part = None
        if "clients" in attended:
            self._took_part = attended["clients"].numpy().copy()

    # One round.

    def cohort(self, run: int) -> np.ndarray:
        """Return who takes part in the coming round of one run."""
        return self._attendance[run].heard(self.round)

    @property
    def _personal(self) -> bool:
        return bool(tree.leaves([crew.store.example for crew in self._crews]))

    def strangers(self, run: int) -> np.ndarray:
        """Return the clients that took part in no round so far: never called, or always broken."""
        if self.method.pooled:
            return np.empty(0, np.int64)
        return np.flatnonzero(~self._present(run))

    def _present(self, run: int) -> np.ndarray:
        """Say of each client whether it took part in some round."""
        found: np.ndarray = np.ones(self._clients, bool)
        if self._took_part is not None:
            found[:] = self._took_part[run]
            return found
        found[self._attendance[run].strangers(self._clients, self.round)] = False
        return found

    def remarks(self) -> list[str]:
        """Tell of workers that were lost; clients never are in a simulation."""
        return self._office.remarks()

    def advance(self) -> Round:
        """Do one round of every run.

        Where rounds are short, the next one is begun on the device before this one is waited for,
        so that neither waits for the other. It is forgotten where it is not what comes next.
        """
        now, self._next = self._next, None
        if now is None or now.round != self.round or now.before is not self.states:
            now = self._begin(self.round, self.states)
        states = now.states
        if self._hurries:
            self._next = self._begin(self.round + 1, states)
        left_out = now.left_out()
        for run, (own, broken) in enumerate(zip(self.runs, left_out, strict=True)):
            # A drawn cohort may be small: that all of it is broken is an empty round then.
            if self._draw == "fixed" or len(now.calls[run].cohort) == self._able[run]:
                refuse_nobody(now, run, broken, own.seed, own.train_data.names, self.method)
        heard = [_anybody(*pair) for pair in zip(now.calls, left_out, strict=True)]
        gone = [ClientKey(run, int(c)) for run, clients in enumerate(left_out) for c in clients]
        if has(self.method, ArchitectureState):
            servers = [groups.server_member(own[0]) for own in self._trained]
            groups.regroup(
                self.method,
                self._crews,
                now.done,
                gone,
                servers,
                states,
                self.round,
                heard,
                self._samples(self.round),
            )
        for harvest in now.done:
            harvest.team.keep(harvest.seats, harvest.personal, gone)
        present = [self._present(run) for run in range(len(self.runs))]
        if not self.method.pooled:
            for there, call, broken in zip(present, now.calls, left_out, strict=True):
                there[np.setdiff1d(call.cohort, broken) if len(broken) else call.cohort] = True
        self._took_part = np.stack(present)
        self.states = states
        self._idle = [n + (not one) for n, one in zip(self._idle, heard, strict=True)]
        self.round += 1
        ended = time.perf_counter()
        self._pace, self._ended = ended - self._ended, ended
        crossing = None if self._crossed or self.method.pooled else now.crossing()
        self._crossed |= crossing is not None
        return Round(now.traffic, now.examples, left_out, crossing)

    def _begin(self, round: int, states: list[Tree]) -> PendingRound:
        """Start a round: on a GPU nothing is waited for, unless the server's step does."""
        method = self.method
        calls = [self._called(run, state, round) for run, state in enumerate(states)]
        if has(method, Preparation) and round >= method.first_preparation:
            self._between("prepare", Prepare(method), self._unready(calls, states))
        coming = [own.training(round + 1) for own in self._attendance]
        for crew in self._crews:
            crew.look_ahead(coming)
        training = [crew.train(Train(method), calls, round) for crew in self._crews]
        done = [harvest for harvest in [wait() for wait in training] if harvest.seats]
        served = gathered(method, calls, states, done, self._device)
        cohorts = [call.cohort for call in calls]
        traffic = self._handout.added(
            [own.traffic for own in served], cohorts, round, self._attendance
        )
        examples = sum(crew.examples("step") for crew in self._crews)
        for crew in self._crews:  # the host has time until it asks who was broken
            samples = self._samples(round + 1)
            crew.prepare(coming, self._trained, method.steps > 0, round + 1, samples)
        return begun(round, states, calls, done, served, traffic, examples)

    @property
    def _hurries(self) -> bool:
        """Whether the next round may begin now: it needs nothing that waits for this one's end."""
        return (
            self._device.type == "cuda"
            and self._backend.kind == "vectorised"
            and self._pace < _SHORT
            and has(self.method, Averaging)
            and not (
                has(self.method, ArchitectureState)
                or has(self.method, Preparation)
                or self.method.public
            )
            and not self._personal
        )

    def _called(self, run: int, state: Tree, round: int) -> CohortRequest:
        heard = self.cohort(run) if round == self.round else self._attendance[run].heard(round)
        cohort = self._attendance[run].training(round) if self._all_train else heard
        return CohortRequest(
            cohort,
            self.method.send(state, self._tensor(cohort)),
            self._trained[run],
            even=self.method.steps > 0,
            heard=heard if self._all_train else None,
            sample=self._samples(round)[run],
        )

    def _samples(self, round: int) -> list[int]:
        """Return each run's number of the public sample of a round: an idle round draws none."""
        return [round - idle for idle in self._idle]

    def _unready(
        self, calls: Sequence[CohortRequest], states: Sequence[Tree]
    ) -> list[CohortRequest]:
        """Return requests to those of the called clients that have not prepared yet."""
        since = self.method.first_preparation if has(self.method, Preparation) else 0
        before = [own.strangers(self._clients, self.round, since) for own in self._attendance]
        if self.method.pooled:
            before = [np.empty(0, np.int64)] * len(calls)
        new = [np.intersect1d(call.cohort, own) for call, own in zip(calls, before, strict=True)]
        return [
            CohortRequest(cohort, self.method.send(state, self._tensor(cohort)), call.members)
            for cohort, state, call in zip(new, states, calls, strict=True)
        ]

    def padding(self) -> float:
        """Return the largest share of padding in any architecture's last round."""
        return max(crew.padding("step") for crew in self._crews)

    # Judging.

    def judge(
        self,
        exams: Sequence[TestData] | None = None,
        *,
        only_global: bool = False,
        keep: bool = False,
        newcomers: bool = False,
        clients: Sequence[np.ndarray] | None = None,
        adapt: bool = True,
        grouped: bool = False,
    ) -> list[ClientScores]:
        """Score every client's models on validation data, or on an exam and validation data both.

        `only_global` skips `deploy`, which may train; `keep` returns the personal models; clients
        that are `newcomers` adapt instead of deploying. `clients` of each run are scored, or all;
        some at a time, so that only what is kept of them takes room. `grouped` also counts right
        answers in groups of the test rows, which comparisons of few clients are paired by.

        Clients that took part in no round adapt as newcomers do, since they have no trained state
        of their own; without `adapt`, which may train, their personal models have no score.
        """
        wanted = clients or [np.arange(self._clients)] * len(self.runs)
        never = [np.intersect1d(own, self.strangers(run)) for run, own in enumerate(wanted)]
        alike = newcomers or only_global or not (self.round and capabilities.adapts(self.method))
        if alike or not any(map(len, never)):
            return self._scored(exams, only_global, keep, newcomers, clients, self.told, grouped)
        took = [np.setdiff1d(own, rest) for own, rest in zip(wanted, never, strict=True)]
        first = [ClientScores({}, {}, [])] * len(self.runs)
        sums = self.told
        if any(map(len, took)):
            first = self._scored(exams, False, keep, False, took, (), grouped)
            sums = [own.told for own in first] if has(self.method, FinalExchange) else ()
        second = self._scored(exams, not adapt, keep and adapt, adapt, never, sums, grouped)
        return [
            mixed((own, one), (rest, other))
            for own, one, rest, other in zip(took, first, never, second, strict=True)
        ]

    def _scored(
        self,
        exams: Sequence[TestData] | None,
        only_global: bool,
        keep: bool,
        newcomers: bool,
        clients: Sequence[np.ndarray] | None,
        sums: Sequence[Sums],
        grouped: bool,
    ) -> list[ClientScores]:
        """Score some clients of each run, or all; newcomers hear what others told, in `sums`."""
        extras = [] if exams is None else [exam.extras for exam in exams]
        rows = (
            [run.train_data.val for run in self.runs] if exams is None else [e.test for e in exams]
        )
        beside = extras or [{} for _ in rows]
        examined = [
            self._library.examined(n, self.runs[n].seed, own, more)
            for n, (own, more) in enumerate(zip(rows, beside, strict=True))
        ]
        tells = has(self.method, FinalExchange) and not only_global
        mark = ScoreTask(
            self.method,
            beside=exams is not None,
            measured=tuple(sorted(set(extras[0]).intersection(*extras))) if extras else (),
            only_global=only_global,
            keep=keep,
            newcomers=newcomers,
            hears=tells and bool(sums or not newcomers),
            grouped=grouped
            and exams is not None
            and not self.runs[0].train_data.dataset.sequential,
        )
        told = self._told(clients) if tells and not newcomers else None
        parts: list[list[ClientScores | None]] = []
        for calls in self._everyone(newcomers, clients):
            seen = [c._replace(exams=own) for c, own in zip(calls, examined, strict=True)]
            if mark.hears and told is None:
                seen = welcomed(sums, seen)
            begun = [
                crew.begin(mark.kind, mark, told.handed(n, seen) if told else seen, self.round)
                for n, crew in enumerate(self._crews)
            ]
            results = [wait() for wait in begun]
            parts.append([run_scores(run, results) for run in range(len(self.runs))])
        found = [joined([part[run] for part in parts]) for run in range(len(self.runs))]
        if told is None:
            return found
        exchanged = zip(found, told.sums, told.traffic, strict=True)
        return [own._replace(told=sums, traffic=traffic) for own, sums, traffic in exchanged]

    def _told(self, clients: Sequence[np.ndarray] | None) -> Exchange:
        """Let clients tell each other, in sum, what their method tells.

        Where there is no room for what they deployed for it, or it would have to travel, they come
        to it twice.
        """
        count = sum(map(len, clients)) if clients else len(self.runs) * self._clients
        sent = self.method.send(self.states[0], self._tensor(np.arange(1)))
        keep = self._backend.kind != "ray" and holds(self.method, sent, count, self._device)
        return held(self.method, self._crews, self._everyone(False, clients), self.round, keep)

    def meet(self) -> None:
        """Let every client look at the present state without training: newcomers catching up."""
        for calls in self._everyone(newcomers=True):
            self._between("meet", Meet(self.method), calls)

    def _between(self, kind: str, work: ClientTask, calls: Sequence[CohortRequest]) -> None:
        """Have something done apart from rounds; clients keep what comes of it."""
        begun = [crew.begin(kind, work, calls, self.round) for crew in self._crews]
        for crew, wait in zip(self._crews, begun, strict=True):
            seats, results = wait()
            if seats:
                crew.keep(seats, results[-1])

    def _everyone(
        self, newcomers: bool, clients: Sequence[np.ndarray] | None = None
    ) -> Iterator[list[CohortRequest]]:
        """Call every client (or some) of every run, with its own data, a group after the other."""
        send = partial(capabilities.welcome, self.method) if newcomers else self.method.send
        wanted = clients or [np.arange(self._clients)] * len(self.runs)
        for start in range(0, max(map(len, wanted)), _GROUP):
            groups = [own[start : start + _GROUP] for own in wanted]
            yield [
                CohortRequest(
                    group,
                    send(state, self._tensor(group)),
                    members,
                    afresh=self.method.starts_over,
                    sample=number,
                )
                for group, state, members, number in zip(
                    groups, self.states, self._judged, self._samples(self.round), strict=True
                )
            ]

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return backend.device_ints(array, self._device)


def _anybody(call: CohortRequest, left_out: np.ndarray) -> bool:
    """Say whether the server could use anybody's report."""
    heard = call.cohort if call.heard is None else call.heard
    return bool(len(np.setdiff1d(heard, left_out)) if len(left_out) else len(heard))
