"""The outcome of training one method over all seeds, and the callbacks that follow its progress."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from numpy.typing import NDArray

Scores = dict[str, NDArray[Any]]
"""Arrays by `model/metric`, in curves by `split/model/metric`."""


RIGHT = "right_by_group"
"""The metric that is no single figure: right answers in groups of a client's test rows, [group]."""

WITHOUT = "without_group"
"""The chosen metric without each group of a client's test rows in turn, [group]."""

EFFECTIVE = "effective_rows"
"""How many rows decide the chosen metric: those of the rarest class, events, or all."""

BY_GROUP = (RIGHT, WITHOUT)
THRESHOLD = "threshold"  # the probability from which a row is called positive, as a metric
BASELINE = "baseline"
"""The model that is none: the majority or the mean of a client's training rows."""


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
    metric: str = "accuracy"  # that chooses and gives the verdict
    task: str = "classes"  # the kind of task
    precision: float = 0.9  # of the metric "recall_at_precision"
    pooled: tuple[Mapping[str, Any], ...] = ()  # per seed, by model: all clients' rows together
    attendance: tuple[Sequence[Mapping[str, str]], ...] = ()  # of a federation: seed, round, site

    @property
    def models(self) -> list[str]:
        """The models that were scored, `personal` first."""
        names = sorted({key.split("/")[0] for key in self.final} - {BASELINE})
        return sorted(names, key=lambda name: (name != "personal", name != "global", name))

    @property
    def headline(self) -> str:
        """The model whose score is quoted: the personal one."""
        return self.models[0]


class Tick(NamedTuple):
    """Where a method stands after a round; NaN for a figure that is not known."""

    label: str
    round: int
    rounds: int
    loss: float  # on validation data, mean over clients and seeds, at the last evaluation
    accuracy: float
    examples_per_second: float
    seconds_left: float  # of the method's rounds; NaN before that can be said
    score: float = float("nan")  # the chosen metric on validation data
    metric: str = "accuracy"  # its name


class PlannedWork(NamedTuple):
    """A method that is going to be trained, and its share of the work, to estimate the time.

    A unit of work is a pass over the data of all clients under one seed.
    """

    label: str
    rounds: int
    round_work: float = 1.0
    final_work: float = 0.5  # after the rounds: adapting, exchanging, scoring
    times: int = 1  # so many, such as trials of settings: their labels begin with this one


class Stage(NamedTuple):
    """What a run is doing outside of its rounds, or within a long one."""

    name: str  # reading data, preparing, rounds, adapting, exchanging, scoring, writing
    label: str = ""  # of the method, where it is one's
    share: float = 0.0  # of the method's work after the rounds, or of the round, that is done
    done: float = 0.0  # clients
    clients: int = 0


class Watch(Protocol):
    """Callbacks of a run."""

    def plan(self, works: Sequence[PlannedWork]) -> None:
        """Take all that is going to be trained, as far as it is known."""

    def stage(self, stage: Stage) -> None:
        """Take that another stage has begun, or how far it is; a few times a second at most."""

    def begin(self, label: str, round: int, rounds: int) -> None:
        """A method starts, or goes on after `round`."""

    def tick(self, tick: Tick) -> None:
        """A round is over."""

    def scored(self, outcome: Callable[[], Outcome]) -> None:
        """There are new scores: after an evaluated round, and once more at the end.

        The outcome is made when it is called, which may be later and from any thread. Before the
        end it has curves but no final scores.
        """

    def note(self, text: str) -> None:
        """There is something the user should know."""

    def end(self, label: str, seconds: float) -> None:
        """A method is trained and scored."""


class Silent:
    """No callbacks."""

    def plan(self, works: Sequence[PlannedWork]) -> None:
        """Do nothing."""

    def stage(self, stage: Stage) -> None:
        """Do nothing."""

    def begin(self, label: str, round: int, rounds: int) -> None:
        """Do nothing."""

    def tick(self, tick: Tick) -> None:
        """Do nothing."""

    def scored(self, outcome: Callable[[], Outcome]) -> None:
        """Do nothing."""

    def note(self, text: str) -> None:
        """Do nothing."""

    def end(self, label: str, seconds: float) -> None:
        """Do nothing."""


class Several:
    """Calls several callbacks in turn."""

    def __init__(self, watches: Sequence[Watch]) -> None:
        self._watches = watches

    def plan(self, works: Sequence[PlannedWork]) -> None:
        """Pass it on."""
        for watch in self._watches:
            watch.plan(works)

    def stage(self, stage: Stage) -> None:
        """Pass it on."""
        for watch in self._watches:
            watch.stage(stage)

    def begin(self, label: str, round: int, rounds: int) -> None:
        """Pass it on."""
        for watch in self._watches:
            watch.begin(label, round, rounds)

    def tick(self, tick: Tick) -> None:
        """Pass it on."""
        for watch in self._watches:
            watch.tick(tick)

    def scored(self, outcome: Callable[[], Outcome]) -> None:
        """Pass it on."""
        for watch in self._watches:
            watch.scored(outcome)

    def note(self, text: str) -> None:
        """Pass it on."""
        for watch in self._watches:
            watch.note(text)

    def end(self, label: str, seconds: float) -> None:
        """Pass it on."""
        for watch in self._watches:
            watch.end(label, seconds)


class Prefixed:
    """Calls callbacks with a few words before every label."""

    def __init__(self, watch: Watch, words: str) -> None:
        self._watch, self._words = watch, words

    def plan(self, works: Sequence[PlannedWork]) -> None:
        """Pass on what is going to be trained."""
        self._watch.plan([work._replace(label=self._words + work.label) for work in works])

    def stage(self, stage: Stage) -> None:
        """Pass on what is being done."""
        self._watch.stage(stage._replace(label=stage.label and self._words + stage.label))

    def begin(self, label: str, round: int, rounds: int) -> None:
        """Pass on that a method starts."""
        self._watch.begin(self._words + label, round, rounds)

    def tick(self, tick: Tick) -> None:
        """Pass on that a round is over."""
        self._watch.tick(tick._replace(label=self._words + tick.label))

    def scored(self, outcome: Callable[[], Outcome]) -> None:
        """Pass on that a round was scored."""
        self._watch.scored(outcome)

    def note(self, text: str) -> None:
        """Pass a notice on."""
        self._watch.note(self._words + text)

    def end(self, label: str, seconds: float) -> None:
        """Pass on that a method is done."""
        self._watch.end(self._words + label, seconds)
