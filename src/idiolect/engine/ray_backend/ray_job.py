"""A job on a cluster: its shards, and what was sent to which worker."""

import weakref
from collections.abc import Sequence
from typing import Any
from uuid import uuid4

import numpy as np
import torch

from idiolect.core.tree import Tree
from idiolect.data.federation import TrainData
from idiolect.engine.architecture import Made
from idiolect.engine.backend import Backend
from idiolect.engine.batch_layout import Member
from idiolect.engine.client_group import CohortRequest
from idiolect.engine.data_pools import DataPools
from idiolect.engine.disk_state import Shelf
from idiolect.engine.ray_backend.cluster import Asked, Cluster, Hand, hired
from idiolect.engine.ray_backend.ray_group import Remote
from idiolect.engine.ray_backend.shards import dealt, lowered, packed
from idiolect.engine.ray_backend.worker import Kit, Outfit
from idiolect.engine.state_store import Store


class Spread:
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
        self._teams: list[Remote] = []
        self._outfits: list[Outfit] = []
        self._shards: list[list[np.ndarray]] = []
        self._kit: Any = None
        self._rolls: list[tuple[Sequence[Member], ...]] = []
        self._packs: dict[tuple[int, int], Any] = {}
        self._sent: tuple[Any, Any] = ((), None)  # the last calls, and where their broadcast is
        self._there: dict[int, tuple[int, set[int]]] = {}  # shard -> its worker, packs it has
        self._opened: set[int] = set()  # workers that know of the job
        weakref.finalize(self, _closed, self.cluster, self.job)

    def hire(
        self,
        clients: np.ndarray,
        made: Made,
        store: Store | Shelf,
        personal: Sequence[Tree],
    ) -> Remote:
        """Add the clients of one architecture."""
        starts = [lowered(setup.params) for setup in made.setups]
        self._outfits.append(
            Outfit(made.networks, starts, [lowered(own) for own in personal], made.stacked)
        )
        place = self._backend.place
        self._teams.append(Remote(self, len(self._teams), clients, store, len(starts), place))
        return self._teams[-1]

    def remarks(self) -> list[str]:
        """Tell whether work was lost on the way."""
        if not self._again:
            return []
        return [f"work was lost with a worker of the cluster and done again ({self._again} times)"]

    def answer(self, asked: Asked) -> tuple[Hand, Any]:
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

    def prepare(self, hand: Hand, shard: int, packs: Sequence[int]) -> list[Any]:
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

    def introduce(self, hand: Hand) -> list[Any]:
        """Tell a worker of the job, if it has not heard of it."""
        if hand.number in self._opened:
            return []
        self._opened.add(hand.number)
        if self._kit is None:
            public = self._library.public() if self._library.has_public else None
            kit = Kit(
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

    def call(self, hand: Hand, name: str, *arguments: Any) -> Any:
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
