"""What a deployment runs: one client alone on its node, and the server with its public examples.

Both draw the batches that they would draw in a simulation of everyone, from the same seeds, so that
a federation of nodes and a simulation of it give the same result.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch

from idiolect.core import capabilities, tree
from idiolect.core.capabilities import ArchitectureState, NewcomerMessage, Preparation, has
from idiolect.core.client import Local, Request
from idiolect.core.method import Method, Sent, Setup, refuse_task
from idiolect.core.tree import Tree
from idiolect.data.dataset import Rows
from idiolect.data.federation import TrainData
from idiolect.engine.architecture import Architecture, blank, make, refuse_other_head
from idiolect.engine.backend import Backend, multiplying
from idiolect.engine.batch_plan import ClientRows
from idiolect.engine.block_runner import Block, BlockRunner, SharedInput
from idiolect.engine.client_group import ClientTask, Fuse, Meet, Prepare
from idiolect.engine.data_pools import DataPools
from idiolect.engine.evaluation import ScoreTask
from idiolect.engine.final_exchange import ExchangeInput, Sums, Tell
from idiolect.engine.local_group import server_group
from idiolect.engine.row_metrics import VALIDATION, ClientOutputs, MetricChoice, in_users_unit
from idiolect.engine.server_update import server_request
from idiolect.errors import DataError
from idiolect.kernels import autotune


@dataclass(frozen=True)
class ClientIdentity:
    """Which client of how many, under which seed."""

    client: int
    clients: int
    seed: int
    newcomer: bool = False  # came after training: its number is none of those clients'


class ClientRuntime:
    """A method's client side: its networks, personal state and data, and nobody else's."""

    def __init__(
        self,
        method: Method,
        place: ClientIdentity,
        train_data: TrainData,
        test: Rows,
        architecture: Architecture,
        device: torch.device,
        look: Callable[[Request, int], None] | None = None,
        least_rows: int = 0,
    ) -> None:
        """`train_data` and `test` hold one client's rows.

        `look` is shown every request for batches behind a report, with the number of rows it is
        about, and may refuse. With `least_rows` the last batch of an epoch is left out if it has
        fewer, or less than half the rows of a batch.
        """
        if train_data.clients != 1:
            raise DataError(f"a node holds one client's data; got {train_data.clients} clients'")
        self.method = method
        self._place = place
        self._device = device
        pools = DataPools([train_data], device)
        (member,) = pools.members(0, place.seed, train_data)
        self._member = member._replace(client=place.client, least_rows=least_rows)
        self._look = look
        self._held = train_data
        self._rows = {"val": train_data.val[0], "test": test}
        self._tests = {
            kind: pools.test_members(0, place.seed, [rows])[0]._replace(client=place.client)
            for kind, rows in self._rows.items()
        }
        backend = Backend(device=device.type, width=1)
        refuse_task(method, train_data.dataset.task)
        built = make("main", architecture, [place.seed], [train_data], pools.examples(), backend)
        held = built.setups[0], train_data.dataset, pools.examples()
        refuse_other_head(method, "main", architecture, *held)
        self.setup: Setup = built.setups[0]  # of a newcomer, who is alone in it
        if not place.newcomer:
            sizes = torch.full((place.clients,), float("nan"), device=device)
            sizes[place.client] = float(len(train_data.train[0]))
            self.setup = self.setup._replace(sizes=sizes)
        self.networks = built.networks
        self._stacked = built.stacked and device.type == "cuda"
        if self._stacked:
            autotune.set_cache(None, meanwhile=True)
        self._data = pools.pools, pools.test_pools
        self._runners: dict[str, BlockRunner] = {}
        self.personal: Tree = tree.to(method.init_personal(self.setup), device)

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
        return tree.to(capabilities.init_group(self.method, self.setup), self._device)

    def _shapes(self, newcomer: bool) -> Sent:
        """Return what is sent as shapes only: a node does not have the server's state."""
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
        """Run a round of a client that has not prepared: prepare, if the method does, and step."""
        fresh, method = self.personal, self.method
        try:
            if has(method, Preparation) and round >= method.first_preparation:
                (self.personal,) = self._run("prepare", Prepare(self.method), sent, round)
            return self.step(sent, round, sample)
        finally:
            self.personal = fresh  # the caller keeps the new state, or asks again

    def step(self, sent: Sent, round: int, sample: int | None = None) -> tuple[Tree, Tree]:
        """Run one round; return the report and the new personal state, which is not kept yet.

        `sample` is the number of the public sample, where that is not the round's.
        """
        report, personal = self._run("step", _ClientStep(self.method), sent, round, sample=sample)
        return report, personal

    def meet(self, sent: Sent, round: int) -> Tree:
        """Take in a state without training; return the new personal state, not kept yet."""
        (personal,) = self._run("meet", Meet(self.method), sent, round)
        return personal

    def tell(self, sent: Sent, round: int) -> tuple[Tree, Tree]:
        """Deploy without the others' sums; return the own contribution, and what was deployed."""
        numbers, deployed = self._run("tell", Tell(self.method, keep=True), sent, round)
        return numbers, deployed

    def evaluate(
        self,
        sent: Sent,
        round: int,
        *,
        tested: bool,
        flags: Sequence[str] = (),
        others: Sums | None = None,
        deployed: Tree = (),
        sample: int | None = None,
        choice: MetricChoice | None = None,
        detail: bool = False,
    ) -> tuple[Tree, Tree, Tree]:
        """Score on test data (and validation data beside), or on validation data alone.

        Flags are those of `ScoreTask`. With the sums of the `others`, what was `deployed` for them
        is not deployed again, if it is still there. The metric of a `choice` is among the scores,
        with `detail` all of its task's; outputs of single rows stay here. Returns scores, facts and
        the personal model, if kept.
        """
        chosen: dict[str, Any] = dict.fromkeys(flags, True)
        if choice is not None:
            detail = detail and not self._held.dataset.sequential
            wanted = self._outputs_wanted(choice, tested, detail)
            chosen |= {"choice": choice, "detail": detail, "outputs": wanted}
        task = ScoreTask(self.method, beside=tested, hears=others is not None, **chosen)
        if others is not None:
            rows = tree.map(lambda leaf: leaf.unsqueeze(0), (dict(others), deployed))
            sent = sent._replace(own=ExchangeInput(sent.own, *rows))
        test = self._tests["test" if tested else "val"]
        scores, facts, kept, said = self._run(task.kind, task, sent, round, test, sample)
        return self._measured(task, scores, said, tested), facts, kept

    def _outputs_wanted(self, choice: MetricChoice, tested: bool, detail: bool) -> tuple[int, int]:
        """Return how many test and validation rows a metric needs the outputs of; -1: none."""
        if self._held.dataset.sequential or (
            choice.native and not detail and (choice.threshold is None or not tested)
        ):
            return -1, -1
        beside = tested and (not choice.native or choice.threshold == VALIDATION)
        scored = len(self._rows["test" if tested else "val"])
        return scored, len(self._rows["val"]) if beside else -1

    def _measured(
        self, task: ScoreTask, scores: Tree, said: Mapping[str, Any], tested: bool
    ) -> dict[str, dict[str, torch.Tensor]]:
        """Return scores in the user's unit, with the chosen metric beside them."""
        dataset = self._held.dataset
        found = in_users_unit(scores, dataset.task)
        if not said:
            return found
        own = tree.map(lambda leaf: leaf.detach().cpu().numpy(), said)
        val = dataset.y[self._rows["val"]]
        scored = dataset.y[self._rows["test"]] if tested else val
        train = dataset.y[self._held.train[0]]
        outputs = ClientOutputs(dataset.task, own["test"], own.get("val", {}), scored, val, train)
        for model, marks in task.measure(outputs).marks.items():
            more = {
                name: torch.tensor(float(own), dtype=torch.float64) for name, own in marks.items()
            }
            found[model] = {**found.get(model, {}), **more}
        return found

    def _run(
        self,
        kind: str,
        task: ClientTask,
        sent: Sent,
        round: int,
        test: ClientRows | None = None,
        sample: int | None = None,
    ) -> Tree:
        """Run a task as a block of one client; tasks of one kind share a runner."""
        training = kind in ("prepare", "step")
        if kind not in self._runners:
            if self._look is not None and training:
                task = _Inspected(self.method, task, self._look, self._member)
            self._runners[kind] = BlockRunner(
                task, self.networks, *self._data, self._device, stacked=self._stacked
            )
        sent, personal = tree.to((Sent(*sent), self.personal), self._device)
        initial = self.setup.params if not training and self.method.starts_over else ()
        block = Block(
            [self._member],
            [] if test is None else [test],
            None if sample is None else [sample],
            SharedInput(sent.shared, initial, sent.group),
            False,
            sent.own,
            tree.map(lambda leaf: leaf.unsqueeze(0), personal),
        )
        with multiplying("fp32", self._device):
            if self._device.type == "cuda":
                autotune.settle(round)
            results = self._runners[kind].run(block, round)
        return tree.map(lambda leaf: leaf[0], results)


