"""An append-only log of what a member asked, answered, allowed and promised.

Each line is an entry in JSON that holds the SHA-256 of the entry before it, so that nothing can be
changed, taken out or put in without changing all that follows. Members sign the newest hash of
their log in every message, and keep what the others signed (`signing`): whoever rewrites a log, or
cuts its end off, is contradicted by the others' logs (`audit_check`).

Light to import: no tensor is touched.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import secrets
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, NamedTuple

from idiolect.errors import DeployError
from idiolect.version import VERSION

LOG_FILE = "audit.jsonl"  # in a member's home
HEADS_FILE = "audit-heads.jsonl"  # in a run's folder: what everyone's log had come to
BEGIN, REPAIRED, CERTIFICATE = "begin", "repaired", "certificate"
ASKED, GOT, ANSWERED, RUN = "asked", "got", "answered", "run"
_CHUNK = 1 << 16  # bytes that are read at a time from the end of a log


class Head(NamedTuple):
    """The newest entry of a log: its number and its hash; the number is -1 before the first."""

    number: int = -1
    hash: str = ""


@dataclass(frozen=True)
class Entry:
    """One line of a log."""

    number: int
    at: str
    previous: str
    kind: str
    fields: dict[str, Any]
    hash: str

    @property
    def seconds(self) -> float:
        """When it was written, by the writer's clock."""
        return datetime.fromisoformat(self.at).timestamp()

    @property
    def head(self) -> Head:
        """What the log had come to with this entry."""
        return Head(self.number, self.hash)


def read_entry(line: bytes) -> Entry | None:
    """Read a line without its end; None where it is no entry."""
    try:
        found = json.loads(line)
        number, at, previous, kind = (found.pop(key) for key in ("n", "at", "prev", "kind"))
        if datetime.fromisoformat(at).tzinfo is None:
            return None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    words = (previous, kind)
    if type(number) is not int or not all(isinstance(one, str) for one in words):
        return None
    return Entry(number, at, previous, kind, found, hashlib.sha256(line).hexdigest())


_HIDDEN = ("question", "answer", "der", "digest", "log", "about", "told")  # of use to programs


def told(entry: Entry) -> str:
    """Say an entry in one line."""
    words = []
    for name in ("question", "answer"):
        if isinstance(proof := entry.fields.get(name), dict):
            what = entry.fields.get("about" if name == "question" else "told", {})
            try:
                words.append(f"{name} {_told_message(json.loads(proof['header']), what)}")
            except (ValueError, TypeError, KeyError, RecursionError):
                words.append(f"{name} that cannot be read")
    for key, value in sorted(entry.fields.items()):
        if key not in _HIDDEN:
            words.append(f"{key}={value if isinstance(value, str) else json.dumps(value)}")
    line = f"{entry.number} {entry.at} {entry.kind}: {'; '.join(words)}"
    return "".join(letter if letter.isprintable() else "?" for letter in line)


def _told_message(header: Mapping[str, Any], about: Mapping[str, Any]) -> str:
    said = " ".join(f"{key}={about[key]}" for key in sorted(about))
    return (
        f"{header['sender']} to {header['to']}, {int(header['size']):,} bytes, "
        f"sha256 {header['digest'][:16]} ({said})"
    )


def torn_digest(rest: bytes) -> str:
    """Name what a crash left of lines that were being written."""
    return hashlib.sha256(rest.rstrip(b"\n")).hexdigest()


class _End(NamedTuple):
    """What a process knows of the end of a log."""

    inode: int = 0
    size: int = 0
    head: Head = Head()
    torn: bytes = b""  # after the last whole entry
    ended: bool = True  # the file ends with the end of a line


