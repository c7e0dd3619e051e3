"""The command that shows what a server learned: who learns from whom, at the end and over time."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from idiolect.cli.guard import guarded
from idiolect.cli.options import JSON

if TYPE_CHECKING:
    from rich.console import Console

    from idiolect.results.trace import Trace

_MOST_CLIENTS = 30  # more do not fit a screen; --svg and --json show all
_SHADES = " ░▒▓█"


@guarded
def draw(
    folder: Annotated[Path, typer.Argument(help="The folder of a run.")],
    method: Annotated[
        str | None, typer.Option("--method", help="A label; needed where several recorded.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option("--seed", help="One seed; the mean of all by default.")
    ] = None,
    svg: Annotated[Path | None, typer.Option("--svg", help="Draw it into this file.")] = None,
    json: Annotated[bool, JSON] = False,
) -> None:
    """Show who learns from whom, clients in the order of similarity; --svg draws it over time."""
    from idiolect.cli.screen import console, print_json
    from idiolect.core.checkpoint import write_whole
    from idiolect.results import trace

    found = trace.read_trace(folder, method or _only(folder))
    name, course = found.matrix(seed)
    order = trace.similar_order(course[-1])
    if json:
        print_json(
            {
                "label": found.label,
                "matrix": name,
                "rounds": found.rounds,
                "clients": found.clients,
                "order": order,
                "course": course.tolist(),
            }
        )
        return
    screen = console()
    one = found.seeds[0] if len(found.seeds) == 1 else seed
    seeds = f"mean of {len(found.seeds)} seeds" if one is None else f"seed {one}"
    title = f"{found.label}: {name}, {seeds}"
    if svg is not None:
        write_whole(svg, trace.matrix_svg(title, found.clients, found.rounds, course).encode())
        screen.print(f"Drawn: {svg}", markup=False, soft_wrap=True)
        return
    _print(screen, title, found, course[-1], order)


def _only(folder: Path) -> str:
    from idiolect.errors import ConfigError, DataError
    from idiolect.results import trace

    labels = trace.traced_labels(folder)
    if not labels:
        raise DataError(
            f"{folder} holds no trace; give the folder of a run of a method that records one, such "
            "as ktpfl"
        )
    if len(labels) > 1:
        raise ConfigError(f"several methods recorded a trace; add --method {' | '.join(labels)}")
    return labels[0]


def _print(screen: "Console", title: str, found: "Trace", matrix: Any, order: list[int]) -> None:
    from rich import box
    from rich.table import Table

    top = max(float(matrix.max()), 1e-12)
    table = Table(title=f"{title}, round {found.rounds[-1]}, %", box=box.SIMPLE_HEAD)
    table.add_column("learns from")
    shown = order[:_MOST_CLIENTS]
    for place in shown:
        table.add_column(found.clients[place].removeprefix("client "), justify="right")
    for row in shown:
        cells = [_cell(float(matrix[row, column]), top) for column in shown]
        table.add_row(found.clients[row], *cells)
    screen.print(table)
    if len(order) > len(shown):
        screen.print(f"... and {len(order) - len(shown)} more clients (--svg or --json shows all)")


def _cell(value: float, top: float) -> str:
    shade = _SHADES[min(len(_SHADES) - 1, max(0, round(value / top * (len(_SHADES) - 1))))]
    return f"{shade}{100 * value:.0f}"
