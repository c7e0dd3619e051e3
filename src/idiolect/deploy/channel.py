"""A signed channel between the server and each node, whatever engine carries the bytes.

Every message travels in an envelope: who sends it, to whom, in which session, its number there and
the SHA-256 of the message, all signed with the key of the sender's kit. The message's own head says
run, method, seed, round and kind, so the signature binds these as well. A node answers only what
its federation's server signed, for this node, in the session that this very process began, under a
number above all before; its answer names the question. So nobody else is answered, and no message
can be used a second time or elsewhere. The same message in a new envelope is a server's honest
retry.
"""

import hashlib
import itertools
import json
import logging
import secrets
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from idiolect.deploy import wire
from idiolect.deploy.identity import NODE, SERVER, Authority, Identity, Signed
from idiolect.deploy.refusals import Refused
from idiolect.deploy.transport import Transport

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
        return _digest(self.plain + self.signed.signature)

    def verify(self, authority: Authority, *, sender: str, role: str, to: str) -> None:
        """Refuse what is not signed by the expected sender, or is for someone else."""
        authority.verify(self.signed, self.plain, name=sender, role=role)
        if (self.header.sender, self.header.to) != (sender, to):
            found = f"from {self.header.sender} to {self.header.to}"
            raise Refused("identity", f"a message {found}, expected from {sender} to {to}")
        if self.header.digest != _digest(self.body):
            raise Refused("identity", "a message that was changed on its way")


def _digest(blob: bytes) -> str:
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
            body = wire.refusal(error.reason)
        header = _Header(own, server, session, number, mark, _digest(body))
        return _sealed(self._identity, header, body)

    def _refuse_old(self, header: _Header) -> None:
        if header.asked:
            raise Refused("identity", "an answer, expected a question")
        if header.session != self._session:
            raise Refused("closed", "a session of another process; the server is told this one's")
        with self._lock:
            if header.number <= self._last:
                raise Refused("replay", f"message {header.number} after {self._last}")
            self._last = header.number


class ServerChannel:
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
        header = _Header(own, site, session, number, "", _digest(blob))
        question = _sealed(self._identity, header, blob)
        envelope = _opened(self._inner.call(site, question, seconds))
        envelope.verify(self._authority, sender=site, role=NODE, to=own)
        found = envelope.header
        if found.asked != _opened(question).mark:
            raise Refused("identity", f"{site} answered another message")
        if not found.session:
            wire.accepted(wire.unpack(envelope.body))  # it says why it does not know this server
            raise Refused("identity", f"{site} answered outside of a session")
        self._sessions[site] = found.session
        return envelope.body

    def returned(self, site: str) -> bool:
        """Say whether a site that was lost could take part again if the run were started anew."""
        return self._inner.returned(site)

    def stopped(self) -> bool:
        """Say whether the engine wants the hub to end."""
        return self._inner.stopped()