class AuditLog:
    """A member's log. Several processes may add to it: each looks at the end of the file first."""

    def __init__(self, home: Path, owner: str, role: str, federation: str = "") -> None:
        self.path = home / LOG_FILE
        self._begin = {"owner": owner, "role": role, "federation": federation}
        self._known = _End()
        self._certificates: set[str] = set()
        self._lock, self._waiting = threading.Lock(), threading.Lock()
        self._lasting = (0, 0)  # inode, and the size that is on the disk

    def append(self, kind: str, **fields: Any) -> Head:
        """Add an entry; when this returns it is on the disk."""
        with self._opened(durable=True) as file:
            return self._added(file, [(kind, fields)])

    def append_signed(
        self, kind: str, certificates: Mapping[str, str], *, durable: bool = True, **fields: Any
    ) -> Head:
        """Add an entry with signatures; certificates by digest are added where they are new.

        Without `durable` a power cut may lose it, until the next that is; no crash does.
        """
        with self._opened(durable) as file:
            new = [
                (CERTIFICATE, {"digest": digest, "der": der})
                for digest, der in certificates.items()
                if digest not in self._certificates
            ]
            head = self._added(file, [*new, (kind, fields)])
            self._certificates |= set(certificates)
            return head

    def settle(self) -> None:
        """Wait until all that was added is on the disk."""
        with self._opened(durable=True):
            pass

    def head(self) -> Head:
        """Return an entry that all before it lead up to: the newest that this process knows of."""
        if (known := self._known.head).number >= 0:
            return known
        with self._opened(durable=True) as file:
            head = self._known.head
            return head if head.number >= 0 else self._added(file, [])

    @contextlib.contextmanager
    def _opened(self, durable: bool) -> Iterator[IO[bytes]]:
        """Hold the file for this process, and know its end; then wait until it is on the disk."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            number = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
            with os.fdopen(number, "r+b", buffering=0) as file:
                with self._lock:
                    fcntl.flock(file, fcntl.LOCK_EX)
                    self._look(file)
                    yield file
                    fcntl.flock(file, fcntl.LOCK_UN)
                if durable:
                    self._last(number)
        except OSError as error:
            raise DeployError(f"{self.path} cannot be written ({error})") from error

    def _last(self, number: int) -> None:
        """Wait until all that was written is on the disk; one wait does for several threads."""
        stat = os.fstat(number)
        with self._waiting:
            if self._lasting[0] == stat.st_ino and self._lasting[1] >= stat.st_size:
                return
            stat = os.fstat(number)
            os.fsync(number)
            self._lasting = stat.st_ino, stat.st_size

    def _look(self, file: IO[bytes]) -> None:
        stat = os.fstat(file.fileno())
        if stat.st_ino != self._known.inode or stat.st_size < self._known.size:
            self._certificates = {
                str(one.fields.get("digest"))
                for line in lines_of(self.path)
                if f'"kind":"{CERTIFICATE}"'.encode() in line and (one := read_entry(line))
            }
        if (stat.st_ino, stat.st_size) != self._known[:2]:
            self._known = _End(stat.st_ino, stat.st_size, *last_entry(file))

    def _added(self, file: IO[bytes], entries: list[tuple[str, dict[str, Any]]]) -> Head:
        """Write entries in one go, after a note about what a crash has torn, if it has."""
        head, torn = self._known.head, self._known.torn
        lines = [] if self._known.ended else [b""]
        note = {"torn": torn_digest(torn), "bytes": len(torn.rstrip(b"\n"))} if torn else {}
        if head.number < 0:
            begin = {**self._begin, "version": VERSION, "log": secrets.token_hex(16), **note}
            entries = [(BEGIN, begin), *entries]
        elif torn:
            entries = [(REPAIRED, note), *entries]
        for kind, fields in entries:
            at = datetime.now(UTC).isoformat(timespec="milliseconds")
            whole = {**fields, "n": head.number + 1, "at": at, "prev": head.hash, "kind": kind}
            lines.append(json.dumps(whole, sort_keys=True, separators=(",", ":")).encode())
            head = Head(head.number + 1, hashlib.sha256(lines[-1]).hexdigest())
        _write(file, b"".join(line + b"\n" for line in lines))
        stat = os.fstat(file.fileno())
        self._known = _End(stat.st_ino, stat.st_size, head)
        return head


def run_facts(
    run: str, submitter: str, experiment: str, methods: Mapping[str, str]
) -> dict[str, Any]:
    """Say who submitted what: digests of the experiment's text and of each method's code."""
    return {
        "run": run,
        "submitter": submitter,
        "experiment": hashlib.sha256(experiment.encode()).hexdigest(),
        "methods": dict(methods),
        "version": VERSION,
    }


def _write(file: IO[bytes], blob: bytes) -> None:
    while blob:
        blob = blob[file.write(blob) :]


def last_entry(file: IO[bytes]) -> tuple[Head, bytes, bool]:
    """Return a log's last whole entry, the bytes after it, and whether a newline ends it."""
    end = file.seek(0, os.SEEK_END)
    place = end
    while True:
        place = max(0, place - _CHUNK)
        file.seek(place)
        tail = file.read(end - place)
        ended = not tail or tail.endswith(b"\n")
        lines = tail.split(b"\n")
        # The first may be the end of a line, unless this is the whole file.
        for number in range(len(lines) - 1, -1 if place == 0 else 0, -1):
            found = read_entry(lines[number])
            if found is not None:
                return found.head, b"\n".join(lines[number + 1 :]), ended
        if place == 0:
            return Head(), tail, ended


def lines_of(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file without their ends."""
    with path.open("rb") as file:
        for line in file:
            yield line.rstrip(b"\n")
