"""Keys that are made where they are used: request, approval, installation, renewal.

A member makes its own key pair and sends a certificate request, which holds no secret; whoever has
the authority signs it after both have compared the key's fingerprint; the member puts what comes
back beside its key. FLARE's provisioning writes the start-up files, as for all other kits; only the
certificate is of the member's own key (FLARE's `nvflare cert` would put a role into every
certificate, which here only admins' have, and knows no other names than its own files').
"""

import base64
import contextlib
import hashlib
import json
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from idiolect.core.checkpoint import write_whole
from idiolect.deploy.certificates import (
    common_name,
    fingerprint,
    public_bytes,
    read_certificate,
    same_fingerprint,
)
from idiolect.deploy.flare import kits, require
from idiolect.deploy.identity import SERVER, key_path
from idiolect.deploy.revocation import REVOKED_FILE, Revocations, padding, read_list, revoke
from idiolect.errors import ConfigError, DeployError
from idiolect.experiment.federation_file import Project

if TYPE_CHECKING:
    from cryptography.x509 import Certificate, CertificateSigningRequest

_NEXT = "next.key"  # in a kit's startup folder: the key of a certificate that is being renewed
_FILES = "signed-files.json"  # in an approved kit: what is in it, signed by the authority
_DOMAIN = b"idiolect kit 1\0"
_LARGEST = 1 << 16  # bytes of a request
SOON = 30  # days before the end from which a certificate's expiry is warned of


# At the member.


