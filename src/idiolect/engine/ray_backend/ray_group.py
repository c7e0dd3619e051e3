"""Clients who work on a cluster.

Personal state lives with the worker that serves a client. What a round changed of it comes back
with the round's results and is kept here too, in memory or on disk as in a single process: that is
what checkpoints are made of, and what a worker is told that takes over from one that was lost.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from uuid import uuid4

import numpy as np
import torch

from idiolect.core import tree
from idiolect.core.method import Report
from idiolect.core.tree import Tree
from idiolect.data.federation import TrainData
from idiolect.engine.architecture import BuiltNetworks
from idiolect.engine.backend import Backend
from idiolect.engine.batch_plan import ClientRows
from idiolect.engine.client_group import (
    Answer,
    ClientGroup,
    ClientKey,
    ClientTask,
    CohortRequest,
    GroupResult,
    Train,
)
from idiolect.engine.data_pools import DataPools
from idiolect.engine.ray_backend.cluster import Cluster, PendingCall, WorkerHandle, hired
from idiolect.engine.ray_backend.worker import (
    ArchitectureSpec,
    JobSpec,
    ShardResult,
    ShardTask,
    dealt,
    lifted,
    lowered,
    packed,
    seats_of,
)
from idiolect.engine.state_store import DiskStore, MemoryStore

_PIECE = 1024  # clients whose state is sent at a time


class _PendingShard(NamedTuple):
    """What was asked of one shard."""

    shard: int
    asked: PendingCall


class RayGroup(ClientGroup):
    """Clients who work on a cluster."""

    def __init__(
        self,
        spread: "RayJob",
        place: int,
        clients: np.ndarray,
        store: MemoryStore | DiskStore,
        runs: int,
        device: torch.device,
    ) -> None:
        super().__init__(clients, store, runs, device)
        self._spread, self._at = spread, place
        self._touched: set[int] = set()  # shards whose state may differ from what all start with
        self._current: dict[int, int] = {}  # shard -> the worker whose copy of its state is true
        self._ahead_of: dict[
            int, WorkerHandle
        ] = {}  # shard -> a worker that has what is not kept yet
        self._ahead: Sequence[np.ndarray] = ()
        self._counts: dict[str, tuple[int, int]] = {}  # of a kind: examples, and with padding

    def begin(
        self, kind: str, work: ClientTask, calls: Sequence[CohortRequest], round: int
    ) -> Answer:
        """Send the work out now; whoever asks for the answer waits for it."""
        parts = self._begun(kind, work, calls, round, sums=False)

        def answer() -> tuple[Sequence[ClientKey], Tree]:
            replies = self._replies(kind, parts, work)
            seats = [seat for reply in replies for seat in seats_of(reply)]
            found = [lifted(reply.results, self.device) for reply in replies]
            return seats, tree.concat(found) if found else ()

        return answer

    def train(
        self, step: Train, calls: Sequence[CohortRequest], round: int
    ) -> Callable[[], GroupResult]:
        """Send a round out; reports come back in sums where the method's server needs no more."""
        if not self._spread.sums:
            return super().train(step, calls, round)
        parts = self._begun("step", step, calls, round, sums=True)

        def harvest() -> GroupResult:
            replies = self._replies("step", parts, step)
            if not replies:
                return GroupResult(self, [], (), (), ())
            found = [lifted(reply.results[-1], self.device) for reply in replies]
            sums = [lifted(list(reply.sums), self.device) for reply in replies]
            broken = [reply.broken for reply in replies if reply.broken is not None]
            return GroupResult(
                self,
                [seat for reply in replies for seat in seats_of(reply)],
                (),
                (),
                tree.concat(found),
                [Report(*tree.concat([own[run] for own in sums])) for run in range(len(calls))],
                torch.from_numpy(np.concatenate(broken)),
            )

        return harvest

    def serve(
        self,
        work: ClientTask,
        servers: Sequence[ClientRows],
        states: Sequence[Tree],
        round: int,
        samples: Sequence[int] | None = None,
    ) -> list[Tree]:
        """Let one of the workers do it: it has the public examples."""
        spread = self._spread
        told = lowered((tuple(states), tuple(self.groups)))

        def task(hand: WorkerHandle) -> list[Any]:
            refs = spread.introduce(hand)
            call = spread.call(hand, "serve", self._at, work, servers, *told, round, samples)
            return [*refs, call]

        cluster = spread.cluster
        _, made = spread.answer(cluster.ask(task, self._at % cluster.size))
        return [lifted(own, self.device) for own in made]

    def keep(
        self, seats: Sequence[ClientKey], personal: Tree, but: Sequence[ClientKey] = ()
    ) -> None:
        """Keep it here too. Workers have it; those who keep what they had are told so."""
        super().keep(seats, personal, but)
        for shard, hand in self._ahead_of.items():
            mine = set(self._spread.shards[shard][self._at].tolist())
            back = [seat for seat in but if seat.client in mine]
            if back and tree.leaves(self.store.example):
                self._spread.cluster.tell(hand, "put", *self._state(shard, back))
            self._current[shard] = hand.number
        self._ahead_of.clear()

    def restore(self, rows: Tree) -> None:
        """Put it back here; workers are told when they next need it."""
        super().restore(rows)
        self._touched = set(range(self._spread.cluster.size))
        self._current.clear()

    def look_ahead(self, cohorts: Sequence[np.ndarray]) -> None:
        """Workers read it, where they keep it on disk."""
        self._ahead = cohorts

    def examples(self, kind: str) -> int:
        """Return how many examples the last round of a kind trained on."""
        return self._counts.get(kind, (0, 0))[0]

    def padding(self, kind: str) -> float:
        """Return the share of a round's examples that were padding."""
        examples, planned = self._counts.get(kind, (0, 0))
        return 1 - examples / planned if planned else 0.0

    # How.

    def _begun(
        self, kind: str, work: ClientTask, calls: Sequence[CohortRequest], round: int, *, sums: bool
    ) -> list[_PendingShard]:
        spread = self._spread
        shared = spread.broadcast(calls)
        groups = lowered(tuple(self.groups))
        lessons = spread.number(tuple(call.members for call in calls))
        exams = spread.number(tuple(c.exams for c in calls)) if calls[0].exams else None
        parts = []
        for shard, clients in enumerate(own[self._at] for own in spread.shards):
            rows = [np.flatnonzero(np.isin(call.cohort, clients)) for call in calls]
            if not any(map(len, rows)):
                continue
            order = ShardTask(
                shard,
                self._at,
                kind,
                work,
                round,
                [call.cohort[own] for call, own in zip(calls, rows, strict=True)],
                [call.heard for call in calls],
                [_taken(c.sent.own, own) for c, own in zip(calls, rows, strict=True)],
                calls[0].even,
                calls[0].afresh,
                lessons,
                exams,
                self._widths(shard),
                self._ahead,
                sums,
                [call.sample for call in calls],
            )
            packs = [lessons] if exams is None else [lessons, exams]
            task = self._task(order, packs, shared, groups)
            parts.append(_PendingShard(shard, spread.cluster.ask(task, shard)))
        self._ahead = ()
        return parts

    def _task(
        self, order: ShardTask, packs: Sequence[int], shared: Any, groups: Tree
    ) -> Callable[[WorkerHandle], list[Any]]:
        spread, shard = self._spread, order.shard

        def task(hand: WorkerHandle) -> list[Any]:
            refs = spread.prepare(hand, shard, packs)
            stale = shard in self._touched and self._current.get(shard) != hand.number
            if stale and tree.leaves(self.store.example):
                refs += self._told(hand, shard)
            self._current[shard] = hand.number
            if order.work.keeps:  # until that is kept here, the worker is ahead of what is true
                self._touched.add(shard)
                self._current.pop(shard)
            return [*refs, spread.call(hand, "run", order, shared, groups)]

        return task

    def _told(self, hand: WorkerHandle, shard: int) -> list[Any]:
        """Tell a worker the personal state of a shard's clients."""
        clients = self._spread.shards[shard][self._at]
        seats = [ClientKey(run, int(c)) for run in range(len(self.groups)) for c in clients]
        pieces = [seats[first : first + _PIECE] for first in range(0, len(seats), _PIECE)]
        return [hand.actor.put.remote(*self._state(shard, piece)) for piece in pieces]

    def _state(self, shard: int, seats: Sequence[ClientKey]) -> tuple[Any, ...]:
        """Say what some clients keep, and where in the shard's store."""
        clients = self._spread.shards[shard][self._at]
        places = np.searchsorted(clients, [seat.client for seat in seats])
        rows = np.array([seat.run for seat in seats]) * len(clients) + places
        values = lowered(self.store.take(self.rows(seats)))
        return self._spread.job, shard, self._at, rows, values

    def _replies(
        self, kind: str, parts: Sequence[_PendingShard], work: ClientTask
    ) -> list[ShardResult]:
        """Wait for all shards, in their order."""
        replies: list[ShardResult] = []
        for part in parts:
            hand, reply = self._spread.answer(part.asked)
            replies.append(reply)
            if work.keeps:
                self._ahead_of[part.shard] = hand
            self.widths.update({f"{name} #{part.shard}": w for name, w in reply.widths.items()})
        self._counts[kind] = (
            sum(reply.examples for reply in replies),
            sum(reply.planned for reply in replies),
        )
        return replies

    def _widths(self, shard: int) -> dict[str, int]:
        end = f" #{shard}"
        return {k.removesuffix(end): w for k, w in self.widths.items() if k.endswith(end)}


