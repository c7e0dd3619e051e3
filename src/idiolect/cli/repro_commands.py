"""Figures of the papers and of this machine: repro, bench."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from idiolect.cli import command_base as base
from idiolect.cli.command_base import guarded
from idiolect.errors import ConfigError

if TYPE_CHECKING:
    from idiolect.cli.screen import PlainConsole
    from idiolect.experiment.repro.items import Item, Paper
    from idiolect.experiment.repro.seed_figures import Measured
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
            help="A table or figure to run, such as persfl-table3, or a .toml with a table of "
            "yours; `check` finds every status again from the kept results, and fails if the page "
            "says otherwise.",
            autocompletion=_complete,
        ),
    ] = None,
    show: Annotated[
        bool, typer.Option("--show", help="Show its figures, files and minutes; run nothing.")
    ] = False,
    set: Annotated[list[str] | None, base.SET] = None,
    out: Annotated[Path, typer.Option("--out", help="Folder of the runs' folders.")] = Path("runs"),
    method: Annotated[list[str] | None, base.ONLY] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on where it stopped.")] = False,
    device: Annotated[str | None, base.DEVICE] = None,
    backend: Annotated[str | None, base.BACKEND] = None,
    data_dir: Annotated[Path | None, base.DATA] = None,
    json: Annotated[bool, base.JSON] = False,
) -> None:
    """List the papers' tables and figures, or run one of them."""
    from idiolect.cli.screen import console, print_json
    from idiolect.experiment.repro.index import find_item, items, own_paper
    from idiolect.experiment.repro.runs import finished_figures
    from idiolect.experiment.repro.seed_figures import shipped_figures

    measured, screen = shipped_figures(), console()
    if name == "check":
        _check(json)
        return
    if name is None:
        if show:
            raise ConfigError("--show shows one table or figure; give its name")
        if json:
            print_json({n: _described(p, i, measured) for n, (p, i) in items().items()})
            return
        _print_overview(screen, measured)
        screen.say(
            "`idiolect repro NAME --show` shows a row's figures, files and minutes; without --show "
            "it is run.\nWhat a status means: docs/reproduction/README.md, or --json."
        )
        return
    overrides = base.overrides_of(set, device, backend)
    if name.endswith(".toml"):
        own, told = own_paper(Path(name)), {}
        for item in own.items:
            if not show:
                _run(own, item, overrides, out, method or [], resume, data_dir)
            found = finished_figures(own, item, out)
            told[item.id] = _described(own, item, found)
            if not json:
                _print_item(screen, own, item, found)
        if json:
            print_json(told)
        return
    paper, item = find_item(name)
    fresh = None
    if not show:
        fresh = _run(paper, item, overrides, out, method or [], resume, data_dir)
    if json:
        print_json(_described(paper, item, measured, fresh))
        return
    _print_item(screen, paper, item, measured, fresh)


def _print_item(
    screen: "PlainConsole",
    paper: "Paper",
    item: "Item",
    measured: "Measured",
    fresh: "Measured | None" = None,
) -> None:
    screen.print(f"{paper.name}, {item.title}: {item.status(measured)}", markup=False)
    if item.note:
        screen.print(item.note, markup=False)
    for failed in item.failed(measured):
        screen.print(failed, markup=False)
    if item.cells:
        _print_figures(screen, item, measured, fresh)
    for one in item.experiments:
        path = one.file if Path(one.file).is_absolute() else f"experiments/{one.file}"
        screen.print(f"{path} {' '.join(one.set)}".rstrip(), markup=False)
    if item.experiments and fresh is None and (time := _time(paper, item)):
        screen.say(time)


def _time(paper: "Paper", item: "Item") -> str:
    from idiolect.experiment.repro.runs import estimated

    found = estimated(item)
    if not found.known:
        return paper.time
    lack = f" Without {found.asked - found.known} of {found.asked} methods, of which none are kept."
    least, most = f"{found.least:.0f}", f"{found.most:.0f}"
    between = "" if least == most else f"{least} to "
    side = "; seeds are trained side by side, and so many were not timed" if between else ""
    return (
        f"Whole, on one H200, one method after the other, by kept seconds: {between}{most} minutes "
        f"(an estimate{side}).{lack if found.known < found.asked else ''}"
    )


def _check(json: bool) -> None:
    from idiolect.cli.screen import console, print_json
    from idiolect.experiment.repro.index import items
    from idiolect.experiment.repro.stored import ROOT, disagreements

    page = ROOT / "docs" / "reproduction" / "README.md"
    told = disagreements(ROOT / "results", page)
    if json:
        print_json({"statuses": len(items()), "disagreements": told})
    elif told:
        for one in told:
            console().print(one, markup=False)
        console().say("`make docs` writes the page anew from results/.")
    else:
        by_hand = sum(bool(item.given) for _, item in items().values())
        console().say(
            f"{len(items())} statuses agree with results/; {by_hand} of them are given by hand, "
            "with a reason."
        )
    if told:
        raise typer.Exit(1)


def _run(
    paper: "Paper",
    item: "Item",
    overrides: list[str],
    out: Path,
    only: list[str],
    resume: bool,
    data_dir: Path | None,
) -> "Measured":
    from idiolect.cli.screen import console, progress
    from idiolect.experiment.repro.runs import run_item
    from idiolect.experiment.run import run_experiment

    def one(experiment: "Experiment", folder: Path, some: Sequence[str]) -> "Document":
        # A run of several files goes on with whatever of them was begun.
        again = resume and (folder / "experiment.toml").exists()
        with progress(console(stderr=True)) as watch:
            content, _ = run_experiment(
                experiment, folder, resume=again, data_dir=data_dir, only=some, watch=watch
            )
        return content

    saved = "interrupted; the last whole round is saved: go on with the same and --resume"
    with base.interruptible(saved):
        return run_item(item, paper.figure, one, out, overrides, only)


