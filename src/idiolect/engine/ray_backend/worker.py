"""What a worker does: it holds shards of a job's clients and works for them when it is told.

Nothing here knows of Ray. A `Worker` is driven by calls, one at a time and in order; what it holds
of a job can be told again to any other.
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
from idiolect.core.client import Network, Pool
from idiolect.core.method import Report, Sent
from idiolect.core.tree import Params, Tree
from idiolect.engine import state_store
from idiolect.engine.backend import Backend
from idiolect.engine.batch_plan import ClientRows
from idiolect.engine.client_group import ClientKey, ClientTask, CohortRequest, GroupResult
from idiolect.engine.data_pools import DataPools, StoredExamples
from idiolect.engine.local_group import LocalGroup, hands
from idiolect.engine.server_update import summed
from idiolect.engine.state_store import DiskStore, MemoryStore
from idiolect.version import VERSION

ShardMembers = Mapping[int, ClientRows]

_PUBLIC = "public"  # the stream that all clients hold alike, and every worker once


def dealt(loads: np.ndarray, kinds: Sequence[np.ndarray], count: int) -> list[list[np.ndarray]]:
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
    """One stream's rows of many clients in three arrays: thousands of small ones travel slowly."""

    which: np.ndarray  # [client] number of its list of rows: some are common to many
    ends: np.ndarray  # [list]
    rows: np.ndarray  # lists, one behind the other

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
    """What the clients of a shard learn from, or are scored on: their examples, and whose."""

    examples: StoredExamples
    rosters: list[RunRows]  # of each run

    def members(self) -> list[ShardMembers]:
        """Give each run's clients their rows of the pack's pool."""
        return [
            {
                int(client): ClientRows(
                    roster.seed,
                    int(client),
                    {name: stream.of(place) for name, stream in roster.streams.items()},
                )
                for place, client in enumerate(roster.clients)
            }
            for roster in self.rosters
        ]

    def pools(self, device: torch.device) -> dict[str, Pool]:
        """Put the examples on a device; all streams but the public one are rows of them."""
        pool = self.examples.pool(device)
        return {name: pool for roster in self.rosters for name in roster.streams if name != _PUBLIC}


def packed(
    library: DataPools, rolls: Sequence[Sequence[ClientRows]], clients: np.ndarray
) -> ShardData:
    """Pack what some clients hold in each run, and no other example."""
    rosters = []
    for roll in rolls:
        members = [roll[int(client)] for client in clients if client < len(roll)]
        names = sorted({name for member in members for name in member.rows})
        streams = {name: _stream([member.rows[name] for member in members]) for name in names}
        numbers = np.array([member.client for member in members], np.int64)
        rosters.append(RunRows(members[0].seed if members else 0, numbers, streams))
    private = [s.rows for r in rosters for name, s in r.streams.items() if name != _PUBLIC]
    stored = library.stored
    held = np.unique(np.concatenate([np.empty(0, np.int64), *private]) % stored)
    for roster in rosters:
        for name, stream in roster.streams.items():
            if name != _PUBLIC:  # a row says which example it is, and how it is scaled
                moved = np.searchsorted(held, stream.rows % stored)
                moved += stream.rows // stored * len(held)
                roster.streams[name] = stream._replace(rows=moved)
    if not len(held):  # padding is a row of the pool too, of no weight
        blank = library.excerpt(np.arange(1))
        return ShardData(
            blank._replace(x=np.zeros_like(blank.x), y=np.zeros_like(blank.y)), rosters
        )
    return ShardData(library.excerpt(held), rosters)


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


# Trees on their way: arrays, which Ray lays into shared memory as they are.


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


NOBODYS = -1  # the shard, and the pack, of a server


class ArchitectureSpec(NamedTuple):
    """What clients of one architecture start with."""

    networks: Mapping[str, Network]
    starts: Sequence[Params]  # parameters that training starts from, of each run
    personal: Sequence[Tree]  # what one client keeps before its first round, of each run
    stacked: bool  # whether they run many clients at once


