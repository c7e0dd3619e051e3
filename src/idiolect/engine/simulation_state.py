"""What a simulation holds between rounds: data, client groups, server states, who took part."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from idiolect.core import capabilities, tree
from idiolect.core.capabilities import ArchitectureState, has
from idiolect.core.method import Method, Sent, Setup, refuse_task
from idiolect.core.tree import Tree
from idiolect.data.federation import TestData, TrainData
from idiolect.engine import architecture, sampling
from idiolect.engine.architecture import Architecture
from idiolect.engine.backend import Backend, device_ints
from idiolect.engine.batch_plan import ClientRows
from idiolect.engine.client_group import ClientGroup, CohortRequest
from idiolect.engine.data_pools import DataPools
from idiolect.engine.final_exchange import Sums
from idiolect.engine.local_group import LocalGroup
from idiolect.engine.ray_backend.ray_group import RayJob
from idiolect.engine.server_update import PublicTraffic, summable
from idiolect.engine.state_store import DiskStore, MemoryStore, make_store
from idiolect.errors import ConfigError

_GROUP = 2048  # clients asked at a time where all are


class SeededRun(NamedTuple):
    """One run: a seed and what the clients may train on."""

    seed: int
    train_data: TrainData


class SimulationState:
    """A method's state on one or several seeded runs."""

    def __init__(
        self,
        method: Method,
        runs: Sequence[SeededRun],
        architectures: Mapping[str, Architecture],
        *,
        cohort: int | None = None,
        draw: str = "fixed",
        bystanders: str = "rest",
        unseen: int = 0,
        backend: Backend | None = None,
        newcomers: bool = False,
        state_folder: Path | None = None,
        rounds: int | None = None,
    ) -> None:
        """`draw` says how a cohort is drawn, by its name in `sampling.DRAWS`.

        `bystanders`, clients outside the cohort, rest, or train as well without being heard.
        `unseen` clients take part in no round; a method that needs no server trains them too.
        With `newcomers` the servers' states have shapes only: existing ones take their place.
        `state_folder` is for personal state on disk; without one it is deleted with the
        simulation. `rounds` are those that are planned, by which a GPU's work is cut into more
        blocks or fewer; None: many.
        """
        if method.alone:
            cohort, draw, unseen = None, "fixed", 0
        if bystanders == "train" and has(method, ArchitectureState):
            raise ConfigError(
                f"bystanders = 'train' does not go with {method.title}, whose groups hear all who "
                "train; leave it at 'rest'"
            )
        self.method = method
        self.round = 0
        self.runs = runs
        self.exchange_sums: Sequence[
            Sums
        ] = ()  # for newcomers: sums of the final exchange before them
        self._draw = draw
        self._idle = [0 for _ in runs]  # rounds in which no report reached the server
        self._backend = backend or Backend()
        self.device = self._backend.place
        self._folder = state_folder
        self._clients = len(runs[0].train_data.names)
        if any(len(run.train_data.names) != self._clients for run in runs):
            raise ConfigError(
                f"runs have {sorted({len(run.train_data.names) for run in runs})} clients; runs "
                "that are trained together need equally many"
            )
        self._pools = DataPools([run.train_data for run in runs], self.device)
        trained = [run.train_data.pooled() if method.pooled else run.train_data for run in runs]
        self._trained = [self._pools.members(n, runs[n].seed, own) for n, own in enumerate(trained)]
        self._members = self._trained
        if method.pooled:
            self._members = [
                self._pools.members(n, r.seed, r.train_data) for n, r in enumerate(runs)
            ]
        self._public_traffic = PublicTraffic(method, trained)
        self._touched = None if bystanders == "train" else cohort  # clients that a round touches
        self._job: RayJob | None = None
        if self._backend.kind == "ray":
            self._job = RayJob(self._backend, self._pools, trained, self._clients, self._touched)
        self.notices: list[str] = []  # for the user
        self.groups: list[ClientGroup] = []
        refuse_task(method, trained[0].dataset.task)
        setups = self._make_groups(architectures, trained, newcomers, rounds)
        seeds = [run.seed for run in runs]
        able = [sampling.eligible(*own, unseen) for own in zip(trained, seeds, strict=True)]
        if newcomers:
            self.states = [method.init_server(architecture.blank(setup)) for setup in setups]
        else:
            setups = [_counted(*own) for own in zip(setups, able, strict=True)]
            self.states = [tree.to(method.init_server(own), self.device) for own in setups]
            if self._job is not None:
                self._job.sums = summable(method, self.states[0])
        # Training that leaves no trace need not be done.
        self._all_train = bystanders == "train" and self._personal
        self._able = [len(own) for own in able]
        # Whose training was used in some round; None: not known, so all who were called.
        self._took_part: np.ndarray | None = np.zeros((len(runs), self._clients), bool)
        self._attendance = [
            sampling.Attendance(run.seed, own, cohort, draw, self._all_train)
            for run, own in zip(runs, able, strict=True)
        ]

    def _make_groups(
        self,
        architectures: Mapping[str, Architecture],
        trained: Sequence[TrainData],
        newcomers: bool,
        rounds: int | None,
    ) -> list[Setup]:
        """Make networks and personal state from each run's seed; return the servers' setups."""
        backend, method, groups = self._backend, self.method, self.groups
        seeds, examples = [run.seed for run in self.runs], self._pools.examples()
        setups: list[Setup] = []
        for place, (name, own) in enumerate(architectures.items()):
            clients = np.arange(self._clients) if own.clients is None else np.array(own.clients)
            built = architecture.make(name, own, seeds, trained, examples, backend)
            held = built.setups[0], trained[0].dataset, examples
            architecture.refuse_other_head(method, name, own, *held)
            setups = setups or built.setups
            architecture.refuse_crowds(method, setups[0])
            if not newcomers:
                architecture.refuse_unequal_states(method, name, setups[0], built.setups[0])
            if built.unmappable and backend.kind == "vectorised":
                self.notices.append(f"architecture {name!r}: {built.unmappable}")
            starts = [method.init_personal(setup) for setup in built.setups]
            store = self._make_store([(start, len(clients)) for start in starts], place)
            if self._job is not None:
                groups.append(self._job.add(clients, built, store, starts))
            else:
                pools = self._pools.pools, self._pools.test_pools
                groups.append(LocalGroup(clients, built, store, *pools, backend, rounds))
            states = [capabilities.init_group(method, setup) for setup in built.setups]
            groups[-1].groups = [tree.to(state, self.device) for state in states]
        if sorted(int(c) for group in groups for c in group.clients) != list(range(self._clients)):
            raise ConfigError("the architectures must name every client exactly once")
        return setups

    def _make_store(
        self, starts: Sequence[tuple[Tree, int]], place: int, disk: bool | None = None
    ) -> MemoryStore | DiskStore:
        path = self._folder and self._folder / f"architecture-{place}.rows"
        return make_store(starts, self._backend, self._touched, self._clients, path, disk)

    # Checkpoints.

    def stored_as(self, named: Mapping[str, torch.Tensor]) -> None:
        """Keep personal state where a checkpoint, of which the leaves are given, had it."""
        for place, group in enumerate(self.groups):
            disk = f"personal.{place}.slots" in named
            if disk != isinstance(group.store, DiskStore) and tree.leaves(group.store.example):
                starts = [(start, len(group.clients)) for start in group.store.starts]
                group.store = self._make_store(starts, place, disk)

    def flush(self) -> None:
        """Write personal state that a checkpoint only refers to."""
        for group in self.groups:
            group.store.flush()

    @property
    def widths(self) -> dict[str, int]:
        """Measured block widths, to be kept with a checkpoint: rounding depends on them."""
        return {
            f"{place} {kind}": width
            for place, group in enumerate(self.groups)
            for kind, width in group.widths.items()
        }

    @widths.setter
    def widths(self, known: Mapping[str, int]) -> None:
        for key, width in known.items():
            place, kind = key.split(" ", 1)
            self.groups[int(place)].widths[kind] = width

    @property
    def tree(self) -> Tree:
        """All state between rounds as one tree: the servers' and the clients'.

        Of personal state on disk it has the table of who has which record, which stays valid.
        """
        kept: dict[str, Tree] = {"server": tuple(self.states)}
        kept["personal"] = tuple(group.store.rows for group in self.groups)
        if has(self.method, ArchitectureState):
            kept["groups"] = tuple(tuple(group.groups) for group in self.groups)
        present = np.stack([self._present(run) for run in range(len(self.runs))])
        kept["attended"] = {
            "idle": torch.tensor(self._idle),
            "clients": torch.from_numpy(present),
        }
        return kept

    @tree.setter
    def tree(self, kept: Tree) -> None:
        self.states = list(tree.to(kept["server"], self.device))
        for group, rows in zip(self.groups, kept["personal"], strict=True):
            group.restore(rows)
        groups_of = tree.to(kept.get("groups", ()), self.device)
        for group, own in zip(self.groups, groups_of, strict=False):
            group.groups = list(own)
        attended = kept.get("attended", {})
        if "idle" in attended:
            self._idle = attended["idle"].tolist()
        self._took_part = None
        if "clients" in attended:
            self._took_part = attended["clients"].numpy().copy()

    # Who takes part.

    def cohort(self, run: int) -> np.ndarray:
        """Return who takes part in the coming round of one run."""
        return self._attendance[run].reporting(self.round)

    def unscored(self, run: int) -> np.ndarray:
        """Return nobody: all clients of a simulation are there."""
        return np.empty(0, np.int64)

    def strangers(self, run: int) -> np.ndarray:
        """Return the clients that took part in no round so far: never called, or always broken."""
        if self.method.pooled:
            return np.empty(0, np.int64)
        return np.flatnonzero(~self._present(run))

    def _present(self, run: int) -> np.ndarray:
        """Say of each client whether it took part in some round."""
        found: np.ndarray = np.ones(self._clients, bool)
        if self._took_part is not None:
            found[:] = self._took_part[run]
            return found
        found[self._attendance[run].strangers(self._clients, self.round)] = False
        return found

    def _samples(self, round: int) -> list[int]:
        """Return each run's number of the public sample of a round: an idle round draws none."""
        return [round - idle for idle in self._idle]

    @property
    def _personal(self) -> bool:
        """Whether clients have personal state."""
        return bool(tree.leaves([group.store.example for group in self.groups]))

    def remarks(self) -> list[str]:
        """Report work that was lost with workers and done again."""
        return [] if self._job is None else self._job.remarks()

    def padding(self) -> float:
        """Return the largest share of padding in any architecture's last round."""
        return max(group.padding("step") for group in self.groups)

    @property
    def remote(self) -> bool:
        """Whether clients are run in other processes."""
        return self._job is not None

    def test_members(self, test_data: Sequence[TestData] | None) -> list[Sequence[ClientRows]]:
        """Return each run's clients with the rows they are scored on: test or validation rows."""
        if test_data is None:
            rows: Sequence[Any] = [(run.train_data.val, {}) for run in self.runs]
        else:
            rows = [(own.test, own.extras) for own in test_data]
        return [self._pools.test_members(n, self.runs[n].seed, *own) for n, own in enumerate(rows)]

    def send(self, state: Tree, clients: np.ndarray, newcomers: bool = False) -> Sent:
        """Return what a server sends to some clients."""
        cohort = device_ints(clients, self.device)
        if newcomers:
            return capabilities.welcome(self.method, state, cohort)
        return self.method.send(state, cohort)

    def everyone(
        self, newcomers: bool, clients: Sequence[np.ndarray] | None = None
    ) -> Iterator[list[CohortRequest]]:
        """Address every client (or some) of every run outside of rounds, a part after the other."""
        wanted = clients or [np.arange(self._clients)] * len(self.runs)
        for start in range(0, max(map(len, wanted)), _GROUP):
            parts = [own[start : start + _GROUP] for own in wanted]
            samples = self._samples(self.round)
            yield [
                CohortRequest(
                    part,
                    self.send(state, part, newcomers),
                    members,
                    afresh=self.method.starts_over,
                    sample=sample,
                )
                for part, state, members, sample in zip(
                    parts, self.states, self._members, samples, strict=True
                )
            ]


def _counted(setup: Setup, able: np.ndarray) -> Setup:
    """Leave clients that take part in no round out of what a server counts, as empty ones are."""
    rows = device_ints(able, setup.sizes.device)
    sizes = torch.zeros_like(setup.sizes).index_copy(0, rows, setup.sizes[rows])
    return setup._replace(sizes=sizes)
