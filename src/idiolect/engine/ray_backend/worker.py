"""What a Ray worker runs: it holds shards of a job's clients, and runs tasks for them.

Nothing here imports Ray. A `Worker` is driven by calls, one at a time and in order; what it holds
of a job can be sent again to any other.
"""

import dataclasses
import heapq
import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from idiolect.core import tree
from idiolect.core.client import Pool
from idiolect.core.method import Report, Sent
from idiolect.core.tree import Tree
from idiolect.engine.architecture import BuiltNetworks
from idiolect.engine.backend import Backend
from idiolect.engine.batch_plan import ClientRows
from idiolect.engine.client_group import ClientKey, ClientTask, CohortRequest, GroupResult, Members
from idiolect.engine.data_pools import DataPools, StoredExamples
from idiolect.engine.local_group import LocalGroup, server_group
from idiolect.engine.server_update import sum_reports
from idiolect.engine.state_store import DiskStore, MemoryStore, make_store
from idiolect.version import VERSION

ShardMembers = Mapping[int, ClientRows]

_PUBLIC = "public"  # the stream that all clients hold alike, and every worker once

# Shards: who is served by which worker, and a shard's examples as they are sent there, once.


def deal_clients(
    loads: np.ndarray, kinds: Sequence[np.ndarray], count: int
) -> list[list[np.ndarray]]:
    """Deal clients into shards of about equal load: for each shard the clients of each kind.

    Within a kind (an architecture) the heaviest come first, each to the shard that has least.
    """
    heap = [(0.0, shard) for shard in range(count)]
    found: list[list[list[int]]] = [[[] for _ in kinds] for _ in range(count)]
    for kind, clients in enumerate(kinds):
        for client in clients[np.argsort(-loads[clients], kind="stable")]:
            load, shard = heapq.heappop(heap)
            found[shard][kind].append(int(client))
            heapq.heappush(heap, (load + float(loads[client]), shard))
    return [[np.array(sorted(own), np.int64) for own in shard] for shard in found]


class RowLists(NamedTuple):
    """One stream's rows of many clients in three arrays, since many small ones are slow."""

    which: np.ndarray  # [client] number of its list of rows: some are common to many
    ends: np.ndarray  # [list]
    rows: np.ndarray  # the lists, concatenated

    def of(self, place: int) -> np.ndarray:
        """Return one client's rows."""
        number = int(self.which[place])
        start = int(self.ends[number - 1]) if number else 0
        own: np.ndarray = self.rows[start : int(self.ends[number])]
        return own


class RunRows(NamedTuple):
    """One run's clients of a shard, with the rows they hold."""

    seed: int
    clients: np.ndarray
    streams: dict[str, RowLists]


class ShardData(NamedTuple):
    """What the clients of a shard train on, or are scored on: their examples, and whose."""

    examples: StoredExamples
    runs: list[RunRows]

    def members(self) -> list[ShardMembers]:
        """Return each run's clients with their rows of the shard's pool."""
        found: list[ShardMembers] = []
        for run in self.runs:
            members = {}
            for place, client in enumerate(run.clients.tolist()):
                rows = {name: stream.of(place) for name, stream in run.streams.items()}
                members[client] = ClientRows(run.seed, client, rows)
            found.append(members)
        return found

    def pools(self, device: torch.device) -> dict[str, Pool]:
        """Put the examples on a device; all streams but the public one are rows of them."""
        pool = self.examples.pool(device)
        return {name: pool for run in self.runs for name in run.streams if name != _PUBLIC}


def pack_shard(pools: DataPools, members_of: Sequence[Members], clients: np.ndarray) -> ShardData:
    """Collect what some clients hold in each run, and no other example."""
    runs = []
    for own in members_of:
        members = [own[int(client)] for client in clients if client < len(own)]
        names = sorted({name for member in members for name in member.rows})
        streams = {name: _stream([member.rows[name] for member in members]) for name in names}
        numbers = np.array([member.client for member in members], np.int64)
        runs.append(RunRows(members[0].seed if members else 0, numbers, streams))
    private = [s.rows for r in runs for name, s in r.streams.items() if name != _PUBLIC]
    stored = pools.stored
    held = np.unique(np.concatenate([np.empty(0, np.int64), *private]) % stored)
    for run in runs:
        for name, stream in run.streams.items():
            if name != _PUBLIC:  # a row says which example it is, and how it is scaled
                moved = np.searchsorted(held, stream.rows % stored)
                moved += stream.rows // stored * len(held)
                run.streams[name] = stream._replace(rows=moved)
    if not len(held):  # padding is a row of the pool too, of no weight
        blank = pools.excerpt(np.arange(1))
        zero = blank._replace(x=np.zeros_like(blank.x), y=np.zeros_like(blank.y))
        return ShardData(zero, runs)
    return ShardData(pools.excerpt(held), runs)


