"""Kits: one folder for each member, signed, with everything foreign switched off."""

import json
import logging
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

from idiolect.core.checkpoint import write_whole
from idiolect.deploy import limits
from idiolect.deploy.flare import require
from idiolect.deploy.flare.engine_logs import log_settings
from idiolect.deploy.flare.job_layout import HOME as HOME
from idiolect.errors import ConfigError, DeployError
from idiolect.experiment.federation_file import Project
from idiolect.experiment.load import dump_toml

_STATE = "cert.json"  # what FLARE remembers of certificates
_ROOT_FILE = "root.json"  # what we keep of that: the authority's, and no member's
_MEMBERS = "members.txt"  # beside it: who has a kit
ISSUED = "issued.jsonl"  # beside it: every certificate that was signed
_ROOT = ("root_cert", "root_pri_key")
_KINDS = {"server": "server", "node": "client", "admin": "admin"}


class KitOwner(NamedTuple):
    """Someone with a kit."""

    role: str  # server, node or admin
    name: str
    org: str
    rights: str = ""  # of an admin
    own_key: bool = False  # it makes its key itself, and asks for a certificate

    @property
    def folder(self) -> str:
        """What its kit is called."""
        return folder_of(self.role, self.name)


def folder_of(role: str, name: str) -> str:
    """Return what a member's kit is called."""
    return "server" if role == "server" else name


def note_issued(authority: Path, owner: KitOwner, startup: Path) -> None:
    """Write down a certificate that was signed: it may be handed out and be gone from here."""
    from idiolect.deploy.certificates import fingerprint, read_certificate

    found = read_certificate(next(iter(startup.glob("*.crt"))))
    own = {
        "name": owner.folder,
        "role": owner.role,
        "serial": f"{found.serial_number:x}",
        "from": found.not_valid_before_utc.isoformat(),
        "until": found.not_valid_after_utc.isoformat(),
        "key": fingerprint(found.public_key()),
    }
    with (authority / ISSUED).open("a") as file:
        file.write(json.dumps(own) + "\n")


Root = Mapping[str, str]
"""The authority's certificate and private key, as PEM."""


def keep_root(workspace: Path, folder: Path) -> None:
    """Keep the authority of a provisioning, readable by its owner only; members' keys are not."""
    known = json.loads((workspace / "state" / _STATE).read_text())
    folder.mkdir(mode=0o700)
    path = folder / _ROOT_FILE
    write_whole(path, json.dumps({key: known[key] for key in _ROOT}).encode())
    path.chmod(0o600)


def keep_members(folder: Path, names: Sequence[str]) -> None:
    """Note who has a kit: it may have been handed out and be gone from here."""
    write_whole(folder / _MEMBERS, ("\n".join(names) + "\n").encode())


def read_members(folder: Path) -> list[str]:
    """Return who has a kit."""
    return (folder / _MEMBERS).read_text().split()


def read_root(folder: Path) -> Root:
    """Read what `keep_root` kept."""
    path = folder / _ROOT_FILE
    try:
        known = json.loads(path.read_text())
        return {key: str(known[key]) for key in _ROOT}
    except FileNotFoundError:
        raise ConfigError(
            f"{path} is missing, and nothing else can sign for this federation; give the folder of "
            "`idiolect federation init`, or make new kits for all"
        ) from None
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{path} cannot be read ({type(error).__name__})") from error


def provision(
    project: Project,
    people: Sequence[KitOwner],
    scratch: Path,
    root: Root | None = None,
    requested: Mapping[str, bytes] | None = None,
) -> Path:
    """Let FLARE make certificates and start-up files; without an authority, a new one too.

    `requested`: public keys (PEM) of members that made their own.
    """
    from nvflare.lighter.prov_utils import prepare_builders
    from nvflare.lighter.provision import prepare_project
    from nvflare.lighter.provisioner import Provisioner

    participants = []
    for one in people:
        person: dict[str, Any] = {"name": one.name, "type": _KINDS[one.role], "org": one.org}
        if one.role == "server":
            person["fed_learn_port"] = project.server.port
        if one.role == "admin":
            person["role"] = one.rights
        participants.append(person)
    impl = "nvflare.lighter.impl"
    days = project.valid_days if root is None else _days(root)
    wanted = {
        "api_version": 3,
        "name": project.name,
        "description": "a federation of idiolect",
        "participants": participants,
        "builders": [
            {
                "path": f"{impl}.workspace.WorkspaceBuilder",
                "args": {"template_file": ["master_template.yml"]},
            },
            {"path": f"{impl}.static_file.StaticFileBuilder", "args": {"config_folder": "config"}},
            {
                "path": "idiolect.deploy.flare.requested_certificates.RequestedCertificates",
                "args": {"root_valid_days": days, "requested": dict(requested or {})},
            },
            {"path": f"{impl}.signature.SignatureBuilder"},
        ],
    }
    if root is not None:
        state = scratch / project.name / "state"
        state.mkdir(parents=True)
        (state / _STATE).write_text(json.dumps(dict(root)))
    quiet = logging.getLogger("idiolect.provision")
    context = Provisioner(str(scratch), prepare_builders(wanted)).provision(
        prepare_project(wanted), logger=quiet
    )
    if context.get("build_error"):
        raise DeployError("FLARE could not make the kits; the lines above say why")
    return Path(context.get_result_location())


