"""Kits: one folder for each member, signed, with everything foreign switched off."""

import json
import logging
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from idiolect.checkpoint import write_whole
from idiolect.deploy.flare import require
from idiolect.errors import ConfigError, DeployError
from idiolect.experiment.project import Project
from idiolect.experiment.toml import dumps

FILE = "idiolect.toml"  # what a kit says about itself
HOME = "idiolect"  # where a kit keeps what idiolect writes
NODE_FILE = "node.json"  # in it: the operator's settings, written by `idiolect node`
HOST_FILE = "server.json"  # the same of `idiolect server`
OUTCOME = "outcome.json"  # in a job's folder: how it ended, for whoever submitted it
RESULT = "result"  # in a job's folder: the run's
RETURNED = "idiolect.returned"  # what an admin's command tells the hub: who could take part again

# A prefix must end in a dot; without the log entry FLARE's own log component fails every job.
ALLOWED = ("idiolect.deploy.flare.", "nvflare.collab.runtime.", "nvflare.app_common.logging.")

_RIGHTS = {
    "project_admin": {
        "submit_job": "any",
        "clone_job": "none",
        "manage_job": "any",
        "download_job": "any",
        "view": "any",
        "operate": "any",
        "app_command": "any",
        "shell_commands": "none",
        "byoc": "none",
    },
    "org_admin": {
        "submit_job": "none",
        "clone_job": "none",
        "manage_job": "o:submitter",
        "download_job": "o:submitter",
        "view": "any",
        "operate": "o:site",
        "shell_commands": "none",
        "byoc": "none",
    },
    "lead": {
        "submit_job": "any",
        "clone_job": "none",
        "manage_job": "n:submitter",
        "download_job": "n:submitter",
        "view": "any",
        "operate": "none",
        "app_command": "n:submitter",  # tells the hub that a node is back
        "shell_commands": "none",
        "byoc": "none",
    },
    "member": {"view": "any"},
}
"""Who may do what. Nobody may bring code or run commands on another's machine."""


@dataclass(frozen=True)
class Kit:
    """A member's folder and what it says about itself."""

    folder: Path
    federation: str
    role: str  # server, node or admin
    name: str
    org: str
    sites: tuple[str, ...]
    host: str
    port: int

    @property
    def home(self) -> Path:
        """Where idiolect keeps its own files in the kit."""
        return self.folder / HOME


def init(project: Project, out: Path) -> list[Path]:
    """Make everyone's kit in a folder; one that holds kits already is left alone."""
    require()
    if out.exists() and any(out.iterdir()):
        raise ConfigError(
            f"{out} is not empty; its kits hold the keys of a federation: choose another --out, "
            "or move them away"
        )
    made: list[Path] = []
    with tempfile.TemporaryDirectory() as scratch:
        built = _provision(project, Path(scratch))
        for role, name, org in _members(project):
            target = out / ("server" if role == "server" else name)
            shutil.copytree(built / name, target)
            _harden(target, role)
            about = {
                "federation": project.name,
                "role": role,
                "name": name,
                "org": org,
                "sites": [site.name for site in project.sites],
                "host": project.server.host,
                "port": project.server.port,
            }
            write_whole(target / FILE, dumps(about).encode())
            for key in (target / "startup").glob("*.key"):
                key.chmod(0o600)
            made.append(target)
    return made


def read(folder: str | Path, *roles: str) -> Kit:
    """Read a kit, of one of the given roles."""
    import tomllib

    path = Path(folder).expanduser()
    try:
        raw: dict[str, Any] = tomllib.loads((path / FILE).read_text())
        kit = Kit(path.resolve(), **{**raw, "sites": tuple(raw["sites"])})
    except FileNotFoundError:
        raise ConfigError(
            f"{path} is no kit (it has no {FILE}); make kits with `idiolect federation init "
            "PROJECT.toml`"
        ) from None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{path / FILE} is damaged; copy the kit again") from error
    if roles and kit.role not in roles:
        raise ConfigError(
            f"{path} is the kit of a{'n' if kit.role == 'admin' else ''} {kit.role}, expected one "
            f"of: {', '.join(roles)}"
        )
    return kit


