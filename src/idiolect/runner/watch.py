"""How a run tells of its progress; whoever draws it implements these four."""

from typing import NamedTuple, Protocol


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

    def note(self, text: str) -> None:
        """Say nothing."""

    def end(self, label: str, seconds: float) -> None:
        """Say nothing."""
