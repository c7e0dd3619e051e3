"""Who signed a message: keys and certificates of the members' kits, under the federation's root.

A kit holds a private key and a certificate that the federation's authority signed; it names the
member, and of an admin the role. `Identity` signs with the key; `Authority` checks a signature:
that the certificate is of this authority, valid today, of the expected member in the expected role,
and that the signature is of exactly these bytes.
"""

import tomllib
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from idiolect.deploy.protocol import Refused
from idiolect.errors import DeployError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.padding import PSS
    from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey, RSAPublicKey
    from cryptography.x509 import Certificate
import hashlib
import itertools
import json
import logging
import secrets
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from idiolect.deploy import protocol
from idiolect.deploy.messenger import Transport

# The kits' keys sign for TLS and for the engine too. What we sign begins with these bytes and has
# salts of another length than theirs, so that no signature of one can pass for one of another.
_DOMAIN = b"idiolect signature 1\0"
_ABOUT = "idiolect.toml"  # what a kit says about itself
_STARTUP = "startup"  # in a kit: key, certificate and the authority's certificate
_CN_LIMIT = 64  # characters of a name in a certificate; the engine cuts a longer host name
SERVER, NODE, ADMIN = "server", "node", "admin"


class Signed(NamedTuple):
    """A signature and the certificate (DER) of the key it was made with."""

    certificate: bytes
    signature: bytes


def server_name(host: str) -> str:
    """Return the name that the server's certificate has."""
    return host[:_CN_LIMIT]


class Identity:
    """A member that can sign: its name, its role and its private key."""

    def __init__(self, name: str, role: str, key: "RSAPrivateKey", certificate: bytes) -> None:
        self.name = name
        self.role = role
        self.certificate = certificate
        self._key = key

    @classmethod
    def from_kit(cls, folder: Path) -> "Identity":
        """Read the identity of a kit's owner; the certificate must be of the name it goes by."""
        from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey
        from cryptography.hazmat.primitives.serialization import (
            Encoding,
            PublicFormat,
            load_pem_private_key,
        )
        from cryptography.x509 import load_pem_x509_certificate

        name, role, _ = _read_about(folder)
        base = folder / _STARTUP / (SERVER if role == SERVER else "client")
        try:
            key = load_pem_private_key(base.with_suffix(".key").read_bytes(), password=None)
            found = load_pem_x509_certificate(base.with_suffix(".crt").read_bytes())
            named = _common_name(found)
        except (OSError, ValueError, TypeError, Refused) as error:
            raise DeployError(
                f"{base}.key or .crt cannot be read ({type(error).__name__}); copy the kit again"
            ) from error
        if not isinstance(key, RSAPrivateKey):
            raise DeployError(f"{base}.key is no RSA key; make the kit anew")
        form = Encoding.DER, PublicFormat.SubjectPublicKeyInfo
        if key.public_key().public_bytes(*form) != found.public_key().public_bytes(*form):
            raise DeployError(f"{base}.key is not the key of {base}.crt; copy the kit again")
        if named != name:
            raise DeployError(
                f"the kit {folder} says it is of {name!r}, and its certificate is of {named!r}; "
                "copy the kit again"
            )
        return cls(name, role, key, found.public_bytes(Encoding.DER))

    def sign(self, context: bytes) -> Signed:
        """Sign bytes; they must say all that the signature is to be bound to."""
        from cryptography.hazmat.primitives.hashes import SHA256

        return Signed(self.certificate, self._key.sign(_DOMAIN + context, _padding(), SHA256()))


