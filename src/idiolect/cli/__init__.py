"""The command line: parse, call, print."""

from typing import Annotated

import typer

from idiolect.cli import (
    adapting,
    benching,
    comparing,
    data_commands,
    federating,
    method_commands,
    privacy_commands,
    reporting,
    reproducing,
    running,
    tracing,
    using,
)
from idiolect.version import VERSION

app = typer.Typer(
    name="idiolect",
    help="Personalised federated learning: one model per client, trained together.",
    no_args_is_help=True,
    rich_markup_mode=None,  # plain text, so that errors stay on one line
    pretty_exceptions_enable=False,
    add_completion=True,
)
app.command()(running.demo)
app.command()(running.run)
app.command()(comparing.compare)
app.command()(running.show)
app.command(name="trace")(tracing.draw)
app.command()(adapting.adapt)
app.command()(reporting.report)
app.command()(reproducing.repro)
app.command()(benching.bench)
app.command(name="methods")(method_commands.list_methods)
app.add_typer(data_commands.app, name="data")
app.add_typer(privacy_commands.app, name="privacy")
app.add_typer(federating.app, name="federation")
app.command()(federating.server)
app.command()(federating.node)
app.command()(federating.status)
app.command()(federating.stop)
app.command()(using.predict)
app.command()(using.export)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"idiolect {VERSION}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """Personalised federated learning: one model per client, trained together."""


def main() -> None:
    """Run the command line."""
    app()
