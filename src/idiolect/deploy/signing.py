"""Who signed a message: keys and certificates of the members' kits, under the federation's root.

A kit holds a private key and a certificate that the federation's authority signed; it names the
member, and of an admin the role. `Identity` signs with the key; `Authority` checks a signature:
that the certificate is of this authority, valid today, of the expected member in the expected role,
and that the signature is of exactly these bytes.
"""

import base64
import hashlib
import itertools
import json
import logging
import secrets
import threading
import time
import tomllib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from idiolect.core.checkpoint import write_whole
from idiolect.deploy import audit, protocol
from idiolect.deploy.audit import AuditLog
from idiolect.deploy.certificates import common_name, public_bytes
from idiolect.deploy.messenger import Transport
from idiolect.deploy.protocol import Refused
from idiolect.deploy.revocation import REVOKED_FILE, Revocations
from idiolect.errors import DeployError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.padding import PSS
    from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey
    from cryptography.x509 import Certificate

log = logging.getLogger("idiolect.channel")

# The kits' keys sign for TLS and for the engine too. What we sign begins with these bytes and has
# salts of another length than theirs, so that no signature of one can pass for one of another.
_DOMAIN = b"idiolect signature 1\0"
_ABOUT = "idiolect.toml"  # what a kit says about itself
HOME = "idiolect"  # in a kit: what idiolect writes
_STARTUP = "startup"  # in a kit: key, certificate and the authority's certificate
_CN_LIMIT = 64  # characters of a name in a certificate; the engine cuts a longer host name
_SLACK = timedelta(days=1)  # of clocks, when records of the past are checked
SERVER, NODE, ADMIN = "server", "node", "admin"


class Signed(NamedTuple):
    """A signature and the certificate (DER) of the key it was made with."""

    certificate: bytes
    signature: bytes


def server_name(host: str) -> str:
    """Return the name that the server's certificate has."""
    return host[:_CN_LIMIT]


class Identity:
    """A member that can sign: its name, its role and its private key.

    A kit's key and certificate are read again when they were replaced: renewal needs no restart.
    """

    def __init__(self, name: str, role: str, key: "RSAPrivateKey", certificate: bytes) -> None:
        self.name = name
        self.role = role
        self._key, self._certificate = key, certificate
        self._files: tuple[Path, Path] | None = None  # of a kit: key and certificate
        self._stamp = _stamp(())

    @classmethod
    def from_kit(cls, folder: Path) -> "Identity":
        """Read the identity of a kit's owner; the certificate must be of the name it goes by."""
        name, role, _ = _read_about(folder)
        files = key_path(folder, role), key_path(folder, role).with_suffix(".crt")
        stamp = _stamp(files)
        key, certificate = _read_pair(*files, name)
        made = cls(name, role, key, certificate)
        made._files, made._stamp = files, stamp
        return made

    @property
    def certificate(self) -> bytes:
        """The certificate (DER) as it is now."""
        return self._current()[1]

    def sign(self, context: bytes) -> Signed:
        """Sign bytes; they must say all that the signature is to be bound to."""
        from cryptography.hazmat.primitives.hashes import SHA256

        key, certificate = self._current()
        return Signed(certificate, key.sign(_DOMAIN + context, _padding(), SHA256()))

    def _current(self) -> "tuple[RSAPrivateKey, bytes]":
        stamp = _stamp(self._files or ())
        if self._files is not None and stamp != self._stamp:
            try:
                self._key, self._certificate = _read_pair(*self._files, self.name)
                self._stamp = stamp
                log.info("the certificate of %s was renewed", self.name)
            except DeployError as error:  # one of the two files is new, the other not yet
                log.warning("%s; going on with the old certificate", error)
        return self._key, self._certificate


def key_path(folder: Path, role: str) -> Path:
    """Return where a kit's private key is; the certificate lies beside it as .crt."""
    return folder / _STARTUP / f"{SERVER if role == SERVER else 'client'}.key"


