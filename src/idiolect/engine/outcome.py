"""What training one method over all seeds amounts to: scores, curves, traffic, time."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray

Scores = dict[str, NDArray[Any]]
"""Arrays by `model/metric`, in curves by `split/model/metric`."""


RIGHT = "right_by_group"
"""The metric that is no single figure: right answers in groups of a client's test rows, [group]."""


@dataclass(frozen=True, eq=False)
class Members:
    """Who took part under one seed, and with how much data."""

    seed: int
    names: tuple[str, ...]
    train: tuple[int, ...]  # [client] examples
    test: tuple[int, ...]
    description: str = ""  # of the federation
    networks: tuple[str, ...] = ()  # [client] what each runs; empty where all run the same


@dataclass(frozen=True, eq=False)
class Wire:
    """What crossed the network under one seed, all rounds together."""

    participations: int = 0  # clients summed over rounds
    bytes_down: int = 0
    bytes_up: int = 0
    public_bytes: int = 0  # the public examples, to each client once; not in `bytes_down`

    def __add__(self, more: "Wire") -> "Wire":
        """Add what crossed at another time."""
        return Wire(
            self.participations + more.participations,
            self.bytes_down + more.bytes_down,
            self.bytes_up + more.bytes_up,
            self.public_bytes + more.public_bytes,
        )


@dataclass(frozen=True, eq=False)
class Speed:
    """Where time went; the only figures that two equal runs do not share."""

    examples: int = 0  # trained on, all seeds together
    train_seconds: float = 0.0
    judge_seconds: float = 0.0

    @property
    def examples_per_second(self) -> float:
        """Examples trained on in a second of training."""
        return self.examples / self.train_seconds if self.train_seconds else 0.0

    def share(self, part: float) -> "Speed":
        """Give the time of a part of the seeds, which were trained together."""
        return Speed(
            round(self.examples * part), self.train_seconds * part, self.judge_seconds * part
        )


@dataclass(frozen=True, eq=False)
class Outcome:
    """One method, trained and scored; arrays are [seed, client], curves [evaluation, seed, client].

    `final` is the score on test data after the last round, the only one taken as the result.
    """

    label: str
    about: Mapping[str, Any]  # the method's name, title, paper, settings; device and backend
    members: tuple[Members, ...]
    rounds: int
    evaluated: tuple[int, ...]  # the rounds after which curves have a point
    curves: Scores
    final: Scores
    facts: Scores
    wire: tuple[Wire, ...]
    speed: Speed
    notices: tuple[str, ...] = field(default=())
    watched: tuple[NDArray[Any], ...] = ()  # per seed the clients curves are of; empty: all
    scored: tuple[NDArray[Any], ...] = ()  # per seed those with a final score, others have NaN
    left_out: tuple[Mapping[str, int], ...] = ()  # per seed: client -> rounds it was left out of
    took_part: tuple[NDArray[Any], ...] = ()  # per seed: [client] in some round; empty: not known
    reasons: tuple[tuple[str, ...], ...] = ()  # per seed: each client's facts in words; or none

    @property
    def models(self) -> list[str]:
        """The models that were scored, `personal` first."""
        names = sorted({key.split("/")[0] for key in self.final})
        return sorted(names, key=lambda name: (name != "personal", name != "global", name))

    @property
    def headline(self) -> str:
        """The model whose score is quoted: the personal one."""
        return self.models[0]
