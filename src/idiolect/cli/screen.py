"""Tables on the screen."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from idiolect.results.document import Document
from idiolect.results.tables import per_client, summary

_MOST_CLIENTS = 30  # more make a table that nobody reads; result.json has them all


def console() -> Console:
    """Return where to write; in a pipe, lines are as long as they need to be."""
    screen = Console(highlight=False)
    return screen if screen.is_terminal else Console(highlight=False, width=200)


def print_json(value: Any) -> None:
    """Write a value for other programs."""
    print(json.dumps(value, indent=1, ensure_ascii=False))


def print_result(screen: Console, content: Document, beside: Mapping[str, Sequence[float]]) -> None:
    """Print each client's accuracy per method, then one line per method and model.

    `beside` adds columns of published figures, in per cent.
    """
    names, columns = per_client(content)
    if len(names) <= _MOST_CLIENTS:
        print_clients(screen, names, columns, beside)
    print_summary(screen, content)


def print_clients(
    screen: Console,
    names: Sequence[str],
    columns: Sequence[tuple[str, list[float | None]]],
    beside: Mapping[str, Sequence[float]],
) -> None:
    """Print test accuracy, a row per client and a column per method."""
    table = Table(
        title="Test accuracy of each client's own model, %, mean over seeds", box=box.SIMPLE_HEAD
    )
    table.add_column("client")
    for label, _ in columns:
        table.add_column(label, justify="right")
    for label in beside:
        table.add_column(label, justify="right", style="dim")
    for place, name in enumerate(names):
        ours = [percent(values[place]) for _, values in columns]
        theirs = [f"{values[place]:.1f}" for values in beside.values()]
        table.add_row(name, *ours, *theirs)
    table.add_section()
    means = [percent(_mean(values)) for _, values in columns]
    theirs = [f"{sum(values) / len(values):.1f}" for values in beside.values()]
    table.add_row("mean", *means, *theirs, style="bold")
    screen.print(table)


def print_summary(screen: Console, content: Document) -> None:
    """Print a line per method and model."""
    table = Table(title="Last round, test data, %", box=box.SIMPLE_HEAD)
    heads = (
        "mean",
        "± seeds",
        "± clients",
        "by samples",
        "worst client",
        "rounds",
        "MB/seed",
        "seconds",
    )
    table.add_column("method")
    table.add_column("model")
    for head in heads:
        table.add_column(head, justify="right")
    for row in summary(content):
        table.add_row(
            row["method"],
            row["model"],
            percent(row["mean"]),
            percent(row["std_seeds"]),
            percent(row["std_clients"]),
            percent(row["weighted_mean"]),
            percent(row["worst_client"]),
            str(row["rounds"]),
            f"{row['megabytes']:,.1f}",
            f"{row['seconds']:.1f}",
        )
    screen.print(table)


def percent(value: float | None) -> str:
    """Write a share as per cent; a dash where there is none."""
    return "-" if value is None else f"{100 * value:.1f}"


def _mean(values: Sequence[float | None]) -> float | None:
    seen = [value for value in values if value is not None]
    return sum(seen) / len(seen) if seen else None