def request(name: str, folder: Path) -> tuple[Path, str]:
    """Make a key pair in a folder and a certificate request; return its path, and fingerprint.

    In a kit the new key waits beside the old one, which holds until the new certificate is there.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import rsa
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
    from cryptography.x509.oid import NameOID

    startup = folder / "startup"
    if (folder / kits.FILE).exists():
        kit = kits.read(folder)
        name, target = kits.folder_of(kit.role, kit.name), startup / _NEXT
    else:
        target = startup / "own.key"
    if target.exists():
        raise ConfigError(
            f"{target} exists: a request was made and not answered yet; send {name}.csr again, or "
            "remove the key to make another"
        )
    key = rsa.generate_private_key(65537, 2048)
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.TraditionalOpenSSL, NoEncryption())
    startup.mkdir(parents=True, exist_ok=True)
    write_whole(target, pem, private=True)
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    made = x509.CertificateSigningRequestBuilder().subject_name(subject).sign(key, SHA256())
    path = folder / f"{name}.csr"
    write_whole(path, made.public_bytes(Encoding.PEM))
    return path, fingerprint(key.public_key())


class Installed(NamedTuple):
    """What was installed, and the authority behind it."""

    words: str
    authority: str  # its fingerprint


def install(folder: Path, given: Path, authority: str | None = None) -> Installed:
    """Put what the authority gave beside the member's own key; a running node takes it up.

    `given`: an approved kit, a renewed one, or a list of revoked certificates; `authority`: the
    fingerprint that the authority is expected to have.
    """
    from cryptography.exceptions import InvalidSignature

    if given.is_file():
        return _install_list(folder, given)
    startup = given / "startup" if (given / "startup").is_dir() else given
    root, names = _root_of(startup), [path.name for path in startup.glob("*.crt")]
    print_ = fingerprint(root.public_key())
    if authority is not None and not same_fingerprint(authority, print_):
        raise ConfigError(f"the authority's key has the fingerprint {print_}, not the one given")
    if len(names) != 1:
        raise ConfigError(f"{given} holds no certificate; give the folder that came back")
    certificate = read_certificate(startup / names[0])
    try:
        certificate.verify_directly_issued_by(root)
    except (ValueError, TypeError, InvalidSignature):
        raise ConfigError(
            f"{startup / names[0]} is not signed by the authority beside it"
        ) from None
    if (folder / kits.FILE).exists():
        return _renew(folder, startup, certificate, root, print_)
    return _first(folder, given, certificate, root)


def _first(folder: Path, given: Path, certificate: "Certificate", root: "Certificate") -> Installed:
    own = folder / "startup" / "own.key"
    if not own.exists():
        raise ConfigError(f"{folder} is neither a kit nor holds a key; `federation request` first")
    _refuse_other_key(own, certificate)
    content, kit = _signed_content(given, root), kits.read(given)
    for name, blob in content.items():
        if not (folder / name).exists():
            write_whole(folder / name, blob)
            (folder / name).chmod((given / name).stat().st_mode & 0o777)
    own.rename(key_path(folder, kit.role))
    (folder / f"{kits.folder_of(kit.role, kit.name)}.csr").unlink(missing_ok=True)
    if (given / kits.HOME / REVOKED_FILE).is_file():
        _install_list(folder, given / kits.HOME / REVOKED_FILE)
    words = f"{folder} is the kit of {kit.role} {kit.name}"
    return Installed(words, fingerprint(root.public_key()))


def _signed_content(given: Path, root: "Certificate") -> dict[str, bytes]:
    """Return what the authority put into an approved kit; refuse what was changed on its way.

    A kit says which programs are started and what a site allows, so a certificate is not enough.
    """
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey
    from cryptography.hazmat.primitives.hashes import SHA256

    key = root.public_key()
    try:
        whole = json.loads((given / _FILES).read_bytes())
        text, signature = whole["files"], base64.b64decode(whole["signature"], validate=True)
        if not isinstance(key, RSAPublicKey):
            raise ValueError("no RSA key")
        key.verify(signature, _DOMAIN + text.encode(), padding(), SHA256())
    except (OSError, ValueError, TypeError, KeyError, AttributeError, InvalidSignature):
        raise ConfigError(
            f"{given / _FILES} is missing, or not what the authority signed; ask for the folder "
            "that `federation approve` made"
        ) from None
    found = {}
    for name, digest in json.loads(text).items():
        found[name] = (given / name).read_bytes() if (given / name).is_file() else b""
        if hashlib.sha256(found[name]).hexdigest() != digest:
            raise ConfigError(f"{given / name} is not what the authority signed; ask for it again")
    return found


def _sign_content(folder: Path, root_key: str) -> None:
    from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    key = load_pem_private_key(root_key.encode(), password=None)
    if not isinstance(key, RSAPrivateKey):
        raise ConfigError("the authority's key is no RSA key")
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    text = json.dumps(
        {
            path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in files
        }
    )
    signature = base64.b64encode(key.sign(_DOMAIN + text.encode(), padding(), SHA256()))
    whole = {"files": text, "signature": signature.decode()}
    write_whole(folder / _FILES, json.dumps(whole).encode())


def _renew(
    folder: Path, startup: Path, certificate: "Certificate", root: "Certificate", authority: str
) -> Installed:
    kit = kits.read(folder)
    if public_bytes(root.public_key()) != public_bytes(_root_of(folder / "startup").public_key()):
        raise ConfigError(f"{startup} is of another federation's authority than {folder}")
    key = key_path(folder, kit.role)
    crt, waiting = key.with_suffix(".crt"), folder / "startup" / _NEXT
    brought = startup / key.name  # renewed with a key that the authority's owner made
    new = brought if brought.exists() else waiting
    if not new.exists():
        raise ConfigError(f"{folder} holds no key for it; make one with `federation request`")
    _refuse_other_key(new, certificate)
    if common_name(certificate) != common_name(read_certificate(crt)):
        raise ConfigError(f"{startup} is of {common_name(certificate)}, and {folder} is not")
    # Whoever reads between the two lines goes on with the old pair, and reads again.
    write_whole(key, new.read_bytes(), private=True)
    write_whole(crt, (startup / crt.name).read_bytes())
    waiting.unlink(missing_ok=True)
    (folder / f"{kits.folder_of(kit.role, kit.name)}.csr").unlink(missing_ok=True)
    until = certificate.not_valid_after_utc
    return Installed(f"{folder} has a certificate until {until:%Y-%m-%d}", authority)


def _install_list(folder: Path, given: Path) -> Installed:
    kit, root = kits.read(folder), _root_of(folder / "startup")
    kept = Revocations(kit.home / REVOKED_FILE, root)
    kit.home.mkdir(parents=True, exist_ok=True)
    new = kept.take(given.read_bytes())
    words = f"{len(kept.current().entries)} members on the list, number {kept.number}"
    return Installed(
        f"{words}{'' if new else '; the one given is no newer'}",
        fingerprint(root.public_key()),
    )


def _refuse_other_key(path: Path, certificate: "Certificate") -> None:
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        key = load_pem_private_key(path.read_bytes(), password=None)
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{path} cannot be read ({type(error).__name__})") from error
    if public_bytes(key.public_key()) != public_bytes(certificate.public_key()):
        raise ConfigError(f"the certificate is of another key than {path}; was it sent to you?")


def _root_of(startup: Path) -> "Certificate":
    return read_certificate(startup / "rootCA.pem")


# At the authority.


class KeyRequest(NamedTuple):
    """A certificate request, before anyone has approved it."""

    name: str
    fingerprint: str
    public: bytes  # the key, as PEM


def read_request(path: Path) -> KeyRequest:
    """Read a request; it must be signed with its own key, and that be strong enough."""
    from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
    from cryptography.x509 import load_pem_x509_csr

    try:
        if path.stat().st_size > _LARGEST:
            raise ValueError("too long")
        found: CertificateSigningRequest = load_pem_x509_csr(path.read_bytes())
        valid, key = found.is_signature_valid, found.public_key()
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{path} is no certificate request ({type(error).__name__})") from error
    if not valid:
        raise ConfigError(f"{path} is not signed with its own key; ask for it again")
    if not isinstance(key, RSAPublicKey) or key.key_size < 2048:
        raise ConfigError(f"{path} is of no RSA key of 2048 bits or more")
    pem = key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    return KeyRequest(common_name(found), fingerprint(key), pem)


def approve(project: Project, out: Path, asked: KeyRequest) -> Path:
    """Sign a member's request; returns the folder to give back, which holds no secret.

    Name and role are the project's; the request only brings the key.
    """
    require()
    root = kits.read_root(out / kits.AUTHORITY)
    kits.refuse_changed(project, out)
    known = {one.folder: one for one in kits.members(project)}
    if asked.name not in known:
        raise ConfigError(
            f"the request is of {asked.name!r}, and the project has: {', '.join(known)}; add it "
            "there first"
        )
    owner = known[asked.name]
    _wait_out_revocation(out, root, owner.name)
    people = [one for one in known.values() if one in (owner, *_least(known.values()))]
    had = kits.read_members(out / kits.AUTHORITY)
    target = out / owner.folder
    if owner.folder in had or target.exists():
        target = out / kits.RENEWED / owner.folder
    if target.exists():
        raise ConfigError(f"{target} exists; hand it out and move it away first")
    with tempfile.TemporaryDirectory() as scratch:
        built = kits.provision(project, people, Path(scratch), root, {owner.name: asked.public})
        if target.parent == out:
            kits.placed(project, owner, built, target)
            _sign_content(target, root["root_pri_key"])
        else:
            shutil.copytree(built / owner.name / "startup", target / "startup")
    if owner.folder not in had:
        kits.keep_members(out / kits.AUTHORITY, [*had, owner.folder])
    kits.note_issued(out / kits.AUTHORITY, owner, target / "startup")
    return target


def _wait_out_revocation(out: Path, root: kits.Root, name: str) -> None:
    """Let the second of a member's revocation pass: what is made after it holds."""
    from cryptography.x509 import load_pem_x509_certificate

    path = out / REVOKED_FILE
    if path.exists():
        own = read_list(path.read_bytes(), load_pem_x509_certificate(root["root_cert"].encode()))
        while own.covers(name, int(time.time())):
            time.sleep(0.1)


