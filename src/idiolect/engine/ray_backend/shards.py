"""Who is served by which worker, and a shard's examples as they are sent there: once."""

import heapq
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from idiolect.core import tree
from idiolect.core.client import Pool
from idiolect.core.tree import Tree
from idiolect.engine.batch_layout import Member
from idiolect.engine.data_pools import DataPools, Excerpt

Members = Mapping[int, Member]

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


class Stream(NamedTuple):
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


class Roster(NamedTuple):
    """One run's clients of a shard, with the rows they hold."""

    seed: int
    clients: np.ndarray
    streams: dict[str, Stream]


class Pack(NamedTuple):
    """What the clients of a shard learn from, or are scored on: their examples, and whose."""

    examples: Excerpt
    rosters: list[Roster]  # of each run

    def members(self) -> list[Members]:
        """Give each run's clients their rows of the pack's pool."""
        return [
            {
                int(client): Member(
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


def packed(library: DataPools, rolls: Sequence[Sequence[Member]], clients: np.ndarray) -> Pack:
    """Pack what some clients hold in each run, and no other example."""
    rosters = []
    for roll in rolls:
        members = [roll[int(client)] for client in clients if client < len(roll)]
        names = sorted({name for member in members for name in member.rows})
        streams = {name: _stream([member.rows[name] for member in members]) for name in names}
        numbers = np.array([member.client for member in members], np.int64)
        rosters.append(Roster(members[0].seed if members else 0, numbers, streams))
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
        return Pack(blank._replace(x=np.zeros_like(blank.x), y=np.zeros_like(blank.y)), rosters)
    return Pack(library.excerpt(held), rosters)


def _stream(lists: Sequence[np.ndarray]) -> Stream:
    number: dict[int, int] = {}
    distinct: list[np.ndarray] = []
    for rows in lists:
        if id(rows) not in number:
            number[id(rows)] = len(distinct)
            distinct.append(rows)
    return Stream(
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
