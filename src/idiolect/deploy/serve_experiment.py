"""A whole experiment over nodes: the same rounds, checkpoints and results as a simulation."""

import dataclasses
import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from idiolect.aggregation import RULES
from idiolect.core import capabilities
from idiolect.core.capabilities import ArchitectureState, Privacy, Refit, has
from idiolect.core.checkpoint import write_whole
from idiolect.core.method import Method, RunPlan
from idiolect.data import SOURCES, Dataset
from idiolect.data.columns import embedded_blocks
from idiolect.data.federation import TestData
from idiolect.deploy import handshake, secure_sum
from idiolect.deploy.data_summary import NodeEntry, read_scalings
from idiolect.deploy.handshake import NodeRegistry
from idiolect.deploy.limits import UNLIMITED
from idiolect.deploy.messenger import FaultLog, Messenger, Transport, WaitPolicy
from idiolect.deploy.node_process import Processes
from idiolect.deploy.node_records import NOBODY
from idiolect.deploy.server import Server, refuse_pooled
from idiolect.deploy.site import NodeSettings
from idiolect.engine.architecture import labels
from idiolect.engine.backend import Backend
from idiolect.engine.outcome import Members, Silent, Tick, Watch
from idiolect.errors import ConfigError, DataError
from idiolect.experiment import run_state
from idiolect.experiment.build import build_federations, cohort_size, load_public
from idiolect.experiment.components import assign_networks
from idiolect.experiment.components import build_method as made_method
from idiolect.experiment.job import Evaluate, Job
from idiolect.experiment.portable import NOWHERE, export_experiment, import_experiment, source_of
from idiolect.experiment.run import EXPERIMENT
from idiolect.experiment.run import run_jobs as run_jobs
from idiolect.experiment.schema import Deployment, Experiment
from idiolect.experiment.untrusted import Permissions, trust_named_code
from idiolect.results import run_files
from idiolect.results.document import Document


@dataclass(frozen=True)
class ServerSettings:
    """The settings of whoever runs the server."""

    public: str | None = None  # stands for the experiment's public examples
    data_dir: Path | None = None
    packages: tuple[str, ...] = ()  # installed ones that an experiment may take networks from
    closed: tuple[str, ...] = ()  # folders that nothing is imported from: the kit
    folders: tuple[str, ...] = ()  # where packages may lie besides; for tries on one's own machine

    @property
    def reach(self) -> Permissions:
        """What an experiment may have imported here."""
        return Permissions(packages=self.packages, closed=self.closed, folders=self.folders)

    def to_json(self) -> str:
        """Write the settings for another process of the same machine."""
        folder = None if self.data_dir is None else str(self.data_dir)
        plain = {"public": self.public, "data_dir": folder, "packages": self.packages}
        return json.dumps(plain)

    @classmethod
    def read(cls, path: Path) -> "ServerSettings":
        """Read what `to_json` wrote; without a file there are none."""
        closed = (str(path.resolve().parents[1]),)  # the kit, with every job's folder
        if not path.is_file():
            return cls(closed=closed)
        plain = json.loads(path.read_text())
        folder = plain["data_dir"]
        packages = tuple(plain.get("packages", ()))
        return cls(plain["public"], None if folder is None else Path(folder), packages, closed)

    def public_examples(self, text: str, entry: NodeEntry) -> Dataset | None:
        """Load the examples that the server trains on, in the form of the nodes' own."""
        source = source_of(text) if entry.source else NOWHERE
        try:
            own: dict[str, Any] = {"public": self.public, "side": "server", "reach": self.reach}
            data = import_experiment(text, source=source, **own).data
            fetched = () if self.public is None else (self.public,)
            blank = entry.form.blank(1)
            return load_public(data, blank, bool(entry.source), self.data_dir, fetched)
        except DataError as error:
            raise DataError(
                f"the server lacks the public examples that it would train on ({error}); start it "
                "with `idiolect server KIT --public PATH` or --data-dir"
            ) from error


NO_SETTINGS = ServerSettings()


