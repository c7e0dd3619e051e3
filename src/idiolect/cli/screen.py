"""The screen: tables of results, JSON, and progress of a run."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from idiolect.cli.command_base import printable
from idiolect.cli.layout import print_table
from idiolect.core.metrics import Metric, metric
from idiolect.engine.outcome import Watch
from idiolect.errors import shortened
from idiolect.results import statistics
from idiolect.results.document import (
    Document,
    baseline_line,
    metric_of,
    metric_rows,
    per_client,
    summary,
)
from idiolect.results.statistics import known_mean
from idiolect.version import VERSION

MOST_CLIENTS = 30  # more make a table that nobody reads; result.json has them all


class PlainConsole(Console):
    """A console for which every string is text: no markup, no control character is obeyed."""

    def render_str(self, text: str, **options: Any) -> Text:
        """Render a string as it is, whatever rich would read into it."""
        return super().render_str(printable(text), **{**options, "markup": False, "emoji": False})

    def say(self, text: str) -> None:
        """Print a line, whatever its length; nothing where it is empty."""
        if text:
            self.print(text, markup=False, soft_wrap=True)


def console(stderr: bool = False) -> PlainConsole:
    """Return where to write; in a pipe, lines are as long as they need to be."""
    screen = PlainConsole(highlight=False, stderr=stderr)
    if screen.is_terminal:
        return screen
    wanted = os.environ.get("COLUMNS", "")
    width = max(40, int(wanted)) if wanted.isdecimal() else 200
    return PlainConsole(highlight=False, stderr=stderr, width=width)


def print_json(value: Any) -> None:
    """Write a value for other programs, in the one form that all commands share."""
    print(json.dumps({"idiolect": VERSION, "result": value}, indent=1, ensure_ascii=False))


def new_table(title: str, left: Sequence[str], right: Sequence[str] = ()) -> Table:
    """Return an empty table: columns of text, then columns of numbers."""
    table = Table(title=title or None, box=box.SIMPLE_HEAD)
    for head in left:
        table.add_column(head)
    for head in right:
        table.add_column(head, justify="right")
    return table


def percent(value: float | None) -> str:
    """Write a share as per cent; a dash where there is none."""
    return "-" if value is None else f"{100 * value:.1f}"


def print_result(
    screen: PlainConsole, content: Document, published: Mapping[str, Sequence[float]] | None = None
) -> None:
    """Print each client's score per method, then one line per method and model.

    `published` adds columns of a paper's figures, in per cent.
    """
    names, columns = per_client(content)
    own = metric_of(content)
    if len(names) <= MOST_CLIENTS:
        _print_clients(screen, own, names, columns, published or {})
        _print_reasons(screen, content)
    heads = ["mean", "± seeds", "± clients", "by samples", "worst client"]
    heads += ["rounds", "MB in all", "seconds in all"]
    keys = ("mean", "std_seeds", "std_clients", "weighted_mean", "worst_client")
    rows = []
    for row in summary(content):
        shares = [own.cell(row[key]) for key in keys]
        costs = [str(row["rounds"]), f"{row['megabytes']:,.1f}", f"{row['seconds']:.1f}"]
        rows.append([row["method"], row["model"], *shares, *costs])
    if guess := content.get("baseline"):
        figures = guess["headline"]
        seeds, clients = figures["seeds"], figures["clients"]
        cells = [own.cell(one) for one in (seeds["mean"], seeds["std"], clients["std"])]
        rows.append(["guessing", guess["name"], *cells, *["-"] * 5])
    which = "" if own.name == "accuracy" else f", {own.title}"
    title = f"Last round, test data{which}{', %' if own.percent else ''}"
    print_table(screen, title, ("method", "model"), heads, rows)
    _print_metrics(screen, content)
    _print_best_test_round(screen, content, own)
    screen.say(baseline_line(content))
    for text in statistics.participation_lines(content["methods"]):
        screen.say(text)


def _print_metrics(screen: PlainConsole, content: Document) -> None:
    """Print every metric of the task, mean over clients, of the methods' headline models."""
    rows, names = metric_rows(content)
    if len(names) > 1:
        heads = [f"{metric(n).title}{', %' if metric(n).percent else ''}" for n in names]
        cells = [[label, *map(_cell, names, values)] for label, values in rows.items()]
        title = "All metrics, test data, mean over clients where defined and over seeds"
        print_table(screen, title, ["method"], heads, cells)


def _print_best_test_round(screen: PlainConsole, content: Document, own: Metric) -> None:
    """Print the figure that is chosen on test data apart from all others, and say so.

    Beside it the mean of the last evaluated rounds, which is not chosen.
    """
    rows = []
    for label, method in content["methods"].items():
        for model, best in method.get("best_test_round", {}).items():
            row = [label, model, own.cell(known_mean(best["weighted_mean"])), _range(best["round"])]
            late = method.get("last_test_rounds", {}).get(model)  # not in older results
            for name in ("weighted_mean", "mean"):
                row.append(own.cell(known_mean(late[name])) if late else "-")
            rows.append([*row, _range(late["from_round"]) if late else "-"])
    if rows:
        title = (
            "For tables that print it: best test round, which is chosen on test data, so too high; "
            "and mean of the last ten scored rounds"
        )
        heads = (
            "by test rows",
            "round",
            "last ten, by test rows",
            "mean over clients",
            "from round",
        )
        print_table(screen, title, ("method", "model"), heads, rows)