class JobSpec(NamedTuple):
    """All of a job that every worker needs alike."""

    backend: Backend
    dtype: torch.dtype
    outfits: Sequence[ArchitectureSpec]
    shards: Sequence[Sequence[np.ndarray]]  # [shard][architecture]: clients
    cohort: int | None
    clients: int
    public: StoredExamples | None


class ShardTask(NamedTuple):
    """Work for the called clients of one shard and architecture."""

    shard: int
    place: int  # of the architecture
    kind: str
    work: ClientTask
    round: int
    cohorts: Sequence[np.ndarray]  # of each run
    heard: Sequence[np.ndarray | None]  # whose reports count; None: all
    own: Sequence[Tree]  # a row for each of the cohort
    even: bool
    afresh: bool
    lessons: int  # number of a pack
    exams: int | None
    widths: Mapping[str, int]  # as they were measured before, here or elsewhere
    ahead: Sequence[np.ndarray]  # who is called in the round after this one
    sums: bool  # reports are wanted in sum
    samples: Sequence[int | None]  # of each run: number of the public sample


class ShardResult(NamedTuple):
    """What came of an order."""

    seats: np.ndarray  # [seat, (run, client)]
    results: Tree  # a row for each seat
    sums: Sequence[Report]
    broken: np.ndarray | None
    widths: Mapping[str, int]
    examples: int
    planned: int


class WorkerJob:
    """What a worker holds of one job."""

    def __init__(self, kit: JobSpec) -> None:
        self.kit = kit
        # The same settings here as in a process of its own; Ray says which device is whose.
        device = kit.backend.workplace
        self.backend = dataclasses.replace(kit.backend, kind="vectorised", device=device)
        self.device = self.backend.place
        for outfit in kit.outfits:
            for network in outfit.networks.values():
                network.to(self.device)
        public = {} if kit.public is None else {"public": kit.public.pool(self.device)}
        self.public: dict[str, Pool] = public
        self.packs: dict[tuple[int, int], tuple[list[ShardMembers], dict[str, Pool]]] = {}
        self._stores: dict[tuple[int, int], MemoryStore | DiskStore] = {}
        self._crews: dict[tuple[int, ...], LocalGroup] = {}

    def store(self, shard: int, place: int) -> MemoryStore | DiskStore:
        """Return where the personal state of a shard's clients is kept."""
        key = (shard, place)
        if key not in self._stores:
            count = len(self.kit.shards[shard][place])
            starts = [
                (lifted(start, self.device), count) for start in self.kit.outfits[place].personal
            ]
            disk = state_store.belongs_on_disk(
                starts, self.backend, self.kit.cohort, self.kit.clients
            )
            self._stores[key] = state_store.make_store(starts, self.backend, disk, None)
        return self._stores[key]

    def crew(self, shard: int, place: int, lessons: int, exams: int | None) -> LocalGroup:
        """Return those who do an order: a crew for each pack, for books keep to their pools."""
        key = (shard, place, lessons, -1 if exams is None else exams)
        if key not in self._crews:
            outfit, server = self.kit.outfits[place], lessons == NOBODYS
            nobody = np.empty(0, np.int64), MemoryStore([((), 0)], self.device)
            clients, store = (
                nobody if server else (self.kit.shards[shard][place], self.store(shard, place))
            )
            pools = {} if server else self.packs[shard, lessons][1]
            self._crews[key] = LocalGroup(
                clients,
                outfit.networks,
                store,
                [lifted(start, self.device) for start in outfit.starts],
                {**pools, **self.public},
                {} if exams is None else self.packs[shard, exams][1],
                self.device,
                self.backend.width if outfit.stacked else 1,
                hands(self.device, outfit.networks),
                outfit.stacked,
                self.backend.cache,
                self.backend.precision,
                self.backend.graph,
            )
        return self._crews[key]

    def leave(self, shard: int) -> None:
        """Forget a shard that another worker serves from now on."""
        self.packs = {key: own for key, own in self.packs.items() if key[0] != shard}
        self._stores = {key: own for key, own in self._stores.items() if key[0] != shard}
        self._crews = {key: own for key, own in self._crews.items() if key[0] != shard}


