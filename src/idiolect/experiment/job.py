"""A job: one method on all seeds, with its data, networks and settings; no files, no output."""

import dataclasses
import functools
import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray

from idiolect.core import capabilities
from idiolect.core.method import Method, RunPlan
from idiolect.core.metrics import CLASSES, LABELS, metric
from idiolect.core.task import Classes
from idiolect.core.tree import Tree
from idiolect.data.federation import Federation, TestData
from idiolect.engine import sampling
from idiolect.engine.architecture import Architecture, labels
from idiolect.engine.backend import Backend
from idiolect.engine.evaluation import ClientScores
from idiolect.engine.outcome import Members
from idiolect.engine.rounds import Round, SeededRun, Simulation
from idiolect.engine.row_metrics import VALIDATION, MetricChoice
from idiolect.errors import ConfigError, DataError

_SAMPLED = 256  # examples in a federation's digest: enough to detect another file, cheap to read

PERSONAL = ("auto", "always", "never")


@dataclass(frozen=True)
class Evaluate:
    """When models are evaluated during training, and what is kept."""

    every: int = 1  # rounds between points of the validation curve
    personal: str = "auto"  # also personal models; auto: not where deploy trains
    test_curve: bool = False  # also on test data; nothing is ever chosen by it
    train_curve: bool = False  # also on training data
    keep_globals: bool = False  # keep the server's state of every round, for newcomers
    save_models: bool = True  # write what every client deploys
    clients: int | None = None  # how many curves are of, always the same ones; None: all
    final_clients: int | None = None  # how many are evaluated at the end; None: all
    trace: int = 0  # rounds between records of the server's trace; 0: as `every`
    metric: str | None = None  # what gives the verdict; None: the task's own
    precision: float = 0.9  # of the metric "recall_at_precision"
    threshold: float | str | None = None  # from which a row is positive; None: the likelier answer
    curves: bool = True  # evaluate during training at all; a trial of settings need not
    detail: bool = True  # at the end all metrics of the task; else the chosen one

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ConfigError(f"evaluate.every is {self.every}, expected at least 1")
        for name, count in (("clients", self.clients), ("final_clients", self.final_clients)):
            if count is not None and count < 1:
                raise ConfigError(f"evaluate.{name} is {count}, expected at least 1")
        if self.personal not in PERSONAL:
            raise ConfigError(
                f"evaluate.personal is {self.personal!r}, expected one of {', '.join(PERSONAL)}"
            )
        if isinstance(self.threshold, str) and self.threshold != VALIDATION:
            raise ConfigError(
                f"evaluate.threshold is {self.threshold!r}, expected a probability or "
                f"{VALIDATION!r}"
            )

    @property
    def watches(self) -> bool:
        """Whether curves are of more than validation data."""
        return self.test_curve or self.train_curve

    def choice(self, kind: str) -> MetricChoice:
        """Return what is measured for a kind of task."""
        name = metric(self.metric or "", kind).name
        if self.threshold is not None and kind not in (CLASSES, LABELS):
            raise ConfigError(
                f"evaluate.threshold is for classes, and the task is {kind}; leave it out"
            )
        return MetricChoice(name, kind, self.precision, self.threshold)


