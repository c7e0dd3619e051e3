"""The command about differential privacy: audit."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from idiolect.cli.guard import guarded
from idiolect.cli.options import DATA, JSON, SET

if TYPE_CHECKING:
    from idiolect.experiment.privacy_audit import Audit

app = typer.Typer(
    help="Look into differential privacy.", no_args_is_help=True, rich_markup_mode=None
)

_BROKEN = 11  # exit status: an attack told more than was promised


@app.callback()
def _group() -> None:
    """Look into differential privacy."""


@app.command()
@guarded
def audit(
    experiment: Annotated[Path, typer.Argument(help="The experiment, a TOML file.")],
    set: Annotated[list[str] | None, SET] = None,
    method: Annotated[
        list[str] | None, typer.Option("--method", help="Only this label; may be repeated.")
    ] = None,
    trials: Annotated[int, typer.Option(help="Canaries of each attack.")] = 20_000,
    seed: Annotated[int, typer.Option(help="Of the canaries' coins.")] = 0,
    data_dir: Annotated[Path | None, DATA] = None,
    json: Annotated[bool, JSON] = False,
) -> None:
    """Attack the private rule with canaries: a lower bound on epsilon beside the promised one."""
    from idiolect.cli.screen import print_json
    from idiolect.experiment.load import load_experiment
    from idiolect.experiment.privacy_audit import audit_experiment

    loaded = load_experiment(experiment, set or ())
    found = audit_experiment(loaded, data_dir, method or (), trials, seed)
    if json:
        print_json({label: one.plain() for label, one in found.items()})
    else:
        for label, one in found.items():
            _print(label, one)
    if not all(one.passed for one in found.values()):
        raise typer.Exit(_BROKEN)


def _print(label: str, found: "Audit") -> None:
    from rich.table import Table
    from rich.text import Text

    from idiolect.cli.screen import console

    table = Table(title=Text(f"{label}: ε at δ = {found.delta:.2g}"))
    for name in ("attack", "rounds", "promised at most", "shown at least", ""):
        table.add_column(Text(name))
    for row in found.rows:
        verdict = "more than promised" if row.broken else "kept"
        cells = (row.attack, str(row.rounds), f"{row.promised:.3g}", f"{row.found:.3g}", verdict)
        table.add_row(*map(Text, cells))
    screen = console()
    screen.print(table)
    words = (
        f"{label}: the run promises ε ≤ {found.promised:.3g}, the attacks show ε ≥ "
        f"{found.lower:.3g} (95 % confidence, {found.canaries} canaries an attack)."
    )
    words += "" if found.passed else " The promise is broken: publish nothing of this run."
    screen.print(Text(words), soft_wrap=True)