def _range(rounds: Sequence[int]) -> str:
    low, high = min(rounds), max(rounds)
    return f"{low}" if low == high else f"{low} to {high}"


def _cell(name: str, value: float | None) -> str:
    return metric(name).cell(value)


def _print_clients(
    screen: Console,
    own: Metric,
    names: Sequence[str],
    columns: Sequence[tuple[str, list[float | None]]],
    published: Mapping[str, Sequence[float]],
) -> None:
    """Print a metric on test data, a row per client and a column per method."""
    heads = [*(label for label, _ in columns), *published]
    rows = []
    for place, name in enumerate(names):
        ours = [own.cell(values[place]) for _, values in columns]
        theirs = [f"{values[place]:.1f}" for values in published.values()]
        rows.append([name, *ours, *theirs])
    known = [[value for value in values if value is not None] for _, values in columns]
    means = [own.cell(sum(seen) / len(seen) if seen else None) for seen in known]
    theirs = [f"{sum(values) / len(values):.1f}" for values in published.values()]
    unit = ", %" if own.percent else ""
    title = f"Test {own.title} of each client's own model{unit}, mean over seeds"
    total = ["mean", *means, *theirs]
    print_table(screen, title, ["client"], heads, rows, total=total, dim=list(published))


def _print_reasons(screen: PlainConsole, content: Document) -> None:
    """Print what each client chose and why, under the first seed, where a method reports it."""
    for label, method in content["methods"].items():
        first = method["seeds"][0]
        chosen = {
            shortened(one["client"]): one["reason"] for one in first["clients"] if one.get("reason")
        }
        if chosen:
            screen.print(f"What {label} chose, seed {first['seed']}, on validation data:")
            for name, reason in chosen.items():
                screen.say(f"  {name}: {reason}")


def print_fairness(screen: Console, found: Document) -> None:
    """Print who is fairer than whom, and by which factor the deviation over clients differs."""
    title = "Is the row fairer than the column? Deviation of the column over that of the row"
    methods = found["methods"]
    rows = []
    for label, own in methods.items():
        cells = []
        for pair in (found["pairs"][label].get(other) for other in methods):
            known = pair is not None and pair["verdict"] is not None
            ratio = f" {pair['ratio']:.2f}x" if known and pair["ratio"] is not None else ""
            cells.append(f"{pair['verdict']}{ratio}" if known else "-")
        rows.append([label, percent(own["std"]), *cells])
    print_table(screen, title, ["method"], ["± clients, %", *methods], rows)


def print_reached(screen: Console, methods: Document) -> None:
    """Print how soon each method came near its last round's validation score."""
    found = {label: own.get("reached") for label, own in methods.items()}
    if not any(found.values()):
        return
    first = next(one for one in found.values() if one)
    own = metric(first.get("metric", "accuracy"))
    points = f"{100 * first['tolerance']:g} {'point' if own.percent else '%'}"
    title = f"First within {points} of the last validation {own.title}"
    heads = ("from round", "of", "MB down", "MB up")
    rows = []
    for label, one in found.items():
        rounds = str(methods[label]["rounds"])
        if one is None:
            rows.append([label, "-", "-", rounds, "-", "-"])
            continue
        bytes = [f"{one[key] / 1e6:,.1f}" for key in ("bytes_down", "bytes_up")]
        rows.append([label, one["model"], str(one["round"]), rounds, *bytes])
    print_table(screen, title, ("method", "model"), heads, rows)


def print_traffic(screen: Console, methods: Document) -> None:
    """Print what crossed the network, mean over seeds; public examples, sent once, apart."""
    heads = ("down a round", "up a round", "down", "up", "public, once")
    keys = ("bytes_down_per_round", "bytes_up_per_round", "bytes_down", "bytes_up", "public_bytes")
    rows = []
    for label, own in methods.items():
        seeds = [seed["traffic"] for seed in own["seeds"]]
        means = [sum(one.get(key, 0) for one in seeds) / len(seeds) / 1e6 for key in keys]
        rows.append([label, *[f"{mean:,.3f}" if mean else "-" for mean in means]])
    print_table(screen, "What crossed the network, MB a seed", ["method"], heads, rows)


def print_attendance(screen: Console, methods: Document) -> None:
    """Print who took part in how many rounds of a federation, and which rounds were missed, why."""
    rows = [
        [f"{label}, seed {seed['seed']}", site, str(own["reported"]), *_missed(own)]
        for label, method in methods.items()
        for seed in method["seeds"]
        for site, own in seed.get("attendance", {}).items()
    ]
    if rows:
        heads = ("rounds reported", "missed", "which, and why")
        print_table(screen, "Who was there", ["method", "site"], heads, rows)


def _missed(own: Document) -> list[str]:
    from idiolect.results.attendance import spans

    return [str(own["missed"]), spans(own) or "-"]


@contextmanager
def progress(screen: Console) -> Iterator[Watch]:
    """Show progress while the block runs: one bar for the whole run on a terminal, else lines."""
    from idiolect.analysis.progress import bar_on

    with bar_on(screen) as watch:
        yield watch