class Authority:
    """The federation's root certificate: says whether a member signed something."""

    def __init__(self, root: bytes, server: str) -> None:
        """`root`: the authority's certificate as PEM; `server`: the name of the server's."""
        from cryptography.x509 import load_pem_x509_certificate

        try:
            self._root = load_pem_x509_certificate(root)
        except ValueError as error:
            raise DeployError(
                "the authority's certificate is damaged; copy the kit again"
            ) from error
        self.server = server
        self._issued: dict[bytes, Certificate] = {}  # certificates whose issuer was checked

    @classmethod
    def from_kit(cls, folder: Path) -> "Authority":
        """Read the root certificate of a kit, and the name of the kit's server."""
        path = folder / _STARTUP / "rootCA.pem"
        try:
            return cls(path.read_bytes(), _read_about(folder)[2])
        except OSError as error:
            raise DeployError(f"{path} cannot be read; copy the kit again") from error

    def verify(self, signed: Signed, context: bytes, *, name: str, role: str) -> None:
        """Refuse what the member `name`, in the role `role`, has not signed."""
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.hashes import SHA256

        key = self._member(signed.certificate, name, role)
        try:
            key.verify(signed.signature, _DOMAIN + context, _padding(), SHA256())
        except InvalidSignature:
            raise Refused("identity", f"not what {name} has signed") from None

    def _member(self, certificate: bytes, name: str, role: str) -> "RSAPublicKey":
        """Return the key of a certificate that is of the expected member, and valid today."""
        from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey
        from cryptography.x509.oid import NameOID

        found = self._issued.get(certificate) or self._checked(certificate)
        now = datetime.now(UTC)
        for one in (found, self._root):
            if not one.not_valid_before_utc <= now <= one.not_valid_after_utc:
                raise Refused("identity", f"a certificate that is not valid today, of {name}?")
        named = _common_name(found)
        # Only an admin's certificate has a role in it; the server is the one with its name.
        if found.subject.get_attributes_for_oid(NameOID.UNSTRUCTURED_NAME):
            own = ADMIN
        else:
            own = SERVER if named == self.server else NODE
        if (named, own) != (name, role):
            raise Refused("identity", f"signed by {own} {named}, expected {role} {name}")
        key = found.public_key()
        if not isinstance(key, RSAPublicKey) or key.key_size < 2048:
            raise Refused("identity", f"{name} has no RSA key of 2048 bits or more")
        return key

    def _checked(self, certificate: bytes) -> "Certificate":
        """Read a certificate that this authority issued to a member."""
        from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
        from cryptography.x509 import load_der_x509_certificate

        try:
            found = load_der_x509_certificate(certificate)
            found.verify_directly_issued_by(self._root)
        except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm) as error:
            raise Refused("identity", "a certificate that is not of this federation") from error
        if found == self._root:
            raise Refused("identity", "the authority itself is no member")
        if len(self._issued) >= 4096:
            self._issued.clear()
        self._issued[certificate] = found
        return found


def _padding() -> "PSS":
    from cryptography.hazmat.primitives.asymmetric.padding import MGF1, PSS
    from cryptography.hazmat.primitives.hashes import SHA256

    return PSS(MGF1(SHA256()), PSS.DIGEST_LENGTH)


def _common_name(certificate: "Certificate") -> str:
    from cryptography.x509.oid import NameOID

    named = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    if len(named) != 1 or not isinstance(named[0].value, str):
        raise Refused("identity", "a certificate without a name, or with several")
    return named[0].value


def _read_about(folder: Path) -> tuple[str, str, str]:
    """Return a kit's name and role, and the name of its server."""
    path = folder / _ABOUT
    try:
        known = tomllib.loads(path.read_text())
        name, role, host = (str(known[key]) for key in ("name", "role", "host"))
    except (OSError, ValueError, KeyError) as error:
        raise DeployError(f"{path} cannot be read; copy the kit again") from error
    return (server_name(name) if role == SERVER else name), role, server_name(host)


log = logging.getLogger("idiolect.channel")
_MAGIC = b"idi\x01"
_SIZES = (4, 2, 2)  # bytes that say how long header, certificate and signature are
_LIMIT = 1 << 16  # bytes of an envelope without the message


@dataclass(frozen=True)
class _Header:
    """What is signed beside the message."""

    sender: str
    to: str
    session: str  # of the node's process; empty: none yet
    number: int  # in the session, of the question
    asked: str  # SHA-256 of the question's envelope; empty in a question
    digest: str  # SHA-256 of the message

    def plain(self) -> bytes:
        """Write it as it is signed."""
        return json.dumps(vars(self), sort_keys=True, separators=(",", ":")).encode()

    @classmethod
    def read(cls, plain: bytes) -> "_Header":
        """Read it, trusting nothing in it."""
        try:
            found: Any = json.loads(plain)
            header = cls(**found)
        except (ValueError, TypeError, RecursionError) as error:
            raise Refused("identity", "an envelope that cannot be read") from error
        words = (header.sender, header.to, header.session, header.asked, header.digest)
        if not all(isinstance(one, str) for one in words) or type(header.number) is not int:
            raise Refused("identity", "an envelope of another form")
        return header


class _Envelope(NamedTuple):
    header: _Header
    signed: Signed
    plain: bytes  # the header's bytes
    body: bytes

    @property
    def mark(self) -> str:
        """What an answer names this envelope by; no two are alike, as signatures are salted."""
        return _sha256(self.plain + self.signed.signature)

    def verify(self, authority: Authority, *, sender: str, role: str, to: str) -> None:
        """Refuse what is not signed by the expected sender, or is for someone else."""
        authority.verify(self.signed, self.plain, name=sender, role=role)
        if (self.header.sender, self.header.to) != (sender, to):
            found = f"from {self.header.sender} to {self.header.to}"
            raise Refused("identity", f"a message {found}, expected from {sender} to {to}")
        if self.header.digest != _sha256(self.body):
            raise Refused("identity", "a message that was changed on its way")