def settle(kit: Kit) -> None:
    """Make a kit's settings fit the folder it lies in now: a server stores nothing elsewhere."""
    if kit.role != "server":
        return
    path = kit.folder / "local" / "resources.json"
    settings = json.loads(path.read_text())
    store = kit.home / "engine"
    settings["snapshot_persistor"]["args"]["storage"]["args"]["root_dir"] = str(store / "snapshots")
    for component in settings["components"]:
        if component["id"] == "job_manager":
            component["args"]["uri_root"] = str(store / "jobs")
    write_whole(path, json.dumps(settings, indent=1).encode())


def _members(project: Project) -> list[tuple[str, str, str]]:
    server = project.server
    return [
        ("server", server.host, server.org),
        *(("node", site.name, site.org or site.name.replace("-", "_")) for site in project.sites),
        *(("admin", admin.email, admin.org or server.org) for admin in project.admins),
    ]


def _provision(project: Project, scratch: Path) -> Path:
    """Let FLARE make an authority, certificates and signed start-up files."""
    from nvflare.lighter.prov_utils import prepare_builders
    from nvflare.lighter.provision import prepare_project
    from nvflare.lighter.provisioner import Provisioner

    kinds = {"server": "server", "node": "client", "admin": "admin"}
    roles = {admin.email: admin.role for admin in project.admins}
    people = []
    for role, name, org in _members(project):
        one: dict[str, Any] = {"name": name, "type": kinds[role], "org": org}
        if role == "server":
            one["fed_learn_port"] = project.server.port
        if role == "admin":
            one["role"] = roles[name]
        people.append(one)
    impl = "nvflare.lighter.impl"
    wanted = {
        "api_version": 3,
        "name": project.name,
        "description": "a federation of idiolect",
        "participants": people,
        "builders": [
            {
                "path": f"{impl}.workspace.WorkspaceBuilder",
                "args": {"template_file": ["master_template.yml"]},
            },
            {
                "path": f"{impl}.static_file.StaticFileBuilder",
                "args": {"config_folder": "config"},
            },
            {
                "path": f"{impl}.cert.CertBuilder",
                "args": {"root_valid_days": project.valid_days},
            },
            {"path": f"{impl}.signature.SignatureBuilder"},
        ],
    }
    quiet = logging.getLogger("idiolect.provision")
    context = Provisioner(str(scratch), prepare_builders(wanted)).provision(
        prepare_project(wanted), logger=quiet
    )
    if context.get("build_error"):
        raise DeployError("FLARE could not make the kits; the lines above say why")
    return Path(context.get_result_location())


def _harden(kit: Path, role: str) -> None:
    """Put our defaults in place of FLARE's."""
    local = kit / "local"
    if role == "admin":
        return
    rights = {"format_version": "1.0", "permissions": _RIGHTS}
    write_whole(local / "authorization.json", json.dumps(rights, indent=1).encode())
    settings = json.loads((local / "resources.json.default").read_text())
    settings["class_list_enforcement_mode"] = "enforce"
    settings["class_allow_list"] = list(ALLOWED)
    # What a log says stays where it was written.
    settings["allow_log_streaming"] = False
    logs = ("site_log_streamer",)
    settings["components"] = [one for one in settings["components"] if one["id"] not in logs]
    for component in settings["components"]:
        if component["id"] == "job_scheduler":
            # One run at a time: a node has one personal state, and one training process.
            component["args"]["max_jobs"] = 1
    for server in settings.get("servers", ()):
        server["heart_beat_timeout"] = 60  # seconds after which a silent node counts as gone
    write_whole(local / "resources.json", json.dumps(settings, indent=1).encode())
