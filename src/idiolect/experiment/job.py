"""What it takes to run one method: data, networks, settings; nothing of files or screens."""

import dataclasses
import functools
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np
import torch

from idiolect.core import wrap
from idiolect.core.method import Method, RunPlan
from idiolect.core.tree import Tree
from idiolect.data.federation import Federation, TestData
from idiolect.engine.architecture import Architecture, labels
from idiolect.engine.backend import Backend
from idiolect.engine.evaluation import ClientScores
from idiolect.engine.outcome import Members
from idiolect.engine.rounds import Round, SeededRun, Simulation
from idiolect.errors import ConfigError, DataError

_SAMPLED = 256  # examples that stand for all: enough to tell another file, cheap to read

PERSONAL = ("auto", "always", "never")


@dataclass(frozen=True)
class Evaluate:
    """When models are scored along the way, and what is kept."""

    every: int = 1  # rounds between points of the validation curve
    personal: str = "auto"  # score personal models too: auto leaves out methods whose deploy trains
    test_curve: bool = False  # also score on test data; nothing is ever chosen by it
    keep_globals: bool = False  # keep the server's state of every round, for newcomers
    save_models: bool = True  # write what every client deploys
    clients: int | None = None  # how many are scored along the way, the same ones; None: all
    final_clients: int | None = None  # how many are scored at the end; None: all
    trace: int = 0  # rounds between records of what the server's state says; 0: as `every`

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


@dataclass(frozen=True, eq=False)
class Job:
    """One method on all seeds."""

    label: str
    name: str  # the method's registered name, or its class
    method: Method
    seeds: tuple[int, ...]
    federations: tuple[Federation, ...]  # one for each seed
    architectures: Mapping[str, Architecture]
    rounds: int
    cohort: int | None = None
    draw: str = "fixed"  # how a cohort is drawn
    bystanders: str = "rest"  # what clients outside the cohort do
    backend: Backend = field(default_factory=Backend)
    evaluate: Evaluate = field(default_factory=Evaluate)
    checkpoint_every: int = 0  # rounds; 0: every few seconds
    preset: str = ""  # where the settings came from, if they have a name
    described: Mapping[str, Any] = field(default_factory=dict)  # data and model, as JSON
    releases: int = 0  # seeds of the whole experiment, of which these may be a part; 0: these

    federated: ClassVar[bool] = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "releases", self.releases or len(self.seeds))
        sizes = sorted({federation.clients for federation in self.federations})
        if len(sizes) > 1:
            raise DataError(
                f"the seeds give federations of {sizes[0]} and {sizes[-1]} clients, which cannot "
                "be trained together; fix data.seed, or run the seeds one by one"
            )

    def settled(self) -> "Job":
        """Fit the method to who takes part and how often, before anything is trained."""
        method, rounds = wrap.settled(self.method, plan_of(self, self.rounds))
        return dataclasses.replace(self, method=method, rounds=rounds)

    @functools.cached_property
    def identity(self) -> dict[str, Any]:
        """All that decides the course of training and its record, apart from how far it goes."""
        return {
            "method": self.name,
            "settings": self.settings,
            "seeds": list(self.seeds),
            "cohort": self.cohort,
            **({} if self.draw == "fixed" else {"draw": self.draw}),
            **({} if self.bystanders == "rest" else {"bystanders": self.bystanders}),
            **self.described,
            "evaluate": {
                "every": self.evaluate.every,
                "personal": self.evaluate.personal,
                "test_curve": self.evaluate.test_curve,
                **({"clients": self.evaluate.clients} if self.evaluate.clients else {}),
            },
            "rows": [_digest(federation) for federation in self.federations],
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

    def trains_as(self, other: "Job") -> bool:
        """Say whether another job's rounds, and their record, are the very ones this one needs."""
        return (
            # The things themselves, not their description, which a job made by hand may lack.
            self.federations == other.federations
            and self.architectures == other.architectures
            and self.method.training() == other.method.training()
            and (self.only_global or self.method == other.method)
            and self._course == other._course
        )

    @property
    def _course(self) -> dict[str, Any]:
        """All that decides the rounds apart from the method."""
        own = {
            key: value for key, value in self.identity.items() if key not in ("method", "settings")
        }
        return {**own, "rounds": self.rounds, "backend": self.backend}

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
    def exams(self) -> list[TestData]:
        """What the final scores are taken on."""
        return [federation.test_data for federation in self.federations]

    @functools.cached_property
    def validated(self) -> bool:
        """Whether some client has validation data under every seed."""
        return all(any(len(rows) for rows in held.val) for held in self.federations)

    @property
    def place(self) -> str:
        """The machine clients are run on, in words."""
        if self.backend.kind == "ray":
            return f"Ray, {self.backend.ray.workers or 'all'} workers"
        place = self.backend.place
        return torch.cuda.get_device_name(place) if place.type == "cuda" else place.type

    def warnings(self) -> list[str]:
        """List what is legal but worth knowing of the data."""
        return [text for federation in self.federations for text in federation.warnings()]

    def simulation(self, shelf: Path | None = None) -> Simulation:
        """Make the simulation. It is handed lessons only: no test row is within its reach.

        `shelf` is the folder for personal state that is kept on disk.
        """
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
            backend=self.backend,
            shelf=shelf,
        )


