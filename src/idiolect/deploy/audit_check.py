"""Checks audit logs: each by itself, then against the others' and what everyone signed.

A log alone shows that nothing in it was changed by someone without its owner's key. That its owner
has not rewritten it, cut its end off or kept two of them, only the others' logs can show: they hold
what the owner signed of its own log in every message.
"""

import base64
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from idiolect.deploy import audit
from idiolect.deploy.audit import Entry, Head
from idiolect.deploy.identity import NODE, SERVER, Authority, Signed
from idiolect.deploy.protocol import Refused
from idiolect.deploy.signing import Header
from idiolect.errors import ConfigError

_BACK = 30.0  # seconds that a clock may be set back, as time servers do
_APART = 60.0  # seconds that two clocks may drift against each other
_WRONG = 300.0  # seconds by which a clock is remarked upon


class Problem(NamedTuple):
    """Something that no honest log shows, crash or not."""

    kind: str
    owner: str
    number: int  # of the entry; -1: of the log as a whole
    words: str

    def __str__(self) -> str:
        where = f", entry {self.number}" if self.number >= 0 else ""
        return f"{self.owner}{where}: {self.words}"


class _Statement(NamedTuple):
    """A header that its sender signed, and the log that holds it."""

    header: Header
    mark: str
    holder: str
    number: int


@dataclass
class Findings:
    """What a check has found: problems, and what is only worth knowing."""

    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    logs: dict[str, int] = field(default_factory=dict)  # entries by owner
    exchanges: int = 0  # found alike on both sides


@dataclass
class _Log:
    """A log that was read."""

    path: Path
    owner: str = ""
    role: str = ""
    entries: list[Entry] = field(default_factory=list)
    places: dict[str, int] = field(default_factory=dict)  # of entries by hash
    certificates: dict[str, bytes] = field(default_factory=dict)
    asked: dict[str, tuple[_Statement, Entry]] = field(default_factory=dict)  # by mark
    got: dict[str, tuple[_Statement, Entry]] = field(default_factory=dict)  # by the question's mark
    # By the question's mark: question, answer.
    answered: dict[str, tuple[_Statement, _Statement, Entry]] = field(default_factory=dict)