def _days(root: Root) -> int:
    """Return for how long the authority was made: FLARE insists on the same figure."""
    from cryptography import x509

    own = x509.load_pem_x509_certificate(root["root_cert"].encode())
    return (own.not_valid_after_utc - own.not_valid_before_utc) // timedelta(days=1)


FILE = "idiolect.toml"  # what a kit says about itself
AUTHORITY = "authority"  # beside the kits: the key that signs them
RENEWED = "renewed"  # beside the kits: new certificates to be handed out
NODE_FILE = "node.json"  # in it: the operator's settings, written by `idiolect node`
HOST_FILE = "server.json"  # the same of `idiolect server`
OUTCOME = "outcome.json"  # in a job's folder: how it ended, for whoever submitted it
RESULT = "result"  # in a job's folder: the run's
GUARD = "idiolect.deploy.flare.job_guard.JobGuard"  # asked by FLARE before a job is started
NODE_GUARD = "idiolect.deploy.flare.job_guard.NodeGuard"  # the same on nodes, where none is
_MOST_RUNS = 4  # at a time; others wait
_OWN = {  # what we add to the engine's long-running process, by role
    "server": ("idiolect_keeper", "idiolect.deploy.flare.run_queue.RunKeeper"),
    "node": ("idiolect_node", "idiolect.deploy.flare.node_side.NodeSide"),
}
_QUEUE = "idiolect.deploy.flare.run_queue.RunQueue"

# A prefix must end in a dot; without the log entry FLARE's own log component fails every job.
ALLOWED = ("idiolect.deploy.flare.", "nvflare.app_common.logging.")

_RIGHTS = {
    "project_admin": {
        "submit_job": "any",
        "clone_job": "none",
        "manage_job": "any",
        "download_job": "any",
        "view": "any",
        "operate": "any",
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
        "shell_commands": "none",
        "byoc": "none",
    },
    "member": {"view": "any"},
}
"""Who may do what. Nobody may bring code or run commands on another's machine."""


@dataclass(frozen=True)
class MemberKit:
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
    """Make everyone's kit in a folder, and the authority that can sign more."""
    require()
    if out.exists() and any(out.iterdir()):
        raise ConfigError(
            f"{out} is not empty; its kits hold the keys of a federation: choose another --out, "
            "or add members to it with `idiolect federation add`"
        )
    with tempfile.TemporaryDirectory() as scratch:
        built = provision(project, members(project), Path(scratch))
        given = [one for one in members(project) if not one.own_key]
        made = [placed(project, one, built, out / one.folder) for one in given]
        keep_root(Path(scratch) / project.name, out / AUTHORITY)
    keep_members(out / AUTHORITY, [one.folder for one in given])
    _note_all(out, given, made)
    return made


def add(project: Project, out: Path) -> tuple[list[Path], list[Path]]:
    """Make the kits of members that never had one, signed by the authority in the same folder.

    Returns them, and the other admins' new lists of sites.
    """
    require()
    root, known = read_root(out / AUTHORITY), read_members(out / AUTHORITY)
    refuse_changed(project, out)
    new = [one for one in members(project) if one.folder not in known and not one.own_key]
    if not new:
        return [], []
    with tempfile.TemporaryDirectory() as scratch:
        built = provision(project, members(project), Path(scratch), root)
        made = [placed(project, one, built, out / one.folder) for one in new]
    keep_members(out / AUTHORITY, [*known, *(one.folder for one in new)])
    _note_all(out, new, made)
    written = []
    for one in members(project):
        if one.role == "admin" and one not in new:
            # Its kit may have been handed out and be here no more.
            written.append(out / RENEWED / one.folder / FILE)
            own = [out / one.folder / FILE] if (out / one.folder).exists() else []
            for path in (written[-1], *own):
                write_whole(path, dump_toml(_about(project, one)).encode())
    return made, written


def renew(project: Project, out: Path, names: Sequence[str]) -> list[Path]:
    """Make new keys and certificates for some members, signed by the same authority.

    Each gets a `startup` folder to put in the place of its old one; nobody else needs anything.
    """
    require()
    root = read_root(out / AUTHORITY)
    refuse_changed(project, out)
    known = {one.folder: one for one in members(project)}
    for name in names:
        if name not in known:
            raise ConfigError(f"--member: {name!r} is none of {', '.join(known)}")
        if (out / RENEWED / name / "startup").exists():
            raise ConfigError(f"{out / RENEWED / name} exists; hand it out and move it away first")
    with tempfile.TemporaryDirectory() as scratch:
        built = provision(project, members(project), Path(scratch), root)
        for name in names:
            startup = out / RENEWED / name / "startup"
            shutil.copytree(built / known[name].name / "startup", startup)
            _close(startup)
    made = [out / RENEWED / name for name in names]
    _note_all(out, [known[name] for name in names], made)
    return made