def _stream(lists: Sequence[np.ndarray]) -> RowLists:
    number: dict[int, int] = {}
    distinct: list[np.ndarray] = []
    for rows in lists:
        if id(rows) not in number:
            number[id(rows)] = len(distinct)
            distinct.append(rows)
    return RowLists(
        np.array([number[id(rows)] for rows in lists], np.int64),
        np.cumsum([len(rows) for rows in distinct]),
        np.concatenate(distinct).astype(np.int64) if distinct else np.empty(0, np.int64),
    )


# Trees are sent as arrays, which Ray puts into shared memory without a copy.


def lowered(values: Tree) -> Tree:
    """Turn tensors into arrays; what NumPy has no type for travels as it is."""

    def array(leaf: torch.Tensor) -> np.ndarray | torch.Tensor:
        plain = leaf.detach().to("cpu")
        return plain if plain.dtype is torch.bfloat16 else plain.numpy()

    return tree.map(array, values)


def lifted(values: Tree, device: torch.device) -> Tree:
    """Turn arrays into tensors on a device; copies, since shared memory must not be written to."""

    def tensor(leaf: np.ndarray | torch.Tensor) -> torch.Tensor:
        own = leaf if isinstance(leaf, torch.Tensor) else torch.from_numpy(np.array(leaf))
        return own.to(device)

    return tree.map(tensor, values)


class JobSpec(NamedTuple):
    """All of a job that every worker needs alike."""

    backend: Backend
    dtype: torch.dtype
    built: Sequence[BuiltNetworks]  # of each architecture; initial parameters are arrays
    personal: Sequence[Sequence[Tree]]  # [architecture][run]: personal state before the first round
    shards: Sequence[Sequence[np.ndarray]]  # [shard][architecture]: clients
    cohort: int | None
    clients: int
    public: StoredExamples | None


class ShardTask(NamedTuple):
    """A task for the clients of one shard and architecture."""

    shard: int
    place: int  # of the architecture
    task: ClientTask
    round: int
    requests: Sequence[CohortRequest]  # of each run; of what is sent only `own`, and no members
    train: int  # number of the shard data that clients train on
    test: int | None  # of those they are scored on
    widths: Mapping[str, int]  # as they were measured before, here or elsewhere
    coming: Sequence[CohortRequest]  # cohorts of the round after this one
    sums: bool  # whether reports are to be summed


class ShardResult(NamedTuple):
    """The results of a shard's task."""

    keys: np.ndarray  # [row, (run, client)]
    results: Tree  # a row for each key
    sums: Sequence[Report]
    broken: np.ndarray | None
    widths: Mapping[str, int]
    examples: int
    planned: int

    def clients(self) -> list[ClientKey]:
        """Return the keys of the rows."""
        return [ClientKey(run, client) for run, client in self.keys.tolist()]


class WorkerJob:
    """What a worker holds of one job."""

    def __init__(self, spec: JobSpec) -> None:
        self.spec = spec
        # The same settings as in a process of its own; Ray says which device is whose.
        device = spec.backend.workplace
        self.backend = dataclasses.replace(spec.backend, kind="vectorised", device=device)
        self.device = self.backend.place
        self.built = []
        for own in spec.built:
            for network in own.networks.values():
                network.to(self.device)
            setups = [s._replace(params=lifted(s.params, self.device)) for s in own.setups]
            self.built.append(own._replace(setups=setups))
        self.public: dict[str, Pool] = {}
        if spec.public is not None:
            self.public = {_PUBLIC: spec.public.pool(self.device)}
        self.data: dict[tuple[int, int], tuple[list[ShardMembers], dict[str, Pool]]] = {}
        self._stores: dict[tuple[int, int], MemoryStore | DiskStore] = {}
        self._groups: dict[tuple[int, ...], LocalGroup] = {}
        self._servers: dict[int, LocalGroup] = {}

    def store(self, shard: int, place: int) -> MemoryStore | DiskStore:
        """Return the store of a shard's personal state."""
        key = (shard, place)
        if key not in self._stores:
            spec, count = self.spec, len(self.spec.shards[shard][place])
            starts = [(lifted(start, self.device), count) for start in spec.personal[place]]
            self._stores[key] = make_store(starts, self.backend, spec.cohort, spec.clients)
        return self._stores[key]

    def group(self, task: ShardTask) -> LocalGroup:
        """Return the group that runs a task: one for each data, since plans keep to their pools."""
        shard, place = task.shard, task.place
        key = (shard, place, task.train, -1 if task.test is None else task.test)
        if key not in self._groups:
            self._groups[key] = LocalGroup(
                self.spec.shards[shard][place],
                self.built[place],
                self.store(shard, place),
                {**self.data[shard, task.train][1], **self.public},
                {} if task.test is None else self.data[shard, task.test][1],
                self.backend,
            )
        return self._groups[key]

    def server(self, place: int) -> LocalGroup:
        """Return the group of the servers, which have public examples only and no shard."""
        if place not in self._servers:
            self._servers[place] = server_group(self.built[place], self.public, self.backend)
        return self._servers[place]

    def leave(self, shard: int) -> None:
        """Forget a shard that another worker serves from now on."""
        self.data = {key: own for key, own in self.data.items() if key[0] != shard}
        self._stores = {key: own for key, own in self._stores.items() if key[0] != shard}
        self._groups = {key: own for key, own in self._groups.items() if key[0] != shard}