def _stamp(files: Sequence[Path]) -> tuple[tuple[int, int], ...]:
    """Return what changes when files are replaced."""
    found = []
    for path in files:
        try:
            stat = path.stat()
            found.append((stat.st_mtime_ns, stat.st_ino))
        except OSError:
            found.append((0, 0))
    return tuple(found)


def _read_pair(key_file: Path, file: Path, name: str) -> "tuple[RSAPrivateKey, bytes]":
    """Read a key and its certificate (DER), which must be of that name."""
    from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey
    from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key
    from cryptography.x509 import load_pem_x509_certificate

    try:
        key = load_pem_private_key(key_file.read_bytes(), password=None)
        found = load_pem_x509_certificate(file.read_bytes())
        named = _common_name(found)
    except (OSError, ValueError, TypeError, Refused) as error:
        raise DeployError(
            f"{key_file} or {file.name} cannot be read ({type(error).__name__}); copy the kit again"
        ) from error
    if not isinstance(key, RSAPrivateKey):
        raise DeployError(f"{key_file} is no RSA key; make the kit anew")
    if public_bytes(key.public_key()) != public_bytes(found.public_key()):
        raise DeployError(f"{key_file} is not the key of {file}; copy the kit again")
    if named != name:
        raise DeployError(
            f"the kit {file.parent.parent} says it is of {name!r}, and its certificate is of "
            f"{named!r}; copy the kit again"
        )
    return key, found.public_bytes(Encoding.DER)


class Authority:
    """The federation's root certificate: says whether a member signed something."""

    def __init__(self, root: bytes, server: str, revoked: Path | None = None) -> None:
        """`root`: the authority's certificate as PEM; `server`: the name of the server's.

        `revoked`: where the list of revoked certificates is, or will be.
        """
        from cryptography.x509 import load_pem_x509_certificate

        try:
            self._root = load_pem_x509_certificate(root)
        except ValueError as error:
            raise DeployError(
                "the authority's certificate is damaged; copy the kit again"
            ) from error
        self.server = server
        self.revocations = Revocations(revoked, self._root)
        self._issued: dict[bytes, Certificate] = {}  # certificates whose issuer was checked

    @classmethod
    def from_kit(cls, folder: Path) -> "Authority":
        """Read the root certificate of a kit, and the name of the kit's server."""
        path = folder / _STARTUP / "rootCA.pem"
        try:
            revoked = folder / HOME / REVOKED_FILE
            return cls(path.read_bytes(), _read_about(folder)[2], revoked)
        except OSError as error:
            raise DeployError(f"{path} cannot be read; copy the kit again") from error

    def verify(self, signed: Signed, context: bytes, *, name: str, role: str) -> None:
        """Refuse what the member `name`, in the role `role`, has not signed."""
        self._verify(self._member(signed.certificate, name, role), signed, context, name)

    def signer(self, signed: Signed, context: bytes, when: datetime) -> tuple[str, str]:
        """Return name and role of the member that signed something when its certificate was valid.

        For records of the past: a certificate that has expired or was revoked since is no matter.
        """
        found, name, role = self._named(signed.certificate)
        if not found.not_valid_before_utc - _SLACK <= when <= found.not_valid_after_utc + _SLACK:
            raise Refused("identity", f"a certificate of {name} that was not valid then")
        self._verify(found, signed, context, name)
        return name, role

    def _member(self, certificate: bytes, name: str, role: str) -> "Certificate":
        """Return a certificate that is of the expected member, and valid today."""
        found, named, own = self._named(certificate)
        now = datetime.now(UTC)
        for one in (found, self._root):
            if not one.not_valid_before_utc <= now <= one.not_valid_after_utc:
                raise Refused("identity", f"a certificate that is not valid today, of {name}?")
        if (named, own) != (name, role):
            raise Refused("identity", f"signed by {own} {named}, expected {role} {name}")
        self.refuse_revoked(certificate)
        return found

    def refuse_revoked(self, certificate: bytes) -> None:
        """Refuse a certificate that is on the authority's list, as it is now."""
        found, name, _ = self._named(certificate)
        try:
            revoked = self.revocations.current()
        except (OSError, DeployError) as error:
            words = f"{self.revocations.path} cannot be read ({error}); nobody is trusted"
            raise Refused("identity", words) from error
        if revoked.holds(found, name):
            raise Refused("revoked", f"the certificate of {name} was revoked")

    def expires(self, certificate: bytes) -> datetime:
        """Return until when a certificate of this authority is valid."""
        return min(one.not_valid_after_utc for one in (self._named(certificate)[0], self._root))

    def _named(self, certificate: bytes) -> "tuple[Certificate, str, str]":
        """Return a certificate of this authority with the name and the role in it."""
        from cryptography.x509.oid import NameOID

        found = self._issued.get(certificate) or self._checked(certificate)
        named = _common_name(found)
        # Only an admin's certificate has a role in it; the server is the one with its name.
        if found.subject.get_attributes_for_oid(NameOID.UNSTRUCTURED_NAME):
            return found, named, ADMIN
        return found, named, SERVER if named == self.server else NODE

    def _verify(self, found: "Certificate", signed: Signed, context: bytes, name: str) -> None:
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey
        from cryptography.hazmat.primitives.hashes import SHA256

        key = found.public_key()
        if not isinstance(key, RSAPublicKey) or key.key_size < 2048:
            raise Refused("identity", f"{name} has no RSA key of 2048 bits or more")
        try:
            key.verify(signed.signature, _DOMAIN + context, _padding(), SHA256())
        except InvalidSignature:
            raise Refused("identity", f"not what {name} has signed") from None

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
    named = common_name(certificate)
    if not named:
        raise Refused("identity", "a certificate without a name, or with several")
    return named


