"""The command line: parse, call, print."""

import typer

from idiolect.cli import (
    command_base,
    compare_commands,
    data_commands,
    describe_commands,
    federation_commands,
    method_commands,
    model_commands,
    repro_commands,
    run_commands,
)

app = typer.Typer(
    name="idiolect",
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
app.command()(repro_commands.repro)
app.command()(repro_commands.bench)
app.command(name="methods")(method_commands.list_methods)
app.command()(describe_commands.describe)
app.add_typer(data_commands.app, name="data")
app.add_typer(method_commands.privacy_app, name="privacy")
app.add_typer(federation_commands.app, name="federation")
app.command()(federation_commands.server)
app.command()(federation_commands.node)
app.command()(federation_commands.status)
app.command()(federation_commands.stop)
app.command()(model_commands.predict)
app.command()(model_commands.export)

main = app  # what the `idiolect` script calls
