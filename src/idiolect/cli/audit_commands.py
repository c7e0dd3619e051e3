"""Audit logs: audit verify, show."""

from pathlib import Path
from typing import Annotated

import typer

from idiolect.cli.command_base import JSON, CommandGroup, guarded, say
from idiolect.errors import ConfigError

app = typer.Typer(help="Check audit logs.", no_args_is_help=True, cls=CommandGroup)

_TAMPERED = 12  # exit status
_LOGS = typer.Argument(help="Logs, kits that hold one, or run folders with everyone's heads.")


@app.callback()
def _group() -> None:
    """Check audit logs."""


@app.command()
@guarded
def verify(
    logs: Annotated[list[Path], _LOGS],
    kit: Annotated[
        Path | None,
        typer.Option(help="A kit of the federation, whose authority is believed."),
    ] = None,
    json: Annotated[bool, JSON] = False,
) -> None:
    """Check logs, each by itself and against the others; status 12 if something is wrong."""
    from idiolect.cli.screen import print_json
    from idiolect.deploy.audit_check import check, log_paths
    from idiolect.deploy.identity import Authority

    paths = log_paths(logs)
    found = check(paths, Authority.from_kit(_believed(kit, paths)))
    if json:
        print_json(
            {
                "problems": [one._asdict() for one in found.problems],
                "notes": found.notes,
                "entries": found.logs,
                "exchanges": found.exchanges,
            }
        )
    else:
        for owner, count in found.logs.items():
            say(f"{owner}: {count} entries")
        say(f"{found.exchanges} exchanges of messages are told alike by both sides")
        for note in found.notes:
            say(f"note: {note}")
        for one in found.problems:
            say(f"problem ({one.kind}): {one}")
        say(f"{len(found.problems)} problems" if found.problems else "no problem was found")
    if found.problems:
        raise typer.Exit(_TAMPERED)


def _believed(kit: Path | None, paths: list[Path]) -> Path:
    """Return the kit whose authority signatures are checked by."""
    if kit is not None:
        return kit.expanduser()
    for path in paths:
        folder = path.resolve().parent.parent
        if (folder / "startup" / "rootCA.pem").is_file():
            return folder
    raise ConfigError("none of the logs lies in a kit; name one of the federation with --kit")


@app.command()
@guarded
def show(
    log: Annotated[Path, typer.Argument(help="A log, or a kit that holds one.")],
    last: Annotated[int, typer.Option(help="Only so many entries, the newest.")] = 0,
) -> None:
    """Show a log in words, an entry a line."""
    from idiolect.deploy.audit import lines_of, read_entry, told
    from idiolect.deploy.audit_check import log_paths

    (path,) = log_paths([log])
    lines = list(lines_of(path))
    for line in lines[-last:] if last > 0 else lines:
        entry = read_entry(line)
        say("a line that is no entry" if entry is None else told(entry))