def _read_about(folder: Path) -> tuple[str, str, str]:
    """Return a kit's name and role, and the name of its server."""
    path = folder / _ABOUT
    try:
        known = tomllib.loads(path.read_text())
        name, role, host = (str(known[key]) for key in ("name", "role", "host"))
    except (OSError, ValueError, KeyError) as error:
        raise DeployError(f"{path} cannot be read; copy the kit again") from error
    return (server_name(name) if role == SERVER else name), role, server_name(host)


_MAGIC = b"idi\x01"
_SIZES = (4, 2, 2, 4)  # bytes that say how long header, certificate, signature and list are
_LIMIT = 1 << 20  # bytes of an envelope without the message


@dataclass(frozen=True)
class Header:
    """What is signed beside the message."""

    sender: str
    to: str
    session: str  # of the node's process; empty: none yet
    number: int  # in the session, of the question
    asked: str  # SHA-256 of the question's envelope; empty in a question
    digest: str  # SHA-256 of the message
    size: int = 0  # bytes of the message
    # The hash of the newest entry in the sender's audit log; empty: it keeps none. Not its number,
    # which would tell how much the sender has had to do with others.
    head: str = ""
    heard: str = ""  # in a question: the last answer in this session that was taken
    revoked: int = 0  # the number of the list of revoked certificates that the sender has

    def plain(self) -> bytes:
        """Write it as it is signed."""
        return json.dumps(vars(self), sort_keys=True, separators=(",", ":")).encode()

    @classmethod
    def read(cls, plain: bytes) -> "Header":
        """Read it, trusting nothing in it."""
        try:
            found: Any = json.loads(plain)
            header = cls(**found)
        except (ValueError, TypeError, RecursionError) as error:
            raise Refused("identity", "an envelope that cannot be read") from error
        for spec in fields(cls):
            if type(getattr(header, spec.name)) is not spec.type:
                raise Refused("identity", "an envelope of another form")
        return header


