"""The progress of a whole run: one bar over all methods and seeds, and how long the rest takes."""

import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING, Any

from idiolect.engine.outcome import PlannedWork, Silent, Stage, Tick, Watch
from idiolect.errors import shortened

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

_LONG = 20.0  # seconds of a single round that say how long others take
_SOME = 0.03  # of a stage done, from which on its own pace counts
_LINES = 10  # of progress for a method's rounds, where the output is no terminal
_QUIET = 10.0  # seconds without a line there, after which a stage says how far it is
_REFRESH = 0.25  # seconds between two changes of a notebook's bar


@dataclass
class _Part:
    """A method that is trained in this run, and what was measured of it in this session."""

    work: PlannedWork
    round: int = 0
    share: float = 0.0  # of the work after the rounds
    ended: bool = False
    rounds: list[float] = field(default_factory=list)  # seconds of each, in this session
    since: float | None = None  # when its last stage began: work after the rounds
    spent: float = 0.0  # seconds in that, in this session

    @property
    def total(self) -> float:
        return self.work.rounds * self.work.round_work + self.work.final_work

    @property
    def done(self) -> float:
        if self.ended:
            return self.total
        return self.round * self.work.round_work + self.share * self.work.final_work

    @property
    def measured(self) -> list[float]:
        """Seconds of rounds that tell of others: the first of a session measures and compiles."""
        return self.rounds[1:] or [one for one in self.rounds if one >= _LONG]

    @property
    def pace(self) -> float | None:
        """Seconds for a unit of work in this session's rounds; None before that can be said."""
        seconds = self.measured
        return sum(seconds) / (len(seconds) * self.work.round_work) if seconds else None


class RunEstimate:
    """How much of a run is done, and how long the rest takes by the work of this session alone.

    Rounds that were done before, or are taken over from another method, count as done and say
    nothing about time. What comes after the rounds is weighed by passes over the data, until its
    own pace is known.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._parts: list[_Part] = []
        self._now: _Part | None = None
        self._last = clock()

    def plan(self, works: Sequence[PlannedWork]) -> None:
        """Add what is going to be trained; what is planned already stays."""
        for work in works:
            if self._found(work.label) is None:
                one = work._replace(times=1)
                self._parts += [_Part(one) for _ in range(max(work.times, 1))]

    def begin(self, label: str, round: int, rounds: int) -> None:
        """A method starts, or goes on after a round."""
        part = self._found(label)
        if part is None:
            part = _Part(PlannedWork(label, rounds))
            self._parts.append(part)
        part.work = part.work._replace(label=label, rounds=rounds)
        part.round = round
        self._now, self._last = part, self._clock()

    def tick(self, round: int) -> None:
        """A round of the present method is over."""
        now = self._clock()
        if self._now is not None:
            self._now.rounds.append(now - self._last)
            self._now.round = round
        self._last = now

    def stage(self, stage: Stage) -> None:
        """The present method is in a stage after its rounds."""
        part = self._now
        if part is None or not stage.label or stage.name in ("rounds", "preparing"):
            return
        now = self._clock()
        if part.since is None or (part.share == 0 and stage.share == 0):
            part.since = now  # what is measured and compiled before says nothing about the rest
        part.spent = now - part.since
        part.share = max(part.share, min(stage.share, 1.0))

    def end(self) -> None:
        """The present method is trained and scored."""
        if self._now is not None:
            self._now.ended = True
            self._now = None
        self._last = self._clock()

    @property
    def place(self) -> tuple[int, int]:
        """The number of the present method, from 1, and how many there are."""
        at = next((n for n, part in enumerate(self._parts) if part is self._now), 0)
        return at + 1, len(self._parts)

    @property
    def share(self) -> float:
        """How much of all work is done, from 0 to 1."""
        total = sum(part.total for part in self._parts)
        return min(sum(part.done for part in self._parts) / total, 1.0) if total else 0.0

    @property
    def seconds_left(self) -> float | None:
        """How long the rest takes; None before that can be said."""
        known = [part for part in self._parts if part.pace is not None]
        work = sum(len(part.measured) * part.work.round_work for part in known)
        seconds = sum(sum(part.measured) for part in known)
        usual = seconds / work if work else None
        left = 0.0
        for part in self._parts:
            if part.ended:
                continue
            pace = part.pace if part.pace is not None else usual
            rest = self._rest(part, pace)
            if rest is None:
                return None
            left += rest
        return left

    def _rest(self, part: _Part, pace: float | None) -> float | None:
        rounds = (part.work.rounds - part.round) * part.work.round_work
        if rounds and pace is None:
            return None
        before = 0.0 if pace is None else rounds * pace
        spent = part.spent
        if part.since is not None:
            spent = self._clock() - part.since
        guess = None if pace is None else part.work.final_work * pace
        if part.share >= _SOME and spent:
            own = spent / part.share
            trust = min(part.share / 0.2, 1.0)
            whole = own if guess is None else (1 - trust) * guess + trust * own
            return before + max(whole - spent, own * (1 - part.share) * trust, 0.0)
        if guess is None:
            return None
        return before + max(guess - spent, 0.1 * guess)

    def _found(self, label: str) -> _Part | None:
        """Find what a label is planned as, by its own name or by what trials' names begin with."""
        ready = [part for part in self._parts if not part.ended]
        exact = [part for part in ready if part.work.label == label]
        alike = [
            part
            for part in ready
            if part.work.label.endswith(" with") and label.startswith(part.work.label + " ")
        ]
        return next(iter([*exact, *alike]), None)


