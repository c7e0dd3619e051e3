"""`idiolect doctor`: what could keep a server, a node or an admin from working, before it starts.

Each finding says what, why, and what to do about it.
"""

import shutil
import socket
import ssl
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from idiolect.data import SOURCES
from idiolect.deploy.flare.kits import NODE_FILE, MemberKit
from idiolect.deploy.flare.watchdog import taken_port
from idiolect.deploy.identity import Authority, Identity
from idiolect.deploy.limits import policy_path, read_server_policy, read_site_policy
from idiolect.deploy.site import NodeSettings
from idiolect.errors import ConfigError, DeployError, IdiolectError
from idiolect.experiment.build import load_source
from idiolect.version import VERSION

if TYPE_CHECKING:
    from cryptography.x509 import Certificate

_SOON = timedelta(days=30)
_ROOM = 1 << 30  # bytes of disk below which it is said
_WAIT = 5.0  # seconds for the server to answer


class Finding(NamedTuple):
    """What was looked at, whether it is fine, and words."""

    what: str
    fine: bool
    words: str


def checked(kit: MemberKit, data: NodeSettings | None = None) -> Iterator[Finding]:
    """Look at everything that a member of a federation depends on.

    `data`: a node's settings, to read its data; those it was last started with by default.
    """
    looks: list[tuple[str, Callable[[], str]]] = [
        ("versions", _versions),
        ("certificate", lambda: _certificate(kit)),
        ("clock", lambda: _clock(kit)),
        ("disk", lambda: _disk(kit.folder)),
    ]
    if kit.role == "server":
        looks += [("port", lambda: _port(kit)), ("policy", lambda: _policy(kit))]
    else:
        looks += [("server", lambda: _server(kit))]
    if kit.role == "node":
        looks += [("policy", lambda: _policy(kit)), ("data", lambda: _data(kit, data))]
    for what, look in looks:
        try:
            yield Finding(what, True, look())
        except (IdiolectError, OSError) as error:
            yield Finding(what, False, str(error))


def _versions() -> str:
    names = ("torch", "nvflare", "cryptography")
    known = ", ".join(f"{name} {metadata.version(name)}" for name in names)
    return f"idiolect {VERSION}, Python {sys.version.split()[0]}, {known}"


def _own(kit: MemberKit) -> "Certificate":
    from cryptography.x509 import load_der_x509_certificate

    return load_der_x509_certificate(Identity.from_kit(kit.folder).certificate)


def refuse_invalid_certificate(kit: MemberKit) -> None:
    """Refuse to start with a certificate that nobody would accept today."""
    _certificate(kit)


def _certificate(kit: MemberKit) -> str:
    found, now = _own(kit), datetime.now(UTC)
    last, first = found.not_valid_after_utc, found.not_valid_before_utc
    if now > last:
        raise DeployError(
            f"the kit's certificate expired on {last:%d %b %Y}; ask whoever made the kits for a "
            f"renewed one: `idiolect federation renew PROJECT.toml --member {kit.folder.name}`"
        )
    if now < first:
        raise DeployError(
            f"the kit's certificate is valid from {first:%d %b %Y %H:%M} UTC, and this machine's "
            f"clock says {now:%d %b %Y %H:%M} UTC; set the clock by NTP"
        )
    Authority.from_kit(kit.folder)
    found.verify_directly_issued_by(_root(kit))
    words = f"valid until {last:%d %b %Y}, of {kit.federation}"
    if last - now < _SOON:
        words += f"; {(last - now).days} days are left: have it renewed now"
    return words


def _root(kit: MemberKit) -> "Certificate":
    from cryptography.x509 import load_pem_x509_certificate

    return load_pem_x509_certificate((kit.folder / "startup" / "rootCA.pem").read_bytes())


def _clock(kit: MemberKit) -> str:
    now, made = datetime.now(UTC), _own(kit).not_valid_before_utc
    if now < made:
        raise DeployError(
            f"this machine's clock ({now:%d %b %Y %H:%M} UTC) is before the kit was made; set it"
        )
    return f"{now:%d %b %Y %H:%M:%S} UTC; compared with the server's when the node is connected"


def _disk(folder: Path) -> str:
    free = shutil.disk_usage(folder).free
    if free < _ROOM:
        raise DeployError(f"{free >> 20} MB are free where the kit lies; a GB should be")
    probe = folder / ".probe"
    try:
        probe.write_bytes(b"1")
    except OSError as error:
        raise DeployError(f"{folder} cannot be written to: {error.strerror}") from error
    probe.unlink()
    return f"{free >> 30} GB free, and it can be written to"


def _port(kit: MemberKit) -> str:
    if taken := taken_port(kit.port):
        raise DeployError(f"{taken} (or this server is running already)")
    return f"{kit.port} is free; nodes and admins must reach it from outside"


def _policy(kit: MemberKit) -> str:
    file = policy_path(kit.folder, None)
    if file is None:
        return "none; the defaults hold"
    (read_server_policy if kit.role == "server" else read_site_policy)(file)
    return f"{file} can be read"


def _server(kit: MemberKit) -> str:
    """Speak TLS with the server, as the engine will."""
    where, startup = f"{kit.host}:{kit.port}", kit.folder / "startup"
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False  # FLARE's certificates carry the name elsewhere
    context.load_verify_locations(startup / "rootCA.pem")
    context.load_cert_chain(startup / "client.crt", startup / "client.key")
    try:
        with (
            socket.create_connection((kit.host, kit.port), timeout=_WAIT) as raw,
            context.wrap_socket(raw, server_hostname=kit.host) as secured,
        ):
            secured.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            if not secured.recv(16):  # in TLS 1.3 a refusal comes with the first answer
                raise DeployError(_refused(kit, where))
    except socket.gaierror as error:
        raise DeployError(
            f"the name {kit.host} does not resolve here; ask for DNS, or the kits' server.host"
        ) from error
    except ssl.SSLCertVerificationError as error:
        raise DeployError(
            f"who answers at {where} is not this federation's server ({error.verify_message}); "
            "check the address, the clock, or whether the kits were made anew"
        ) from error
    except (ssl.SSLError, ConnectionResetError) as error:
        raise DeployError(_refused(kit, where)) from error
    except OSError as error:
        raise DeployError(
            f"nobody answers at {where} ({error.strerror or error}): the server is down, or a "
            "firewall is shut"
        ) from error
    return f"{where} answers, and each side accepts the other's certificate"


def _refused(kit: MemberKit, where: str) -> str:
    return (
        f"the server at {where} refuses the certificate of {kit.name}: it is of another "
        "federation, has expired or was revoked; ask whoever made the kits"
    )


def _data(kit: MemberKit, given: NodeSettings | None) -> str:
    if given is None:
        path = kit.home / NODE_FILE
        if not path.is_file():
            return "not looked at: give --data and --label as for `idiolect node`"
        given = NodeSettings.from_json(path.read_text())
    return check_data(given)


def check_data(site: NodeSettings) -> str:
    """Read a node's own data as a run would; say what it is."""
    if site.data in SOURCES:
        return f"a share of {site.data}, which is read when a run asks for it"
    dataset = load_source(site.data, _options(site), site.data_dir)
    if not len(dataset):
        raise ConfigError(f"{site.data} holds no rows")
    words = f"{len(dataset):,} rows of {site.data}"
    if dataset.task.kind == "classes" and dataset.classes:
        shown = ", ".join(dataset.classes[:6]) + (", ..." if len(dataset.classes) > 6 else "")
        words += f", classes {shown}"
    return words


def _options(site: NodeSettings) -> dict[str, Any]:
    return dict(site.options)
