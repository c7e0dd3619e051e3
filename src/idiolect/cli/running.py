"""The commands that run experiments: run, demo, show."""

import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from idiolect.cli.guard import complain, debugging, guarded, interrupted
from idiolect.cli.options import BACKEND, DATA, DEVICE, JSON, SET, machine

if TYPE_CHECKING:
    from idiolect.analysis.live import Address
    from idiolect.experiment.schema import Experiment

# Heavy imports stand inside the commands, so that --help and completion answer at once.

_OUT = typer.Option("--out", help="Folder for the results; runs/NAME by default.")


@guarded
def run(
    experiment: Annotated[Path, typer.Argument(help="The experiment, a TOML file.")],
    set: Annotated[list[str] | None, SET] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on where the run stopped.")] = False,
    out: Annotated[Path | None, _OUT] = None,
    device: Annotated[str | None, DEVICE] = None,
    backend: Annotated[str | None, BACKEND] = None,
    data_dir: Annotated[Path | None, DATA] = None,
    method: Annotated[
        list[str] | None, typer.Option("--method", help="Run only this label; may be repeated.")
    ] = None,
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
    json: Annotated[bool, JSON] = False,
) -> None:
    """Run an experiment: train its methods, score every client, write the results."""
    from idiolect.analysis.live import address
    from idiolect.experiment.load import load_experiment

    wanted = serve or serve_at is not None
    served = address(serve_at or "", anyone=serve_anyone) if wanted else None

    overrides = [*(set or ()), *machine(device, backend)]
    loaded = load_experiment(experiment, overrides)
    if on is not None:
        from idiolect.cli.federating import run_on, say, say_aside

        tell = say_aside if json else say
        _print(run_on(on, loaded, out, resume, method or [], tell), json)
        return
    _execute(
        loaded,
        out,
        resume=resume,
        data_dir=data_dir,
        only=method or (),
        serve=served,
        log=log or (),
        json=json,
    )


@guarded
def demo(
    set: Annotated[list[str] | None, SET] = None,
    out: Annotated[Path, _OUT] = Path("runs/demo"),
    device: Annotated[str | None, DEVICE] = None,
    json: Annotated[bool, JSON] = False,
) -> None:
    """Train Local, FedAvg, FedAvg + FT, FedPer and PersFL on real digits, beside the paper."""
    from idiolect.cli.demo import EXPERIMENT, PAPER, REMARK
    from idiolect.experiment.load import parse_experiment

    loaded = parse_experiment(EXPERIMENT, [*(set or ()), *machine(device, None)], "the demo")
    _execute(loaded, out, overwrite=True, beside=PAPER, remark=REMARK, json=json)


@guarded
def show(
    folder: Annotated[Path, typer.Argument(help="The folder of a run.")],
    fairness: Annotated[
        bool, typer.Option("--fairness", help="Compare methods by spread over clients.")
    ] = False,
    json: Annotated[bool, JSON] = False,
) -> None:
    """Print the tables of a run again."""
    from idiolect.cli.screen import (
        console,
        print_fairness,
        print_json,
        print_reached,
        print_result,
        print_traffic,
    )
    from idiolect.errors import DataError
    from idiolect.results import document

    content = document.read_document(folder)
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
        print_fairness(screen, content)
    else:
        print_result(screen, content, {})
        print_reached(screen, content)
        print_traffic(screen, content)
    if not content["complete"]:
        print("This run is not complete; go on with `idiolect run EXPERIMENT.toml --resume`.")


def _print(folder: Path, json: bool) -> None:
    """Print the tables of a run that was done elsewhere."""
    from idiolect.cli.screen import console, print_json, print_result
    from idiolect.results import document

    if json:
        print_json(document.read_document(folder))
        return
    screen = console()
    print_result(screen, document.read_document(folder), {})
    screen.print(f"Results: {folder}", markup=False, soft_wrap=True)


def _execute(
    loaded: "Experiment",
    out: Path | None,
    *,
    resume: bool = False,
    overwrite: bool = False,
    data_dir: Path | None = None,
    only: Sequence[str] = (),
    serve: "Address | None" = None,
    log: Sequence[str] = (),
    beside: Mapping[str, Sequence[float]] | None = None,
    remark: str = "",
    json: bool = False,
) -> None:
    from idiolect.cli.progress import watching
    from idiolect.cli.screen import console, print_json, print_result
    from idiolect.experiment.run import run_experiment

    screen = console(stderr=json)
    try:
        with watching(screen) as watch:
            content, folder = run_experiment(
                loaded,
                out,
                resume=resume,
                overwrite=overwrite,
                data_dir=data_dir,
                only=only,
                watch=watch,
                serve=serve,
                log=log,
            )
    except KeyboardInterrupt as error:
        if debugging():
            raise
        again = "start it again" if overwrite else f"go on with `{_again()}`"
        complain(f"interrupted; the last whole round is saved in the run's folder: {again}")
        raise typer.Exit(interrupted(error)) from None
    if json:
        print_json(content)
        return
    print_result(screen, content, beside or {})
    if remark:
        screen.print(remark, markup=False, soft_wrap=True)
    screen.print(f"Results: {folder}", markup=False, soft_wrap=True)


def _again() -> str:
    """Repeat the command the user gave, with --resume."""
    given = sys.argv[1:]
    extra = [] if "--resume" in given else ["--resume"]
    return shlex.join(["idiolect", *given, *extra])
