"""How a run tells of its progress; whoever draws or records it implements these."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from idiolect.engine.outcome import Outcome


class Tick(NamedTuple):
    """Where a method stands after a round; NaN for a figure that is not known."""

    label: str
    round: int
    rounds: int
    loss: float  # on validation data, mean over clients and seeds, at the last evaluation
    accuracy: float
    examples_per_second: float
    seconds_left: float


class Watch(Protocol):
    """Someone to tell."""

    def begin(self, label: str, round: int, rounds: int) -> None:
        """Hear that a method starts, or goes on after `round`."""

    def tick(self, tick: Tick) -> None:
        """Hear that a round is over."""

    def scored(self, outcome: Callable[[], Outcome]) -> None:
        """Hear that there are new scores: after an evaluated round, and once more at the end.

        Nothing is made until it is asked for, and it may be asked for later, from any thread. What
        comes before the end has curves but no final scores.
        """

    def note(self, text: str) -> None:
        """Hear something the user should know."""

    def end(self, label: str, seconds: float) -> None:
        """Hear that a method is trained and scored."""


class Silent:
    """Nobody is watching."""

    def begin(self, label: str, round: int, rounds: int) -> None:
        """Say nothing."""

    def tick(self, tick: Tick) -> None:
        """Say nothing."""

    def scored(self, outcome: Callable[[], Outcome]) -> None:
        """Ask for nothing."""

    def note(self, text: str) -> None:
        """Say nothing."""

    def end(self, label: str, seconds: float) -> None:
        """Say nothing."""


class Several:
    """Tells everyone in turn."""

    def __init__(self, watches: Sequence[Watch]) -> None:
        self._watches = watches

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
    """Passes everything on, with a few words before every label."""

    def __init__(self, watch: Watch, words: str) -> None:
        self._watch, self._words = watch, words

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