class _Envelope(NamedTuple):
    header: Header
    signed: Signed
    plain: bytes  # the header's bytes
    body: bytes
    revoked: bytes = b""  # the list of revoked certificates, which the authority signed itself

    @property
    def mark(self) -> str:
        """What an answer names this envelope by; no two are alike, as signatures are salted."""
        return _sha256(self.plain + self.signed.signature)

    @property
    def blob(self) -> bytes:
        """The envelope as it travels."""
        parts = [_MAGIC]
        for size, part in zip(_SIZES, (self.plain, *self.signed, self.revoked), strict=True):
            parts += (len(part).to_bytes(size, "little"), part)
        return b"".join((*parts, self.body))

    @property
    def evidence(self) -> dict[str, str]:
        """What proves, without the message, that the sender has sent it."""
        return {
            "header": self.plain.decode(),
            "signature": base64.b64encode(self.signed.signature).decode(),
            "certificate": _sha256(self.signed.certificate),
        }

    def verify(self, authority: Authority, *, sender: str, role: str, to: str) -> None:
        """Refuse what is not signed by the expected sender, or is for someone else.

        A newer list of revoked certificates is kept first, whoever brings it.
        """
        if self.revoked:
            try:
                if authority.revocations.take(self.revoked):
                    log.warning("a new list of revoked certificates has come")
            except DeployError as error:
                raise Refused("identity", str(error)) from error
        self.verify_header(authority, sender=sender, role=role, to=to)
        if (self.header.digest, self.header.size) != (_sha256(self.body), len(self.body)):
            raise Refused("identity", "a message that was changed on its way")

    def verify_header(self, authority: Authority, *, sender: str, role: str, to: str) -> None:
        """Refuse what someone else signed, or for someone else, before the message is read."""
        authority.verify(self.signed, self.plain, name=sender, role=role)
        if (self.header.sender, self.header.to) != (sender, to):
            found = f"from {self.header.sender} to {self.header.to}"
            raise Refused("identity", f"a message {found}, expected from {sender} to {to}")


def _sha256(blob: bytes) -> str:
    return hashlib.sha256(blob).hexdigest()


def sealed(identity: Identity, header: Header, body: bytes) -> bytes:
    """Return a message in a signed envelope, as it travels."""
    return _signed(identity, header, body).blob


def _signed(identity: Identity, header: Header, body: bytes) -> _Envelope:
    plain = header.plain()
    return _Envelope(header, identity.sign(plain), plain, body)


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
    plain, certificate, signature, revoked = parts
    signed = Signed(certificate, signature)
    return _Envelope(Header.read(plain), signed, plain, blob[place:], revoked)


def _certificates(*envelopes: _Envelope) -> dict[str, str]:
    """Return the certificates of envelopes by digest."""
    found = {one.signed.certificate for one in envelopes}
    return {_sha256(one): base64.b64encode(one).decode() for one in found}


_TOLD = ("run", "label", "seed", "round", "submitter", "code")  # of a message's head, in the log


def _about(body: bytes) -> dict[str, Any]:
    """Say in a few words what a message is about."""
    kind, head = protocol.peek(body)
    known = {key: head[key] for key in _TOLD if isinstance(head.get(key), str | int)}
    return {"what": kind, **known} if kind else {}