class _Check:
    def __init__(self, authority: Authority) -> None:
        self.authority = authority
        self.found = Findings()
        self.statements: list[_Statement] = []

    def problem(self, kind: str, owner: str, number: int, words: str) -> None:
        self.found.problems.append(Problem(kind, owner, number, words))

    # One log.

    def read(self, path: Path) -> _Log:
        """Read a log, and follow its chain."""
        log, torn = _Log(path), b""
        blob = _content(path)
        if audit.read_entry(blob.rpartition(b"\n")[2]) is not None:
            blob += b"\n"  # only the end of the line was lost
        if blob and not blob.endswith(b"\n"):
            blob, _, rest = blob.rpartition(b"\n")
            self.found.notes.append(
                f"{path}: its last line was being written when something ended it ({len(rest)} "
                "bytes); the next entry will say so"
            )
        lines = blob.split(b"\n")
        for line in lines[:-1] if blob.endswith(b"\n") else lines:
            entry = audit.read_entry(line)
            if entry is None:
                torn += line + b"\n"
                continue
            if not log.entries:
                log.owner = _word(entry.fields.get("owner"), "?")
                log.role = _word(entry.fields.get("role"), "?")
            self._follow(log, entry, torn)
            log.entries.append(entry)
            log.places[entry.hash] = entry.number
            torn = b""
        if torn:
            self.problem("torn", log.owner, -1, "it ends with a line that is no entry")
        if not log.entries:
            self.problem("empty", str(path), -1, "it holds no entry")
            return log
        if log.entries[0].kind != audit.BEGIN:
            self.problem("begin", log.owner, 0, "it does not begin where a log begins")
        self.found.logs[log.owner] = len(log.entries)
        return log

    def _follow(self, log: _Log, entry: Entry, torn: bytes) -> None:
        last = log.entries[-1] if log.entries else None
        expected = Head() if last is None else last.head
        if (entry.number, entry.previous) != (expected.number + 1, expected.hash):
            self.problem(
                "chain",
                log.owner,
                entry.number,
                f"it does not follow on entry {expected.number}: something was changed, taken out, "
                "put in or moved",
            )
        if last is not None and entry.kind == audit.BEGIN:
            self.problem("begin", log.owner, entry.number, "a log begins within the log")
        if last is not None and entry.seconds < last.seconds - _BACK:
            gap = last.seconds - entry.seconds
            self.problem("clock", log.owner, entry.number, f"the clock was set back by {gap:.0f} s")
        noted = entry.fields.get("torn")
        if torn and noted != audit.torn_digest(torn):
            self.problem("torn", log.owner, entry.number, "a line before it is no entry")
        elif torn:
            self.found.notes.append(
                f"{log.owner}, entry {entry.number}: a crash tore {entry.fields.get('bytes')} bytes"
            )
        elif noted is not None:
            self.problem("torn", log.owner, entry.number, "it notes a torn line, and there is none")

    def evidence(self, log: _Log) -> None:
        """Check every signature that a log holds."""
        for entry in log.entries:
            if entry.kind == audit.CERTIFICATE:
                self._keep(log, entry)
            elif entry.kind in (audit.ASKED, audit.GOT, audit.ANSWERED):
                self._exchange(log, entry)

    def _keep(self, log: _Log, entry: Entry) -> None:
        der = _decoded(entry.fields.get("der"))
        if hashlib.sha256(der).hexdigest() != entry.fields.get("digest"):
            self.problem("signature", log.owner, entry.number, "a certificate that was changed")
        log.certificates[str(entry.fields.get("digest"))] = der

    def _exchange(self, log: _Log, entry: Entry) -> None:
        try:
            if entry.kind == audit.ASKED:
                own = self._signed(log, entry, "question", SERVER)
                self._own(log, entry, own)
                if log.asked.setdefault(own.mark, (own, entry))[1] is not entry:
                    raise Refused("identity", "the same message stands in it twice")
            elif entry.kind == audit.GOT:
                told = self._signed(log, entry, "answer", NODE)
                if told.header.to != log.owner:
                    raise Refused("identity", f"an answer to {told.header.to}")
                if told.header.asked not in log.asked:
                    raise Refused("identity", "an answer to no question of this log")
                if log.got.setdefault(told.header.asked, (told, entry))[1] is not entry:
                    raise Refused("identity", "the same answer stands in it twice")
            else:
                asked = self._signed(log, entry, "question", SERVER)
                own = self._signed(log, entry, "answer", NODE)
                self._own(log, entry, own)
                if (asked.header.to, own.header.asked) != (log.owner, asked.mark):
                    raise Refused("identity", "an answer to another question")
                known = log.answered.setdefault(asked.mark, (asked, own, entry))
                if known[2] is not entry:
                    told_to = entry.fields.get("told")
                    closed = isinstance(told_to, dict) and told_to.get("code") == "closed"
                    if not closed:  # which asks to start anew
                        raise Refused("identity", "the same message was answered twice")
        except Refused as error:
            self.problem("signature", log.owner, entry.number, str(error))

    def _signed(self, log: _Log, entry: Entry, name: str, role: str) -> _Statement:
        proof = entry.fields.get(name)
        if not isinstance(proof, dict):
            raise Refused("identity", f"it holds no {name}")
        certificate = log.certificates.get(_word(proof.get("certificate"), ""), b"")
        when = datetime.fromisoformat(entry.at)
        found = self._checked(proof, certificate, role, when, log.owner, entry.number)
        self.statements.append(found)
        return found

    def _checked(
        self,
        proof: Mapping[str, Any],
        certificate: bytes,
        role: str,
        when: datetime,
        holder: str,
        number: int,
    ) -> _Statement:
        plain, signature = _word(proof.get("header"), ""), _decoded(proof.get("signature"))
        signed, blob = Signed(certificate, signature), plain.encode(errors="replace")
        name, own = self.authority.signer(signed, blob, when)
        header = Header.read(blob)
        if (name, own) != (header.sender, role):
            raise Refused("identity", f"signed by {own} {name}, and it says {role} {header.sender}")
        mark = hashlib.sha256(plain.encode() + signature).hexdigest()
        return _Statement(header, mark, holder, number)

    def _own(self, log: _Log, entry: Entry, own: _Statement) -> None:
        """Check what a member signed itself: its name, and what its log had come to."""
        if own.header.sender != log.owner:
            raise Refused("identity", f"signed by {own.header.sender}, and the log's owner did not")
        if log.places.get(own.header.head, entry.number) >= entry.number:
            raise Refused("identity", "a message that names an entry after itself, or none")

    # Several logs.

    def witness(self, path: Path) -> None:
        """Read what a run's folder keeps of everyone's logs."""
        for number, line in enumerate(_content(path).splitlines()):
            try:
                proof = json.loads(line)
                der = _decoded(proof["der"])
                server = self.authority.server
                role = SERVER if json.loads(proof["header"])["sender"] == server else NODE
                now = datetime.now(UTC)
                self.statements.append(self._checked(proof, der, role, now, str(path), number))
            except (ValueError, KeyError, TypeError, RecursionError, Refused) as error:
                self.problem("signature", str(path), number, f"no signed head ({error})")

    def heads(self, logs: Mapping[str, _Log]) -> None:
        """Compare what everyone signed of its own log with that log."""
        for one in self.statements:
            log = logs.get(one.header.sender)
            if log is not None and one.header.head and one.header.head not in log.places:
                self.problem(
                    "rewritten",
                    log.owner,
                    -1,
                    f"it lacks an entry ({one.header.head[:16]}) that its owner signed to "
                    f"{one.holder} (entry {one.number} there): its end was cut off, it was "
                    "rewritten, its owner keeps two logs or went back to an old copy",
                )

    def messages(self, hub: _Log, node: _Log) -> None:
        """Compare what a server and a node say of their messages."""
        denied = "which the other side holds with its signature"
        for mark, (asked, own, entry) in node.answered.items():
            if mark not in hub.asked:
                words = f"it denies a question to {node.owner} (entry {entry.number} there)"
                self.problem("denied", hub.owner, -1, f"{words}, {denied}")
                continue
            told = hub.got.get(mark)
            if told is not None and told[0].mark != own.mark:
                words = f"it answered question {asked.header.number} in two ways"
                self.problem("denied", node.owner, entry.number, words)
            self._alike(node, entry, "about", hub.asked[mark][1], "about")
            if told is not None:
                self._alike(node, entry, "told", told[1], "told")
                self.found.exchanges += 1
        for mark, (answer, entry) in hub.got.items():
            if answer.header.sender == node.owner and mark not in node.answered:
                words = f"it denies an answer (entry {entry.number} of {hub.owner})"
                self.problem("denied", node.owner, -1, f"{words}, {denied}")
        heard = {answer.mark for answer, _ in hub.got.values()}
        for asked, _, entry in node.answered.values():
            if asked.header.heard and asked.header.heard not in heard:
                words = f"it denies an answer of {node.owner} that it signed to have had"
                self.problem("denied", hub.owner, -1, f"{words} (entry {entry.number} there)")
        lost = sum(mark not in hub.got for mark in node.answered if mark in hub.asked)
        if lost:
            words = f"{lost} answers left {node.owner} and are not in the log of {hub.owner}"
            self.found.notes.append(f"{words}: lost on the way, late, or in a crash")
        self._clocks(hub, node)

    def _alike(self, left: _Log, entry: Entry, name: str, other: Entry, there: str) -> None:
        if entry.fields.get(name) != other.fields.get(there):
            words = f"it says something else of a message than entry {other.number} of the server's"
            self.problem("denied", left.owner, entry.number, words)

    def _clocks(self, hub: _Log, node: _Log) -> None:
        """Check that two clocks kept their distance: an answer is given between ask and receipt."""
        low, high = float("-inf"), float("inf")
        for mark, (_, _, entry) in node.answered.items():
            if mark not in hub.got or mark not in hub.asked:
                continue
            low = max(low, entry.seconds - hub.got[mark][1].seconds)
            high = min(high, entry.seconds - hub.asked[mark][1].seconds)
            if low - high > _APART:
                words = f"its clock and that of {hub.owner} moved {low - high:.0f} s apart"
                self.problem("clock", node.owner, entry.number, words)
                return
        if low > _WRONG or high < -_WRONG:
            gap = low if low > 0 else high
            self.found.notes.append(f"the clock of {node.owner} is {gap:+.0f} s off {hub.owner}'s")

    def runs(self, hub: _Log, node: _Log) -> None:
        """Compare who submitted which experiment, with which code."""
        known = {_run(entry) for entry in hub.entries if entry.kind == audit.RUN}
        for entry in node.entries:
            if entry.kind == audit.RUN and _run(entry) not in known:
                words = (
                    f"run {entry.fields.get('run')} was opened here with an experiment, code or "
                    f"submitter that {hub.owner} does not name"
                )
                self.problem("run", node.owner, entry.number, words)


