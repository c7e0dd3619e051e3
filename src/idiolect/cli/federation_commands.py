"""A real federation: federation init, add, renew; server, node, status, stop."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from idiolect.cli import command_base as base
from idiolect.cli.command_base import CommandGroup, guarded, say
from idiolect.errors import ConfigError, DataError

if TYPE_CHECKING:
    from idiolect.experiment.schema import Experiment

app = typer.Typer(help="Make the kits of a federation.", no_args_is_help=True, cls=CommandGroup)

_KIT = typer.Argument(help="The folder of a kit.")
_PROJECT = typer.Argument(help="The members, a TOML file.")
_KITS = typer.Option("--out", help="Folder of the kits; NAME-kits by default.")
_POLICY = typer.Option(help="What this machine allows; policy.toml of the kit by default.")
_LOG = typer.Option(help="How events are printed: text, or json.")
_METRICS = typer.Option(help="A port for health and metrics, on this machine only; 0: none.")
_HAND_OUT = "Give each member its own, over a channel you trust: it holds a private key."


@app.callback()
def _group() -> None:
    """Make the kits of a federation."""


@app.command()
@guarded
def init(
    project: Annotated[Path, _PROJECT],
    out: Annotated[Path | None, _KITS] = None,
) -> None:
    """Make signed kits for server, sites and admins."""
    from idiolect.deploy.flare.kits import init as make
    from idiolect.experiment.federation_file import load_project

    wanted = load_project(project)
    made = make(wanted, out or Path(f"{wanted.name}-kits"))
    for folder in made:
        say(str(folder))
    say(_HAND_OUT)
    say("Keep `authority` where only you can read it: it signs kits that you add or renew.")


@app.command()
@guarded
def add(project: Annotated[Path, _PROJECT], out: Annotated[Path | None, _KITS] = None) -> None:
    """Make kits for members that were added to the file.

    The others keep theirs.
    """
    from idiolect.deploy.flare.kits import add as make
    from idiolect.experiment.federation_file import load_project

    wanted = load_project(project)
    made, changed = make(wanted, out or Path(f"{wanted.name}-kits"))
    for folder in made:
        say(str(folder))
    say(_HAND_OUT if made else "every member of the file has a kit already")
    for path in changed:
        say(f"the list of sites has changed: give {path} to that admin (it is no secret)")


@app.command()
@guarded
def renew(
    project: Annotated[Path, _PROJECT],
    member: Annotated[
        list[str], typer.Option("--member", help="Whose kit: `server`, a site or an admin.")
    ],
    out: Annotated[Path | None, _KITS] = None,
) -> None:
    """Make new certificates for some members.

    The others keep theirs.
    """
    from idiolect.deploy.flare.kits import renew as make
    from idiolect.experiment.federation_file import load_project

    wanted = load_project(project)
    for folder in make(wanted, out or Path(f"{wanted.name}-kits"), member):
        say(f"{folder / 'startup'}: to be put in the place of the same folder of the old kit")
    say(_HAND_OUT)


@guarded
def server(
    kit: Annotated[Path, _KIT],
    public: Annotated[
        str | None, typer.Option(help="Public examples, for methods that train on the server.")
    ] = None,
    data_dir: Annotated[Path | None, base.DATA] = None,
    policy: Annotated[Path | None, _POLICY] = None,
    log: Annotated[str, _LOG] = "text",
    metrics: Annotated[int, _METRICS] = 0,
) -> None:
    """Run the federation's server until interrupted."""
    from idiolect.deploy.flare.checkup import refuse_invalid_certificate
    from idiolect.deploy.flare.kits import read
    from idiolect.deploy.flare.supervisor import keep_running
    from idiolect.deploy.limits import ServerPolicy, policy_path, read_server_policy
    from idiolect.deploy.serve_experiment import ServerSettings

    own = read(kit, "server")
    file = policy_path(own.folder, policy)
    allowed = ServerPolicy() if file is None else read_server_policy(file)
    public = _own_path("--public", public, "the public examples")
    host = ServerSettings(public, data_dir and data_dir.resolve(), allowed.packages)
    refuse_invalid_certificate(own)
    keep_running(own, host, log, metrics)