class NodeChannel:
    """A node's end: hands on what the server signed for it, and signs the answers.

    With a log, each exchange is in it before the answer leaves.
    """

    def __init__(
        self, identity: Identity, authority: Authority, audit: AuditLog | None = None
    ) -> None:
        if identity.role != NODE:
            raise Refused("identity", f"the kit is of a {identity.role}, expected a node's")
        self._identity, self._authority, self._audit = identity, authority, audit
        self._session = secrets.token_hex(16)
        self._last = 0  # the highest number that was answered
        self._closed: deque[str] = deque(maxlen=256)  # questions of other sessions
        self._lock = threading.Lock()

    def signed_by_server(self, blob: bytes) -> bool:
        """Return whether the server signed a message for this node; nothing is kept of it."""
        about = {"sender": self._authority.server, "role": SERVER, "to": self._identity.name}
        try:
            _opened(blob).verify_header(self._authority, **about)
        except Refused:
            return False
        return True

    def answer(self, blob: bytes, ask: Callable[[bytes], bytes]) -> bytes:
        """Answer one message by `ask`, if it is of the server, for this node, and new."""
        server, question = self._authority.server, None
        try:
            opened = _opened(blob)
            opened.verify(self._authority, sender=server, role=SERVER, to=self._identity.name)
            question = opened
            self._refuse_old(opened)
            body = ask(opened.body)
        except Refused as error:
            level = logging.INFO if error.reason == "closed" else logging.ERROR
            log.log(level, "refused with %r: %s", error.reason, error)
            body = protocol.refusal(error.reason)
            if error.reason == "replay":  # anyone may repeat what is in the log already
                question = None
        if question is None:
            return self._answered(None, _mark(blob), body).blob
        try:
            return self._answered(question, question.mark, body).blob
        except DeployError as error:
            # Outside of the session: what is in no log was never said.
            log.error("refused with 'disk': %s", error)
            return self._answered(None, question.mark, protocol.refusal("disk")).blob

    def _answered(self, question: _Envelope | None, mark: str, body: bytes) -> _Envelope:
        """Sign an answer, in the session if it is to a question of the server's; note it."""
        own, to = self._identity.name, self._authority.server
        session, number, head = "", 0, ""
        if question is not None:
            session, number = self._session, question.header.number
            head = self._audit.head().hash if self._audit is not None else ""
        known = self._authority.revocations
        theirs = 0 if question is None else question.header.revoked
        header = Header(
            own, to, session, number, mark, _sha256(body), len(body), head, "", known.number
        )
        newer = known.newer_than(theirs) if question is not None else b""
        made = _signed(self._identity, header, body)._replace(revoked=newer)
        if question is not None and self._audit is not None:
            self._audit.append_signed(
                audit.ANSWERED,
                _certificates(question, made),
                question=question.evidence,
                answer=made.evidence,
                about=_about(question.body),
                told=_about(body),
            )
        return made

    def _refuse_old(self, question: _Envelope) -> None:
        header = question.header
        if header.asked:
            raise Refused("identity", "an answer, expected a question")
        if header.session != self._session:
            if question.mark in self._closed:
                raise Refused("replay", "a message of another session, for the second time")
            self._closed.append(question.mark)
            raise Refused("closed", "a session of another process; the server gets this one's")
        with self._lock:
            if header.number <= self._last:
                raise Refused("replay", f"message {header.number} after {self._last}")
            self._last = header.number


def _mark(blob: object) -> str:
    """Return what an envelope is named by, if it can be read."""
    try:
        return _opened(blob).mark
    except Refused:
        return ""