def check(paths: Sequence[Path], authority: Authority) -> Findings:
    """Check logs, and heads that a run's folder keeps, against each other."""
    work, logs = _Check(authority), dict[str, _Log]()
    for path in paths:
        if path.name == audit.HEADS_FILE:
            work.witness(path)
            continue
        log = work.read(path)
        work.evidence(log)
        if log.owner in logs:
            words = f"{logs[log.owner].path} and {path} both say that they are its log"
            work.problem("twice", log.owner, -1, words)
        elif log.entries:
            logs[log.owner] = log
    work.heads(logs)
    servers = [log for log in logs.values() if log.role == SERVER]
    for hub in servers:
        for node in logs.values():
            if node.role == NODE:
                work.messages(hub, node)
                work.runs(hub, node)
    others = {one.header.to for one in work.statements if one.header.to}
    others |= {one.header.sender for one in work.statements}
    for name in sorted(others - set(logs)):
        work.found.notes.append(f"no log of {name} was given: what it says is not known")
    work.found.problems = list(dict.fromkeys(work.found.problems))
    return work.found


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror})") from error


def _word(value: Any, otherwise: str) -> str:
    return value if isinstance(value, str) else otherwise


def _decoded(value: Any) -> bytes:
    try:
        return base64.b64decode(_word(value, ""), validate=True)
    except ValueError:
        return b""


_RUN_FIELDS = ("run", "submitter", "experiment", "methods", "version")


def _run(entry: Entry) -> str:
    return json.dumps([entry.fields.get(key) for key in _RUN_FIELDS], sort_keys=True)


def log_paths(given: Iterable[Path]) -> list[Path]:
    """Return the logs at paths: of a kit, of a run's folder, or files."""
    found: list[Path] = []
    for path in given:
        inside = [path / "idiolect" / audit.LOG_FILE, path / audit.LOG_FILE]
        inside += [path / audit.HEADS_FILE]
        there = [path] if path.is_file() else [one for one in inside if one.is_file()][:1]
        if not there:
            raise ConfigError(f"{path} is no audit log, no kit with one and no run's folder")
        found += there
    return found