def _taken(own: Tree, rows: np.ndarray) -> Tree:
    return lowered(tree.map(lambda leaf: leaf[torch.from_numpy(rows)], own))


class RayJob:
    """What all teams of a simulation share: the cluster, the shards, what was sent where."""

    def __init__(
        self,
        backend: Backend,
        library: DataPools,
        lessons: Sequence[TrainData],
        clients: int,
        cohort: int | None,
    ) -> None:
        """`lessons` of each run say how much work every client is."""
        self.cluster: Cluster = hired(backend.ray)
        self._again = 0  # how often work was done again
        self.sums = False  # whether reports are wanted in sum
        self._backend, self._library = backend, library
        self._cohort, self._loads = cohort, np.ones(clients)
        for own in lessons:
            self._loads[: own.clients] += [len(rows) for rows in own.train]
        self.job = uuid4().hex
        self.cluster.jobs.add(self.job)
        self._teams: list[RayGroup] = []
        self._outfits: list[ArchitectureSpec] = []
        self._shards: list[list[np.ndarray]] = []
        self._kit: Any = None
        self._rolls: list[tuple[Sequence[ClientRows], ...]] = []
        self._packs: dict[tuple[int, int], Any] = {}
        self._sent: tuple[Any, Any] = ((), None)  # the last calls, and where their broadcast is
        self._there: dict[int, tuple[int, set[int]]] = {}  # shard -> its worker, packs it has
        self._opened: set[int] = set()  # workers that know of the job
        weakref.finalize(self, _closed, self.cluster, self.job)

    def hire(
        self,
        clients: np.ndarray,
        made: BuiltNetworks,
        store: MemoryStore | DiskStore,
        personal: Sequence[Tree],
    ) -> RayGroup:
        """Add the clients of one architecture."""
        starts = [lowered(setup.params) for setup in made.setups]
        self._outfits.append(
            ArchitectureSpec(
                made.networks, starts, [lowered(own) for own in personal], made.stacked
            )
        )
        place = self._backend.place
        self._teams.append(RayGroup(self, len(self._teams), clients, store, len(starts), place))
        return self._teams[-1]

    def remarks(self) -> list[str]:
        """Tell whether work was lost on the way."""
        if not self._again:
            return []
        return [f"work was lost with a worker of the cluster and done again ({self._again} times)"]

    def answer(self, asked: PendingCall) -> tuple[WorkerHandle, Any]:
        """Wait for an answer; say who gave it."""
        found = self.cluster.answer(asked)
        self._again += found.again
        return found.hand, found.value

    @property
    def shards(self) -> list[list[np.ndarray]]:
        """Who is in which shard, by architecture; dealt once all architectures are known."""
        if not self._shards:
            kinds = [team.clients for team in self._teams]
            self._shards = dealt(self._loads, kinds, self.cluster.size)
        return self._shards

    def broadcast(self, calls: Sequence[CohortRequest]) -> Any:
        """Lay what everyone is sent alike into the object store, once for all teams and workers."""
        if self._sent[0] is not calls:
            shared = tuple(lowered(call.sent.shared) for call in calls)
            self._sent = (calls, self.cluster.put(shared))
        return self._sent[1]

    def number(self, rolls: tuple[Any, ...]) -> int:
        """Return the number under which workers know what these members hold."""
        for number, known in enumerate(self._rolls):
            if len(known) == len(rolls) and all(a is b for a, b in zip(known, rolls, strict=True)):
                return number
        self._rolls.append(rolls)
        return len(self._rolls) - 1

    def prepare(self, hand: WorkerHandle, shard: int, packs: Sequence[int]) -> list[Any]:
        """See to it that a worker has all of a shard but its personal state."""
        refs = self.introduce(hand)
        where, there = self._there.get(shard, (-1, set()))
        if where != hand.number:
            self._forget(shard, where)
            there = set()
            self._there[shard] = (hand.number, there)
        for number in packs:
            if number not in there:
                pack = self._pack(shard, number)
                refs.append(hand.actor.learn.remote(self.job, shard, number, pack))
                there.add(number)
        return refs

    def introduce(self, hand: WorkerHandle) -> list[Any]:
        """Tell a worker of the job, if it has not heard of it."""
        if hand.number in self._opened:
            return []
        self._opened.add(hand.number)
        if self._kit is None:
            public = self._library.public() if self._library.has_public else None
            kit = JobSpec(
                self._backend,
                torch.get_default_dtype(),
                self._outfits,
                self.shards,
                self._cohort,
                len(self._loads),
                public,
            )
            self._kit = self.cluster.put(kit)
        return [hand.actor.open.remote(self.job, self._kit)]

    def call(self, hand: WorkerHandle, name: str, *arguments: Any) -> Any:
        """Call a worker about this job."""
        return getattr(hand.actor, name).remote(self.job, *arguments)

    def _forget(self, shard: int, number: int) -> None:
        """Let a worker that stood in for another forget the shard again."""
        for hand in self.cluster.everyone():
            if hand.number == number:
                self.cluster.tell(hand, "leave", self.job, shard)

    def _pack(self, shard: int, number: int) -> Any:
        if (shard, number) not in self._packs:
            clients = np.sort(np.concatenate(self.shards[shard]))
            pack = packed(self._library, self._rolls[number], clients)
            self._packs[shard, number] = self.cluster.put(pack)
        return self._packs[shard, number]


def _closed(cluster: Cluster, job: str) -> None:
    """Free what workers hold of a job that is over."""
    cluster.jobs.discard(job)
    for hand in cluster.everyone():
        cluster.tell(hand, "close", job)