class ServerChannel(Transport):
    """The server's end: a `Transport` that signs what it sends, and checks every answer.

    With a log, each question is in it before it leaves, and each answer before it is used.
    """

    def __init__(
        self,
        inner: Transport,
        identity: Identity,
        authority: Authority,
        audit: AuditLog | None = None,
    ) -> None:
        if identity.role != SERVER:
            raise Refused("identity", f"the kit is of a {identity.role}, expected the server's")
        self.sites: Sequence[str] = inner.sites
        self.looks = inner.looks
        self._inner = inner
        self._identity, self._authority, self._audit = identity, authority, audit
        self._sessions: dict[str, str] = {}
        self._heard: dict[str, _Envelope] = {}  # the last answer of each site
        self._disk = ThreadPoolExecutor(1, thread_name_prefix="audit")
        # From the clock, so that they go on rising when the server's process is another one; each
        # site has its own, as a common count would tell it how many others were asked.
        began = time.time_ns()
        self._numbers = {site: itertools.count(began) for site in self.sites}

    def call(self, site: str, blob: bytes, seconds: float) -> bytes:
        """Bring a message to a site and return its answer, if it is that site's to this message."""
        if site not in self._sessions:
            self._exchanged(site, "", b"", seconds)
        known = self._sessions[site]
        try:
            self._authority.refuse_revoked(self._heard[site].signed.certificate)
        except Refused:
            del self._sessions[site]  # it may come back with a new certificate
            raise
        answer = self._exchanged(site, known, blob, seconds)
        if self._sessions[site] != known:  # its process is another one than before
            raise Refused("closed", f"{site} was started anew")
        return answer

    def _exchanged(self, site: str, session: str, blob: bytes, seconds: float) -> bytes:
        question = self._question(site, session, blob)
        # No crash loses what was asked; that no power cut does is waited for while the node works.
        settled = None if self._audit is None else self._disk.submit(self._audit.settle)
        envelope = _opened(self._inner.call(site, question.blob, seconds))
        if settled is not None:
            self._wait_for_disk(settled)
        envelope.verify(self._authority, sender=site, role=NODE, to=self._identity.name)
        found = envelope.header
        if found.asked != question.mark:
            raise Refused("identity", f"{site} answered another message")
        if not found.session:
            protocol.accepted(
                protocol.unpack(envelope.body)
            )  # it says why it does not know this server
            raise Refused("identity", f"{site} answered outside of a session")
        self._note(audit.GOT, envelope, "answer", told=_about(envelope.body))
        self._sessions[site], self._heard[site] = found.session, envelope
        return envelope.body

    def _question(self, site: str, session: str, blob: bytes) -> _Envelope:
        """Sign a question and note it."""
        heard, known = self._heard.get(site), self._authority.revocations
        header = Header(
            self._identity.name,
            site,
            session,
            next(self._numbers[site]),
            "",
            _sha256(blob),
            len(blob),
            "" if self._audit is None else self._audit.head().hash,
            "" if heard is None else heard.mark,
            known.number,
        )
        newer = known.newer_than(0 if heard is None else heard.header.revoked)
        made = _signed(self._identity, header, blob)._replace(revoked=newer)
        self._note(audit.ASKED, made, "question", about=_about(blob))
        return made

    def _wait_for_disk(self, settled: "Future[None]") -> None:
        try:
            settled.result()
        except DeployError as error:
            raise Refused("disk", str(error)) from error

    def _note(self, kind: str, envelope: _Envelope, name: str, **more: Any) -> None:
        if self._audit is None:
            return
        proof: dict[str, Any] = {name: envelope.evidence}
        try:
            self._audit.append_signed(kind, _certificates(envelope), lasting=False, **proof, **more)
        except DeployError as error:
            raise Refused("disk", str(error)) from error

    def note(self, kind: str, **facts: Any) -> None:
        """Record something in the server's audit log."""
        if self._audit is not None:
            self._audit.append(kind, **facts)

    def expiries(self) -> Mapping[str, str]:
        """Return until when each site's certificate is valid, of those that were heard of."""
        return {
            site: self._authority.expires(one.signed.certificate).isoformat()
            for site, one in self._heard.items()
        }

    def leave_heads(self, folder: Path) -> None:
        """Leave in a run's folder what everyone's log has come to, signed by each: for the lead.

        The server's own is in a message to itself, that nobody gets.
        """
        if self._audit is None:
            return
        last = Header(self._identity.name, "", "", 0, "", _sha256(b""), 0, self._audit.head().hash)
        proofs = [_signed(self._identity, last, b""), *self._heard.values()]
        lines = [
            json.dumps({**one.evidence, "der": base64.b64encode(one.signed.certificate).decode()})
            for one in proofs
        ]
        write_whole(folder / audit.HEADS_FILE, ("\n".join(lines) + "\n").encode())

    def present(self, site: str) -> bool:
        """Return whether a site gives a sign now."""
        return self._inner.present(site)

    def process(self, site: str) -> str:
        """Return the name of the process that last answered for a site."""
        return self._inner.process(site)

    def queued(self, site: str) -> float:
        """Return for how long a site's message has waited behind those of other runs."""
        return self._inner.queued(site)

    def stopped(self) -> bool:
        """Return whether the server should end."""
        return self._inner.stopped()
