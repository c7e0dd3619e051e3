"""A whole experiment over nodes: the same rounds, checkpoints and results as a simulation."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from idiolect.aggregation import RULES
from idiolect.core.checkpoint import write_whole
from idiolect.core.method import Method
from idiolect.data import Dataset
from idiolect.data.federation import TestData
from idiolect.deploy import fingerprints, fixed_point
from idiolect.deploy.handshake import Roster, scalings
from idiolect.deploy.hub import Hub, refuse_pooled
from idiolect.deploy.messenger import Ledger, Policy, Post
from idiolect.deploy.ownership import NOBODY
from idiolect.deploy.server_data import HOST, Host
from idiolect.deploy.transport import Transport
from idiolect.engine.architecture import Architecture, labels
from idiolect.engine.backend import Backend
from idiolect.engine.callbacks import Watch
from idiolect.engine.outcome import Members
from idiolect.errors import ConfigError
from idiolect.experiment import run_state
from idiolect.experiment.build import cohort_size
from idiolect.experiment.components import assign_networks
from idiolect.experiment.components import build_method as made_method
from idiolect.experiment.job import Evaluate, plan_of
from idiolect.experiment.portable import import_experiment
from idiolect.experiment.run import EXPERIMENT
from idiolect.experiment.run import run_jobs as run_courses
from idiolect.experiment.schema import Deployment, Experiment
from idiolect.experiment.untrusted import Permissions
from idiolect.results import data_record
from idiolect.results.document import Document


@dataclass(frozen=True, eq=False)
class RemoteCourse:
    """One method on all seeds, trained by nodes; a `runner.course.Course`."""

    label: str
    name: str
    method: Method
    seeds: tuple[int, ...]
    rounds: int
    cohort: int | None
    draw: str
    evaluate: Evaluate
    preset: str
    described: Mapping[str, Any]
    run: str
    post: Post
    roster: Roster
    architectures: Mapping[str, Architecture]
    checkpoint_every: int = 1  # whatever happens, no more than one round is done again
    backend: Backend = field(default_factory=lambda: Backend("sequential", "cpu"))
    exams: Sequence[TestData] = ()
    deploy: Deployment = field(default_factory=Deployment)
    bystanders: str = "rest"
    public: Sequence[Dataset] | None = None  # the server's own, by seed

    federated: ClassVar[bool] = True

    @property
    def releases(self) -> int:
        """How often the nodes' data are trained on."""
        return len(self.seeds)

    def settled(self) -> "RemoteCourse":
        """Fit the method to who takes part and how often, before anything is trained."""
        method, rounds = self.method.settled(plan_of(self, self.rounds))
        return dataclasses.replace(self, method=method, rounds=rounds)

    @property
    def identity(self) -> dict[str, Any]:
        """All that decides the course of training; the nodes' data is the roster's to compare."""
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
    def settings(self) -> dict[str, Any]:
        """The method's hyper-parameters."""
        return self.method.settings()

    @property
    def only_global(self) -> bool:
        """Whether curves leave the personal models out."""
        wanted = self.evaluate.personal
        return wanted == "never" or (wanted == "auto" and self.method.tunes)

    @property
    def members(self) -> tuple[Members, ...]:
        """Who takes part under each seed."""
        own = f"{self.roster.clients} sites, each with data of its own"
        return tuple(
            Members(
                seed,
                self.roster.names,
                tuple(self.roster.sizes(0, run)),
                tuple(self.roster.sizes(2, run)),
                self.roster.first.descriptions[run] or own,
                labels(self.architectures, self.roster.clients),
            )
            for run, seed in enumerate(self.seeds)
        )

    @property
    def validated(self) -> bool:
        """Whether some node has validation data under every seed."""
        return all(any(self.roster.sizes(1, run)) for run in range(len(self.seeds)))

    @property
    def place(self) -> str:
        """The machine clients are run on, in words."""
        return "nodes"

    def warnings(self) -> list[str]:
        """List nodes without data of a kind."""
        told = []
        for part, word in enumerate(("train", "val", "test")):
            empty = [
                name
                for name, size in zip(self.roster.names, self.roster.sizes(part, 0), strict=True)
                if not size
            ]
            if empty:
                told.append(
                    f"{len(empty)} of {self.roster.clients} clients have no {word} row: {empty[0]}"
                )
        return told

    def trains_as(self, other: Any) -> bool:
        """Say no: personal state is kept by label, so every method does its own rounds."""
        return False

    def simulation(self) -> Hub:
        """Make the hub."""
        return Hub(
            self.label,
            self.method,
            self.seeds,
            self.run,
            self.post,
            self.roster,
            self.architectures,
            self.cohort,
            self.draw,
            self.deploy,
            self.public,
            self.bystanders,
        )


def post(transport: Transport, text: str, folder: Path, host: Host = HOST) -> Post:
    """Make the hub's post, with the experiment's patience and the run's memory of failures."""
    deploy = import_experiment(text, reach=host.reach).deploy
    policy = Policy(
        deploy.timeout, deploy.join, deploy.minimum, deploy.patience, deploy.limit_mb << 20
    )
    return Post(transport, policy, Ledger(folder / "faults.json"))


