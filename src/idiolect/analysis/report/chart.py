"""A figure in plain words: panels, axes and marks. The page, the SVG and the CSV are made of it."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

Number = float | int | None


@dataclass(frozen=True)
class Axis:
    """What a direction means; `categories` are named places 0, 1, 2, ... on it."""

    title: str = ""
    unit: str = ""  # "%": values are shares, shown as per cent
    log: bool = False
    categories: tuple[str, ...] = ()
    low: float | None = None  # ends of the axis; absent: what the marks need
    high: float | None = None


@dataclass(frozen=True)
class Panel:
    """One pair of axes; several make small multiples."""

    title: str = ""
    x: Axis = Axis()
    y: Axis = Axis()


@dataclass(frozen=True)
class Mark:
    """Something drawn in a panel.

    line, dots: x, y. band: x, between low and high. span: a bar from low to high at y. bars: x, y.
    heat: z[y][x] on two axes of categories.
    """

    kind: str
    panel: int = 0
    method: str = ""  # its label: gives colour and symbol, and the mark goes with the method
    name: str = ""  # in the legend of marks that belong to no method
    x: Sequence[Number] = ()
    y: Sequence[Number] = ()
    low: Sequence[Number] = ()
    high: Sequence[Number] = ()
    z: Sequence[Sequence[Number]] = ()
    text: Sequence[str] = ()  # what hovering says, in full
    says: str = ""  # of heat: the same for every cell, with {x}, {y} and {z}
    tone: int | None = None  # of the ramp, where marks of one method or of none differ in degree
    faint: bool = False
    big: bool = False
    bottom: float | None = None  # of heat: the value of the palest cell, else 0
    top: float | None = None  # and of the strongest


@dataclass(frozen=True)
class Chart:
    """A figure: what it shows, how to read it, and every number in it as a row of a table."""

    id: str
    title: str
    caption: str
    panels: Sequence[Panel]
    marks: Sequence[Mark]
    header: Sequence[str]
    rows: Sequence[Sequence[Any]]
    height: int = 320  # of a row of panels, in pixels
    square: bool = False  # both axes are the same: as wide as it is high
    frames: Sequence[str] = ()  # names of the steps of a slider; panel n is shown at step n

    def plain(self) -> dict[str, Any]:
        """Give the figure as JSON, without what is empty."""
        return {
            "id": self.id,
            "title": self.title,
            "height": self.height,
            "square": self.square,
            "panels": [_full(asdict(panel)) for panel in self.panels],
            "marks": [_full(vars(mark)) for mark in self.marks],
            "frames": list(self.frames),
            "csv": csv(self.header, self.rows),
        }


def csv(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Write rows for a spreadsheet; what is not known is an empty cell."""
    return "".join(",".join(map(_cell, row)) + "\n" for row in (header, *rows))


def _cell(value: Any) -> str:
    if value is None:
        return ""
    text = f"{value:.10g}" if isinstance(value, float) else str(value)
    # A spreadsheet takes text that starts so for a formula; a client's name may come from anyone.
    if isinstance(value, str) and text[:1] in ("=", "+", "-", "@"):
        text = "'" + text
    quoted = any(mark in text for mark in ',"\n\r')
    return '"' + text.replace('"', '""') + '"' if quoted else text


def _full(value: Any) -> Any:
    """Drop what says nothing, so that the page stays small; figures keep six digits."""
    if isinstance(value, Mapping):
        shown = {key: _full(inner) for key, inner in value.items()}
        return {k: v for k, v in shown.items() if v or (v == 0 and v is not False)}
    if isinstance(value, list | tuple):
        return [_full(inner) for inner in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value