@dataclass(frozen=True, eq=False, kw_only=True)
class RemoteJob(Job):
    """One method on all seeds, trained by nodes."""

    run: str
    registry: NodeRegistry
    checkpoint_every: int = 1  # whatever happens, no more than one round is done again
    backend: Backend = field(default_factory=lambda: Backend("sequential", "cpu"))
    deploy: Deployment = field(default_factory=Deployment)
    public: Sequence[Dataset] | None = None  # the server's own, by seed

    federated: ClassVar[bool] = True

    def plan(self, rounds: int) -> RunPlan:
        """Return who takes part, of sites that came later none.

        Among fewer a client is drawn more often, so what is promised holds for the first rounds
        too.
        """
        plan = super().plan(rounds)
        return plan._replace(clients=min(plan.clients, self.registry.able))

    @property
    def task(self) -> str:
        """The kind of task."""
        return str(self.registry.first.form.task["kind"])

    @property
    def identity(self) -> dict[str, Any]:
        """All that decides the course of training; the registry compares the nodes' data."""
        return {
            "method": self.name,
            "settings": self.settings,
            "seeds": list(self.seeds),
            "cohort": self.cohort,
            "draw": self.draw,
            **({} if self.bystanders == "rest" else {"bystanders": self.bystanders}),
            **self.described,
            "run": self.run,
        }

    @property
    def members(self) -> tuple[Members, ...]:
        """Who takes part under each seed."""
        own = f"{self.registry.clients} sites, each with data of its own"
        return tuple(
            Members(
                seed,
                self.registry.names,
                tuple(self.registry.sizes(0, run)),
                tuple(self.registry.sizes(2, run)),
                self.registry.first.descriptions[run] or own,
                labels(self.architectures, self.registry.clients),
            )
            for run, seed in enumerate(self.seeds)
        )

    @property
    def test_data(self) -> Sequence[TestData]:
        """Return nothing: nodes keep their test data to themselves."""
        return ()

    @property
    def validated(self) -> bool:
        """Whether some node has validation data under every seed."""
        return all(any(self.registry.sizes(1, run)) for run in range(len(self.seeds)))

    @property
    def place(self) -> str:
        """The machine clients are run on, in words."""
        return "nodes"

    def attendance(self, rounds: int) -> tuple[Sequence[Mapping[str, str]], ...]:
        """Return who did what in each round of each seed; empty where draws are secret."""
        found = self.registry.attendance.read(self.label, rounds, len(self.seeds))
        return tuple(found) if any(any(own) for own in found) else ()

    def warnings(self) -> list[str]:
        """Return a warning about nodes without data of a kind."""
        found = []
        for part, name in enumerate(("train", "val", "test")):
            sizes = zip(self.registry.names, self.registry.sizes(part, 0), strict=True)
            if empty := [site for site, size in sizes if not size]:
                clients = self.registry.clients
                found.append(f"{len(empty)} of {clients} clients have no {name} row: {empty[0]}")
        return found

    def trains_as(self, other: Job) -> bool:
        """Return False: personal state is kept by label, so every method does its own rounds."""
        return False

    def simulation(self, personal: Path | None = None) -> Server:
        """Return the server."""
        told = capabilities.promise(self.method, self.plan(self.rounds)).get("privacy", {})
        return Server(
            self.label,
            self.method,
            self.seeds,
            self.run,
            self.registry,
            self.architectures,
            self.cohort,
            self.draw,
            self.deploy,
            self.public,
            self.bystanders,
            hides=bool(told.get("meaningful")),
        )


def make_messenger(
    transport: Transport, text: str, folder: Path, host: ServerSettings = NO_SETTINGS
) -> Messenger:
    """Return a messenger with the experiment's limits and the run's record of failures."""
    deploy = import_experiment(text, reach=host.reach).deploy
    policy = WaitPolicy(
        deploy.timeout,
        deploy.join,
        deploy.minimum,
        deploy.patience,
        deploy.limit_mb << 20,
        deploy.approval,
    )
    return Messenger(transport, policy, FaultLog(folder / "faults.json"))


