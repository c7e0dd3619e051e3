"""Progress on the screen: a live bar per method on a terminal, a few plain lines elsewhere."""

import math
from collections.abc import Callable
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from idiolect.engine.callbacks import Tick
from idiolect.engine.outcome import Outcome
from idiolect.errors import printable

_LINES = 10  # plain lines for each method


class Plain:
    """Lines for logs and pipes."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._told = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        pass

    def begin(self, label: str, round: int, rounds: int) -> None:
        """Say what starts, and from where if it was resumed."""
        self._told = round * _LINES // rounds
        if round >= rounds:
            self._say(f"{label}: {rounds} rounds were done before")
        elif round:
            self._say(f"{label}: going on after round {round} of {rounds}")

    def tick(self, tick: Tick) -> None:
        """Say where a method stands, at every tenth of the way."""
        told = tick.round * _LINES // tick.rounds
        if told > self._told:
            self._told = told
            self._say(f"{tick.label}: round {tick.round}/{tick.rounds}, {figures(tick)}")

    def scored(self, outcome: Callable[[], Outcome]) -> None:
        """Leave scores to the tables at the end."""

    def note(self, text: str) -> None:
        """Pass a notice on."""
        self._say(f"note: {text}")

    def end(self, label: str, seconds: float) -> None:
        """Say that a method is done."""
        self._say(f"{label}: done in {clock(seconds)}")

    def _say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


class Live:
    """A bar for each method."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            TextColumn("{task.fields[label]}", markup=False),
            BarColumn(bar_width=24),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TextColumn("{task.fields[figures]}", markup=False),
            console=console,
        )
        self._bars: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def begin(self, label: str, round: int, rounds: int) -> None:
        """Add a bar."""
        self._bars[label] = self._progress.add_task(
            label, total=rounds, completed=round, label=printable(label), figures="starting"
        )

    def tick(self, tick: Tick) -> None:
        """Move the bar."""
        self._progress.update(self._bars[tick.label], completed=tick.round, figures=figures(tick))

    def scored(self, outcome: Callable[[], Outcome]) -> None:
        """Leave scores to the tables at the end."""

    def note(self, text: str) -> None:
        """Print a notice above the bars."""
        self._progress.console.print(f"note: {text}", markup=False, highlight=False)

    def end(self, label: str, seconds: float) -> None:
        """Leave the bar with the time it took."""
        self._progress.update(self._bars[label], figures=f"done in {clock(seconds)}")


def watching(console: Console) -> Plain | Live:
    """Choose by where the output goes."""
    return Live(console) if console.is_terminal else Plain(console)


def figures(tick: Tick) -> str:
    """Write a tick's figures; those that are not known are left out."""
    parts = []
    if not math.isnan(tick.loss):
        parts.append(f"loss {tick.loss:.3f}" if tick.loss < 1e4 else f"loss {tick.loss:.1e}")
        parts.append(f"validation accuracy {100 * tick.accuracy:.1f}%")
    parts.append(f"{tick.examples_per_second:,.0f} examples/s")
    if tick.round < tick.rounds:
        parts.append(f"{clock(tick.seconds_left)} left")
    return ", ".join(parts)


def clock(seconds: float) -> str:
    """Write a duration as a person would."""
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d} min"
