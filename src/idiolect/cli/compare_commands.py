"""Compare methods and write reports: compare, report."""

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from idiolect.cli import command_base as base
from idiolect.cli.command_base import guarded

if TYPE_CHECKING:
    from idiolect.experiment.schema import Experiment


@guarded
def compare(
    experiment: Annotated[
        Path, typer.Argument(help="An experiment, a TOML file; or a folder of results.")
    ],
    set: Annotated[list[str] | None, base.SET] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder for the results; runs/NAME by default.")
    ] = None,
    target: Annotated[
        float | None,
        typer.Option(help="Validation score to reach, such as 0.9; else where the worst ends."),
    ] = None,
    alpha: Annotated[
        float, typer.Option(help="How often equal methods may be called different.")
    ] = 0.05,
    unit: Annotated[
        str | None,
        typer.Option(
            help="What a verdict is over: clients (clients like these) or examples (these clients)."
        ),
    ] = None,
    metric: Annotated[
        str | None,
        typer.Option(help="What methods are compared by, such as auroc; else evaluate.metric."),
    ] = None,
    device: Annotated[str | None, base.DEVICE] = None,
    backend: Annotated[str | None, base.BACKEND] = None,
    data_dir: Annotated[Path | None, base.DATA] = None,
    json: Annotated[bool, base.JSON] = False,
) -> None:
    """Compare methods over seeds and splits, with a verdict.

    Goes on by itself where it was stopped; methods and seeds added to the file are added to what
    is there.
    """
    from idiolect.errors import ConfigError
    from idiolect.experiment.compare import compare_folder
    from idiolect.experiment.load import load_experiment

    if not 0 < alpha < 1:
        raise ConfigError(f"--alpha is {alpha}; expected between 0 and 1, such as 0.05")
    if unit not in (None, "clients", "examples"):
        raise ConfigError(f"--unit is {unit!r}; expected clients or examples")
    if target is not None and not target > 0:
        raise ConfigError(f"--target is {target}; expected a score above 0, such as 0.9")
    asked: dict[str, Any] = {"alpha": alpha, "target": target, "unit": unit}
    if experiment.is_dir():
        _print(compare_folder(experiment, **asked, metric=metric), experiment, json)
        return
    chosen = [f"evaluate.metric={metric}"] if metric else []
    loaded = load_experiment(
        experiment, base.overrides_of([*(set or []), *chosen], device, backend)
    )
    run_comparison(loaded, out, json, data_dir=data_dir, **asked)


def run_comparison(loaded: "Experiment", out: Path | None, json: bool, **asked: Any) -> None:
    """Train, compare and print, with a bar meanwhile."""
    from idiolect.cli.screen import console, progress
    from idiolect.experiment.compare import compare_experiment

    saved = "interrupted; the last whole round is saved: go on with the same command"
    with base.interruptible(saved), progress(console(stderr=json)) as watch:
        content, folder = compare_experiment(loaded, out, watch=watch, **asked)
    _print(content, folder, json)


def _print(content: dict[str, Any], folder: Path, json: bool) -> None:
    from idiolect.cli.comparison_tables import print_comparison
    from idiolect.cli.screen import console, print_json

    if json:
        print_json(content)
        return
    screen = console()
    print_comparison(screen, content)
    screen.say(f"Results: {folder}")


@guarded
def report(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs, one or several.")],
    out: Annotated[
        Path | None, typer.Option("--out", help="The page; report.html in the run's folder.")
    ] = None,
    files: Annotated[
        Path | None,
        typer.Option("--files", help="Also write every figure and table as a file, here."),
    ] = None,
    title: Annotated[str, typer.Option("--title", help="The page's title.")] = "",
    json: Annotated[bool, typer.Option("--json", help="Print what was written as JSON.")] = False,
) -> None:
    """Write a report: one page that opens offline.

    With --files also every figure as SVG and CSV, every table as Markdown, LaTeX and CSV.
    """
    from idiolect.analysis.report import report as write
    from idiolect.cli.screen import print_json

    command = shlex.join(["idiolect", *sys.argv[1:]])
    written = write(list(runs), out, files=files, title=title, command=command)
    if json:
        print_json({"page": str(written[0]), "files": [str(path) for path in written[1:]]})
        return
    print(f"Report: {written[0]}")
    if files:
        print(f"{len(written) - 1} files of figures and tables: {files}")
