"""Keys of members: federation request, approve, install, revoke, members."""

import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from idiolect.cli.command_base import JSON, guarded, say
from idiolect.cli.federation_commands import _KIT, _KITS, _PROJECT
from idiolect.errors import ConfigError

if TYPE_CHECKING:
    from idiolect.experiment.federation_file import Project


@guarded
def request(
    member: Annotated[
        str, typer.Argument(help="The member's name in the project; or its kit, to renew it.")
    ],
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder of the new kit; NAME by default.")
    ] = None,
) -> None:
    """Make a key on this machine, and a request for a certificate.

    The key stays here; the request is no secret.
    """
    from idiolect.deploy.flare.kits import FILE
    from idiolect.deploy.flare.site_keys import request as make

    given = Path(member).expanduser()
    known = (given / FILE).exists()
    folder = given if known else out or Path(member)
    if not known and ("/" in member or not member):
        raise ConfigError(f"{member!r} is no kit (it has no {FILE}) and no member's name")
    path, print_ = make(member, folder)
    say(f"{path}: send this to whoever made the kits; it holds no secret")
    say(f"fingerprint of the key: {print_}")
    say("Tell it by another way, such as by phone: it shows that the request is yours.")


@guarded
def approve(
    project: Annotated[Path, _PROJECT],
    request: Annotated[Path, typer.Argument(help="The request that a member sent.")],
    out: Annotated[Path | None, _KITS] = None,
    fingerprint: Annotated[
        str | None,
        typer.Option(help="The key's fingerprint, as the member told it; else you are asked."),
    ] = None,
) -> None:
    """Sign a member's request after comparing its fingerprint."""
    from idiolect.deploy.certificates import same_fingerprint
    from idiolect.deploy.flare.site_keys import approve as sign
    from idiolect.deploy.flare.site_keys import read_request

    wanted, asked = _project(project), read_request(request)
    say(f"{asked.name} asks for a certificate of the key")
    say(f"  {asked.fingerprint}")
    if fingerprint is None:
        if not sys.stdin.isatty():
            raise ConfigError("compare it with the member, then give it with --fingerprint")
        fingerprint = str(typer.prompt("the fingerprint, as the member told it"))
    if not same_fingerprint(fingerprint, asked.fingerprint):
        raise ConfigError("the fingerprints differ: this is not the request that the member made")
    folder = sign(wanted, out or Path(f"{wanted.name}-kits"), asked)
    say(f"{folder}: give it back to {asked.name}; it holds no private key")
    say("there: idiolect federation install KIT FOLDER")


@guarded
def install(
    kit: Annotated[Path, _KIT],
    given: Annotated[
        Path, typer.Argument(help="What came back: an approved or renewed kit, or revoked.json.")
    ],
    fingerprint: Annotated[
        str | None, typer.Option(help="The authority's fingerprint, as its owner told it.")
    ] = None,
) -> None:
    """Put a signed certificate, or a list of revoked ones, into a kit.

    A process that runs takes it up by itself.
    """
    from idiolect.deploy.flare.site_keys import install as put

    done = put(kit.expanduser(), given.expanduser(), fingerprint)
    say(done.words)
    if fingerprint is None:
        say(f"fingerprint of the federation's authority: {done.authority}")


@guarded
def revoke(
    project: Annotated[Path, _PROJECT],
    member: Annotated[
        list[str], typer.Option("--member", help="Whose certificates: `server`, a site, an admin.")
    ],
    out: Annotated[Path | None, _KITS] = None,
    why: Annotated[str, typer.Option(help="A few words, for those who read the list.")] = "",
    before: Annotated[
        str | None,
        typer.Option(help="Only certificates made until then, such as 2027-01-31T12:00; all."),
    ] = None,
) -> None:
    """Revoke members' certificates at once."""
    from idiolect.deploy.flare.site_keys import revoke_members

    moment = None if before is None else _moment(before)
    wanted = _project(project)
    path, *kits = revoke_members(wanted, out or Path(f"{wanted.name}-kits"), member, why, moment)
    say(f"{path}: put it on the server with `idiolect federation install KIT {path.name}`")
    say("(no secret; the server tells the nodes with its next message, or do so there too)")
    for folder in kits:
        say(f"put into {folder}")


def _moment(text: str) -> datetime:
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise ConfigError(f"--before: {text!r} is no time such as 2027-01-31T12:00") from None
    return found if found.tzinfo else found.astimezone()


@guarded
def members(
    project: Annotated[Path, _PROJECT],
    out: Annotated[Path | None, _KITS] = None,
    json: Annotated[bool, JSON] = False,
) -> None:
    """List the certificates that were signed, until when, and which are revoked."""
    from idiolect.cli.screen import print_json
    from idiolect.deploy.flare.site_keys import issued

    wanted = _project(project)
    found = issued(wanted, out or Path(f"{wanted.name}-kits"))
    if json:
        print_json([{**one._asdict(), "until": one.until.isoformat()} for one in found])
        return
    for one in found:
        left = (one.until - datetime.now(UTC)).days
        say(f"{one.name} ({one.role}): {one.state}, until {one.until:%Y-%m-%d} ({left} days)")
        say(f"  key {one.fingerprint}")


def _project(path: Path) -> "Project":
    from idiolect.experiment.federation_file import load_project

    return load_project(path)
