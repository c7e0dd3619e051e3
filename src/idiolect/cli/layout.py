"""Tables that stay readable at 80 columns: heads wrap, further columns follow; none is cut."""

import textwrap
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from idiolect.errors import shortened

LONGEST = 40  # letters of a name in a table
NARROW = 100  # columns of a screen below which names are shorter and spare columns left out


def print_table(
    screen: Console,
    title: str,
    left: Sequence[str],
    right: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    total: Sequence[str] = (),
    spare: Sequence[str] = (),
    dim: Sequence[str] = (),
    cut: bool = True,
) -> None:
    """Print rows: `left` are columns of names, `right` of numbers; `total` is a last row.

    Long cells are shortened in their middle, or with `cut` off only those of the first column.

    Where rows do not fit, `spare` columns are left out and said to be; then columns that still do
    not fit follow in a table of their own, with the names again.
    """
    most = 32 if screen.width < NARROW else LONGEST
    lines = [
        [shortened(cell, most) if cut or not place else cell for place, cell in enumerate(row)]
        for row in ([*rows, total] if total else rows)
    ]
    heads = [shortened(head, LONGEST) for head in (*left, *right)]
    whole = list(range(len(heads)))
    make = partial(_table, left, heads, lines, dim=dim, total=bool(total))
    if title:
        screen.print(Text(f"\n{title}", style="italic"))
    if _width(screen, make(whole)) <= screen.width:
        screen.print(make(whole))
        return
    kept = whole
    if _width(screen, make(whole, wrap=True)) > screen.width:
        kept = [place for place in whole if heads[place] not in spare]
    for group in _groups(screen, make, kept[: len(left)], kept[len(left) :]):
        screen.print(make(group, wrap=True))
    if len(kept) < len(whole):
        gone = ", ".join(heads[place] for place in whole if place not in kept)
        screen.print(f"Left out at this width: {gone} (a wider window or --json shows them).")


def _groups(
    screen: Console, make: Callable[..., Table], names: list[int], numbers: list[int]
) -> list[list[int]]:
    """Deal the columns of numbers to as few tables as they fit, of about equal width."""
    for count in range(1, len(numbers) + 1):
        size = -(-len(numbers) // count)
        parts = [numbers[start : start + size] for start in range(0, len(numbers), size)]
        found = [names + part for part in parts]
        if all(_width(screen, make(own, wrap=True)) <= screen.width for own in found):
            return found
    return [[*names, number] for number in numbers] or [names]


def _width(screen: Console, table: Table) -> int:
    return Measurement.get(screen, screen.options.update(max_width=1 << 16), table).maximum


def _table(
    left: Sequence[str],
    heads: Sequence[str],
    lines: Sequence[Sequence[str]],
    places: Sequence[int],
    *,
    dim: Sequence[str],
    total: bool,
    wrap: bool = False,
) -> Table:
    """Make the table of some columns; wrapped heads take as much room as their longest word."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for place in places:
        cells = [len(line[place]) for line in lines]
        joined = heads[place].replace("± ", "±~")  # never apart
        width = max([*cells, *(len(word) for word in joined.split()), 1])
        options: dict[str, Any] = {"style": "dim"} if heads[place] in dim else {}
        table.add_column(
            textwrap.fill(joined, width).replace("~", " ") if wrap else heads[place],
            justify="right" if place >= len(left) else "left",
            overflow="fold",
            **options,
        )
    for number, line in enumerate(lines):
        last = total and number == len(lines) - 1
        if last:
            table.add_section()
        table.add_row(*(line[place] for place in places), style="bold" if last else "")
    return table


def print_texts(
    screen: Console, heads: Sequence[str], rows: Sequence[Sequence[str]], title: str = ""
) -> None:
    """Print names with sentences: a table where there is room, else a paragraph for each name.

    The column with the longest text is the one that is wrapped.
    """
    if title:
        screen.print(Text(f"\n{title}", style="italic"))
    widths = [
        max([len(head), *(len(row[place]) for row in rows)]) for place, head in enumerate(heads)
    ]
    body = widths.index(max(widths))
    if sum(widths) - widths[body] + 3 * len(heads) + min(widths[body], 30) <= screen.width:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for place, head in enumerate(heads):
            table.add_column(head, overflow="fold", no_wrap=place != body)
        for row in rows:
            table.add_row(*row)
        screen.print(table)
        return
    for row in rows:
        beside = [
            cell for place, cell in enumerate(row[1:], 1) if place != body and cell not in ("", "-")
        ]
        first = Text(shortened(row[0], screen.width - 4), style="bold")
        screen.print(first + Text("".join(f"  {cell}" for cell in beside), style="not bold"))
        if row[body]:
            words = textwrap.fill(row[body], screen.width - 4)
            screen.print(Text(textwrap.indent(words, "    ")))
