"""Signed envelopes, in which all messages between a node and the server travel.

`NodeChannel` and `ServerChannel` are the two ends. What is signed beside a message ties an answer
to its question, and both to the sender's audit log.
"""

import base64
import hashlib
import itertools
import json
import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

from idiolect.core.checkpoint import write_whole
from idiolect.deploy import audit, protocol
from idiolect.deploy.audit import AuditLog
from idiolect.deploy.identity import NODE, SERVER, Authority, Identity, Signed
from idiolect.deploy.messenger import Transport
from idiolect.deploy.protocol import Refused
from idiolect.errors import DeployError

log = logging.getLogger("idiolect.channel")

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
            self._audit.append_signed(kind, _certificates(envelope), durable=False, **proof, **more)
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