def _own_path(option: str, source: str | None, what: str) -> str | None:
    """Return a dataset's name as it is, and an existing path written out, for another process."""
    from idiolect.data import SOURCES

    if source is None or source in SOURCES:
        return source
    found = Path(source).expanduser()
    if not found.exists():
        raise DataError(f"{option}: {found} does not exist; give {what}")
    return str(found.resolve())


@guarded
def node(
    kit: Annotated[Path, _KIT],
    data: Annotated[str, typer.Option("--data", help="This site's data: a path, or a source.")],
    client: Annotated[
        int | None, typer.Option(help="Take this client's share of the experiment's own data.")
    ] = None,
    label: Annotated[str | None, base.LABEL_COLUMN] = None,
    split_column: Annotated[str | None, base.SPLIT_COLUMN] = None,
    size: Annotated[str | None, base.SIZE] = None,
    text: Annotated[str | None, base.TEXT_COLUMN] = None,
    public: Annotated[
        str | None, typer.Option(help="The public examples, where asked for.")
    ] = None,
    device: Annotated[str, base.DEVICE] = "auto",
    data_dir: Annotated[Path | None, base.DATA] = None,
    limit_mb: Annotated[int, typer.Option(help="The largest message that is read.")] = 256,
    secure: Annotated[
        bool, typer.Option("--secure", help="Take part only in runs with deploy.secure = true.")
    ] = False,
    policy: Annotated[Path | None, _POLICY] = None,
    log: Annotated[str, _LOG] = "text",
    metrics: Annotated[int, _METRICS] = 0,
) -> None:
    """Run a site's node until interrupted.

    It trains when a run asks for it, on data that stays here.
    """
    from idiolect.deploy.flare.checkup import check_data, refuse_invalid_certificate
    from idiolect.deploy.flare.kits import read
    from idiolect.deploy.flare.supervisor import keep_running
    from idiolect.deploy.limits import SitePolicy, policy_path, read_site_policy
    from idiolect.deploy.site import NodeSettings

    own = read(kit, "node")
    file = policy_path(own.folder, policy)
    site = NodeSettings(
        own.name,
        own.federation,
        own.home,
        _own_path("--data", data, "this site's data") or "",
        base.reading_options(size, label=label, split=split_column, text=text),
        client,
        data_dir.resolve() if data_dir else None,
        _own_path("--public", public, "the public examples"),
        device,
        limit_mb << 20,
        secure,
        SitePolicy() if file is None else read_site_policy(file),
        own.folder,
    )
    refuse_invalid_certificate(own)
    try:
        say(f"data: {check_data(site)}")
    except DataError as error:  # a run may say how it is to be read
        say(f"note: the data cannot be read as given, and a run may refuse it: {error}")
    keep_running(own, site, log, metrics)


@guarded
def doctor(
    kit: Annotated[Path, _KIT],
    data: Annotated[str | None, typer.Option("--data", help="A node's data, to be read.")] = None,
    label: Annotated[str | None, base.LABEL_COLUMN] = None,
    json: Annotated[bool, base.JSON] = False,
) -> None:
    """Check a kit before anything is started.

    Certificate, clock, port or server, versions, disk, policy and data: what is wrong, and what to
    do about it.
    """
    from idiolect.cli.screen import print_json
    from idiolect.deploy.flare.checkup import checked
    from idiolect.deploy.flare.kits import read
    from idiolect.deploy.site import NodeSettings
    from idiolect.errors import DeployError

    own, site = read(kit), None
    if data is not None:
        path = _own_path("--data", data, "this site's data") or ""
        options = base.reading_options(None, label=label, split=None, text=None)
        site = NodeSettings(own.name, own.federation, own.home, path, options)
    found = list(checked(own, site))
    if json:
        print_json([one._asdict() for one in found])
    for one in () if json else found:
        say(f"{'ok' if one.fine else 'NOT OK'}  {one.what}: {one.words}")
    if bad := [one.what for one in found if not one.fine]:
        raise DeployError(f"not ready: {', '.join(bad)}")


