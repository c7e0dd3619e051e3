"""The clients × classes picture: in the terminal, and as SVG."""

from html import escape
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from idiolect.data import Federation

_SHADES = " ░▒▓█"
_MOST_CLIENTS, _MOST_CLASSES = 60, 16  # more do not fit a screen; --json and --svg show all


def print_picture(screen: Console, federation: Federation, counts: Any) -> None:
    """Draw a row per client: a shade for each class, with counts where they fit, and totals."""
    classes = federation.columns
    roomy = len(classes) <= _MOST_CLASSES
    table = Table(title=federation.description, box=box.SIMPLE_HEAD)
    table.add_column("client")
    if roomy:
        for name in classes:
            table.add_column(_short(name), justify="right")
    else:
        table.add_column(f"{classes[0]} … {classes[-1]}", no_wrap=True)
    table.add_column("total", justify="right")
    most = max(int(counts.max()), 1)
    for place, name in enumerate(federation.names[:_MOST_CLIENTS]):
        row = counts[place]
        cells = [_cell(n, most) for n in row] if roomy else [Text(_shades(row, most))]
        table.add_row(name, *cells, f"{int(row.sum()):,}")
    table.add_section()
    totals = counts.sum(axis=0)
    sums = [f"{int(n):,}" for n in totals] if roomy else [_shades(totals, max(totals.max(), 1))]
    table.add_row("all", *sums, f"{int(counts.sum()):,}", style="bold")
    screen.print(table)
    if len(federation.names) > _MOST_CLIENTS:
        hidden = len(federation.names) - _MOST_CLIENTS
        screen.print(f"... and {hidden} more clients (--json or --svg shows all)")
    sizes = [sum(len(rows) for rows in part) for part in (federation.train, federation.val)]
    tested = sum(len(rows) for rows in federation.test)
    screen.print(f"{sizes[0]:,} train, {sizes[1]:,} validation, {tested:,} test rows")
    for text in federation.warnings():
        screen.print(f"note: {text}", markup=False, soft_wrap=True)


def as_svg(federation: Federation, counts: Any) -> str:
    """Draw the same as an SVG: darker is more."""
    side, left, top = 18, 110, 26
    most = max(int(counts.max()), 1)
    clients, classes = counts.shape
    width, height = left + classes * side + 60, top + clients * side + 10
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" font-family="sans-serif" font-size="10">',
        f"<title>{escape(federation.description)}</title>",
    ]
    for column, name in enumerate(federation.columns):
        x = left + column * side + side / 2
        lines.append(f'<text x="{x}" y="{top - 8}" text-anchor="middle">{escape(name[:3])}</text>')
    for row, name in enumerate(federation.names):
        y = top + row * side
        lines.append(f'<text x="{left - 6}" y="{y + 12}" text-anchor="end">{escape(name)}</text>')
        for column in range(classes):
            share = counts[row, column] / most
            if share:
                lines.append(
                    f'<rect x="{left + column * side}" y="{y}" width="{side - 1}" '
                    f'height="{side - 1}" fill="#1f4e8c" fill-opacity="{share:.3f}">'
                    f"<title>{int(counts[row, column])}</title></rect>"
                )
        total = int(counts[row].sum())
        lines.append(f'<text x="{left + classes * side + 6}" y="{y + 12}">{total}</text>')
    return "\n".join([*lines, "</svg>", ""])


def _cell(count: int, most: int) -> Text:
    if not count:
        return Text("·", style="dim")
    return Text(f"{_shade(count, most)} {int(count)}")


def _shades(counts: Any, most: int) -> str:
    return "".join(_shade(int(count), most) for count in counts)


def _shade(count: int, most: int) -> str:
    """Return a darker block for more; anything above zero is visible."""
    return _SHADES[int(np.ceil(count / most * (len(_SHADES) - 1)))]


def _short(name: str) -> str:
    return name if len(name) <= 6 else name[:5] + "…"