class Worker:
    """What runs in a process of the cluster."""

    def __init__(self, threads: int, path: Sequence[str]) -> None:
        """`path` is where the first process finds modules: a user's own network may be there."""
        sys.path += [place for place in path if place not in sys.path]
        torch.set_num_threads(threads)
        self._jobs: dict[str, WorkerJob] = {}

    def about(self) -> dict[str, Any]:
        """Say who this is; versions must agree, for what is sent are objects."""
        versions = {"idiolect": VERSION, "torch": torch.__version__}
        return {**versions, "pid": os.getpid(), "cpu_seconds": time.process_time()}

    def open(self, job: str, kit: JobSpec) -> None:
        """Begin a job."""
        torch.set_default_dtype(kit.dtype)
        self._jobs[job] = WorkerJob(kit)

    def close(self, job: str) -> None:
        """End a job."""
        self._jobs.pop(job, None)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def learn(self, job: str, shard: int, number: int, pack: ShardData) -> None:
        """Take in a shard's examples."""
        held = self._held(job)
        held.packs[shard, number] = (pack.members(), pack.pools(held.device))

    def put(self, job: str, shard: int, place: int, rows: np.ndarray, personal: Tree) -> None:
        """Take in personal state: it comes back from where it was kept safe."""
        held = self._held(job)
        there = torch.from_numpy(np.array(rows)).to(held.device)
        held.store(shard, place).put(there, lifted(personal, held.device))

    def leave(self, job: str, shard: int) -> None:
        """Forget a shard."""
        self._held(job).leave(shard)

    def run(
        self, job: str, order: ShardTask, shared: Sequence[Tree], groups: Sequence[Tree]
    ) -> ShardResult:
        """Do an order. What clients keep is kept here, and told."""
        held = self._held(job)
        crew = held.crew(order.shard, order.place, order.lessons, order.exams)
        crew.groups = list(lifted(tuple(groups), held.device))
        crew.widths.update(order.widths)
        members = held.packs[order.shard, order.lessons][0]
        exams = None if order.exams is None else held.packs[order.shard, order.exams][0]
        calls = [
            CohortRequest(
                cohort,
                Sent(*lifted((sent, own), held.device)),
                members[run],
                () if exams is None else exams[run],
                order.even,
                order.afresh,
                order.heard[run],
                order.samples[run],
            )
            for run, (cohort, sent, own) in enumerate(
                zip(order.cohorts, shared, order.own, strict=True)
            )
        ]
        crew.look_ahead(order.ahead)
        seats, results = crew.run(order.kind, order.work, calls, order.round)
        if order.work.keeps:
            crew.store.put(crew.rows(seats), results[-1])
        harvest = GroupResult(crew, seats, (), (), ())
        if order.sums:
            harvest = summed(order.work.method, GroupResult(crew, seats, *results), calls)
            results = ((), *results[1:])
        return ShardResult(
            np.array(seats, np.int64).reshape(-1, 2),
            lowered(results),
            lowered(list(harvest.sums)),
            None if harvest.broken is None else harvest.broken.cpu().numpy(),
            dict(crew.widths),
            crew.examples(order.kind),
            crew.planned(order.kind),
        )

    def serve(
        self,
        job: str,
        place: int,
        work: ClientTask,
        servers: Sequence[ClientRows],
        states: Sequence[Tree],
        groups: Sequence[Tree],
        round: int,
        samples: Sequence[int] | None = None,
    ) -> list[Tree]:
        """Work for the servers, who have public examples only and no shard."""
        held = self._held(job)
        crew = held.crew(NOBODYS, place, NOBODYS, None)
        crew.groups = list(lifted(tuple(groups), held.device))
        made = crew.serve(work, servers, lifted(tuple(states), held.device), round, samples)
        return list(lowered(tuple(made)))

    def _held(self, job: str) -> WorkerJob:
        held = self._jobs[job]
        torch.set_default_dtype(held.kit.dtype)
        return held


def seats_of(reply: ShardResult) -> list[ClientKey]:
    """Read who was there."""
    return [ClientKey(run, client) for run, client in reply.seats.tolist()]
