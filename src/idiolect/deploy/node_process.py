"""A node in a process of its own: what kills its training kills nothing else.

Messages go through pipes, each with its length before it. The child ends as soon as its parent
does, whatever it is doing.
"""

import contextlib
import logging
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import IO

from idiolect.deploy import protocol
from idiolect.deploy.messenger import Transport
from idiolect.deploy.node import Node
from idiolect.deploy.processes import isolated, locked
from idiolect.deploy.protocol import Refused
from idiolect.deploy.site import NodeSettings

log = logging.getLogger("idiolect.node")
# Our own frames: `multiprocessing.connection` was slower (docs/design/0002-deploy-libraries.md).
_LENGTH = 8  # bytes of a message's length
_PIPE = 1 << 20  # bytes in a pipe, where the system allows it
_GRACE = 5.0  # seconds a child has to end by itself


class NodeProcess:
    """A node's process, started when it is first asked, and again after it died."""

    def __init__(self, site: NodeSettings) -> None:
        self._site = site
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """The process's number, while it lives."""
        return self._process.pid if self._process and self._process.poll() is None else None

    def answer(self, blob: bytes) -> bytes:
        """Ask the child process; if it dies, the answer is a refusal that says so."""
        with self._lock:
            try:
                process = self._running()
            except OSError as error:
                log.error("the training process cannot be started: %s", error)
                return protocol.refusal("crashed")
            assert process.stdin is not None and process.stdout is not None
            try:
                write(process.stdin, blob)
                answer = read(process.stdout)
            except OSError:
                answer = None
            if answer is None:
                log.error("the training process ended with status %s", self._reaped(process))
                return protocol.refusal("crashed")
            return answer

    def close(self) -> None:
        """End the child, and wait until it has."""
        process = self._process
        if process is not None:
            self._reaped(process)

    def _running(self) -> "subprocess.Popen[bytes]":
        if self._process is None or self._process.poll() is not None:
            if self._process is not None:
                self._reaped(self._process)
            self._site.home.mkdir(parents=True, exist_ok=True)
            path = self._site.home / "node.log"
            path.touch(0o600)
            with path.open("ab") as words:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "idiolect.deploy.node_process"],
                    cwd=self._site.home,
                    env=isolated(os.environ, self._site.home.resolve().parent),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=words,
                    # Ctrl-C is for the command that started us; it ends the child in its own way.
                    start_new_session=True,
                )
            assert self._process.stdin is not None and self._process.stdout is not None
            for pipe in (self._process.stdin, self._process.stdout):
                _widen(pipe)
            write(self._process.stdin, self._site.to_json().encode())
        return self._process

    def _reaped(self, process: "subprocess.Popen[bytes]") -> int:
        """Close the pipes, which ends the child, and return its status."""
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        try:
            return process.wait(_GRACE)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()


def _widen(pipe: IO[bytes]) -> None:
    """Let a pipe hold more, where the system can: models cross it in fewer turns."""
    with contextlib.suppress(ImportError, AttributeError, OSError):
        import fcntl

        fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, _PIPE)


def write(pipe: IO[bytes], blob: bytes) -> None:
    """Write a message with its length."""
    pipe.write(len(blob).to_bytes(_LENGTH, "little"))
    pipe.write(blob)
    pipe.flush()


def read(pipe: IO[bytes]) -> bytes | None:
    """Read a message; None where the other side has ended."""
    length = _exactly(pipe, _LENGTH)
    return None if length is None else _exactly(pipe, int.from_bytes(length, "little"))


def _exactly(pipe: IO[bytes], count: int) -> bytes | None:
    parts, left = [], count
    while left:
        part = pipe.read(left)
        if not part:
            return None
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


def main() -> None:
    """Be the child."""
    # Whatever a library prints must not get between the messages.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr
    )
    questions = sys.stdin.buffer
    settings = read(questions)
    if settings is None:
        return
    asked: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(questions, asked), daemon=True).start()
    site = NodeSettings.from_json(settings.decode())
    with locked(site.home) as free:
        node = Node(site) if free else None
        while True:
            blob = asked.get()
            write(answers, protocol.refusal("busy") if node is None else node.answer(blob))
            if node is None:
                return


def _listen(questions: IO[bytes], asked: "queue.SimpleQueue[bytes]") -> None:
    """Pass messages on; when the parent has ended, exit at once, even during training."""
    while (blob := read(questions)) is not None:
        asked.put(blob)
    os._exit(0)


class InProcess(Transport):
    """Nodes in this very process: for tests and for debugging a method over messages."""

    def __init__(self, nodes: Mapping[str, Node]) -> None:
        self.sites: Sequence[str] = tuple(nodes)
        self._nodes = nodes
        self._turn = threading.Lock()  # networks are made under torch's one random state

    def call(self, site: str, blob: bytes, seconds: float) -> bytes:
        """Ask the node, one at a time."""
        with self._turn:
            return self._nodes[site].answer(blob)


class Processes(Transport):
    """Each node a process of this machine: a federation to try things on."""

    def __init__(self, sites: Sequence[NodeSettings]) -> None:
        self.sites: Sequence[str] = tuple(site.name for site in sites)
        self.children = {site.name: NodeProcess(site) for site in sites}

    def call(self, site: str, blob: bytes, seconds: float) -> bytes:
        """Ask the node's process, starting it where there is none."""
        if site not in self.children:
            raise Refused("unreachable", f"no site {site!r}")
        return self.children[site].answer(blob)

    def close(self) -> None:
        """End all processes."""
        for child in self.children.values():
            child.close()


if __name__ == "__main__":
    main()
