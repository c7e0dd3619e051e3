"""Clients that are run on a Ray cluster.

Personal state lives with the worker that serves a client. What a round changed of it comes back
with the round's results and is kept here too, in memory or on disk as in a single process: that is
what checkpoints are made of, and what is sent to a worker that replaces a lost one.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any
from uuid import uuid4

import numpy as np
import torch

from idiolect.core import tree
from idiolect.core.method import Report, Sent
from idiolect.core.tree import Tree
from idiolect.data.federation import TrainData
from idiolect.engine.architecture import BuiltNetworks
from idiolect.engine.backend import Backend
from idiolect.engine.client_group import (
    Answer,
    ClientGroup,
    ClientKey,
    ClientTask,
    CohortRequest,
    GroupResult,
    Members,
    Train,
)
from idiolect.engine.data_pools import DataPools
from idiolect.engine.ray_backend.cluster import Cluster, PendingCall, WorkerHandle, open_cluster
from idiolect.engine.ray_backend.worker import (
    JobSpec,
    ShardResult,
    ShardTask,
    deal_clients,
    lifted,
    lowered,
    pack_shard,
)
from idiolect.engine.state_store import DiskStore, MemoryStore

_PIECE = 1024  # clients whose state is sent at a time


class RayGroup(ClientGroup):
    """Clients of one architecture that are run on a cluster."""

    def __init__(
        self,
        job: "RayJob",
        place: int,
        clients: np.ndarray,
        store: MemoryStore | DiskStore,
        runs: int,
        device: torch.device,
    ) -> None:
        super().__init__(clients, store, runs, device)
        self._job, self._at = job, place
        self._touched: set[int] = set()  # shards whose state may differ from the initial one
        self._current: dict[int, int] = {}  # shard -> the worker that has its present state
        self._ahead: dict[int, WorkerHandle] = {}  # shard -> a worker with state not kept here yet
        self._coming: Sequence[CohortRequest] = ()
        self._counts: dict[str, tuple[int, int]] = {}  # of a kind: examples, and with padding

    def begin(self, task: ClientTask, requests: Sequence[CohortRequest], round: int) -> Answer:
        """Send a task to the workers now; calling the answer waits for it."""
        pending = self._send(task, requests, round, sums=False)

        def answer() -> tuple[Sequence[ClientKey], Tree]:
            results = self._results(task, pending)
            keys = [key for result in results for key in result.clients()]
            found = [lifted(result.results, self.device) for result in results]
            return keys, tree.concat(found) if found else ()

        return answer

    def train(
        self, task: Train, requests: Sequence[CohortRequest], round: int
    ) -> Callable[[], GroupResult]:
        """Send a round out; reports come back in sums where the method's server needs no more."""
        if not self._job.sums:
            return super().train(task, requests, round)
        pending = self._send(task, requests, round, sums=True)

        def result() -> GroupResult:
            results = self._results(task, pending)
            if not results:
                return GroupResult(self, [], (), (), ())
            found = [lifted(own.results[-1], self.device) for own in results]
            sums = [lifted(list(own.sums), self.device) for own in results]
            broken = [own.broken for own in results if own.broken is not None]
            return GroupResult(
                self,
                [key for own in results for key in own.clients()],
                (),
                (),
                tree.concat(found),
                [Report(*tree.concat([own[run] for own in sums])) for run in range(len(requests))],
                torch.from_numpy(np.concatenate(broken)),
            )

        return result

    def serve(self, task: ClientTask, requests: Sequence[CohortRequest], round: int) -> list[Tree]:
        """Run a task of the servers on one of the workers, which have the public examples."""
        job, cluster = self._job, self._job.cluster
        sent = [request._replace(sent=Sent(*lowered(tuple(request.sent)))) for request in requests]
        groups = lowered(tuple(self.groups))

        def send(worker: WorkerHandle) -> list[Any]:
            refs = job.introduce(worker)
            return [*refs, job.call(worker, "serve", self._at, task, sent, groups, round)]

        _, found = job.answer(cluster.ask(send, self._at % cluster.size))
        found = lifted(found, self.device)
        return [tree.map(lambda leaf, n=n: leaf[n], found) for n in range(len(requests))]

    def keep(
        self, keys: Sequence[ClientKey], personal: Tree, but: Sequence[ClientKey] = ()
    ) -> None:
        """Store it here too. Workers have it; the old state of clients in `but` is sent to them."""
        super().keep(keys, personal, but)
        for shard, worker in self._ahead.items():
            mine = set(self._job.shards[shard][self._at].tolist())
            back = [key for key in but if key.client in mine]
            if back and tree.leaves(self.store.example):
                self._job.cluster.send(worker, "put", *self._state(shard, back))
            self._current[shard] = worker.number
        self._ahead.clear()

    def restore(self, rows: Tree) -> None:
        """Put it back here; it is sent to workers when they next need it."""
        super().restore(rows)
        self._touched = set(range(self._job.cluster.size))
        self._current.clear()

    def prefetch_state(self, requests: Sequence[CohortRequest]) -> None:
        """Have workers read it, where they keep it on disk."""
        self._coming = [CohortRequest(request.cohort, Sent(), ()) for request in requests]

    def examples(self, kind: str) -> int:
        """Return how many examples the last tasks of a kind trained on."""
        return self._counts.get(kind, (0, 0))[0]

    def planned(self, kind: str) -> int:
        """Return the same with padding."""
        return self._counts.get(kind, (0, 0))[1]

    def _send(
        self, task: ClientTask, requests: Sequence[CohortRequest], round: int, *, sums: bool
    ) -> list[tuple[int, PendingCall]]:
        """Send a task to the workers of all shards that have clients of the cohorts."""
        job = self._job
        shared = job.broadcast(requests)
        groups = lowered(tuple(self.groups))
        train = job.number([request.members for request in requests])
        test = job.number([request.tests for request in requests]) if requests[0].tests else None
        pending = []
        for shard, clients in enumerate(own[self._at] for own in job.shards):
            cut = [_cut(request, clients) for request in requests]
            if not any(len(request.cohort) for request in cut):
                continue
            own = ShardTask(
                shard,
                self._at,
                task,
                round,
                cut,
                train,
                test,
                self._widths(shard),
                self._coming,
                sums,
            )
            pending.append((shard, job.cluster.ask(self._sender(own, shared, groups), shard)))
        self._coming = ()
        return pending

    def _sender(
        self, own: ShardTask, shared: Any, groups: Tree
    ) -> Callable[[WorkerHandle], list[Any]]:
        """Return a function that sends a task, and what it needs, to a worker."""
        job, shard = self._job, own.shard
        data = [own.train] if own.test is None else [own.train, own.test]

        def send(worker: WorkerHandle) -> list[Any]:
            refs = job.prepare(worker, shard, data)
            stale = shard in self._touched and self._current.get(shard) != worker.number
            if stale and tree.leaves(self.store.example):
                refs += self._send_state(worker, shard)
            self._current[shard] = worker.number
            if own.task.keeps:  # until it is kept here, the worker is ahead of the valid state
                self._touched.add(shard)
                self._current.pop(shard)
            return [*refs, job.call(worker, "run", own, shared, groups)]

        return send

    def _send_state(self, worker: WorkerHandle, shard: int) -> list[Any]:
        """Send a worker the personal state of a shard's clients."""
        clients = self._job.shards[shard][self._at]
        keys = [ClientKey(run, int(c)) for run in range(len(self.groups)) for c in clients]
        pieces = [keys[first : first + _PIECE] for first in range(0, len(keys), _PIECE)]
        return [worker.actor.put.remote(*self._state(shard, piece)) for piece in pieces]

    def _state(self, shard: int, keys: Sequence[ClientKey]) -> tuple[Any, ...]:
        """Return the arguments of `Worker.put` for some clients."""
        clients = self._job.shards[shard][self._at]
        places = np.searchsorted(clients, [key.client for key in keys])
        rows = np.array([key.run for key in keys]) * len(clients) + places
        values = lowered(self.store.take(self.rows(keys)))
        return self._job.name, shard, self._at, rows, values

    def _results(
        self, task: ClientTask, pending: Sequence[tuple[int, PendingCall]]
    ) -> list[ShardResult]:
        """Wait for all shards, in their order."""
        results: list[ShardResult] = []
        for shard, call in pending:
            worker, result = self._job.answer(call)
            results.append(result)
            if task.keeps:
                self._ahead[shard] = worker
            self.widths.update({f"{name} #{shard}": w for name, w in result.widths.items()})
        self._counts[task.kind] = (
            sum(result.examples for result in results),
            sum(result.planned for result in results),
        )
        return results

    def _widths(self, shard: int) -> dict[str, int]:
        end = f" #{shard}"
        return {k.removesuffix(end): w for k, w in self.widths.items() if k.endswith(end)}