def _note_all(out: Path, owners: Sequence[KitOwner], made: Sequence[Path]) -> None:
    for one, folder in zip(owners, made, strict=True):
        note_issued(out / AUTHORITY, one, folder / "startup")


def placed(project: Project, one: KitOwner, built: Path, target: Path) -> Path:
    """Put a member's kit where it belongs, with our defaults and a word about itself."""
    shutil.copytree(built / one.name, target)
    _harden(target, one.role)
    write_whole(target / FILE, dump_toml(_about(project, one)).encode())
    if one.role != "admin":
        write_whole(target / limits.POLICY_FILE, limits.initial_policy(one.role))
    _close(target / "startup")
    return target


def _about(project: Project, one: KitOwner) -> dict[str, Any]:
    return {
        "federation": project.name,
        "role": one.role,
        "name": one.name,
        "org": one.org,
        "sites": [site.name for site in project.sites],
        "host": project.server.host,
        "port": project.server.port,
    }


def _close(startup: Path) -> None:
    for key in startup.glob("*.key"):
        key.chmod(0o600)


def refuse_changed(project: Project, out: Path) -> None:
    """Refuse another name or address: every kit has them, so all would have to be made anew."""
    for folder in sorted(path.parent for path in out.glob(f"*/{FILE}")):
        kit = read(folder)
        given = (project.name, project.server.host, project.server.port)
        if given != (kit.federation, kit.host, kit.port):
            raise ConfigError(
                f"the project is {given[0]} at {given[1]}:{given[2]} and the kits in {out} are of "
                f"{kit.federation} at {kit.host}:{kit.port}; all have to be made anew: "
                "`idiolect federation init` with another --out"
            )


def read(folder: str | Path, *roles: str) -> MemberKit:
    """Read a kit, of one of the given roles."""
    import tomllib

    path = Path(folder).expanduser()
    try:
        raw: dict[str, Any] = tomllib.loads((path / FILE).read_text())
        kit = MemberKit(path.resolve(), **{**raw, "sites": tuple(raw["sites"])})
    except FileNotFoundError:
        raise ConfigError(
            f"{path} is no kit (it has no {FILE}); make kits with `idiolect federation init "
            "PROJECT.toml`"
        ) from None
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise ConfigError(f"{path / FILE} is damaged; copy the kit again") from error
    if roles and kit.role not in roles:
        raise ConfigError(
            f"{path} is the kit of a{'n' if kit.role == 'admin' else ''} {kit.role}, expected one "
            f"of: {', '.join(roles)}"
        )
    return kit


def settle(kit: MemberKit) -> None:
    """Make a kit's settings fit this version and the folder it lies in now.

    A server stores nothing elsewhere; jobs that are not made as ours are get refused.
    """
    path = kit.folder / "local" / "resources.json"
    settings = json.loads(path.read_text())
    guard = GUARD if kit.role == "server" else NODE_GUARD
    settings["app_validator"] = {"path": guard, "args": {}}
    settings["class_allow_list"] = list(ALLOWED)
    name, own = _OWN[kit.role]
    parts = [one for one in settings["components"] if one["id"] != name]
    settings["components"] = [*parts, {"id": name, "path": own, "args": {}}]
    if kit.role == "server":
        store = kit.home / "engine"
        snapshots = settings["snapshot_persistor"]["args"]["storage"]["args"]
        snapshots["root_dir"] = str(store / "snapshots")
        for component in parts:
            if component["id"] == "job_manager":
                component["args"]["uri_root"] = str(store / "jobs")
            if component["id"] == "job_scheduler":
                component.update(path=_QUEUE, args={"max_jobs": _MOST_RUNS})
    write_whole(path, json.dumps(settings, indent=1).encode())
    quiet = json.dumps(log_settings(), indent=1).encode()
    write_whole(path.with_name("log_config.json"), quiet)


def members(project: Project) -> list[KitOwner]:
    """Return everyone of a project."""
    server = project.server
    return [
        KitOwner("server", server.host, server.org, own_key=server.own_key),
        *(
            KitOwner("node", one.name, one.org or one.name.replace("-", "_"), own_key=one.own_key)
            for one in project.sites
        ),
        *(
            KitOwner("admin", one.email, one.org or server.org, one.role, one.own_key)
            for one in project.admins
        ),
    ]


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
    for server in settings.get("servers", ()):
        server["heart_beat_timeout"] = 60  # seconds after which a silent node counts as gone
    write_whole(local / "resources.json", json.dumps(settings, indent=1).encode())