class RunProgress(Silent):
    """Follows a run and puts it into words; what shows them is up to the subclasses."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.estimate = RunEstimate(clock)
        self._clock = clock
        self._began = clock()
        self._label, self._what, self._figures = "", "starting", ""

    def plan(self, works: Sequence[PlannedWork]) -> None:
        """Take all that is going to be trained."""
        self.estimate.plan(works)

    def begin(self, label: str, round: int, rounds: int) -> None:
        """A method starts, or goes on."""
        self.estimate.begin(label, round, rounds)
        self._label, self._figures = label, ""
        self._what = f"round {round} of {rounds}" if round else f"{rounds} rounds"
        self._show()

    def tick(self, tick: Tick) -> None:
        """A round is over."""
        self.estimate.tick(tick.round)
        self._what, self._figures = f"round {tick.round} of {tick.rounds}", _figures(tick)
        self._show()

    def stage(self, stage: Stage) -> None:
        """Another stage, or more of it."""
        self.estimate.stage(stage)
        if stage.name != "rounds":
            self._label, self._figures = stage.label, ""
            many = stage.clients > 1 and stage.name != "writing"
            counted = f", {stage.done:.0f} of {stage.clients:,} clients" if many else ""
            self._what = f"{stage.name}{counted}"
        self._show()

    def end(self, label: str, seconds: float) -> None:
        """A method is trained and scored."""
        self.estimate.end()
        self._label, self._what, self._figures = label, f"done in {clock(seconds)}", ""
        self._show()

    @property
    def where(self) -> str:
        """The method and its stage."""
        name = shortened(self._label, 32)
        return f"{name}: {self._what}" if name else self._what

    @property
    def left(self) -> str:
        """How long the rest takes, in words; empty before that can be said."""
        seconds = self.estimate.seconds_left
        return f"{clock(seconds)} left" if seconds else ""

    def _show(self) -> None:
        """Show where it stands, if it is time."""


class ProgressLines(RunProgress):
    """Lines for logs and pipes: at every tenth of the rounds, and in a long stage now and then."""

    def __init__(
        self, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(clock)
        self._say = say
        self._tenth = 0
        self._said = clock()

    def begin(self, label: str, round: int, rounds: int) -> None:
        """Print where a resumed method starts."""
        super().begin(label, round, rounds)
        self._tenth = round * _LINES // rounds if rounds else 0
        if rounds and round >= rounds:
            self._print(f"{label}: {rounds} rounds were done before")
        elif round:
            self._print(f"{label}: going on after round {round} of {rounds}")

    def tick(self, tick: Tick) -> None:
        """Print a line at every tenth of the rounds."""
        super().tick(tick)
        tenth = tick.round * _LINES // tick.rounds
        if tenth > self._tenth:
            self._tenth = tenth
            words = [f"{tick.label}: round {tick.round}/{tick.rounds}", self._figures, self.left]
            self._print(", ".join(word for word in words if word))

    def stage(self, stage: Stage) -> None:
        """Print how far a long stage is."""
        super().stage(stage)
        if self._clock() - self._said >= _QUIET:
            self._print(", ".join(word for word in (self.where, self.left) if word))

    def note(self, text: str) -> None:
        """Print a notice."""
        self._print(f"note: {text}")

    def end(self, label: str, seconds: float) -> None:
        """Print that a method is done."""
        super().end(label, seconds)
        place, count = self.estimate.place[0], self.estimate.place[1]
        share = f", {self.estimate.share:.0%} of all" if count > 1 and place else ""
        self._print(f"{label}: done in {clock(seconds)}{share}")

    def _print(self, text: str) -> None:
        self._said = self._clock()
        self._say(text)


class ProgressBar(RunProgress):
    """One bar on a terminal, with a line above it for every method that is done."""

    def __init__(self, bars: "Progress") -> None:
        super().__init__()
        self._bars = bars
        self._bar = bars.add_task("run", total=1.0, where="starting", left="")

    def note(self, text: str) -> None:
        """Print a notice above the bar."""
        self._bars.console.print(f"note: {text}", markup=False, highlight=False)

    def end(self, label: str, seconds: float) -> None:
        """Print that a method is done above the bar."""
        super().end(label, seconds)
        text = f"{shortened(label, 60)}: done in {clock(seconds)}"
        self._bars.console.print(text, markup=False, highlight=False)

    def _show(self) -> None:
        wide = self._bars.console.width >= 110
        where = f"{self.where}, {self._figures}" if self._figures and wide else self.where
        self._bars.update(
            self._bar,
            completed=self.estimate.share,
            where=shortened(where, max(self._bars.console.width - 44, 24)),
            left=self.left,
        )


class NotebookProgress(RunProgress):
    """A bar in a notebook, one display that is changed in place; nothing to be installed."""

    def __init__(self, display: Callable[..., Any]) -> None:
        """`display(html, text)` makes it and returns what changes it; see `notebook_display`."""
        super().__init__()
        self._change: Callable[[str, str], None] | None = None
        self._display = display
        self._due = 0.0
        self._notes: list[str] = []
        self._over = ""

    def note(self, text: str) -> None:
        """Show a notice under the bar."""
        self._notes.append(text)
        self._due = 0.0
        self._show()

    def close(self, words: str) -> None:
        """Leave one quiet line in place of the bar."""
        self._over, self._due = words, 0.0
        if self._change is not None:
            self._show()

    def _show(self) -> None:
        now = self._clock()
        if now < self._due:
            return
        self._due = now + _REFRESH
        html, text = self.html(), self.text()
        if self._change is None:
            self._change = self._display(html, text)
        else:
            self._change(html, text)

    def text(self) -> str:
        """Return the bar as a line of text."""
        if self._over:
            return self._over
        return ", ".join(w for w in (f"{self.estimate.share:.0%}", self.where, self.left) if w)

    def html(self) -> str:
        """Return the bar as HTML."""
        done = 100 * self.estimate.share
        words = [self.where, self._figures, self.left]
        line = self._over or " · ".join(word for word in words if word)
        bar = (
            ""
            if self._over
            else '<div style="background:#e5e7eb;border-radius:4px;height:8px;max-width:480px">'
            f'<div style="background:#0067a5;border-radius:4px;height:8px;width:{done:.1f}%">'
            "</div></div>"
        )
        notes = "".join(
            f'<div style="color:#7a4b00">note: {escape(shortened(text, 400))}</div>'
            for text in self._notes[-5:]
        )
        return (
            f'<div class="idiolect" style="font:13px/1.4 system-ui,sans-serif">{bar}'
            f"<div>{escape(line)}</div>{notes}</div>"
        )


@contextmanager
def bar_on(screen: "Console") -> Iterator[Watch]:
    """Show one bar on a terminal, else a few lines, while the block runs."""
    if not screen.is_terminal:
        yield ProgressLines(
            lambda text: screen.print(text, markup=False, highlight=False, soft_wrap=True)
        )
        return
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

    with Progress(
        BarColumn(bar_width=20),
        TaskProgressColumn(),
        TextColumn("{task.fields[where]}", markup=False),
        TextColumn("{task.fields[left]}", markup=False),
        console=screen,
    ) as bars:
        yield ProgressBar(bars)


@contextmanager
def shown(wanted: bool | None) -> Iterator[Watch]:
    """Show progress where somebody looks: in a notebook or on a terminal; True: wherever it is."""
    display = notebook_display() if wanted is not False else None
    if wanted is False or (wanted is None and display is None and not _terminal()):
        yield Silent()
        return
    if display is None:
        from rich.console import Console

        screen = Console(stderr=True, highlight=False, markup=False, emoji=False)
        with bar_on(screen) as watch:
            yield watch
        return
    watch = NotebookProgress(display)
    began = time.monotonic()
    try:
        yield watch
        watch.close(f"done in {clock(time.monotonic() - began)}")
    except BaseException as error:
        watch.close(f"stopped after {clock(time.monotonic() - began)}: {type(error).__name__}")
        raise


def notebook_display() -> Callable[[str, str], Callable[[str, str], None]] | None:
    """Return what shows HTML in place in this notebook; None where there is none."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if shell is None or not hasattr(shell, "kernel"):  # IPython in a terminal has none
        return None
    from importlib import import_module

    ipython = import_module("IPython.display")

    def made(html: str, text: str) -> Callable[[str, str], None]:
        handle = ipython.display(_bundle(html, text), raw=True, display_id=True)

        def change(html: str, text: str) -> None:
            handle.update(_bundle(html, text), raw=True)

        return change

    return made


def _bundle(html: str, text: str) -> dict[str, str]:
    return {"text/html": html, "text/plain": text}


def _terminal() -> bool:
    return bool(getattr(sys.stderr, "isatty", lambda: False)())


def _figures(tick: Tick) -> str:
    """Write a tick's figures; those that are not known are left out."""
    parts = []
    if not math.isnan(tick.loss):
        parts.append(f"loss {tick.loss:.3f}" if tick.loss < 1e4 else f"loss {tick.loss:.1e}")
    if tick.metric != "accuracy" and not math.isnan(tick.score):
        parts.append(f"validation {tick.metric.replace('_', ' ')} {tick.score:.3f}")
    elif not math.isnan(tick.accuracy):
        parts.append(f"validation accuracy {100 * tick.accuracy:.1f}%")
    parts.append(f"{tick.examples_per_second:,.0f} examples/s")
    return ", ".join(parts)


def clock(seconds: float) -> str:
    """Write a duration as a person would."""
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d} min"