def _sha256(blob: bytes) -> str:
    return hashlib.sha256(blob).hexdigest()


def _sealed(identity: Identity, header: _Header, body: bytes) -> bytes:
    plain = header.plain()
    signed = identity.sign(plain)
    parts = [_MAGIC]
    for size, part in zip(_SIZES, (plain, *signed), strict=True):
        parts += (len(part).to_bytes(size, "little"), part)
    return b"".join((*parts, body))


def _opened(blob: object) -> _Envelope:
    """Take an envelope apart, trusting nothing in it."""
    if not isinstance(blob, bytes) or blob[: len(_MAGIC)] != _MAGIC:
        raise Refused("identity", "a message without a signature")
    place, parts = len(_MAGIC), []
    for size in _SIZES:
        length = int.from_bytes(blob[place : place + size], "little")
        place += size + length
        if place > min(len(blob), _LIMIT):
            raise Refused("identity", "an envelope that is cut short, or too long")
        parts.append(blob[place - length : place])
    plain, certificate, signature = parts
    return _Envelope(_Header.read(plain), Signed(certificate, signature), plain, blob[place:])


class NodeChannel:
    """A node's end: hands on what the server signed for it, and signs the answers."""

    def __init__(self, identity: Identity, authority: Authority) -> None:
        if identity.role != NODE:
            raise Refused("identity", f"the kit is of a {identity.role}, expected a node's")
        self._identity, self._authority = identity, authority
        self._session = secrets.token_hex(16)
        self._last = 0  # the highest number that was answered
        self._lock = threading.Lock()

    def answer(self, blob: bytes, ask: Callable[[bytes], bytes]) -> bytes:
        """Answer one message by `ask`, if it is of the server, for this node, and new."""
        own, server = self._identity.name, self._authority.server
        session, number, mark = "", 0, ""
        try:
            envelope = _opened(blob)
            mark = envelope.mark
            envelope.verify(self._authority, sender=server, role=SERVER, to=own)
            session, number = self._session, envelope.header.number
            self._refuse_old(envelope.header)
            body = ask(envelope.body)
        except Refused as error:
            log.error("refused with %r: %s", error.reason, error)
            body = protocol.refusal(error.reason)
        header = _Header(own, server, session, number, mark, _sha256(body))
        return _sealed(self._identity, header, body)

    def _refuse_old(self, header: _Header) -> None:
        if header.asked:
            raise Refused("identity", "an answer, expected a question")
        if header.session != self._session:
            raise Refused("closed", "a session of another process; the server gets this one's")
        with self._lock:
            if header.number <= self._last:
                raise Refused("replay", f"message {header.number} after {self._last}")
            self._last = header.number


class ServerChannel(Transport):
    """The server's end: a `Transport` that signs what it sends, and checks every answer."""

    def __init__(self, inner: Transport, identity: Identity, authority: Authority) -> None:
        if identity.role != SERVER:
            raise Refused("identity", f"the kit is of a {identity.role}, expected the server's")
        self.sites: Sequence[str] = inner.sites
        self._inner = inner
        self._identity, self._authority = identity, authority
        self._sessions: dict[str, str] = {}
        self._numbers = itertools.count(1)

    def call(self, site: str, blob: bytes, seconds: float) -> bytes:
        """Bring a message to a site and return its answer, if it is that site's to this message."""
        if site not in self._sessions:
            self._exchanged(site, "", b"", seconds)
        known = self._sessions[site]
        answer = self._exchanged(site, known, blob, seconds)
        if self._sessions[site] != known:  # its process is another one than before
            raise Refused("closed", f"{site} was started anew")
        return answer

    def _exchanged(self, site: str, session: str, blob: bytes, seconds: float) -> bytes:
        number, own = next(self._numbers), self._identity.name
        header = _Header(own, site, session, number, "", _sha256(blob))
        question = _sealed(self._identity, header, blob)
        envelope = _opened(self._inner.call(site, question, seconds))
        envelope.verify(self._authority, sender=site, role=NODE, to=own)
        found = envelope.header
        if found.asked != _opened(question).mark:
            raise Refused("identity", f"{site} answered another message")
        if not found.session:
            protocol.accepted(
                protocol.unpack(envelope.body)
            )  # it says why it does not know this server
            raise Refused("identity", f"{site} answered outside of a session")
        self._sessions[site] = found.session
        return envelope.body

    def returned(self, site: str) -> bool:
        """Return whether a lost site could take part again after a restart of the run."""
        return self._inner.returned(site)

    def stopped(self) -> bool:
        """Return whether the server should end."""
        return self._inner.stopped()
