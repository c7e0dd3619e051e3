"""What a section is made of: charts, tables and text. The page, SVG and CSV are made from these."""

import csv
import io
import math
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib import resources
from typing import Any, NamedTuple

from markupsafe import Markup

from idiolect.errors import shortened

Number = float | int | None


@dataclass(frozen=True)
class Axis:
    """One direction of a panel; `categories` are named places 0, 1, 2, ... on it."""

    title: str = ""
    unit: str = ""  # "%": values are shares, shown as per cent
    log: bool = False
    categories: tuple[str, ...] = ()
    low: float | None = None  # ends of the axis; absent: what the marks need
    high: float | None = None
    step: int = 0  # between its ticks; 0: what suits

    def __post_init__(self) -> None:
        names = tuple(shortened(name, 34) for name in self.categories)
        object.__setattr__(self, "categories", names)


def of_rounds(last: float) -> Axis:
    """Return the axis of so many rounds: there is none between two of them."""
    step = next(n * 10**power for power in range(9) for n in (1, 2, 5) if n * 10**power >= last / 8)
    return Axis("round", low=0.0, step=step)


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
    method: str = ""  # its label: gives colour and symbol, and the mark is hidden with the method
    name: str = ""  # in the legend of marks that belong to no method
    x: Sequence[Number] = ()
    y: Sequence[Number] = ()
    low: Sequence[Number] = ()
    high: Sequence[Number] = ()
    z: Sequence[Sequence[Number]] = ()
    text: Sequence[str] = ()  # shown on hovering, in full
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

    def as_json(self) -> dict[str, Any]:
        """Return the figure for the page's script, without empty fields."""
        return {
            "id": self.id,
            "title": self.title,
            "height": self.height,
            "square": self.square,
            "panels": [_compact(asdict(panel)) for panel in self.panels],
            "marks": [_compact(vars(mark)) for mark in self.marks],
            "frames": list(self.frames),
            "csv": self.csv(),
        }

    def csv(self) -> str:
        """Return every number of the figure for a spreadsheet."""
        return as_csv(self.header, self.rows)


