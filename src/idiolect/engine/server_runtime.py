"""The server by itself, on the simulator's own desk: what it does with public examples.

The hub of a real federation reads reports and trains what it keeps for an architecture with the
very batches that the server of a simulation draws.
"""

import numpy as np
import torch

from idiolect.core import tree
from idiolect.core.client import Local
from idiolect.core.method import Method, Sent
from idiolect.core.tree import Tree
from idiolect.data.federation import TrainData
from idiolect.engine.architecture import Architecture, make
from idiolect.engine.architecture_state import server_member
from idiolect.engine.client_tasks import Fuse
from idiolect.engine.data_pools import DataPools
from idiolect.engine.local_group import CohortRequest, LocalGroup
from idiolect.engine.state_store import Store


class Serving:
    """What a server keeps for one architecture, under one seed."""

    def __init__(
        self,
        method: Method,
        seed: int,
        lessons: TrainData,
        architecture: Architecture,
        device: torch.device,
    ) -> None:
        """`lessons` hold the server's public examples; of their private ones the form is used."""
        self._method = method
        library = DataPools([lessons], device)
        self._member = server_member(library.members(0, seed, lessons)[0])
        made = make("main", architecture, [seed], [lessons], library.examples(), device)
        self._crew = LocalGroup(
            np.array([self._member.client]),
            made.networks,
            Store([((), 1)], device),
            [made.setups[0].params],
            library.pools,
            library.exam_pools,
            device,
            1,
            1,
            made.stacked,
            None,
        )
        self.group = tree.to(method.init_group(made.setups[0]), device)

    def read(self, report: Tree, round: int, sample: int | None = None) -> Tree:
        """See what a report says of the public examples, or of a sample of that number."""
        method = self._method

        def read(sent: Sent, personal: Tree, local: Local, exam: Local) -> Tree:
            return method.read(sent.shared, local)

        client = self._member.client
        call = CohortRequest(
            np.array([client]), Sent(report), {client: self._member}, sample=sample
        )
        _, found = self._crew.run("read", read, [call], round)
        return tree.map(lambda leaf: leaf[0], found)

    def join(self, reports: Tree) -> None:
        """Join the reports of the architecture's clients, stacked on axis 0."""
        self.group = self._method.group_step(self.group, reports)

    def fuse(self, state: Tree, round: int, sample: int | None = None) -> None:
        """Train what is kept on the public examples."""
        self._crew.groups = [self.group]
        number = [round if sample is None else sample]
        fuse = Fuse(self._method)
        (self.group,) = self._crew.serve(fuse, [self._member], [state], round, number)
