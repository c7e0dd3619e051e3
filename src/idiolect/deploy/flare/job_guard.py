"""What FLARE lets in: a job of exactly our two files, under an id that the server drew.

FLARE asks an `AppValidator` before it starts a job, on the server and, if it were brought one, on a
node. What it has no
such question for is put in place by `watch`: ids that name other folders of the kit, and settings
in formats that can include files (HOCON) or read variables of the environment.
"""

import json
import logging
import os
import runpy
import sys
import uuid
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zipfile import ZipFile

from nvflare.apis.app_validation import AppValidator

from idiolect.deploy.certificates import common_name, read_certificate
from idiolect.deploy.flare import job_layout
from idiolect.deploy.flare.job_layout import MODULES
from idiolect.deploy.revocation import REVOKED_FILE, Revocations
from idiolect.errors import DeployError

if TYPE_CHECKING:
    from cryptography.x509 import Certificate

log = logging.getLogger("idiolect.guard")
_LOOKS = ("get_job_meta", "check_status", "list_jobs", "show_stats", "show_errors", "_logout")
_STRINGS = ("run", "experiment", "signed")


class JobGuard(AppValidator):  # type: ignore[misc]
    """Refuses a deployed job that is not made as ours are."""

    def validate(self, app_folder: str) -> tuple[str, dict[str, Any]]:
        """Return why a job is refused, or nothing."""
        folder = Path(app_folder)
        reason = foreign(folder) or of_revoked(folder)
        if reason:
            log.warning("refused a job that was deployed: %s", reason)
        return reason, {}


class NodeGuard(AppValidator):  # type: ignore[misc]
    """Refuses every job: the server does them alone, and asks."""

    def validate(self, app_folder: str) -> tuple[str, dict[str, Any]]:
        """Return why a job is refused."""
        log.warning("refused a job that was deployed: no job is started on a node")
        return "no job is started on a node", {}


def foreign(app: Path) -> str:
    """Say what in a job's folder is not ours; empty where all is."""
    wanted = {job_layout.SERVER, job_layout.CLIENT}
    known = {*wanted, *_signed("", "config/")}
    found = {path.relative_to(app).as_posix(): path for path in app.rglob("*")}
    strange = sorted(set(found) - {"config", *known})
    if strange or not wanted <= set(found):
        return f"a job holds {' and '.join(sorted(wanted))} only, and this one {strange[:1]}"
    for name in sorted(set(found) - {"config"}):
        path = found[name]
        if path.is_symlink() or not path.is_file() or path.stat().st_size > job_layout.LARGEST:
            return f"{name} is no file of at most {job_layout.LARGEST} bytes"
    try:
        server, client = (
            json.loads((app / name).read_text()) for name in (job_layout.SERVER, job_layout.CLIENT)
        )
        arguments = server["workflows"][0]["args"]
        same = server == job_layout.server(arguments) and client == job_layout.client()
    except (ValueError, TypeError, KeyError, IndexError, RecursionError):
        return "its configurations are not those of idiolect"
    if not same or not _well_formed(arguments):
        return "its configurations are not those of idiolect"
    return ""


def kit_revocations() -> Revocations:
    """Return the list of revoked certificates of the kit that this process works in."""
    kit = Path.cwd()
    root = read_certificate(kit / "startup" / "rootCA.pem")
    return Revocations(kit / "idiolect" / REVOKED_FILE, root)


def of_revoked(app: Path) -> str:
    """Say that whoever submitted a job was revoked; empty otherwise."""
    from cryptography.x509 import load_pem_x509_certificate

    for path in sorted(app.rglob(job_layout.SIGNED[1])):
        try:
            found = load_pem_x509_certificate(path.read_bytes())
        except (OSError, ValueError):
            return "the certificate of its submitter cannot be read"
        if kit_revocations().current().holds(found, common_name(found)):
            return f"the certificate of {common_name(found)} was revoked"
    return ""