def _least(members: Any) -> list[kits.KitOwner]:
    """Return whom the engine's provisioning cannot do without: the server."""
    return [one for one in members if one.role == SERVER]


def revoke_members(
    project: Project, out: Path, names: Sequence[str], why: str, before: datetime | None
) -> list[Path]:
    """Revoke members' certificates; returns the signed list, and the kits it was put into."""
    root = kits.read_root(out / kits.AUTHORITY)
    known = {one.folder: one.name for one in kits.members(project)}
    known |= {name: name for name in kits.read_members(out / kits.AUTHORITY) if name not in known}
    for name in names:
        if name not in known:
            raise ConfigError(f"--member: {name!r} is none of {', '.join(known)}")
    path, moment = out / REVOKED_FILE, None if before is None else before.timestamp()
    pair = root["root_cert"], root["root_pri_key"]
    revoke(path, pair, [known[name] for name in names], why, moment)
    written = [path]
    for folder in sorted(one.parent for one in out.glob(f"*/{kits.FILE}")):
        home = folder / kits.HOME
        home.mkdir(exist_ok=True)
        write_whole(home / REVOKED_FILE, path.read_bytes())
        written.append(folder)
    return written


class Member(NamedTuple):
    """A certificate that was signed, and what became of it."""

    name: str
    role: str
    until: datetime
    fingerprint: str
    state: str  # valid, expired, revoked or replaced