def serve(
    post: Post,
    text: str,
    run: str,
    folder: Path,
    *,
    only: Sequence[str] = (),
    watch: Watch | None = None,
    host: Host = HOST,
    submitter: str = NOBODY,
) -> Document:
    """Run an experiment over the hub's post, going on from what the folder holds of the same run.

    `text` is the experiment as TOML; `run` names the run, and with it the nodes' personal state;
    `host` says what the server's machine has of its own; `submitter` owns the run.
    """
    experiment = import_experiment(text, reach=host.reach)  # refused before anything is written
    folder.mkdir(0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)  # reports and models of many sites: for the server's own account alone
    methods = served_methods(experiment, only)
    digests = {label: fingerprints.of_method(method) for label, method in methods.items()}
    seeds = len(experiment.seeds)
    roster = Roster(post, run, text, digests, seeds, folder / "roster.json", submitter=submitter)
    rules = {table.aggregate.name for table in experiment.methods if table.aggregate}
    roster.gather(experiment.data.normalise, bool(rules & (set(RULES) - {"mean"})))
    blank = _described(roster, folder, seeds)
    public = None
    if any(method.public == "server" for method in methods.values()):
        found = host.public_examples(text, roster.first)
        public = None if found is None else [_scaled(found, own) for own in blank]
    courses = _courses(experiment, methods, run, post, roster, public, host.reach)
    for course in courses:  # before the experiment that the folder holds is replaced
        if (path := run_state.checkpoint_path(folder, course.label)).exists():
            run_state.load(path, course.identity, course.place)
    write_whole(folder / EXPERIMENT, text.encode())
    data_record.save_scaling(folder, dict(zip(experiment.seeds, blank, strict=True)))
    return run_courses(courses, folder, _about(experiment, roster), resume=True, watch=watch)


def served_methods(experiment: Experiment, only: Sequence[str] = ()) -> dict[str, Method]:
    """Make the experiment's methods by label, or say why a federation of nodes cannot run it."""
    if experiment.data.common_test:
        raise ConfigError("data.common_test is for simulations; nodes are scored on their own rows")
    if experiment.attack is not None:
        raise ConfigError("[attack] is for simulations; take it out to serve a real federation")
    methods = {
        table.label or table.name: made_method(table)
        for table in experiment.methods
        if not only or table.label in only
    }
    for label, method in methods.items():
        refuse_pooled(label, method)
        if experiment.bystanders == "train" and method.grouped:
            raise ConfigError(
                f'{label}: its server hears all who train; leave out bystanders = "train"'
            )
        if experiment.deploy.secure:
            fixed_point.refuse_unfit(label, method)
    return methods


def _courses(
    experiment: Experiment,
    methods: Mapping[str, Method],
    run: str,
    post: Post,
    roster: Roster,
    public: Sequence[Dataset] | None,
    reach: Permissions,
) -> list[RemoteCourse]:
    form = roster.first.form
    shape, words = tuple(form.shape), tuple(form.words)
    classes = len(form.classes)
    bound = assign_networks(experiment, shape, classes, roster.clients, words, roster.names, reach)
    return [
        RemoteCourse(
            label=table.label or table.name,
            name=table.name,
            method=methods[table.label or table.name],
            seeds=experiment.seeds,
            rounds=table.rounds or experiment.rounds,
            cohort=cohort_size(experiment.cohort, roster.clients),
            draw=experiment.draw,
            evaluate=Evaluate(**experiment.evaluate.model_dump()),
            preset=table.preset or "",
            described={"model": experiment.model.model_dump(exclude_none=True)},
            run=run,
            post=post,
            roster=roster,
            architectures=bound,
            deploy=experiment.deploy,
            bystanders=experiment.bystanders,
            public=public if methods[table.label or table.name].public == "server" else None,
        ).settled()
        for table in experiment.methods
        if (table.label or table.name) in methods
    ]


def _about(experiment: Experiment, roster: Roster) -> dict[str, Any]:
    entry = roster.first
    return {
        "name": experiment.name,
        "data": {
            "source": entry.source or "the nodes' own data",
            "provenance": "",
            "classes": entry.form.classes,
            "clients": roster.clients,
            "federations": list(entry.descriptions),
        },
    }


def _described(roster: Roster, folder: Path, seeds: int) -> list[Dataset]:
    """Describe how examples are decoded under each seed, as a dataset of one blank example."""
    known = scalings(folder / "scaling.json", seeds)
    return [roster.first.form.blank(1, shift, scale) for shift, scale in known]


def _scaled(public: Dataset, private: Dataset) -> Dataset:
    """Scale public examples that are rows of the clients' own source as those are."""
    if not public.unfitted:
        return public
    return dataclasses.replace(public, shift=private.shift, scale=private.scale, unfitted="")
