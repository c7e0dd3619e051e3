"""Teams for the clients of each architecture, with the networks and the state they start from."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from idiolect.core import tree
from idiolect.core.method import Method, Setup
from idiolect.data.federation import TrainData
from idiolect.engine import state_placement
from idiolect.engine.architecture import Architecture, make, refuse_unequal_states
from idiolect.engine.backend import Backend
from idiolect.engine.client_group import ClientGroup
from idiolect.engine.data_pools import DataPools
from idiolect.engine.disk_state import Shelf
from idiolect.engine.local_backend import Here
from idiolect.engine.ray_backend.ray_job import Spread
from idiolect.engine.state_store import Store
from idiolect.errors import ConfigError


class Room(NamedTuple):
    """Where personal state may be kept, and of how many clients."""

    backend: Backend
    folder: Path | None  # for what goes to disk
    cohort: int | None  # clients that a round touches; None: all
    clients: int

    def store(
        self, starts: state_placement.Starts, place: int, disk: bool | None = None
    ) -> Store | Shelf:
        """Make the place where the state of one architecture's clients is kept."""
        if disk is None:
            disk = state_placement.on_disk(starts, self.backend, self.cohort, self.clients)
        path = self.folder and self.folder / f"architecture-{place}.rows"
        return state_placement.store(starts, self.backend, disk, path)


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
    office: Here | Spread,
    room: Room,
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
        team.groups = [tree.to(method.init_group(setup), device) for setup in made.setups]
        found.teams.append(team)
    if sorted(int(c) for team in found.teams for c in team.clients) != list(range(room.clients)):
        raise ConfigError("the architectures must name every client exactly once")
    return found
