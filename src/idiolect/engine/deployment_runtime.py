"""One client by itself, on the simulator's own desk: what a node of a real federation runs.

The client draws the batches it would draw in a simulation of everyone, from the same seeds, so
that a federation of nodes and a simulation of them give the same result.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch

from idiolect.core import capabilities, tree
from idiolect.core.batches import Request
from idiolect.core.capabilities import ArchitectureState, NewcomerMessage, Preparation, has
from idiolect.core.client import Local
from idiolect.core.method import Method, Sent, Setup
from idiolect.core.tree import Tree
from idiolect.data.dataset import Rows
from idiolect.data.federation import TrainData
from idiolect.engine.architecture import Architecture, blank, make
from idiolect.engine.batch_plan import BatchPlanner, ClientRows
from idiolect.engine.block_runner import ClientFunction
from idiolect.engine.client_group import Fuse, Meet, Prepare
from idiolect.engine.data_pools import DataPools
from idiolect.engine.evaluation import ScoreTask
from idiolect.engine.final_exchange import ExchangeInput, Sums, Tell
from idiolect.engine.local_group import CohortRequest, LocalGroup
from idiolect.engine.server_update import server_member
from idiolect.engine.state_store import MemoryStore
from idiolect.errors import DataError


@dataclass(frozen=True)
class ClientIdentity:
    """Which client of how many, under which seed; what it cannot know of the others stays NaN."""

    client: int
    clients: int
    seed: int
    newcomer: bool = False  # came when all was over: its number is none of those clients'


class ClientRuntime:
    """A method's client side: its networks, personal state and data, and nobody else's."""

    def __init__(
        self,
        method: Method,
        place: ClientIdentity,
        lessons: TrainData,
        test: Rows,
        architecture: Architecture,
        device: torch.device,
        look: Callable[[Request, int], None] | None = None,
        short_batches: bool = True,
    ) -> None:
        """`lessons` and `test` hold one client's rows.

        `look` is shown every request for batches behind a report, with the number of rows it is
        about, and may refuse. Without `short_batches` the last batch of an epoch is left out if it
        has less than half the rows of a batch.
        """
        if lessons.clients != 1:
            raise DataError(f"a node holds one client's data; got {lessons.clients} clients'")
        self.method = method
        self._place = place
        self._device = device
        library = DataPools([lessons], device)
        (member,) = library.members(0, place.seed, lessons)
        self._member = member._replace(client=place.client, short_batches=short_batches)
        self._look = look
        self._exams = {
            kind: self._examined(library, rows)
            for kind, rows in {"val": lessons.val[0], "test": test}.items()
        }
        made = make("main", architecture, [place.seed], [lessons], library.examples(), device)
        self.setup: Setup = made.setups[0]  # of a newcomer, who is alone in it
        if not place.newcomer:
            sizes = torch.full((place.clients,), float("nan"), device=device)
            sizes[place.client] = float(len(lessons.train[0]))
            self.setup = self.setup._replace(sizes=sizes)
        self.networks = made.networks
        self._crew = LocalGroup(
            np.array([place.client]),
            made.networks,
            MemoryStore([(method.init_personal(self.setup), 1)], device),
            [self.setup.params],
            library.pools,
            library.exam_pools,
            device,
            1,
            1,
            made.stacked,
            None,
        )

    def _examined(self, library: DataPools, rows: Rows) -> ClientRows:
        (member,) = library.examined(0, self._place.seed, [rows])
        return member._replace(client=self._place.client)

    @property
    def personal(self) -> Tree:
        """What this client keeps between rounds."""
        return tree.map(lambda leaf: leaf[0], self._crew.store.rows)

    @personal.setter
    def personal(self, kept: Tree) -> None:
        self._crew.store.rows = tree.map(
            lambda leaf: leaf.unsqueeze(0), tree.to(kept, self._device)
        )

    @cached_property
    def form(self) -> Sent:
        """What a server of this method sends to this client before the first round."""
        method, own = self.method, torch.tensor([self._place.client], device=self._device)
        if self._place.newcomer or method.public == "server":
            sent = self._shapes(self._place.newcomer)
        else:
            sent = method.send(tree.to(method.init_server(self.setup), self._device), own)
        return sent._replace(group=self._group)

    @cached_property
    def guest_form(self) -> Sent:
        """What a server sends to this client if it is a newcomer, or took part in no round."""
        if self._place.newcomer or not has(self.method, NewcomerMessage):
            return self.form
        return self._shapes(newcomer=True)._replace(group=self._group)

    @property
    def _group(self) -> Tree:
        group = capabilities.init_group(self.method, self.setup)
        return tree.to(group, self._device)

    def _shapes(self, newcomer: bool) -> Sent:
        """What is sent, without its values: this client cannot know what the server holds."""
        method, place = self.method, self._place
        unknown = self.setup._replace(sizes=torch.empty(place.clients))
        state = method.init_server(blank(unknown))
        nowhere = torch.zeros(1, dtype=torch.int64, device="meta")
        send = partial(capabilities.welcome, method) if newcomer else method.send
        sent = send(state, nowhere)
        return Sent(*tree.map(lambda leaf: torch.zeros_like(leaf, device=self._device), sent))

    def prepared(self, rounds: int) -> bool:
        """Say whether a client that took part in the last of so many rounds has prepared."""
        method = self.method
        return rounds > (method.first_preparation if has(method, Preparation) else 0)

    def first(self, sent: Sent, round: int, sample: int | None = None) -> tuple[Tree, Tree]:
        """Do a round of a client that has not prepared: `prepare`, if the method does, and step."""
        fresh, method = self.personal, self.method
        try:
            if has(method, Preparation) and round >= method.first_preparation:
                (self.personal,) = self._run("prepare", Prepare(self.method), sent, round)
            return self.step(sent, round, sample)
        finally:
            self.personal = fresh  # the caller keeps the new state, or asks again

    def step(self, sent: Sent, round: int, sample: int | None = None) -> tuple[Tree, Tree]:
        """Do one round; return the report and the new personal state, which is not kept yet.

        `sample` is the number of the public sample, where that is not the round's.
        """
        method = self.method

        def step(sent: Sent, personal: Tree, local: Local, exam: Local) -> Tree:
            return method.client_step(sent, personal, local)

        report, personal = self._run("step", step, sent, round, sample=sample)
        return report, personal

    def meet(self, sent: Sent, round: int) -> Tree:
        """Look at a state without training; return the new personal state, not kept yet."""
        (personal,) = self._run("meet", Meet(self.method), sent, round)
        return personal

    def tell(self, sent: Sent, round: int) -> tuple[Tree, Tree]:
        """Settle what to use without the others; return what they may know of it, and itself."""
        work = Tell(self.method, keep=True)
        told, deployed = self._run("tell", work, sent, round)
        return told, deployed

    def judge(
        self,
        sent: Sent,
        round: int,
        *,
        tested: bool,
        flags: Sequence[str] = (),
        others: Sums | None = None,
        deployed: Tree = (),
        sample: int | None = None,
    ) -> tuple[Tree, Tree, Tree]:
        """Score on test data (and validation data beside), or on validation data alone.

        Flags are those of `Marking`. Who hears `others` goes by what it `deployed` when it told, if
        that is still there. Returns marks, facts and the personal model, if kept.
        """
        chosen: dict[str, Any] = dict.fromkeys(flags, True)
        mark = ScoreTask(self.method, beside=tested, hears=others is not None, **chosen)
        if others is not None:
            rows = tree.map(lambda leaf: leaf.unsqueeze(0), (dict(others), deployed))
            sent = sent._replace(own=ExchangeInput(sent.own, *rows))
        exam = self._exams["test" if tested else "val"]
        marks, facts, kept = self._run(mark.kind, mark, sent, round, exam, sample)
        return marks, facts, kept

    def predict(self, model: Tree, x: torch.Tensor) -> torch.Tensor:
        """Return logits of a deployed model on decoded examples."""
        nothing = torch.zeros((), dtype=torch.int64, device=self._device)
        size = self.setup.sizes[0 if self._place.newcomer else self._place.client]
        plans = BatchPlanner({}, self._device)  # a prediction asks for no batches
        local = Local(self.networks, plans, nothing, size, size.new_zeros(()), stacked=False)
        return self.method.predict(model, x, local)

    def _run(
        self,
        kind: str,
        fn: ClientFunction,
        sent: Sent,
        round: int,
        exam: ClientRows | None = None,
        sample: int | None = None,
    ) -> Tree:
        client = self._member.client
        call = CohortRequest(
            np.array([client]),
            Sent(*tree.to(tuple(sent), self._device)),
            {client: self._member},
            {} if exam is None else {client: exam},
            afresh=kind not in ("prepare", "step") and self.method.starts_over,
            sample=sample,
        )
        self._crew.groups = [call.sent.group]
        work = fn
        if (look := self._look) is not None and kind in ("prepare", "step"):
            rows = self._member.rows

            def work(sent: Sent, personal: Tree, local: Local, exam: Local) -> Tree:
                seen = local.watched(lambda one: look(one, len(rows[one.stream])))
                return fn(sent, personal, seen, exam)

        _, results = self._crew.run(kind, work, [call], round)
        return tree.map(lambda leaf: leaf[0], results)


class ServerRuntime:
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
            MemoryStore([((), 1)], device),
            [made.setups[0].params],
            library.pools,
            library.exam_pools,
            device,
            1,
            1,
            made.stacked,
            None,
        )
        self.group = tree.to(capabilities.init_group(method, made.setups[0]), device)

    def read(self, report: Tree, round: int, sample: int | None = None) -> Tree:
        """See what a report says of the public examples, or of a sample of that number."""
        method = self._method

        def read(sent: Sent, personal: Tree, local: Local, exam: Local) -> Tree:
            assert has(method, ArchitectureState)
            return method.read(sent.shared, local)

        client = self._member.client
        call = CohortRequest(
            np.array([client]), Sent(report), {client: self._member}, sample=sample
        )
        _, found = self._crew.run("read", read, [call], round)
        return tree.map(lambda leaf: leaf[0], found)

    def join(self, reports: Tree) -> None:
        """Join the reports of the architecture's clients, stacked on axis 0."""
        assert has(self._method, ArchitectureState)
        self.group = self._method.group_step(self.group, reports)

    def fuse(self, state: Tree, round: int, sample: int | None = None) -> None:
        """Train what is kept on the public examples."""
        self._crew.groups = [self.group]
        number = [round if sample is None else sample]
        fuse = Fuse(self._method)
        (self.group,) = self._crew.serve(fuse, [self._member], [state], round, number)