class Rounds(Protocol):
    """What trains all seeds of a job: a simulation, or the hub of a real federation."""

    round: int
    notices: list[str]
    tree: Tree
    widths: Mapping[str, int]

    def advance(self) -> Round:
        """Run one round of every seed."""

    def evaluate(
        self,
        test_data: Sequence[TestData] | None = None,
        *,
        only_global: bool = False,
        keep: bool = False,
        adapt: bool = True,
        choice: MetricChoice | None = None,
        detail: bool = False,
    ) -> list[ClientScores]:
        """Evaluate every client on validation data, or on test and validation data.

        With `adapt`, clients that took part in no round adapt as newcomers do. The metric of a
        `choice` is among the scores, with `detail` all of its task's.
        """

    def padding(self) -> float:
        """Return the largest share of padding in the last round."""

    def remarks(self) -> list[str]:
        """Return warnings about what failed and was tolerated."""

    def strangers(self, run: int) -> np.ndarray:
        """Return the clients that took part in no round of a seed."""

    def unscored(self, run: int) -> np.ndarray:
        """Return the clients that were not there at the last evaluation of a seed."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Job(ABC):
    """One method on all seeds, wherever its clients are."""

    label: str  # unique within the experiment
    name: str  # the method's registered name, or its class
    method: Method
    seeds: tuple[int, ...]
    architectures: Mapping[str, Architecture]
    rounds: int
    cohort: int | None = None  # clients a round; None: all
    draw: str = "fixed"  # how a cohort is drawn
    bystanders: str = "rest"  # what clients outside the cohort do
    unseen: int = 0  # clients that take part in no round
    backend: Backend = field(default_factory=Backend)
    evaluate: Evaluate = field(default_factory=Evaluate)
    checkpoint_every: int = 0  # rounds; 0: every few seconds
    preset: str = ""  # the name of the settings, if they have one
    described: Mapping[str, Any] = field(default_factory=dict)  # data and model, as JSON
    releases: int = 0  # seeds of the whole experiment, of which these may be a part; 0: these

    federated: ClassVar[bool] = False  # whether clients are nodes elsewhere

    def __post_init__(self) -> None:
        object.__setattr__(self, "releases", self.releases or len(self.seeds))

    def settled(self) -> Self:
        """Fit the method to who takes part and how often, before training."""
        method, rounds = capabilities.settled(self.method, self.plan(self.rounds))
        return dataclasses.replace(self, method=method, rounds=rounds)

    def plan(self, rounds: int) -> RunPlan:
        """Return who takes part in how many rounds; of several seeds the one with fewest able."""
        able = min(sum(size > 0 for size in members.train) for members in self.members)
        able -= 0 if self.method.alone else self.unseen
        return RunPlan(rounds, able, self.cohort, self.draw, self.releases, self.federated)

    @property
    def kept_out(self) -> list[NDArray[Any]]:
        """Return each seed's clients that `unseen` keeps out of all rounds."""
        many = 0 if self.method.alone else self.unseen
        return [
            sampling.kept_out(own.seed, np.flatnonzero(own.train), many) for own in self.members
        ]

    @property
    def task(self) -> str:
        """The kind of task."""
        return CLASSES

    @property
    def choice(self) -> MetricChoice:
        """What is measured."""
        return self.evaluate.choice(self.task)

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
    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """All that decides the rounds and their record, apart from their number."""

    @property
    @abstractmethod
    def members(self) -> tuple[Members, ...]:
        """Who takes part under each seed."""

    @property
    @abstractmethod
    def test_data(self) -> Sequence[TestData]:
        """The test data; empty where clients keep it to themselves."""

    @property
    @abstractmethod
    def validated(self) -> bool:
        """Whether some client has validation data under every seed."""

    @property
    def follows(self) -> bool:
        """Whether curves are taken on validation rows: on such that nothing was trained on."""
        return self.validated and not capabilities.trains_on_validation(self.method)

    @property
    @abstractmethod
    def place(self) -> str:
        """The device clients run on, for the result."""

    def attendance(self, rounds: int) -> tuple[Sequence[Mapping[str, str]], ...]:
        """Return who did what in each round of each seed; empty where all are always there."""
        return ()

    @abstractmethod
    def warnings(self) -> list[str]:
        """List what is legal but noteworthy about the data."""

    @abstractmethod
    def trains_as(self, other: "Job") -> bool:
        """Return whether another job's rounds are exactly those of this one."""

    @abstractmethod
    def simulation(self, personal: Path | None = None) -> Rounds:
        """Make what runs the rounds; `personal` is the folder for personal state on disk."""


