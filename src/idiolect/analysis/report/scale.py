"""Axes for drawing without a browser: where a value stands, and which ticks to name."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from idiolect.analysis.report.chart import Axis, Mark

Range = tuple[float, float]


@dataclass(frozen=True)
class Scale:
    """A direction on paper: values from `first` to `last` stand from `start` to `end`."""

    first: float
    last: float
    start: float
    end: float

    def at(self, value: float) -> float:
        """Say where a value stands."""
        return self.start + (value - self.first) / (self.last - self.first) * (
            self.end - self.start
        )


def reach(axis: Axis, marks: Sequence[Mark], direction: str) -> Range:
    """Find the ends of an axis: those it names, else those of its marks and a little room."""
    if axis.categories:
        last = len(axis.categories) - 0.5
        return (-0.5, last)
    values = [value for mark in marks for value in _values(mark, direction)]
    low = min(values, default=0.0) if axis.low is None else min([axis.low, *values])
    high = max(values, default=1.0) if axis.high is None else max([axis.high, *values])
    room = (high - low) * 0.04 or 0.5
    return (low - (0 if axis.low == low else room), high + room)


def _values(mark: Mark, direction: str) -> list[float]:
    """List what a mark occupies: bands reach up and down, spans and bars to the sides."""
    own: list[float | None] = list(mark.x if direction == "x" else mark.y)
    if (direction == "y") == (mark.kind == "band") and mark.kind in ("band", "span"):
        own += [*mark.low, *mark.high]
    if mark.kind == "bars" and direction == "x":
        own.append(0.0)
    return [value for value in own if value is not None]


def ticks(first: float, last: float, most: int = 6) -> list[float]:
    """Choose round values within an axis."""
    span = abs(last - first)
    if not span:
        return [first]
    raw = span / most
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= raw)
    low = math.ceil(min(first, last) / step - 1e-9)
    high = math.floor(max(first, last) / step + 1e-9)
    return [number * step for number in range(low, high + 1)]


def label(value: float, unit: str) -> str:
    """Write a tick."""
    if unit == "%":
        return f"{round(100 * value, 6):g}%"
    return f"{value:,g}" if abs(value) < 1e5 else f"{value:.3g}"
