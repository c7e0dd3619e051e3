"""Run experiments and print their results: run, demo, show."""

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from idiolect.cli import command_base as base
from idiolect.cli.command_base import guarded

if TYPE_CHECKING:
    from idiolect.cli.screen import PlainConsole
    from idiolect.experiment.schema import Experiment
    from idiolect.results.document import Document

_OUT = typer.Option("--out", help="Folder for the results; runs/NAME by default.")

# PersFL's Table 3, MNIST DS-1, users 0 to 9.
_PAPER = {
    "paper: FedAvg": [91.2, 92.2, 88.0, 93.2, 92.3, 92.2, 93.8, 91.5, 94.3, 91.3],
    "paper: PersFL": [98.3, 98.8, 99.5, 98.2, 98.7, 98.3, 98.7, 98.7, 98.3, 98.5],
}
_REMARK = (
    "The paper's DS-1 is two shards of 300 images for each of 10 users; "
    "the demo's users have 4 digits, each 0.6 times as frequent as the one before "
    "(data.partition.imbalance), so figures stand beside the paper's, and are not to equal them."
)


@guarded
def run(
    experiment: Annotated[
        Path, typer.Argument(help="The experiment, a TOML file; or a run's folder, to run it here.")
    ],
    set: Annotated[list[str] | None, base.SET] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on where the run stopped.")] = False,
    out: Annotated[Path | None, _OUT] = None,
    device: Annotated[str | None, base.DEVICE] = None,
    backend: Annotated[str | None, base.BACKEND] = None,
    data_dir: Annotated[Path | None, base.DATA] = None,
    method: Annotated[list[str] | None, base.ONLY] = None,
    serve: Annotated[
        bool, typer.Option("--serve", help="Serve the report while it grows, to this machine.")
    ] = False,
    serve_at: Annotated[
        str | None, typer.Option("--serve-at", help="Serve at HOST:PORT; 127.0.0.1:8484 if free.")
    ] = None,
    serve_anyone: Annotated[
        bool, typer.Option("--serve-anyone", help="Let other machines see it too.")
    ] = False,
    log: Annotated[
        list[str] | None,
        typer.Option("--log", help="Also log to tensorboard, mlflow or wandb; NAME or NAME=WHERE."),
    ] = None,
    on: Annotated[
        str | None,
        typer.Option("--on", help="An admin's kit of a federation, or `local`: a process a node."),
    ] = None,
    trust_code: Annotated[bool, base.TRUST] = False,
    json: Annotated[bool, base.JSON] = False,
) -> None:
    """Run an experiment: train, score every client, write results."""
    from idiolect.analysis.live import address
    from idiolect.cli.screen import console
    from idiolect.experiment.load import load_experiment
    from idiolect.results.document import read_document

    wanted = serve or serve_at is not None
    served = address(serve_at or "", anyone=serve_anyone) if wanted else None
    loaded = load_experiment(experiment, base.overrides_of(set, device, backend), trust_code)
    if on is not None:
        from idiolect.cli.federation_commands import run_on

        folder = run_on(on, loaded, out, resume, method or [], base.say_aside if json else base.say)
        _print(console(), read_document(folder), folder, json)
        return
    options: dict[str, Any] = {"resume": resume, "data_dir": data_dir, "only": method or ()}
    again = shlex.join(["idiolect", *sys.argv[1:], *([] if resume else ["--resume"])])
    _execute(loaded, out, f"go on with `{again}`", json, **options, serve=served, log=log or ())


_DEMOS = ("digits", "hospitals")


@guarded
def demo(
    what: Annotated[
        str,
        typer.Argument(
            help="digits: ten users, beside a paper's figures; hospitals: four real ones, with a "
            "verdict.",
            autocompletion=base.completing(*_DEMOS),
        ),
    ] = "digits",
    set: Annotated[list[str] | None, base.SET] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder for the results; runs/demo by default.")
    ] = None,
    device: Annotated[str | None, base.DEVICE] = None,
    json: Annotated[bool, base.JSON] = False,
) -> None:
    """Train personal models on real data that comes with idiolect.

    Five methods on digits beside the paper's figures, or four methods and what a hospital would use
    instead on patients of four hospitals.
    """
    from idiolect.errors import ConfigError, suggest
    from idiolect.experiment.load import parse_experiment

    if what not in _DEMOS:
        raise ConfigError(f"no demo is called {suggest(what, _DEMOS)}")
    loaded = parse_experiment(demo_experiment(what), base.overrides_of(set, device), "the demo")
    if what == "digits":
        folder = out or Path("runs/demo")
        _execute(loaded, folder, "start it again", json, published=True, overwrite=True)
        return
    from idiolect.cli.compare_commands import run_comparison
    from idiolect.experiment.run import clear_run_folder

    folder = out or Path("runs/hospitals")
    clear_run_folder(folder)
    run_comparison(loaded, folder, json)


def demo_experiment(what: str = "digits") -> str:
    """Return the experiment file of a demo."""
    name = {"digits": "demo.toml", "hospitals": "hospitals.toml"}[what]
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def _execute(
    loaded: "Experiment",
    out: Path | None,
    advice: str,
    json: bool,
    *,
    published: bool = False,
    **options: Any,
) -> None:
    from idiolect.cli.screen import console, progress
    from idiolect.experiment.run import run_experiment

    screen = console(stderr=json)
    saved = f"interrupted; the last whole round is saved in the run's folder: {advice}"
    with base.interruptible(saved), progress(screen) as watch:
        content, folder = run_experiment(loaded, out, watch=watch, **options)
    _print(screen, content, folder, json, published)


def _print(
    screen: "PlainConsole", content: "Document", folder: Path, json: bool, published: bool = False
) -> None:
    from idiolect.cli.screen import print_json, print_result

    if json:
        print_json(content)
        return
    print_result(screen, content, _PAPER if published else None)
    screen.say(_REMARK if published else "")
    screen.say(f"Results: {folder}")


@guarded
def show(
    folder: Annotated[Path, typer.Argument(help="The folder of a run.")],
    fairness: Annotated[
        bool, typer.Option("--fairness", help="Compare methods by spread over clients.")
    ] = False,
    json: Annotated[bool, base.JSON] = False,
) -> None:
    """Print the tables of a run again."""
    from idiolect.cli.screen import (
        console,
        print_attendance,
        print_fairness,
        print_json,
        print_reached,
        print_result,
        print_traffic,
    )
    from idiolect.errors import DataError
    from idiolect.results.document import read_document

    content = read_document(folder)
    if fairness and "fairness" not in content:
        raise DataError(
            f"{folder} was written by an older idiolect, which did not compare fairness; run its "
            "experiment again with --resume"
        )
    if json:
        print_json(content["fairness"] if fairness else content)
        return
    screen = console()
    if fairness:
        print_fairness(screen, content["fairness"])
    else:
        print_result(screen, content)
        print_reached(screen, content["methods"])
        print_traffic(screen, content["methods"])
        print_attendance(screen, content["methods"])
    if not content["complete"]:
        print("This run is not complete; go on with `idiolect run EXPERIMENT.toml --resume`.")
