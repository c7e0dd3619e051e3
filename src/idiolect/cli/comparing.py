"""The command that compares methods: compare."""

from pathlib import Path
from typing import Annotated, Any

import typer

from idiolect.cli.guard import complain, debugging, guarded, interrupted
from idiolect.cli.options import BACKEND, DATA, DEVICE, JSON, SET, machine


@guarded
def compare(
    experiment: Annotated[
        Path, typer.Argument(help="An experiment, a TOML file; or a folder of results.")
    ],
    set: Annotated[list[str] | None, SET] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder for the results; runs/NAME by default.")
    ] = None,
    target: Annotated[
        float | None,
        typer.Option(help="Validation accuracy to reach, 0 to 1; else where the lowest ends."),
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
    device: Annotated[str | None, DEVICE] = None,
    backend: Annotated[str | None, BACKEND] = None,
    data_dir: Annotated[Path | None, DATA] = None,
    json: Annotated[bool, JSON] = False,
) -> None:
    """Compare methods over seeds and splits, with statistics and a verdict.

    Goes on by itself where it was stopped; methods and seeds added to the file are added to what
    is there.
    """
    from idiolect.cli.screen import console, print_json
    from idiolect.cli.verdicts import print_comparison
    from idiolect.errors import ConfigError

    if not 0 < alpha < 1:
        raise ConfigError(f"--alpha is {alpha}; expected between 0 and 1, such as 0.05")
    if unit not in (None, "clients", "examples"):
        raise ConfigError(f"--unit is {unit!r}; expected clients or examples")
    if target is not None and not 0 < target <= 1:
        raise ConfigError(f"--target is {target}; expected an accuracy between 0 and 1")
    if experiment.is_dir():
        from idiolect.experiment.compare import compare_folder

        content, folder = compare_folder(experiment, alpha, target, unit), experiment
    else:
        overrides = [*(set or ()), *machine(device, backend)]
        content, folder = _run(experiment, overrides, out, data_dir, alpha, target, unit, json)
    if json:
        print_json(content)
        return
    screen = console()
    print_comparison(screen, content)
    screen.print(f"Results: {folder}", markup=False, soft_wrap=True)


def _run(
    path: Path,
    overrides: list[str],
    out: Path | None,
    data_dir: Path | None,
    alpha: float,
    target: float | None,
    unit: str | None,
    quiet: bool,
) -> tuple[dict[str, Any], Path]:
    from idiolect.cli.progress import watching
    from idiolect.cli.screen import console
    from idiolect.experiment.compare import compare_experiment
    from idiolect.experiment.load import load_experiment

    loaded = load_experiment(path, overrides)
    try:
        with watching(console(stderr=quiet)) as watch:
            return compare_experiment(
                loaded,
                out,
                data_dir=data_dir,
                watch=watch,
                alpha=alpha,
                target=target,
                unit=unit,
            )
    except KeyboardInterrupt as error:
        if debugging():
            raise
        complain("interrupted; the last whole round is saved: go on with the same command")
        raise typer.Exit(interrupted(error)) from None
