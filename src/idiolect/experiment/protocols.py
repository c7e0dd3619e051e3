"""What a run needs of those who do its rounds: a simulation, or the hub of a real federation."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from idiolect.core.method import Method
from idiolect.core.tree import Tree
from idiolect.data.federation import TestData
from idiolect.engine.backend import Backend
from idiolect.engine.outcome import Members
from idiolect.engine.rounds import Round, Verdict
from idiolect.experiment.job import Evaluate


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
    ) -> list[Verdict]:
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