class Planned(Protocol):
    """The part of a course that a plan is made of."""

    @property
    def cohort(self) -> int | None:
        """Clients a round."""

    @property
    def draw(self) -> str:
        """How they are drawn."""

    @property
    def members(self) -> tuple[Members, ...]:
        """Who takes part under each seed."""

    @property
    def releases(self) -> int:
        """How often the same clients' data are trained on."""

    @property
    def federated(self) -> bool:
        """Whether clients are nodes elsewhere."""


def plan_of(course: Planned, rounds: int) -> RunPlan:
    """Say who takes part; of several seeds the one with the fewest clients that can."""
    able = min(sum(size > 0 for size in members.train) for members in course.members)
    return RunPlan(rounds, able, course.cohort, course.draw, course.releases, course.federated)


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
            digest.update(federation.dataset.y[rows].astype(np.int64).tobytes())
    return digest.hexdigest()[:16]


# What a run needs of those who do its rounds: a simulation, or the hub of a real federation.


class Rounds(Protocol):
    """Someone who advances all seeds of a method round by round, and scores them when asked."""

    round: int
    notices: list[str]
    tree: Tree
    widths: Mapping[str, int]

    def advance(self) -> Round:
        """Do one round of every seed."""

    def judge(
        self,
        exams: Sequence[TestData] | None = None,
        *,
        only_global: bool = False,
        keep: bool = False,
        adapt: bool = True,
    ) -> list[ClientScores]:
        """Score every client on validation data, or on an exam and validation data both.

        Clients that took part in no round adapt as newcomers do, or have no score of their own.
        """

    def padding(self) -> float:
        """Return the largest share of padding in the last round."""

    def remarks(self) -> list[str]:
        """Tell what went wrong along the way and was put up with."""

    def strangers(self, run: int) -> np.ndarray:
        """Return the clients that took part in no round of a seed."""


class Course(Protocol):
    """One method on all seeds, wherever its clients are."""

    # Read-only, so that a frozen job will do.
    @property
    def label(self) -> str:
        """What the user calls it."""

    @property
    def name(self) -> str:
        """The method's registered name."""

    @property
    def method(self) -> Method:
        """The method."""

    @property
    def seeds(self) -> tuple[int, ...]:
        """One run each."""

    @property
    def rounds(self) -> int:
        """How many rounds there shall be."""

    @property
    def cohort(self) -> int | None:
        """Clients a round; None: everyone."""

    @property
    def draw(self) -> str:
        """How a cohort is drawn."""

    @property
    def backend(self) -> Backend:
        """Where clients are run."""

    @property
    def evaluate(self) -> Evaluate:
        """When models are scored."""

    @property
    def checkpoint_every(self) -> int:
        """Rounds between checkpoints; 0: every few seconds."""

    @property
    def preset(self) -> str:
        """Where the settings came from, if they have a name."""

    @property
    def described(self) -> Mapping[str, Any]:
        """Data and model, as JSON."""

    @property
    def identity(self) -> dict[str, Any]:
        """All that decides the course of training and its record."""

    @property
    def settings(self) -> dict[str, Any]:
        """The method's hyper-parameters."""

    @property
    def only_global(self) -> bool:
        """Whether curves leave the personal models out."""

    @property
    def members(self) -> tuple[Members, ...]:
        """Who takes part under each seed."""

    @property
    def releases(self) -> int:
        """How often the same clients' data are trained on: once for each seed."""

    @property
    def federated(self) -> bool:
        """Whether clients are nodes elsewhere: checkpoints are for the hub's eyes alone."""

    @property
    def exams(self) -> Sequence[TestData]:
        """What the final scores are taken on; empty where the clients keep it to themselves."""

    @property
    def validated(self) -> bool:
        """Whether some client has validation data under every seed."""

    @property
    def place(self) -> str:
        """The machine clients are run on, in words."""

    def warnings(self) -> list[str]:
        """List what is legal but worth knowing of the data."""

    def trains_as(self, other: Any) -> bool:
        """Say whether another course's rounds are the very ones this one needs."""

    def simulation(self) -> Rounds:
        """Make those who do the rounds."""
