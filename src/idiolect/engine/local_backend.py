"""Where clients are hired to work in this process."""

from collections.abc import Sequence

import numpy as np

from idiolect.core.tree import Tree
from idiolect.engine.architecture import Made
from idiolect.engine.backend import Backend
from idiolect.engine.data_pools import DataPools
from idiolect.engine.disk_state import Shelf
from idiolect.engine.local_group import LocalGroup, hands
from idiolect.engine.state_store import Store


class Here:
    """Hires crews, on the device that the backend names."""

    sums = False  # reports are at hand, so nothing is saved by adding them up

    def __init__(self, backend: Backend, library: DataPools) -> None:
        self._backend, self._library = backend, library

    def hire(
        self,
        clients: np.ndarray,
        made: Made,
        store: Store | Shelf,
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