class _ClientStep(ClientTask):
    """A client's round; returns its report and its personal state."""

    def __call__(self, sent: Sent, personal: Tree, local: Local, test: Local) -> Tree:
        """Train and report."""
        return self.method.client_step(sent, personal, capabilities.given(self.method, local))


@dataclass(frozen=True)
class _Inspected(ClientTask):
    """A task whose requests for batches are shown to `look`, which may refuse."""

    task: ClientTask
    look: Callable[[Request, int], None]
    member: ClientRows

    def __call__(self, sent: Sent, personal: Tree, local: Local, test: Local) -> Tree:
        """Run the task."""
        rows = self.member.rows
        seen = local.watched(lambda one: self.look(one, len(rows[one.stream])))
        return self.task(sent, personal, seen, test)


class _Read(ClientTask):
    """The server reads a report with its public examples."""

    name = "read"

    def __call__(self, sent: Sent, personal: Tree, local: Local, test: Local) -> Tree:
        """Return what it reads."""
        assert has(self.method, ArchitectureState)
        return self.method.read(sent.shared, local)


class ServerRuntime:
    """What a server keeps for one architecture, under one seed."""

    def __init__(
        self,
        method: Method,
        seed: int,
        train_data: TrainData,
        architecture: Architecture,
        device: torch.device,
    ) -> None:
        """`train_data` has the public examples; of its private ones only the form is used."""
        self._method = method
        pools, backend = DataPools([train_data], device), Backend(device=device.type)
        self._member = pools.members(0, seed, train_data)[0]
        built = make("main", architecture, [seed], [train_data], pools.examples(), backend)
        self._server = server_group(built, pools.pools, backend)
        self.group = tree.to(capabilities.init_group(method, built.setups[0]), device)

    def read(self, report: Tree, round: int, sample: int | None = None) -> Tree:
        """Return what a report says of the public examples, or of a sample of that number."""
        return self._run(_Read(self._method), report, round, sample)

    def join(self, reports: Sequence[Tree]) -> None:
        """Join the reports of the architecture's clients, if there are any."""
        method = self._method
        assert has(method, ArchitectureState)
        if reports:
            self.group = method.group_step(self.group, tree.stack(reports))
        else:
            self.group = method.unheard(self.group)

    def fuse(self, state: Tree, round: int, sample: int | None = None) -> None:
        """Train what is kept on the public examples."""
        self.group = self._run(Fuse(self._method), state, round, sample)

    def _run(self, task: ClientTask, shared: Tree, round: int, sample: int | None) -> Tree:
        request = server_request(self._member, shared, round if sample is None else sample)
        self._server.groups = [self.group if isinstance(task, Fuse) else ()]
        _, found = self._server.run(task, [request], round)
        return tree.map(lambda leaf: leaf[0], found)