class _Doorkeeper:
    """Lets nobody in, and nobody stay, whose certificate is revoked."""

    def __init__(self, known: Revocations) -> None:
        self._known = known
        self._seen: dict[str, Certificate] = {}  # the certificate that a name came with

    def refuses(self, name: str, certificate: "Certificate | None" = None) -> bool:
        """Return whether a member is refused; without a certificate, as it came last."""
        revoked = self._known.current()
        if certificate is None:
            certificate = self._seen.get(name)
            if certificate is None:  # it came before this process began: let it show it anew
                return any(one.name == name for one in revoked.entries)
        self._seen[name] = certificate
        return revoked.holds(certificate, name)


def _keep_out_revoked() -> None:
    """Ask the list wherever the engine's server checks who someone is, and at every heartbeat."""
    from nvflare.apis.fl_constant import FLContextKey
    from nvflare.private.fed.server.client_manager import ClientManager
    from nvflare.private.fed.utils import identity_utils

    door = _Doorkeeper(kit_revocations())
    verify: Callable[..., bool] = identity_utils.IdentityVerifier.verify_common_name
    beat: Callable[..., Any] = ClientManager.heartbeat

    def verified(
        self: Any, asserted_cn: str, nonce: str, asserter_cert: Any, *a: Any, **k: Any
    ) -> bool:
        done = verify(self, asserted_cn, nonce, asserter_cert, *a, **k)
        if door.refuses(asserted_cn, asserter_cert):
            log.warning("refused %s, whose certificate was revoked", asserted_cn)
            raise identity_utils.InvalidAsserterCert("the certificate was revoked")
        return done

    def heartbeat(self: Any, token: Any, client_name: str, client_fqcn: Any, fl_ctx: Any) -> Any:
        if not door.refuses(client_name):
            return beat(self, token, client_name, client_fqcn, fl_ctx)
        if self.clients.get(token):
            log.warning("%s is put out: its certificate was revoked", client_name)
            self.remove_client(token)
        fl_ctx.set_prop(FLContextKey.UNAUTHENTICATED, "the certificate was revoked", sticky=False)
        return False

    identity_utils.IdentityVerifier.verify_common_name = verified
    ClientManager.heartbeat = heartbeat


def _signed(*folders: str) -> set[str]:
    return {f"{folder}{name}" for folder in folders for name in job_layout.SIGNED}


def _well_formed(arguments: Any) -> bool:
    """Check what the server's side is told; FLARE would read braces as its own variables."""
    if not isinstance(arguments, dict) or set(arguments) != set(
        job_layout.ServerArguments.__annotations__
    ):
        return False
    lists = [arguments["sites"], arguments["only"], arguments["wanted"] or []]
    if not all(isinstance(arguments[key], str) for key in _STRINGS):
        return False
    if not all(isinstance(own, list) for own in lists) or type(arguments["describe"]) is not bool:
        return False
    entries = [entry for own in lists for entry in own]
    plain = all(entry is None or isinstance(entry, str | int) for entry in entries)
    words = [
        entry
        for entry in (*entries, arguments["run"], arguments["signed"])
        if isinstance(entry, str)
    ]
    return plain and not any(mark in word for word in words for mark in "{}$")