def serve(
    messenger: Messenger,
    text: str,
    run: str,
    folder: Path,
    *,
    only: Sequence[str] = (),
    watch: Watch | None = None,
    host: ServerSettings = NO_SETTINGS,
    submitter: str = NOBODY,
) -> Document:
    """Run an experiment with a messenger's nodes, resuming from the folder of the same run.

    `text` is the experiment as TOML; `run` names the run, and with it the nodes' personal state;
    `host` says what the server's machine has of its own; `submitter` owns the run.
    """
    experiment = import_experiment(text, reach=host.reach)  # refused before anything is written
    folder.mkdir(0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)  # reports and models of many sites: for the server's own account alone
    methods = served_methods(experiment, only)
    digests = {label: handshake.method_fingerprint(method) for label, method in methods.items()}
    seeds = len(experiment.seeds)
    registry = NodeRegistry(
        messenger, run, text, digests, seeds, folder / "roster.json", submitter=submitter
    )
    if watch is not None:
        registry.say = watch.note
    rules = {table.aggregate.name for table in experiment.methods if table.aggregate}
    registry.gather(experiment.data.normalise, bool(rules & (set(RULES) - {"mean"})))
    if watch is not None:
        for text in registry.remarks:
            watch.note(text)  # before round 1
    blank = _described(registry, folder, seeds)
    public = None
    if any(method.public == "server" for method in methods.values()):
        found = host.public_examples(text, registry.first)
        public = None if found is None else [_scaled(found, own) for own in blank]
    jobs = _jobs(experiment, methods, run, registry, public, host.reach)
    for job in jobs:  # before the experiment that the folder holds is replaced
        if (path := run_state.checkpoint_path(folder, job.label)).exists():
            run_state.load(path, job.identity, job.place)
    write_whole(folder / EXPERIMENT, text.encode())
    run_files.save_scaling(folder, dict(zip(experiment.seeds, blank, strict=True)))
    document = run_jobs(jobs, folder, _about(experiment, registry), resume=True, watch=watch)
    registry.close()
    if not any(has(method, Privacy) for method in methods.values()):
        messenger.transport.leave_heads(folder)  # else they would tell who was drawn how often
    return document


def served_methods(experiment: Experiment, only: Sequence[str] = ()) -> dict[str, Method]:
    """Return the experiment's methods by label; refuse what a federation of nodes cannot run."""
    if experiment.data.common_test:
        raise ConfigError("data.common_test is for simulations; nodes are scored on their own rows")
    if experiment.attack is not None:
        raise ConfigError("[attack] is for simulations; take it out to serve a real federation")
    if experiment.unseen:
        raise ConfigError(
            "unseen is for simulations; take it out, and leave sites out, who are newcomers later"
        )
    for table in experiment.methods:
        if table.refit and not has(made_method(table), Refit):
            raise ConfigError(
                f"{table.label_or_name}: refit is for simulations, and for portfolio; a site that "
                "has nothing left to choose gives its validation share as 0 in data.split"
            )
    methods = {
        table.label_or_name: made_method(table)
        for table in experiment.methods
        if not only or table.label in only
    }
    for label, method in methods.items():
        refuse_pooled(label, method)
        if experiment.bystanders == "train" and has(method, ArchitectureState):
            raise ConfigError(
                f'{label}: its server hears all who train; leave out bystanders = "train"'
            )
        if experiment.deploy.secure:
            secure_sum.refuse_unfit(label, method)
    return methods


def _jobs(
    experiment: Experiment,
    methods: Mapping[str, Method],
    run: str,
    registry: NodeRegistry,
    public: Sequence[Dataset] | None,
    reach: Permissions,
) -> list[RemoteJob]:
    form = registry.first.form
    shape, words = tuple(form.shape), tuple(form.words)
    classes = len(form.classes)
    bound = assign_networks(
        experiment,
        shape,
        classes,
        registry.clients,
        words,
        registry.names,
        reach,
        embedded_blocks(registry.agreement.encoders),
    )
    return [
        RemoteJob(
            label=table.label_or_name,
            name=table.name,
            method=methods[table.label_or_name],
            seeds=experiment.seeds,
            rounds=table.rounds or experiment.rounds,
            cohort=cohort_size(experiment.cohort, registry.clients),
            draw=experiment.draw,
            evaluate=Evaluate(**experiment.evaluate.of_job()),
            preset=table.preset or "",
            described={"model": experiment.model.model_dump(exclude_none=True)},
            run=run,
            registry=registry,
            architectures=bound,
            deploy=experiment.deploy,
            bystanders=experiment.bystanders,
            public=public if methods[table.label_or_name].public == "server" else None,
        ).settled()
        for table in experiment.methods
        if table.label_or_name in methods
    ]


