"""The federation's own authority: FLARE's provisioning, and the key that can sign later on."""

import json
import logging
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

from idiolect.core.checkpoint import write_whole
from idiolect.errors import ConfigError, DeployError
from idiolect.experiment.federation_file import Project

_STATE = "cert.json"  # what FLARE remembers of certificates
_FILE = "root.json"  # what we keep of that: the authority's, and no member's
_MEMBERS = "members.txt"  # beside it: who has a kit
_ROOT = ("root_cert", "root_pri_key")
_KINDS = {"server": "server", "node": "client", "admin": "admin"}


class Member(NamedTuple):
    """Someone with a kit."""

    role: str  # server, node or admin
    name: str
    org: str
    rights: str = ""  # of an admin

    @property
    def folder(self) -> str:
        """What its kit is called."""
        return "server" if self.role == "server" else self.name


Root = Mapping[str, str]
"""The authority's certificate and private key, as PEM."""


def keep_root(workspace: Path, folder: Path) -> None:
    """Keep the authority of a provisioning, readable by its owner only; members' keys are not."""
    known = json.loads((workspace / "state" / _STATE).read_text())
    folder.mkdir(mode=0o700)
    path = folder / _FILE
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
    path = folder / _FILE
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
    project: Project, members: Sequence[Member], scratch: Path, root: Root | None = None
) -> Path:
    """Let FLARE make certificates and start-up files; without an authority, a new one too."""
    from nvflare.lighter.prov_utils import prepare_builders
    from nvflare.lighter.provision import prepare_project
    from nvflare.lighter.provisioner import Provisioner

    people = []
    for one in members:
        person: dict[str, Any] = {"name": one.name, "type": _KINDS[one.role], "org": one.org}
        if one.role == "server":
            person["fed_learn_port"] = project.server.port
        if one.role == "admin":
            person["role"] = one.rights
        people.append(person)
    impl = "nvflare.lighter.impl"
    days = project.valid_days if root is None else _days(root)
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
            {"path": f"{impl}.static_file.StaticFileBuilder", "args": {"config_folder": "config"}},
            {"path": f"{impl}.cert.CertBuilder", "args": {"root_valid_days": days}},
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