def _print_overview(screen: "PlainConsole", measured: "Measured") -> None:
    from idiolect.cli.layout import NARROW, print_table, print_texts
    from idiolect.experiment.repro.index import items
    from idiolect.experiment.repro.stored import written

    rows = []
    for name, (_, item) in items().items():
        cell = item.headline(measured)
        ours = cell.ours(measured) if cell else None
        figures = [written(ours), f"{cell.paper:.1f}", cell.what] if cell and ours else ["", "", ""]
        rows.append([name, item.title, item.status(measured), *figures])
    if screen.width >= NARROW:
        heads = ("name", "what", "status", "ours", "paper", "of (furthest below)")
        print_texts(screen, heads, rows)
        return
    shown = [[row[0], row[2], row[3], row[4]] for row in rows]
    print_table(screen, "", ("name", "status"), ("ours", "paper"), shown)
    screen.say("Figures of the table's method that is furthest below the paper's.")


def _print_figures(
    screen: "PlainConsole", item: "Item", measured: "Measured", fresh: "Measured | None"
) -> None:
    from idiolect.cli.layout import print_table
    from idiolect.experiment.repro.seed_figures import BEST_TEST_ROUND
    from idiolect.experiment.repro.stored import written

    columns = {"ours": measured} if fresh is None else {"this run": fresh, "kept": measured}
    shown = next(iter(columns.values()))
    best = any(cell.model.endswith(BEST_TEST_ROUND) for cell in item.cells)
    rows = []
    for cell in item.cells:
        found = [cell.ours(one) for one in columns.values()]
        if best:
            found.append(cell.last_round(shown))
        apart = f"{found[0].mean - cell.paper:+.1f}" if found[0] else ""
        figures = [written(one) if one else "-" for one in found]
        rows.append([cell.what, *figures, f"{cell.paper:.1f}", apart])
    further = ["last round"] if best else []
    print_table(screen, "", ["%"], [*columns, *further, "paper", "apart"], rows)
    counts = item.counts(shown)
    if ran := counts["near"] + counts["below"]:
        left = f"; {counts['not_measured']} are not measured" if counts["not_measured"] else ""
        screen.say(
            f"{counts['near']} of {ran} cells are within one point of the paper's or above{left}."
        )
    if best:
        screen.say(
            "Where a last round stands beside, ours is scored as the paper does: the best test "
            "round, clients weighed by test rows, which is chosen on test data. The last round, "
            "mean over clients, is ours."
        )


def _described(
    paper: "Paper", item: "Item", measured: "Measured", fresh: "Measured | None" = None
) -> dict[str, Any]:
    from idiolect.experiment.repro.items import RULES

    cells = []
    for cell in item.cells:
        ours = cell.ours(measured)
        one: dict[str, Any] = {
            "what": cell.what,
            "run": cell.run,
            "method": cell.label,
            "model": cell.model,
            "paper": cell.paper,
            "ours": ours.mean if ours else None,
            "deviation": ours.deviation if ours else None,
        }
        if last := cell.last_round(measured):
            one["last_round"] = last.mean
        if fresh is not None:
            now = cell.ours(fresh)
            one["this_run"] = now.mean if now else None
        cells.append(one)
    status = item.status(measured)
    return {
        "paper": paper.title,
        "title": item.title,
        "status": status,
        "means": RULES[status],
        "note": item.note,
        "not_found": list(item.failed(measured)),
        "experiments": [{"file": one.file, "set": list(one.set)} for one in item.experiments],
        "time": _time(paper, item) if item.experiments else None,
        "figures": cells,
        "counts": item.counts(measured if fresh is None else fresh),
    }


@guarded
def bench(
    only: Annotated[
        list[str] | None, typer.Argument(help="Workloads; by default those meant for the device.")
    ] = None,
    device: Annotated[str, base.DEVICE] = "auto",
    grow: Annotated[
        bool, typer.Option("--grow", help="Also time how it grows with clients, batch and network.")
    ] = False,
    precision: Annotated[
        bool, typer.Option("--precision", help="Also time TF32 and bfloat16.")
    ] = False,
    peers: Annotated[bool, typer.Option(help="Time pfl and flwr where installed.")] = True,
    check: Annotated[bool, typer.Option(help="First compare with sequential float64.")] = True,
    seconds: Annotated[float, typer.Option(help="Seconds to time each workload for.")] = 6.0,
    out: Annotated[Path | None, typer.Option("--out", help="Write the JSON here too.")] = None,
    data_dir: Annotated[Path | None, base.DATA] = None,
    json: Annotated[bool, base.JSON] = False,
) -> None:
    """Time backends, plain loops and peers on the same workloads."""
    from idiolect.bench.run_benchmark import Options, bench
    from idiolect.cli.screen import print_json

    chosen = Options(
        device=device,
        only=tuple(only or ()),
        grow=grow,
        precision=precision,
        peers=peers,
        check=check,
        seconds=seconds,
        data_dir=data_dir,
    )
    found = bench(chosen, lambda line: typer.echo(line, err=json), out)
    if json:
        print_json(found)
    if found["faults"]:
        raise typer.Exit(1)
