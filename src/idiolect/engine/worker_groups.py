"""Teams for the clients of each architecture, with the networks and the state they start from."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from idiolect.core import capabilities, tree
from idiolect.core.method import Method, Setup
from idiolect.core.tree import Tree
from idiolect.data.federation import TrainData
from idiolect.engine import state_store
from idiolect.engine.architecture import Architecture, BuiltNetworks, make, refuse_unequal_states
from idiolect.engine.backend import Backend
from idiolect.engine.client_group import ClientGroup
from idiolect.engine.data_pools import DataPools
from idiolect.engine.local_group import LocalGroup, hands
from idiolect.engine.ray_backend.ray_group import RayJob
from idiolect.engine.state_store import DiskStore, MemoryStore
from idiolect.errors import ConfigError


class LocalBackend:
    """Hires crews, on the device that the backend names."""

    sums = False  # reports are at hand, so nothing is saved by adding them up

    def __init__(self, backend: Backend, library: DataPools) -> None:
        self._backend, self._library = backend, library

    def hire(
        self,
        clients: np.ndarray,
        made: BuiltNetworks,
        store: MemoryStore | DiskStore,
        personal: Sequence[Tree],
    ) -> LocalGroup:
        """Make a crew of the clients of one architecture, whose state is in the store."""
        backend, device = self._backend, self._backend.place
        return LocalGroup(
            clients,
            made.networks,
            store,
            [setup.params for setup in made.setups],
            self._library.pools,
            self._library.exam_pools,
            device,
            backend.width if made.stacked else 1,
            1 if backend.kind == "sequential" else hands(device, made.networks),
            made.stacked,
            backend.cache,
            backend.precision,
            backend.graph,
        )

    def remarks(self) -> list[str]:
        """Say nothing: nobody gets lost here."""
        return []


class StatePlacement(NamedTuple):
    """Where personal state may be kept, and of how many clients."""

    backend: Backend
    folder: Path | None  # for what goes to disk
    cohort: int | None  # clients that a round touches; None: all
    clients: int

    def store(
        self, starts: state_store.Starts, place: int, disk: bool | None = None
    ) -> MemoryStore | DiskStore:
        """Make the place where the state of one architecture's clients is kept."""
        if disk is None:
            disk = state_store.belongs_on_disk(starts, self.backend, self.cohort, self.clients)
        path = self.folder and self.folder / f"architecture-{place}.rows"
        return state_store.make_store(starts, self.backend, disk, path)


class Hired(NamedTuple):
    """Teams, what the server of each run starts from, and what the user should know."""

    teams: list[ClientGroup]
    setups: list[Setup]
    notices: list[str]


def hired(
    method: Method,
    architectures: Mapping[str, Architecture],
    seeds: Sequence[int],
    trained: Sequence[TrainData],
    library: DataPools,
    office: LocalBackend | RayJob,
    room: StatePlacement,
    newcomers: bool,
) -> Hired:
    """Make networks and personal state from each run's seed."""
    backend, device = room.backend, room.backend.place
    stacked = backend.kind != "sequential"
    examples = library.examples()
    found = Hired([], [], [])
    for name, architecture in architectures.items():
        own = architecture.clients
        clients = np.arange(room.clients) if own is None else np.array(own)
        made = make(
            name, architecture, seeds, trained, examples, device, backend.precision, stacked
        )
        if not found.setups:
            found.setups.extend(made.setups)
        if not newcomers:
            refuse_unequal_states(method, name, found.setups[0], made.setups[0])
        if made.unmappable and backend.kind == "vectorised":
            found.notices.append(f"architecture {name!r}: {made.unmappable}")
        starts = [method.init_personal(setup) for setup in made.setups]
        store = room.store([(start, len(clients)) for start in starts], len(found.teams))
        team = office.hire(clients, made, store, starts)
        team.groups = [
            tree.to(capabilities.init_group(method, setup), device) for setup in made.setups
        ]
        found.teams.append(team)
    if sorted(int(c) for team in found.teams for c in team.clients) != list(range(room.clients)):
        raise ConfigError("the architectures must name every client exactly once")
    return found