def _compact(value: Any) -> Any:
    """Drop empty fields and round to six digits, so that the page stays small."""
    if isinstance(value, Mapping):
        shown = {key: _compact(inner) for key, inner in value.items()}
        return {k: v for k, v in shown.items() if v or (v == 0 and v is not False)}
    if isinstance(value, list | tuple):
        return [_compact(inner) for inner in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def as_csv(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Write rows for a spreadsheet; what is not known is an empty cell."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(map(_csv_cell, row) for row in (header, *rows))
    return text.getvalue()


def _csv_cell(value: Any) -> Any:
    if isinstance(value, float):
        return f"{value:.10g}"
    # A spreadsheet takes text that starts so for a formula; a client's name may come from anyone.
    formula = isinstance(value, str) and value.startswith(("=", "+", "-", "@"))
    return f"'{value}" if formula else value


class Column(NamedTuple):
    """A heading and how its values are written."""

    head: str
    form: str = "text"  # text, number, p, interval or one of `_FORMS`
    help: str = ""  # shown when hovering over the heading
    best: str = ""  # "high" or "low": which value is set in bold


class TableCell(NamedTuple):
    """A cell of a table on the page."""

    text: str
    sort: str  # the number to sort by; empty: by the text
    best: bool


# How a number is written, and what it is multiplied and divided by before.
_FORMS = {
    "percent": (".1f", 100.0, 1),
    "points": ("+.1f", 100.0, 1),
    "interval": (".1f", 100.0, 1),
    "interval of numbers": (".4g", 1, 1),
    "whole": (",.0f", 1, 1),
    "kilo": (",.1f", 1, 1e3),
    "mega": (",.1f", 1, 1e6),
    "seconds": (",.1f", 1, 1),
    "index": (".4f", 1, 1),
    "figure": (".3g", 1, 1),
}


@dataclass(frozen=True)
class Table:
    """A table; a cell is a value, or (value, spread) written as value ± spread.

    In a column of intervals a cell is (low, high).
    """

    id: str
    title: str
    caption: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Any]]
    methods: Sequence[str] = ()  # the method of each row, with which it is hidden

    def cells(self) -> list[tuple[str, list[TableCell]]]:
        """Return each row's method and its cells, for the page."""
        best = [
            _best(column, [_number(row[n]) for row in self.rows])
            for n, column in enumerate(self.columns)
        ]
        methods = self.methods or [""] * len(self.rows)
        return [
            (
                method,
                [
                    TableCell(
                        text,
                        "" if number is None else repr(number),
                        top is not None and number == top,
                    )
                    for text, number, top in zip(texts, map(_number, row), best, strict=True)
                ],
            )
            for method, row, texts in zip(methods, self.rows, self._written(), strict=True)
        ]

    def markdown(self) -> str:
        """Write the table for a README."""
        rule = ["---" if column.form == "text" else "---:" for column in self.columns]
        rows = [[column.head for column in self.columns], rule, *self._written()]
        return "".join(f"| {' | '.join(row)} |\n" for row in _replaced(rows, {"|": "\\|"}))

    def latex(self) -> str:
        """Write the table for a paper, in the manner of booktabs."""
        kinds = "".join("l" if column.form == "text" else "r" for column in self.columns)
        rows = [[column.head for column in self.columns], *self._written()]
        head, *lines = [f"{' & '.join(row)} \\\\\n" for row in _replaced(rows, _TEX)]
        return (
            f"% needs \\usepackage{{booktabs}}\n\\begin{{tabular}}{{{kinds}}}\n\\toprule\n{head}"
            f"\\midrule\n{''.join(lines)}\\bottomrule\n\\end{{tabular}}\n"
        )

    def csv(self) -> str:
        """Write values in the units of the headings, unrounded; a spread gets its own column."""
        header: list[str] = []
        columns: list[list[Any]] = []
        for n, column in enumerate(self.columns):
            values = [row[n] if isinstance(row[n], tuple) else (row[n], None) for row in self.rows]
            heads = [column.head]
            if any(isinstance(row[n], tuple) for row in self.rows):
                ends = [f"{column.head}, low", f"{column.head}, high"]
                heads = (
                    ends
                    if column.form.startswith("interval")
                    else [column.head, f"± {column.head}"]
                )
            header += heads
            columns += [
                [_scaled(column.form, pair[k]) for pair in values] for k in range(len(heads))
            ]
        return as_csv(header, list(zip(*columns, strict=True)))

    def _written(self) -> list[list[str]]:
        return [
            [_written(column.form, value) for column, value in zip(self.columns, row, strict=True)]
            for row in self.rows
        ]


def _written(form: str, value: Any) -> str:
    """Write a value as its column says; a dash where there is none."""
    if isinstance(value, tuple):
        first, second = (_written(form, part) for part in value)
        if form.startswith("interval"):
            return f"{first} to {second}"
        return first if _unknown(value[1]) else f"{first} ± {second}"
    if _unknown(value):
        return "–"
    if form in _FORMS:
        scaled = _scaled(form, value)
        if form == "mega" and 0 < scaled < 0.05:
            return "< 0.1"
        large = form in ("figure", "interval of numbers") and 1e3 <= abs(scaled) < 1e15
        return format(scaled, ",.0f" if large else _FORMS[form][0])
    if form == "p":
        return "< 0.001" if value < 0.001 else f"{value:.3f}"
    return f"{value:.4g}" if form == "number" and isinstance(value, float) else str(value)


def _scaled(form: str, value: Any) -> Any:
    if _unknown(value) or form not in _FORMS:
        return value
    _, factor, divisor = _FORMS[form]
    return value * factor / divisor


def _unknown(value: Any) -> bool:
    return value is None or (isinstance(value, float) and not math.isfinite(value))


def _number(value: Any) -> Any:
    """Return what a cell is sorted by; None where that is its text."""
    inner = value[0] if isinstance(value, tuple) else value
    return None if _unknown(inner) or isinstance(inner, str) else inner


def _best(column: Column, numbers: Iterable[Any]) -> Any:
    known = [number for number in numbers if number is not None]
    if not column.best or len(known) < 2:
        return None
    return max(known) if column.best == "high" else min(known)


_MATH = r"\pm < > \geq \leq \lambda \alpha \beta \Delta \times -".split()
_TEX = (
    {sign: f"\\{sign}" for sign in "&%$#_{}"}
    | {sign: f"${name}$" for sign, name in zip("±<>≥≤λαβΔ×−", _MATH, strict=True)}
    | {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "–": "--"}
)


