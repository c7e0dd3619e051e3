"""A table once, for the page (sortable), for Markdown, for LaTeX and for a spreadsheet."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from idiolect.analysis.report.chart import csv


@dataclass(frozen=True)
class Column:
    """A heading and how its values are written."""

    head: str
    form: str = "text"  # text, percent, points, interval, whole, kilo, mega, seconds, figure,
    # number, index, p
    help: str = ""  # said when one hovers over the heading
    best: str = ""  # "high" or "low": which value is set in bold


@dataclass(frozen=True)
class Sheet:
    """A table; a cell is a value, or (value, spread) written as value ± spread.

    In a column of intervals a cell is (low, high).
    """

    id: str
    title: str
    caption: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Any]]
    methods: Sequence[str] = ()  # the method of each row, so that rows go with it

    def html(self) -> str:
        """Write the table for the page."""
        heads = "".join(_head(column) for column in self.columns)
        best = [
            _best(column, [row[n] for row in self.rows]) for n, column in enumerate(self.columns)
        ]
        lines = []
        for place, row in enumerate(self.rows):
            method = self.methods[place] if self.methods else ""
            mark = f' data-method="{escape(method)}"' if method else ""
            cells = "".join(
                _html_cell(column, value, first=not n, best=_key(value) == best[n], method=method)
                for n, (column, value) in enumerate(zip(self.columns, row, strict=True))
            )
            lines.append(f"<tr{mark}>{cells}</tr>")
        return (
            f'<div class="scroll"><table id="{self.id}"><thead><tr>{heads}</tr></thead>'
            f"<tbody>{''.join(lines)}</tbody></table></div>"
        )

    def markdown(self) -> str:
        """Write the table for a README."""
        rule = ["---" if column.form == "text" else "---:" for column in self.columns]
        rows = [[column.head for column in self.columns], rule, *self._written()]
        return "".join("| " + " | ".join(_piped(cell) for cell in row) + " |\n" for row in rows)

    def latex(self) -> str:
        """Write the table for a paper, in the manner of booktabs."""
        kinds = "".join("l" if column.form == "text" else "r" for column in self.columns)
        lines = [" & ".join(map(_tex, row)) + r" \\" for row in self._written()]
        head = " & ".join(_tex(column.head) for column in self.columns) + r" \\"
        return "\n".join(
            [
                r"% needs \usepackage{booktabs}",
                rf"\begin{{tabular}}{{{kinds}}}",
                r"\toprule",
                head,
                r"\midrule",
                *lines,
                r"\bottomrule",
                r"\end{tabular}",
                "",
            ]
        )

    def csv(self) -> str:
        """Write values in the units of the headings, unrounded; a spread gets its own column."""
        spread = [
            any(isinstance(row[n], tuple) for row in self.rows) for n in range(len(self.columns))
        ]
        header: list[str] = []
        for column, wide in zip(self.columns, spread, strict=True):
            ends = [f"{column.head}, low", f"{column.head}, high"]
            both = ends if column.form == "interval" else [column.head, f"± {column.head}"]
            header += both if wide else [column.head]
        rows = []
        for row in self.rows:
            cells: list[Any] = []
            for column, value, wide in zip(self.columns, row, spread, strict=True):
                pair = value if isinstance(value, tuple) else (value, None)
                scaled = [_scaled(column.form, one) for one in pair]
                cells += scaled if wide else scaled[:1]
            rows.append(cells)
        return csv(header, rows)

    def _written(self) -> list[list[str]]:
        return [
            [written(column, value) for column, value in zip(self.columns, row, strict=True)]
            for row in self.rows
        ]


def written(column: Column, value: Any) -> str:
    """Write a value as its column says; a dash where there is none."""
    if column.form == "interval":
        return "–" if value is None else " to ".join(one("percent", end) for end in value)
    if isinstance(value, tuple):
        middle, spread = value
        return one(column.form, middle) + (
            "" if _none(spread) else f" ± {one(column.form, spread)}"
        )
    return one(column.form, value)


def one(form: str, value: Any) -> str:
    """Write one figure."""
    if _none(value):
        return "–"
    match form:
        case "percent":
            return f"{100 * value:.1f}"
        case "points":
            return f"{100 * value:+.1f}"
        case "whole":
            return f"{value:,.0f}"
        case "kilo":
            return f"{value / 1e3:,.1f}"
        case "mega":
            return f"{value / 1e6:,.1f}"
        case "seconds":
            return f"{value:,.1f}"
        case "number":
            return f"{value:.4g}" if isinstance(value, float) else str(value)
        case "index":
            return f"{value:.4f}"
        case "figure":
            return f"{value:.3g}"
        case "p":
            return "< 0.001" if value < 0.001 else f"{value:.3f}"
    return str(value)


_UNITS = {"percent": 100.0, "points": 100.0, "interval": 100.0, "kilo": 1e-3, "mega": 1e-6}


def _scaled(form: str, value: Any) -> Any:
    return value if _none(value) or form not in _UNITS else value * _UNITS[form]


def _head(column: Column) -> str:
    kind = "" if column.form == "text" else ' class="number"'
    told = f' title="{escape(column.help)}"' if column.help else ""
    return f'<th scope="col"{kind}{told}><button type="button">{escape(column.head)}</button></th>'


def _html_cell(column: Column, value: Any, *, first: bool, best: bool, method: str) -> str:
    shown = escape(written(column, value))
    if first and method:
        shown = f'<span class="key" data-key="{escape(method)}"></span>{shown}'
    key = _key(value)
    sort = "" if key is None else f' data-sort="{key!r}"' if not isinstance(key, str) else ""
    kind = "" if column.form == "text" else ' class="number"'
    if best:
        shown = f"<strong>{shown}</strong>"
    return f"<th scope='row'{sort}>{shown}</th>" if first else f"<td{kind}{sort}>{shown}</td>"


def _key(value: Any) -> Any:
    inner = value[0] if isinstance(value, tuple) else value
    return None if _none(inner) else inner


def _best(column: Column, values: Sequence[Any]) -> Any:
    keys = [_key(value) for value in values if _key(value) is not None]
    if not column.best or len(keys) < 2:
        return _NOTHING
    return max(keys) if column.best == "high" else min(keys)


_NOTHING = object()  # equals no value


def _none(value: Any) -> bool:
    return value is None or (isinstance(value, float) and not math.isfinite(value))


def _piped(text: str) -> str:
    return text.replace("|", "\\|")


_TEX = {
    "\\": r"\textbackslash{}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
    "–": "--",
    "<": r"$<$",
    ">": r"$>$",
    "≥": r"$\geq$",
    "≤": r"$\leq$",
    "λ": r"$\lambda$",
    "α": r"$\alpha$",
    "β": r"$\beta$",
    "Δ": r"$\Delta$",
    "×": r"$\times$",
    "−": "$-$",
}


def _tex(text: str) -> str:
    return "".join(_TEX.get(character, character) for character in text)