def _cut(request: CohortRequest, clients: np.ndarray) -> CohortRequest:
    """Cut a request to the clients of a shard, without what is sent to it in other ways."""
    rows = np.flatnonzero(np.isin(request.cohort, clients))
    own = lowered(tree.map(lambda leaf: leaf[torch.from_numpy(rows)], request.sent.own))
    return request._replace(cohort=request.cohort[rows], sent=Sent((), own), members=(), tests=())


class RayJob:
    """What all groups of a simulation share: the cluster, the shards, what was sent where."""

    def __init__(
        self,
        backend: Backend,
        pools: DataPools,
        trained: Sequence[TrainData],
        clients: int,
        cohort: int | None,
    ) -> None:
        """`trained` data of each run say how much work every client is."""
        self.cluster: Cluster = open_cluster(backend.ray)
        self._again = 0  # how often work was done again
        self.sums = False  # whether reports are to be summed by the workers
        self._backend, self._pools = backend, pools
        self._cohort, self._loads = cohort, np.ones(clients)
        for own in trained:
            self._loads[: own.clients] += [len(rows) for rows in own.train]
        self.name = uuid4().hex
        self.cluster.jobs.add(self.name)
        self._groups: list[RayGroup] = []
        self._built: list[BuiltNetworks] = []
        self._personal: list[list[Tree]] = []
        self._shards: list[list[np.ndarray]] = []
        self._spec: Any = None  # these are in Ray's object store
        self._data: dict[tuple[int, int], Any] = {}
        self._members: list[Sequence[Members]] = []
        self._sent: tuple[Any, Any] = ((), None)  # the last requests, and where their broadcast is
        self._there: dict[int, tuple[int, set[int]]] = {}  # shard -> its worker, data it has
        self._opened: set[int] = set()  # workers that know of the job
        weakref.finalize(self, _close, self.cluster, self.name)

    def add(
        self,
        clients: np.ndarray,
        built: BuiltNetworks,
        store: MemoryStore | DiskStore,
        personal: Sequence[Tree],
    ) -> RayGroup:
        """Add the clients of one architecture."""
        setups = [
            own._replace(params=lowered(own.params), auxiliary={}, sizes=torch.empty(0))
            for own in built.setups
        ]
        self._built.append(built._replace(setups=setups))
        self._personal.append([lowered(own) for own in personal])
        place, runs = len(self._groups), len(setups)
        self._groups.append(RayGroup(self, place, clients, store, runs, self._backend.place))
        return self._groups[-1]

    def remarks(self) -> list[str]:
        """Report whether work was lost on the way."""
        if not self._again:
            return []
        return [f"work was lost with a worker of the cluster and done again ({self._again} times)"]

    def answer(self, call: PendingCall) -> tuple[WorkerHandle, Any]:
        """Wait for a call; return the worker that answered, and its answer."""
        found = self.cluster.answer(call)
        self._again += found.again
        return found.worker, found.value

    @property
    def shards(self) -> list[list[np.ndarray]]:
        """The clients of each shard by architecture; dealt once all architectures are known."""
        if not self._shards:
            kinds = [group.clients for group in self._groups]
            self._shards = deal_clients(self._loads, kinds, self.cluster.size)
        return self._shards

    def broadcast(self, requests: Sequence[CohortRequest]) -> Any:
        """Put what all clients are sent into the object store, once for all groups and workers."""
        if self._sent[0] is not requests:
            shared = tuple(lowered(request.sent.shared) for request in requests)
            self._sent = (requests, self.cluster.put(shared))
        return self._sent[1]

    def number(self, members: Sequence[Members]) -> int:
        """Return the number under which workers know what these members hold."""
        for number, known in enumerate(self._members):
            if len(known) == len(members) and all(
                one is other for one, other in zip(known, members, strict=True)
            ):
                return number
        self._members.append(members)
        return len(self._members) - 1

    def prepare(self, worker: WorkerHandle, shard: int, numbers: Sequence[int]) -> list[Any]:
        """Send a worker all of a shard that it lacks, but for personal state."""
        refs = self.introduce(worker)
        where, there = self._there.get(shard, (-1, set()))
        if where != worker.number:
            for other in self.cluster.workers():  # one that stood in for another
                if other.number == where:
                    self.cluster.send(other, "leave", self.name, shard)
            there = set()
            self._there[shard] = (worker.number, there)
        for number in numbers:
            if number not in there:
                data = self._shard_data(shard, number)
                refs.append(self.call(worker, "receive", shard, number, data))
                there.add(number)
        return refs

    def introduce(self, worker: WorkerHandle) -> list[Any]:
        """Open the job on a worker, if it is not open there."""
        if worker.number in self._opened:
            return []
        self._opened.add(worker.number)
        if self._spec is None:
            spec = JobSpec(
                self._backend,
                torch.get_default_dtype(),
                self._built,
                self._personal,
                self.shards,
                self._cohort,
                len(self._loads),
                self._pools.public() if self._pools.has_public else None,
            )
            self._spec = self.cluster.put(spec)
        return [self.call(worker, "open", self._spec)]

    def call(self, worker: WorkerHandle, name: str, *arguments: Any) -> Any:
        """Call a worker about this job."""
        return getattr(worker.actor, name).remote(self.name, *arguments)

    def _shard_data(self, shard: int, number: int) -> Any:
        if (shard, number) not in self._data:
            clients = np.sort(np.concatenate(self.shards[shard]))
            data = pack_shard(self._pools, self._members[number], clients)
            self._data[shard, number] = self.cluster.put(data)
        return self._data[shard, number]


def _close(cluster: Cluster, job: str) -> None:
    """Free what workers hold of a job that is over."""
    cluster.jobs.discard(job)
    for worker in cluster.workers():
        cluster.send(worker, "close", job)