def _replaced(rows: list[list[str]], signs: Mapping[str, str]) -> list[list[str]]:
    table = str.maketrans(dict(signs))
    return [[cell.translate(table) for cell in row] for row in rows]


Block = Chart | Table | Markup


@dataclass(frozen=True)
class Section:
    """A part of the page: a heading, a sentence on what follows, and the blocks."""

    id: str
    title: str
    lead: str
    blocks: Sequence[Block]
    short: str = ""  # for the list of sections, where the title is long


@cache
def _texts(kind: str) -> dict[str, Any]:
    path = resources.files("idiolect.analysis.report").joinpath("assets", "texts.toml")
    found: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))[kind]
    return found


def section(ident: str, blocks: Sequence[Block], **values: Any) -> Section:
    """Return a section with its words of texts.toml, filled with `values`."""
    words = _texts("section")[ident]
    lead, short = words["lead"].format(**values), words.get("short", "")
    return Section(ident, words["title"], lead, blocks, short)


def chart(
    ident: str,
    panels: Sequence[Panel],
    marks: Sequence[Mark],
    rows: Sequence[Sequence[Any]],
    *,
    height: int = 320,
    square: bool = False,
    frames: Sequence[str] = (),
    prefix: str = "",
    suffix: str = "",
    **values: Any,
) -> Chart:
    """Return a chart with its words of texts.toml; prefix and suffix make ids of several unique."""
    words = _texts("chart")[ident]
    title, caption = (words[key].format(**values) for key in ("title", "caption"))
    head = words["header"]
    return Chart(
        f"{prefix}{ident}{suffix}",
        title,
        caption,
        panels,
        marks,
        head,
        rows,
        height,
        square,
        frames,
    )


def table(
    ident: str,
    rows: Sequence[Sequence[Any]],
    methods: Iterable[str] = (),
    columns: Sequence[Column] = (),
    **values: Any,
) -> Table:
    """Return a table with its words of texts.toml, and its columns unless they are given."""
    words = _texts("table")[ident]
    title, caption = (words[key].format(**values) for key in ("title", "caption"))
    fixed = [
        Column(*(part.format(**values) for part in column)) for column in words.get("columns", ())
    ]
    return Table(ident, title, caption, columns or fixed, rows, list(methods))


def paragraph(text: str, bold: str = "") -> Markup:
    """Return a paragraph; both texts are escaped."""
    start = Markup("<b>{}</b> ").format(bold) if bold else ""
    return Markup("<p>{}{}</p>").format(start, text)


class MethodStyle(NamedTuple):
    """How a method is drawn, on white and on a dark page, the same in all figures."""

    light: str
    dark: str
    symbol: str
    dash: str


# The colours differ in lightness as well as in hue, so that they differ with any colour vision;
# symbols and dashes differ too. Local training, the reference, is grey. Okabe and Ito's hues,
# darkened for white and lightened for a dark page until text is readable.
GREY = ("#6b7280", "#9ca3af")
_COLOURS = (
    ("#0067a5", "#4ea8e6"),  # blue
    ("#c4570a", "#f08a3c"),  # vermilion
    ("#00805d", "#2bbd92"),  # green
    ("#a83a78", "#e383b8"),  # purple
    ("#9a7400", "#e6b422"),  # gold
    ("#1f9bb8", "#6fd0ea"),  # sky
    ("#5b3fa3", "#a993ea"),  # violet
    ("#8c2f39", "#e5737e"),  # wine
    ("#4d7326", "#9ccb5f"),  # olive
)
_SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "triangle-down", "x", "star")
_DASHES = ("solid", "dash", "dot", "dashdot")


def styles(methods: Iterable[tuple[str, str]]) -> dict[str, MethodStyle]:
    """Give each label a style, in order; a pair is a label and the method's registered name."""
    given: dict[str, MethodStyle] = {}
    coloured = 0
    for label, name in methods:
        if label in given:
            continue
        if name == "local" and not any(style.light == GREY[0] for style in given.values()):
            given[label] = MethodStyle(*GREY, "circle-open", "dot")
            continue
        # Nine colours, then the same again with the next dash; symbols repeat after eight.
        lap, place = divmod(coloured, len(_COLOURS))
        symbol = _SYMBOLS[coloured % len(_SYMBOLS)]
        given[label] = MethodStyle(*_COLOURS[place], symbol, _DASHES[lap % len(_DASHES)])
        coloured += 1
    return given
