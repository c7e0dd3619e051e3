"""The command line: parse, call, print."""

import re
import sys
from typing import Any

import typer

from idiolect.cli import (
    audit_commands,
    command_base,
    compare_commands,
    data_commands,
    describe_commands,
    federation_commands,
    key_commands,
    method_commands,
    model_commands,
    node_commands,
    referee_commands,
    repro_commands,
    run_commands,
)
from idiolect.errors import suggest

app = typer.Typer(
    name="idiolect",
    cls=command_base.CommandGroup,
    no_args_is_help=True,
    rich_markup_mode=None,  # plain text, so that errors stay on one line
    pretty_exceptions_enable=False,
    add_completion=True,
)
app.callback()(command_base.common_options)
app.command()(run_commands.demo)
app.command()(run_commands.run)
app.command()(compare_commands.compare)
app.command()(run_commands.show)
app.command()(method_commands.trace)
app.command()(model_commands.adapt)
app.command()(compare_commands.report)
app.add_typer(referee_commands.app, name="referee")
app.command()(repro_commands.repro)
app.command()(repro_commands.bench)
app.command()(data_commands.new)
app.command(name="methods")(method_commands.list_methods)
app.command()(describe_commands.describe)
app.add_typer(data_commands.app, name="data")
app.add_typer(method_commands.privacy_app, name="privacy")
for _command in ("request", "approve", "install", "revoke", "members"):
    federation_commands.app.command()(getattr(key_commands, _command))
app.add_typer(federation_commands.app, name="federation")
app.add_typer(audit_commands.app, name="audit")
app.command()(federation_commands.server)
app.add_typer(node_commands.app, name="node")
app.command()(federation_commands.doctor)
app.command()(federation_commands.status)
app.command()(federation_commands.stop)
app.command()(model_commands.predict)
app.command()(model_commands.export)
app.command()(model_commands.pin)


def main() -> None:
    """Do what the `idiolect` script does: a wrong command line too is one line and status 2."""
    try:
        status = app(standalone_mode=False)
    except Exception as error:
        if not hasattr(error, "format_message"):  # of typer's own, under whichever name
            raise
        if type(error).__name__ == "NoArgsIsHelpError":
            error.show()  # type: ignore[attr-defined]
        else:
            command_base.complain(_usage(error))
        status = getattr(error, "exit_code", 2)
    sys.exit(status if isinstance(status, int) else 0)


def _usage(error: Any) -> str:
    """Say in one line what is wrong with a command line, and where help is."""
    said = str(error.format_message()).rstrip(".")
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "idiolect"
    known = getattr(getattr(context, "command", None), "commands", {})
    if said.startswith("No such command") and (wrong := re.search("'([^']*)'", said)):
        said = f"there is no command {suggest(wrong[1], known)}"
    return f"{path}: {said[:1].lower()}{said[1:]} (see {path} --help)"