def watch() -> None:
    """Put our checks into this process of the engine, before it starts."""
    from nvflare.apis import workspace
    from nvflare.fuel.f3.sfm import conn_manager
    from nvflare.fuel.sec import audit
    from nvflare.fuel.utils.config import ConfigFormat
    from nvflare.private.fed.server import job_meta_validator, job_runner

    def formats(cls: Any) -> Any:
        return OrderedDict({".json": cls.JSON, ".json.default": cls.JSON})

    validator = job_meta_validator.JobMetaValidator
    try:
        inner: Callable[[Any, str, ZipFile], Any] = validator._validate_zf
        _ = workspace.check_job_id, job_meta_validator.check_job_id
        replies: Callable[..., Any] = job_runner.check_client_replies
        note: Callable[..., Any] = audit.Auditor.add_event
    except AttributeError as error:
        raise DeployError(
            f"this version of NVIDIA FLARE is not known ({error}); install the one that idiolect "
            "names: `pip install 'idiolect[flare]'`"
        ) from error

    def validated(self: Any, name: str, job: ZipFile) -> Any:
        try:
            refuse_strange(name, job)
            return inner(self, name, job)
        except ValueError as error:
            log.warning("refused a job that was submitted: %s", error)
            raise

    def checked(*, client_sites: list[str], **named: Any) -> Any:
        # A job of ours is started on the server alone, so nobody has to reply.
        return replies(client_sites=client_sites, **named) if client_sites else []

    _keep_out_revoked()

    def noted(self: Any, user: str, action: str, *rest: Any, **named: Any) -> Any:
        # Who only looks changes nothing, and looks every second.
        looks = action.split(" ", 1)[0].rsplit(".", 1)[-1] in _LOOKS
        return "" if looks else note(self, user, action, *rest, **named)

    # Seconds between attempts to connect at most, and from which on a failure is logged.
    conn_manager.MAX_WAIT, conn_manager.SILENT_RECONNECT_TIME = 3, 2
    ConfigFormat.config_ext_formats = classmethod(formats)
    audit.Auditor.add_event = noted
    job_runner.check_client_replies = checked
    validator._validate_zf = validated
    job_meta_validator.check_job_id = _refuse_chosen
    workspace.check_job_id = refuse_id


def refuse_id(job: Any) -> None:
    """Refuse an id that is not of the form the server draws: folders of a kit are called by it."""
    try:
        drawn = isinstance(job, str) and str(uuid.UUID(job)) == job
    except ValueError:
        drawn = False
    if not drawn:
        raise ValueError("a job's id is a UUID, drawn by the server")


def _refuse_chosen(job: Any) -> None:
    raise ValueError("a job's id is drawn by the server; leave job_id out of meta.json")


def refuse_strange(name: str, job: ZipFile) -> None:
    """Refuse a submitted archive with other files than a job of ours has."""
    app = f"{name}/{job_layout.APP}"
    wanted = {
        f"{name}/{job_layout.META}",
        f"{app}/{job_layout.SERVER}",
        f"{app}/{job_layout.CLIENT}",
    }
    files = [entry for entry in job.infolist() if not entry.is_dir()]
    folders = {entry.filename.rstrip("/") for entry in job.infolist() if entry.is_dir()}
    names = [entry.filename for entry in files]
    known = {*wanted, *_signed(f"{name}/", f"{app}/", f"{app}/config/")}
    if not wanted <= set(names) <= known or len(set(names)) < len(names):
        raise ValueError("a job holds meta.json and two configurations in app/config only")
    if not folders <= {name, app, f"{app}/config"}:
        raise ValueError("a job has the folder app/config only")
    if any(entry.file_size > job_layout.LARGEST for entry in files):
        raise ValueError(f"a file of the job has more than {job_layout.LARGEST} bytes")
    try:
        meta = json.loads(job.read(f"{name}/{job_layout.META}"))
        keys = set(meta)
    except (ValueError, TypeError, RecursionError):
        raise ValueError("meta.json cannot be read") from None
    known = set(job_layout.meta("", 0, []))
    if keys != known or meta["resource_spec"] != {}:
        raise ValueError(f"meta.json holds {', '.join(sorted(known))} and nothing else")


def main() -> None:
    """Be the process."""
    module = sys.argv[1]
    if module not in MODULES.values():
        raise SystemExit(f"{module} is none of {', '.join(MODULES.values())}")
    os.umask(0o077)  # what the engine stores of a run is for its owner alone
    watch()
    sys.argv[:] = sys.argv[1:]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