@guarded
def status(kit: Annotated[Path, _KIT], json: Annotated[bool, base.JSON] = False) -> None:
    """Show who is connected and how far the runs are."""
    from idiolect.cli.screen import print_json
    from idiolect.deploy.flare.admin import described
    from idiolect.deploy.flare.kits import read
    from idiolect.deploy.flare.site_keys import certificates, expiry_line

    own = read(kit, "admin")
    found = {**described(own), "certificates": certificates(own.folder)}
    if json:
        print_json(found)
        return
    say(f"server {found['server']} is up")
    for site in found["sites"]:
        say(f"{site['name']}: {'connected' if site['connected'] else 'not connected'}")
    for run in found["runs"]:
        far = f"{run['label']}, round {run['round']} of {run['rounds']}" if run["label"] else ""
        waits = f"; waiting for {', '.join(run['waiting'])}" if run["waiting"] else ""
        waits += f"; without {', '.join(run['absent'])}" if run["absent"] else ""
        say(f"run {run['run']}: {run['state']}{far and ', ' + far}{waits}")
    if not found["runs"]:
        say("nothing is running")
    for name, until in [
        *found["certificates"].items(),
        *(pair for run in found["runs"] for pair in run["certificates"].items()),
    ]:
        say(expiry_line(name, until))


@guarded
def stop(kit: Annotated[Path, _KIT]) -> None:
    """Stop the runs of a federation that one may stop: a lead its own.

    What was trained is kept for --resume.
    """
    from idiolect.deploy.flare.admin import stop as end
    from idiolect.deploy.flare.kits import read

    if not end(read(kit, "admin"), say):
        say("nothing is running")


def run_on(
    place: str,
    experiment: "Experiment",
    out: Path | None,
    resume: bool,
    only: list[str],
    echo: Callable[[str], None] = say,
) -> Path:
    """Run an experiment on a federation: that of a kit, or one of processes on this machine."""
    from idiolect.deploy.serve_experiment import served_methods
    from idiolect.experiment.build import refuse_unknown_labels
    from idiolect.experiment.run import open_run_folder
    from idiolect.results.run_files import folder_name

    refuse_unknown_labels(experiment, only)
    served_methods(experiment, only)  # refuses what no federation can run before any node is asked
    folder = out or Path("runs") / folder_name(experiment.name)
    with open_run_folder(folder, resume=resume):
        if place == "local":
            from idiolect.deploy.serve_experiment import run_local

            return run_local(experiment, folder, only, echo)
        from idiolect.deploy.flare.admin import FederationRun, run_task
        from idiolect.deploy.flare.kits import read

        kit = read(place, "admin")
        try:
            return FederationRun(
                kit, run_task(kit, experiment, folder, only), folder, echo
            ).finish()
        except KeyboardInterrupt:
            print(
                f"the run goes on at the server; watch it again with --resume --out {folder}, or "
                f"end it with `idiolect stop {place}`",
                file=sys.stderr,
            )
            raise


def adapt_on(
    place: str,
    folder: Path,
    sites: list[str],
    out: Path | None,
    method: str | None,
    seed: int | None,
    network: str | None,
    echo: Callable[[str], None] = say,
) -> dict[str, Any]:
    """Give nodes that come after a run their personal models; return the findings."""
    import json

    from idiolect.deploy.flare.admin import FederationRun, newcomers_task
    from idiolect.deploy.flare.kits import read

    kit = read(place, "admin")
    task = newcomers_task(kit, folder, sites, method, seed, network)
    target = out or folder / "newcomers" / "-".join(sites) / task.run
    if target.exists() and any(target.iterdir()):
        raise ConfigError(f"{target} is not empty; choose another --out")
    FederationRun(kit, task, target, echo).finish()
    (path,) = target.glob("*-seed-*.json")
    content: dict[str, Any] = json.loads(path.read_text())
    return {**content, "folder": str(target)}