class Worker:
    """What runs in a process of the cluster."""

    def __init__(self, threads: int, path: Sequence[str]) -> None:
        """`path` is where the first process finds modules: a user's own network may be there."""
        sys.path += [place for place in path if place not in sys.path]
        torch.set_num_threads(threads)
        self._jobs: dict[str, WorkerJob] = {}

    def about(self) -> dict[str, Any]:
        """Identify this worker; versions must agree, since objects are sent."""
        versions = {"idiolect": VERSION, "torch": torch.__version__}
        return {**versions, "pid": os.getpid(), "cpu_seconds": time.process_time()}

    def open(self, job: str, spec: JobSpec) -> None:
        """Begin a job."""
        torch.set_default_dtype(spec.dtype)
        self._jobs[job] = WorkerJob(spec)

    def close(self, job: str) -> None:
        """End a job."""
        self._jobs.pop(job, None)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def receive(self, job: str, shard: int, number: int, data: ShardData) -> None:
        """Take in a shard's examples."""
        held = self._held(job)
        held.data[shard, number] = (data.members(), data.pools(held.device))

    def put(self, job: str, shard: int, place: int, rows: np.ndarray, personal: Tree) -> None:
        """Take in personal state that was kept elsewhere."""
        held = self._held(job)
        there = torch.from_numpy(np.array(rows)).to(held.device)
        held.store(shard, place).put(there, lifted(personal, held.device))

    def leave(self, job: str, shard: int) -> None:
        """Forget a shard."""
        self._held(job).leave(shard)

    def run(
        self, job: str, own: ShardTask, shared: Sequence[Tree], groups: Sequence[Tree]
    ) -> ShardResult:
        """Run a task. New personal state is kept here, and returned."""
        held = self._held(job)
        group = held.group(own)
        group.groups = list(lifted(tuple(groups), held.device))
        group.widths.update(own.widths)
        members = held.data[own.shard, own.train][0]
        tests = None if own.test is None else held.data[own.shard, own.test][0]
        requests = [
            request._replace(
                sent=Sent(*lifted((sent, request.sent.own), held.device)),
                members=members[run],
                tests=() if tests is None else tests[run],
            )
            for run, (request, sent) in enumerate(zip(own.requests, shared, strict=True))
        ]
        group.prefetch_state(own.coming)
        keys, results = group.run(own.task, requests, own.round)
        if own.task.keeps:
            group.store.put(group.rows(keys), results[-1])
        result = GroupResult(group, keys, (), (), ())
        if own.sums:
            whole = GroupResult(group, keys, *results)
            result = sum_reports(own.task.method, whole, requests)
            results = ((), *results[1:])
        return ShardResult(
            np.array(keys, np.int64).reshape(-1, 2),
            lowered(results),
            lowered(list(result.sums)),
            None if result.broken is None else result.broken.cpu().numpy(),
            dict(group.widths),
            group.examples(own.task.kind),
            group.planned(own.task.kind),
        )

    def serve(
        self,
        job: str,
        place: int,
        task: ClientTask,
        requests: Sequence[CohortRequest],
        groups: Sequence[Tree],
        round: int,
    ) -> Tree:
        """Run a task of the servers; returns a row for each run."""
        held = self._held(job)
        server = held.server(place)
        server.groups = list(lifted(tuple(groups), held.device))
        own = [r._replace(sent=Sent(*lifted(tuple(r.sent), held.device))) for r in requests]
        return lowered(server.run(task, own, round)[1])

    def _held(self, job: str) -> WorkerJob:
        held = self._jobs[job]
        torch.set_default_dtype(held.spec.dtype)
        return held
