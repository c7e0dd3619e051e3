"""The command of the reproduction index: repro."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from idiolect.cli.guard import complain, debugging, guarded, interrupted
from idiolect.cli.options import BACKEND, DATA, DEVICE, JSON, SET, machine

if TYPE_CHECKING:
    from idiolect.experiment.repro.index import Item, Measured, Paper
    from idiolect.experiment.schema import Experiment
    from idiolect.results.document import Document


def _complete(incomplete: str) -> Iterable[tuple[str, str]]:
    from idiolect.experiment.repro.index import items

    return [(n, item.title) for n, (_, item) in items().items() if n.startswith(incomplete)]


@guarded
def repro(
    name: Annotated[
        str | None,
        typer.Argument(
            help="A table or figure to run, such as persfl-table3.", autocompletion=_complete
        ),
    ] = None,
    show: Annotated[
        bool, typer.Option("--show", help="Tell its figures and files; run nothing.")
    ] = False,
    set: Annotated[list[str] | None, SET] = None,
    out: Annotated[Path, typer.Option("--out", help="Folder of the runs' folders.")] = Path("runs"),
    method: Annotated[
        list[str] | None, typer.Option("--method", help="Run only this label; may be repeated.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on where it stopped.")] = False,
    device: Annotated[str | None, DEVICE] = None,
    backend: Annotated[str | None, BACKEND] = None,
    data_dir: Annotated[Path | None, DATA] = None,
    json: Annotated[bool, JSON] = False,
) -> None:
    """List every table and figure of the papers with its status, or run one of them."""
    from idiolect.cli.screen import console, print_json
    from idiolect.errors import ConfigError
    from idiolect.experiment.repro.index import find_item, items, shipped_figures

    measured, screen = shipped_figures(), console()
    if name is None:
        if show:
            raise ConfigError("--show tells of one table or figure; give its name")
        if json:
            print_json({n: _described(p, i, measured) for n, (p, i) in items().items()})
            return
        screen.print(_overview(measured))
        screen.print(
            "`idiolect repro NAME --show` tells a row's figures and files; without --show it is "
            "run.\nWhat a status means: docs/reproduction/README.md, or --json.",
            markup=False,
        )
        return
    paper, item = find_item(name)
    fresh = None
    if not show:
        overrides = [*(set or ()), *machine(device, backend)]
        fresh = _run(paper, item, overrides, out, method or [], resume, data_dir)
    if json:
        print_json(_described(paper, item, measured, fresh))
        return
    screen.print(f"{paper.name}, {item.title}: {item.status(measured)}", markup=False)
    if item.note:
        screen.print(item.note, markup=False)
    for failed in item.failed(measured):
        screen.print(failed, markup=False)
    if item.cells:
        screen.print(_figures(item, measured, fresh))
    for one in item.experiments:
        screen.print(f"experiments/{one.file} {' '.join(one.set)}".rstrip(), markup=False)


def _run(
    paper: "Paper",
    item: "Item",
    overrides: list[str],
    out: Path,
    only: list[str],
    resume: bool,
    data_dir: Path | None,
) -> "Measured":
    from idiolect.cli.progress import watching
    from idiolect.cli.screen import console
    from idiolect.experiment.repro.index import run_item
    from idiolect.experiment.run import run_experiment

    def one(experiment: "Experiment", folder: Path) -> "Document":
        # A run of several files goes on with whatever of them was begun.
        again = resume and (folder / "experiment.toml").exists()
        with watching(console(stderr=True)) as watch:
            content, _ = run_experiment(
                experiment, folder, resume=again, data_dir=data_dir, only=only, watch=watch
            )
        return content

    try:
        return run_item(item, paper.figure, one, out, overrides)
    except KeyboardInterrupt as error:
        if debugging():
            raise
        complain("interrupted; the last whole round is saved: go on with the same and --resume")
        raise typer.Exit(interrupted(error)) from None


def _overview(measured: "Measured") -> Any:
    from rich import box
    from rich.table import Table

    from idiolect.experiment.repro.index import items

    table = Table(box=box.SIMPLE_HEAD)
    for head in ("name", "what", "status"):
        table.add_column(head)
    for head in ("ours", "paper"):
        table.add_column(head, justify="right")
    table.add_column("of (furthest below)")
    for name, (_, item) in items().items():
        cell = item.headline(measured)
        ours = cell.ours(measured) if cell else None
        figures = (
            (f"{ours.mean:.1f} ± {ours.deviation:.1f}", f"{cell.paper:.1f}", cell.what)
            if cell and ours
            else ("", "", "")
        )
        table.add_row(name, item.title, item.status(measured), *figures)
    return table


def _figures(item: "Item", measured: "Measured", fresh: "Measured | None") -> Any:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("%")
    columns = [measured] if fresh is None else [fresh, measured]
    heads = ["kept"] if fresh is None else ["this run", "kept"]
    for head in (*heads, "paper"):
        table.add_column(head, justify="right")
    for cell in item.cells:
        found = [cell.ours(one) for one in columns]
        shown = [f"{one.mean:.1f} ± {one.deviation:.1f}" if one else "-" for one in found]
        table.add_row(cell.what, *shown, f"{cell.paper:.1f}")
    return table


def _described(
    paper: "Paper", item: "Item", measured: "Measured", fresh: "Measured | None" = None
) -> dict[str, Any]:
    from idiolect.experiment.repro.index import RULES

    cells = []
    for cell in item.cells:
        ours = cell.ours(measured)
        told: dict[str, Any] = {
            "what": cell.what,
            "run": cell.run,
            "method": cell.label,
            "model": cell.model,
            "paper": cell.paper,
            "ours": ours.mean if ours else None,
            "deviation": ours.deviation if ours else None,
        }
        if fresh is not None:
            now = cell.ours(fresh)
            told["this_run"] = now.mean if now else None
        cells.append(told)
    status = item.status(measured)
    return {
        "paper": paper.title,
        "title": item.title,
        "status": status,
        "means": RULES[status],
        "note": item.note,
        "not_found": list(item.failed(measured)),
        "experiments": [{"file": one.file, "set": list(one.set)} for one in item.experiments],
        "figures": cells,
    }