def _about(experiment: Experiment, registry: NodeRegistry) -> dict[str, Any]:
    entry = registry.first
    return {
        "name": experiment.name,
        "data": {
            "source": entry.source or "the nodes' own data",
            "provenance": "",
            "classes": entry.form.classes,
            "clients": registry.clients,
            "federations": list(entry.descriptions),
        },
    }


def _described(registry: NodeRegistry, folder: Path, seeds: int) -> list[Dataset]:
    """Describe how examples are decoded under each seed, as a dataset of one blank example."""
    form, agreement = registry.first.form, registry.agreement
    blank = [form.blank(1, *own) for own in read_scalings(folder / "scaling.json", seeds)]
    if agreement.encoders:
        pairs = zip(blank, agreement.encoders, strict=True)
        blank = [dataclasses.replace(d, encoder=e, features=e.features) for d, e in pairs]
    if agreement.tasks:
        fitted = zip(blank, agreement.tasks, strict=True)
        blank = [dataclasses.replace(dataset, task=task) for dataset, task in fitted]
    return blank


def _scaled(public: Dataset, private: Dataset) -> Dataset:
    """Scale public examples that are rows of the clients' own source as those are."""
    if not public.unfitted:
        return public
    return dataclasses.replace(public, shift=private.shift, scale=private.scale, unfitted="")


_MOST = 32  # processes, each with a torch of its own
_FILE = "federation.json"


class _PrintProgress(Silent):
    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say

    def tick(self, tick: Tick) -> None:
        self._say(f"{tick.label}: round {tick.round} of {tick.rounds}")

    def note(self, text: str) -> None:
        self._say(f"note: {text}")


def local_sites(
    experiment: Experiment, folder: Path
) -> tuple[Experiment, list[NodeSettings], ServerSettings]:
    """Return a node for every client of an experiment's partition, all on this machine."""
    clients = build_federations(experiment)[0].clients
    if clients > _MOST:
        raise ConfigError(
            f"--on local would start {clients} processes, one a client; {_MOST} at most: use the "
            "simulator, or fewer clients"
        )
    source = experiment.data.source
    # Own files and own modules are the user's, who sits at this very machine.
    given = experiment.data.public
    public = None if given is None or given.source in SOURCES else given.source
    own = trust_named_code(experiment.model_dump())
    settings: dict[str, Any] = {"packages": own.packages, "folders": own.folders, "public": public}
    deploy = experiment.deploy.model_copy(update={"packages": own.packages})
    experiment = experiment.model_copy(update={"deploy": deploy})
    sites = [
        # One machine's own data: no site whose limits would protect it from another.
        NodeSettings(
            f"node-{n}",
            "local",
            folder / "nodes" / f"node-{n}",
            source,
            {} if source in SOURCES else experiment.data.options,
            client=n,
            policy=UNLIMITED,
            **settings,
        )
        for n in range(clients)
    ]
    return experiment, sites, ServerSettings(**settings)


def run_local(
    experiment: Experiment, folder: Path, only: Sequence[str], say: Callable[[str], None]
) -> Path:
    """Run an experiment with a process for every client of its partition."""
    experiment, sites, host = local_sites(experiment, folder)
    path = folder / _FILE
    run = json.loads(path.read_text())["run"] if path.exists() else uuid.uuid4().hex[:12]
    write_whole(path, json.dumps({"run": run, "federation": "local"}).encode())
    transport = Processes(sites)
    say(f"{len(sites)} nodes start, a process each; their state is in {folder / 'nodes'}")
    try:
        text = export_experiment(experiment)
        calls, watch = make_messenger(transport, text, folder, host), _PrintProgress(say)
        serve(calls, text, run, folder, only=only, watch=watch, host=host)
    finally:
        transport.close()
    return folder