def issued(project: Project, out: Path) -> list[Member]:
    """List the certificates that the authority signed, as far as it has written them down."""
    from cryptography.x509 import load_pem_x509_certificate

    root = load_pem_x509_certificate(kits.read_root(out / kits.AUTHORITY)["root_cert"].encode())
    path, kept, revoked = out / kits.AUTHORITY / kits.ISSUED, [], None
    if (out / REVOKED_FILE).exists():
        revoked = read_list((out / REVOKED_FILE).read_bytes(), root)
    folders = {one.folder: one.name for one in kits.members(project)}
    lines = path.read_text().splitlines() if path.exists() else []
    for line in lines:
        own: Mapping[str, str] = json.loads(line)
        made, until = (datetime.fromisoformat(own[key]) for key in ("from", "until"))
        name, state = folders.get(own["name"], own["name"]), "valid"
        if revoked is not None and revoked.covers(name, made.timestamp()):
            state = "revoked"
        elif until < datetime.now(UTC):
            state = "expired"
        kept.append(Member(own["name"], own["role"], until, own["key"], state))
    return kept


# Expiry.


def expiry(folder: Path) -> tuple[datetime, datetime]:
    """Return until when a kit's certificate and its authority's are valid."""
    kit = kits.read(folder)
    own = read_certificate(key_path(folder, kit.role).with_suffix(".crt"))
    return own.not_valid_after_utc, _root_of(folder / "startup").not_valid_after_utc


def expiry_words(folder: Path, now: datetime | None = None) -> tuple[str, bool]:
    """Say until when a kit's certificate is valid, and whether something must be done."""
    now = now or datetime.now(UTC)
    own, root = expiry(folder)
    until, what = min((own, "its certificate"), (root, "the authority"))
    left = (until - now).days
    when = f"{what} is valid until {until:%Y-%m-%d}"
    if until <= now:
        return f"{what} expired on {until:%Y-%m-%d}: nobody accepts this kit; renew it", True
    if left < SOON:
        remedy = (
            "renew it: `idiolect federation request KIT`" if own <= root else "new kits for all"
        )
        return f"{when}, {left} days from now; {remedy}", True
    return f"{when} ({left} days)", False


def expiry_line(name: str, until: str) -> str:
    """Say until when a member's certificate is valid, with a warning where that is soon."""
    end = datetime.fromisoformat(until)
    left = (end - datetime.now(UTC)).days
    soon = "; renew it (federation request, or renew)" if left < SOON else ""
    return f"certificate of {name}: until {end:%Y-%m-%d}, {left} days{soon}"


def certificates(folder: Path) -> dict[str, str]:
    """Return until when the certificates of a kit, and of its server if it answers, are valid."""
    kit, server = kits.read(folder), server_expiry(folder)
    own, root = expiry(folder)
    found = {kit.name: own, "the authority": root, **({kit.host: server} if server else {})}
    return {name: end.isoformat() for name, end in found.items()}


def server_expiry(folder: Path, seconds: float = 5.0) -> datetime | None:
    """Ask the server of a kit for its certificate; None where it cannot be reached."""
    import socket
    import ssl

    from cryptography.x509 import load_der_x509_certificate

    kit, startup = kits.read(folder), folder / "startup"
    context = ssl.create_default_context(cafile=str(startup / "rootCA.pem"))
    context.check_hostname = False
    key = key_path(folder, kit.role)
    with contextlib.suppress(OSError, ValueError, DeployError):
        context.load_cert_chain(key.with_suffix(".crt"), key)
        with socket.create_connection((kit.host, kit.port), seconds) as plain:
            with context.wrap_socket(plain) as secured:
                der = secured.getpeercert(binary_form=True)
                return load_der_x509_certificate(der or b"").not_valid_after_utc
    return None