@dataclass(frozen=True, eq=False, kw_only=True)
class SimulatedJob(Job):
    """A job whose clients are simulated here."""

    federations: tuple[Federation, ...]  # one for each seed

    def __post_init__(self) -> None:
        super().__post_init__()
        sizes = sorted({federation.clients for federation in self.federations})
        if len(sizes) > 1:
            raise DataError(
                f"the seeds give federations of {sizes[0]} and {sizes[-1]} clients, which cannot "
                "be trained together; fix data.seed, or run the seeds one by one"
            )

    @functools.cached_property
    def identity(self) -> dict[str, Any]:
        """All that decides the rounds and their record, apart from their number."""
        return {
            "method": self.name,
            "settings": self.settings,
            "seeds": list(self.seeds),
            "cohort": self.cohort,
            **({} if self.draw == "fixed" else {"draw": self.draw}),
            **({} if self.bystanders == "rest" else {"bystanders": self.bystanders}),
            **({"unseen": self.unseen} if self.unseen else {}),
            **self.described,
            "evaluate": {
                "every": self.evaluate.every,
                "personal": self.evaluate.personal,
                "test_curve": self.evaluate.test_curve,
                **({"train_curve": True} if self.evaluate.train_curve else {}),
                **({"clients": self.evaluate.clients} if self.evaluate.clients else {}),
                **self._measured(),
            },
            "rows": [_digest(federation) for federation in self.federations],
        }

    @property
    def task(self) -> str:
        """The kind of task."""
        return self.federations[0].dataset.task.kind

    def _measured(self) -> dict[str, Any]:
        """Return what differs from the usual in what is measured."""
        asked = self.evaluate
        usual = metric("", self.task).name
        return {
            **({"metric": asked.metric} if asked.metric not in (None, usual) else {}),
            **({"threshold": asked.threshold} if asked.threshold is not None else {}),
            **({"precision": asked.precision} if asked.metric == "recall_at_precision" else {}),
        }

    def trains_as(self, other: Job) -> bool:
        """Return whether another job's rounds, and their record, are exactly those of this one."""
        return (
            isinstance(other, SimulatedJob)
            # The objects, not their description, which a job made by hand may lack.
            and self.federations == other.federations
            and self.architectures == other.architectures
            and self.method.training() == other.method.training()
            and (self.only_global or self.method == other.method)
            and (self.rounds, self.backend) == (other.rounds, other.backend)
            and _without_method(self.identity) == _without_method(other.identity)
        )

    @functools.cached_property
    def members(self) -> tuple[Members, ...]:
        """Who takes part under each seed."""
        return tuple(
            Members(
                seed,
                federation.names,
                tuple(len(rows) for rows in federation.train),
                tuple(len(rows) for rows in federation.test),
                federation.description,
                labels(self.architectures, federation.clients),
            )
            for seed, federation in zip(self.seeds, self.federations, strict=True)
        )

    @property
    def test_data(self) -> list[TestData]:
        """The test data of each seed."""
        return [federation.test_data for federation in self.federations]

    @property
    def trained_data(self) -> list[TestData]:
        """The training rows of each seed, to be scored as test rows are."""
        return [
            TestData(federation.dataset, federation.train, federation.names)
            for federation in self.federations
        ]

    @functools.cached_property
    def validated(self) -> bool:
        """Whether some client has validation data under every seed."""
        return all(any(len(rows) for rows in held.val) for held in self.federations)

    @property
    def place(self) -> str:
        """The device clients run on, for the result."""
        if self.backend.kind == "ray":
            return f"Ray, {self.backend.ray.workers or 'all'} workers"
        place = self.backend.place
        return torch.cuda.get_device_name(place) if place.type == "cuda" else place.type

    def warnings(self) -> list[str]:
        """List what is legal but noteworthy about the data."""
        return [text for federation in self.federations for text in federation.warnings()]

    def simulation(self, personal: Path | None = None) -> Simulation:
        """Make the simulation. It gets training data only: no test row is within its reach."""
        runs = [
            SeededRun(s, f.train_data) for s, f in zip(self.seeds, self.federations, strict=True)
        ]
        return Simulation(
            self.method,
            runs,
            self.architectures,
            cohort=self.cohort,
            draw=self.draw,
            bystanders=self.bystanders,
            unseen=self.unseen,
            backend=self.backend,
            state_folder=personal,
            rounds=self.rounds,
        )


def _without_method(identity: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in identity.items() if key not in ("method", "settings")}


def _digest(federation: Federation) -> str:
    """Fingerprint who holds which rows with which labels, and a sample of the examples."""
    digest = hashlib.sha256()
    dataset = federation.dataset
    digest.update("\n".join(dataset.words).encode())
    for values in (dataset.shift, dataset.scale, dataset.x[:: -(-len(dataset) // _SAMPLED)]):
        digest.update(np.ascontiguousarray(values).tobytes())
    for part in (federation.train, federation.val, federation.test):
        for rows in part:
            digest.update(f"{len(rows)};".encode())
            digest.update(rows.astype(np.int64).tobytes())
            y = dataset.y[rows]
            whole = y.dtype.kind in "iub"
            digest.update(y.astype(np.int64 if whole else np.float32).tobytes())
    if dataset.task != Classes():
        digest.update(json.dumps(dataset.task.to_json()).encode())
    return digest.hexdigest()[:16]
