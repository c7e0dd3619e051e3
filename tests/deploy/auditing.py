"""A federation of channels and audit logs, without networks or training, that crashes at will."""

import dataclasses
import hashlib
import json
import random
from datetime import UTC, datetime

from kitmaking import HOST, Maker

from idiolect.deploy import audit, protocol, signing
from idiolect.deploy.audit import AuditLog
from idiolect.deploy.identity import Authority, Identity
from idiolect.deploy.messenger import Transport
from idiolect.deploy.protocol import Refused
from idiolect.deploy.signing import NodeChannel, ServerChannel

SITES = ("site-0", "site-1", "site-2")
FACTS = audit.run_facts("r1", "lead@hub.org", "rounds = 3", {"FedAvg": "0" * 32})


class Crash(BaseException):
    """A kill -9."""


class Members:
    """Everyone's identity."""

    def __init__(self, folder):
        made = Maker(folder)
        kits = {site: made.kit(site) for site in SITES} | {HOST: made.kit(HOST, "server")}
        self.identities = {name: Identity.from_kit(kit) for name, kit in kits.items()}
        self.root = made.root
        self.authority = Authority.from_kit(kits[HOST])


class Federation(Transport):
    """A server and its nodes; `danger` is the chance of a crash at each point where one matters."""

    def __init__(self, folder, members, danger=0.0, seed=0):
        self.sites, self.folder, self.members = SITES, folder, members
        self.danger, self.random = danger, random.Random(seed)
        self.crashes = 0
        self.channels = {}
        self.hub = None

    def path(self, name):
        return self.folder / name / audit.LOG_FILE

    def paths(self):
        return [self.path(name) for name in (HOST, *SITES) if self.path(name).exists()]

    def log(self, name):
        return AuditLog(self.folder / name, name, self.members.identities[name].role)

    def start(self, name):
        own, authority = self.members.identities[name], self.members.authority
        if name == HOST:
            self.hub = ServerChannel(self, own, authority, self.log(name))
        else:
            self.channels[name] = NodeChannel(own, authority, self.log(name))

    def maybe(self):
        if self.random.random() < self.danger:
            self.crashes += 1
            raise Crash

    def write(self, file, blob):
        """Write all of it, or die having written a part."""
        if self.random.random() < self.danger:
            self.crashes += 1
            file.write(blob[: self.random.randrange(len(blob) + 1)])
            raise Crash
        file.write(blob)

    def call(self, site, blob, seconds):
        try:
            self.maybe()  # before it arrives
            answer = self.channels[site].answer(blob, lambda body: self._work(site, body))
            self.maybe()  # on its way back
            return answer
        except Crash:
            self.start(site)
            raise Refused("unreachable") from None

    def _work(self, site, body):
        self.maybe()
        kind, head = protocol.peek(body)
        if kind == "open":
            self.channels[site]._audit.append(audit.RUN, **FACTS, promise="none")
        return protocol.pack("yes", {"run": "r1", "round": head.get("round", 0), "to": kind})

    def rounds(self, count=3, first=0):
        """Let the server ask everyone; whoever crashes is started anew, and asked again."""
        for name in SITES:
            if name not in self.channels:
                self.start(name)
        for number in range(first, first + count):
            while True:
                try:
                    if self.hub is None:
                        self.start(HOST)
                        self.hub.note(audit.RUN, **FACTS)
                        for site in SITES:
                            self._ask(site, protocol.pack("open", {"run": "r1"}))
                    for site in SITES:
                        self._ask(site, protocol.pack("step", {"run": "r1", "round": number}))
                    self.maybe()
                    break
                except Crash:
                    self.hub = None

    def _ask(self, site, blob):
        for _ in range(2):
            try:
                self.hub.call(site, blob, 1.0)
                return
            except Refused:
                continue  # it was started anew: the next question finds its session


def entries(path):
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def write(path, found, chain=True):
    """Write entries, with numbers and hashes that fit each other again if asked."""
    lines, previous = [], ""
    for number, one in enumerate(found):
        if chain:
            one = {**one, "n": number, "prev": previous}
        lines.append(json.dumps(one, sort_keys=True, separators=(",", ":")).encode())
        previous = hashlib.sha256(lines[-1]).hexdigest()
    path.write_bytes(b"".join(line + b"\n" for line in lines))


def rewrite(path, found, members, owner, **changes):
    """Write entries as their owner can: with its own signatures anew, of the new chain.

    Returns the marks of its old messages with those of the new ones.
    """
    own, lines, previous, marks = members.identities[owner], [], "", {}
    for number, one in enumerate(found):
        one = {**one, "n": number, "prev": previous}
        name = {"asked": "question", "answered": "answer"}.get(one["kind"])
        if name:
            proof = one[name]
            header = signing.Header.read(proof["header"].encode())
            made = signing._signed(own, dataclasses.replace(header, head=previous, **changes), b"")
            old = hashlib.sha256(
                proof["header"].encode() + signing.base64.b64decode(proof["signature"])
            ).hexdigest()
            marks[old] = made.mark
            one = {**one, name: made.evidence}
        lines.append(json.dumps(one, sort_keys=True, separators=(",", ":")).encode())
        previous = hashlib.sha256(lines[-1]).hexdigest()
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return marks


class Clock(datetime):
    """A clock that is wrong by `off` seconds."""

    off = 0.0

    @classmethod
    def now(cls, tz=None):
        return datetime.fromtimestamp(datetime.now(UTC).timestamp() + cls.off, tz)
