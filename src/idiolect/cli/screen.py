"""Tables on the screen."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from idiolect.errors import printable
from idiolect.results import statistics
from idiolect.results.document import Document, per_client, summary
from idiolect.version import VERSION

_MOST_CLIENTS = 30  # more make a table that nobody reads; result.json has them all


class PlainConsole(Console):
    """A console for which every string is text: no markup, no control character is obeyed."""

    def render_str(self, text: str, **options: Any) -> Text:
        """Render a string as it is, whatever rich would read into it."""
        return super().render_str(printable(text), **{**options, "markup": False, "emoji": False})


def console(stderr: bool = False) -> Console:
    """Return where to write; in a pipe, lines are as long as they need to be."""
    screen = PlainConsole(highlight=False, stderr=stderr)
    return screen if screen.is_terminal else PlainConsole(highlight=False, stderr=stderr, width=200)


def print_json(value: Any) -> None:
    """Write a value for other programs, in the one form that all commands share."""
    print(json.dumps({"idiolect": VERSION, "result": value}, indent=1, ensure_ascii=False))


def print_result(screen: Console, content: Document, beside: Mapping[str, Sequence[float]]) -> None:
    """Print each client's accuracy per method, then one line per method and model.

    `beside` adds columns of published figures, in per cent.
    """
    names, columns = per_client(content)
    if len(names) <= _MOST_CLIENTS:
        print_clients(screen, names, columns, beside)
        print_reasons(screen, content)
    print_summary(screen, content)
    for text in statistics.participation_lines(content["methods"]):
        screen.print(printable(text), markup=False, soft_wrap=True)


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


def print_reasons(screen: Console, content: Document) -> None:
    """Print what each client chose and why, under the first seed, where a method says so."""
    for label, method in content["methods"].items():
        first = method["seeds"][0]
        told = {one["client"]: one["reason"] for one in first["clients"] if one.get("reason")}
        if told:
            screen.print(f"What {label} chose, seed {first['seed']}, on validation data:")
            for name, reason in told.items():
                screen.print(f"  {name}: {reason}", markup=False, soft_wrap=True)


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
        "MB in all",
        "seconds in all",
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


def print_traffic(screen: Console, content: Document) -> None:
    """Print what crossed the network, mean over seeds; public examples, sent once, apart."""
    table = Table(title="What crossed the network, MB a seed", box=box.SIMPLE_HEAD)
    table.add_column("method")
    for head in ("down a round", "up a round", "down", "up", "public, once"):
        table.add_column(head, justify="right")
    keys = ("bytes_down_per_round", "bytes_up_per_round", "bytes_down", "bytes_up", "public_bytes")
    for label, own in content["methods"].items():
        seeds = [seed["traffic"] for seed in own["seeds"]]
        means = [sum(one.get(key, 0) for one in seeds) / len(seeds) / 1e6 for key in keys]
        table.add_row(label, *[f"{mean:,.3f}" if mean else "-" for mean in means])
    screen.print(table)


def print_reached(screen: Console, content: Document) -> None:
    """Print how soon each method came near its last round's validation accuracy."""
    found = {label: own.get("reached") for label, own in content["methods"].items()}
    if not any(found.values()):
        return
    points = next(100 * one["tolerance"] for one in found.values() if one)
    table = Table(
        title=f"First within {points:g} point of the last validation accuracy",
        box=box.SIMPLE_HEAD,
    )
    table.add_column("method")
    table.add_column("model")
    for head in ("from round", "of", "MB down", "MB up"):
        table.add_column(head, justify="right")
    for label, one in found.items():
        rounds = str(content["methods"][label]["rounds"])
        if one is None:
            table.add_row(label, "-", "-", rounds, "-", "-")
            continue
        bytes = [f"{one[key] / 1e6:,.1f}" for key in ("bytes_down", "bytes_up")]
        table.add_row(label, one["model"], str(one["round"]), rounds, *bytes)
    screen.print(table)


def print_fairness(screen: Console, content: Document) -> None:
    """Print who is fairer than whom, and by which factor the deviation over clients differs."""
    found = content["fairness"]
    table = Table(
        title="Is the row fairer than the column? Deviation of the column over that of the row",
        box=box.SIMPLE_HEAD,
    )
    table.add_column("method")
    table.add_column("± clients, %", justify="right")
    for label in found["methods"]:
        table.add_column(label, justify="right")
    for label, own in found["methods"].items():
        cells = [_pair(found["pairs"][label].get(other)) for other in found["methods"]]
        table.add_row(label, percent(own["std"]), *cells)
    screen.print(table)


def print_newcomers(screen: Console, content: Document) -> None:
    """Print what every newcomer holds, how its models score, and what its method chose."""
    told = f"Newcomers to {content['label']} of {content['run']}, seed {content['seed']}"
    table = Table(title=f"{told}: accuracy, %", box=box.SIMPLE_HEAD)
    first = content["newcomers"][0]
    facts = [name for name, value in first["facts"].items() if not isinstance(value, list)]
    table.add_column("newcomer")
    for head in ("train", "val", "test"):
        table.add_column(head, justify="right")
    for model in first["models"]:
        table.add_column(f"{model}, test", justify="right")
        table.add_column(f"{model}, val", justify="right")
    for name in facts:
        table.add_column(name.replace("_", " "), justify="right")
    for one in content["newcomers"]:
        scores = [
            percent(own.get(metric))
            for own in one["models"].values()
            for metric in ("accuracy", "val_accuracy")
        ]
        chosen = [f"{one['facts'][name]:g}" for name in facts]
        sizes = [str(one[part]) for part in ("train", "val", "test")]
        table.add_row(one["client"], *sizes, *scores, *chosen)
    screen.print(table)
    for one in content["newcomers"]:
        if one.get("reason"):
            screen.print(f"  {one['client']}: {one['reason']}", markup=False, soft_wrap=True)


def _pair(pair: Mapping[str, Any] | None) -> str:
    if pair is None or pair["verdict"] is None:
        return "-"
    ratio = "" if pair["ratio"] is None else f" {pair['ratio']:.2f}x"
    return f"{pair['verdict']}{ratio}"


def percent(value: float | None) -> str:
    """Write a share as per cent; a dash where there is none."""
    return "-" if value is None else f"{100 * value:.1f}"


def _mean(values: Sequence[float | None]) -> float | None:
    seen = [value for value in values if value is not None]
    return sum(seen) / len(seen) if seen else None
