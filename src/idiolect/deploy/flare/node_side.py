"""A node's end, within the long-running process of the engine: it is there as long as the node is.

The server asks; the node works on the message in a process of its own and keeps the answer until it
is fetched. The server waits by asking again every few seconds, so each side knows of the other that
it is alive, and a message that a dead process took with it is sent again.
"""

import dataclasses
import gc
import hashlib
import logging
import os
import secrets
import threading
import time
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from nvflare.apis.event_type import EventType
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_context import FLContext
from nvflare.fuel.f3.cellnet.defs import MessageHeaderKey, ReturnCode
from nvflare.fuel.f3.cellnet.utils import new_cell_message

from idiolect.deploy import protocol
from idiolect.deploy.audit import AuditLog
from idiolect.deploy.flare.job_layout import (
    CHANNEL,
    DONE,
    HELLO,
    HOME,
    MARK,
    PROCESS,
    QUEUED,
    STATE,
    TIME_SAID,
    TOPIC,
    TURN,
    UNKNOWN,
    VERSION_SAID,
    WORKING,
)
from idiolect.deploy.flare.kits import NODE_FILE
from idiolect.deploy.flare.prometheus import write_status
from idiolect.deploy.identity import Authority, Identity
from idiolect.deploy.node_process import NodeProcess
from idiolect.deploy.protocol import Refused
from idiolect.deploy.signing import NodeChannel
from idiolect.deploy.site import NodeSettings
from idiolect.version import VERSION

log = logging.getLogger("idiolect.flare")

_THREADS = 32
_KEPT = 4  # answers that are kept until they are fetched, and channels to jobs of the server
_CHANNELS = 16
_LOOK = 10.0  # seconds between two greetings of the server
_MISSES = 2  # of its answers in a row, over a connection that stands, until we register anew
_SKEW = 60.0  # seconds between two clocks that are worth a word
_ANEW = 75  # status of a process that wants to be started again


def mark_of(blob: bytes) -> str:
    """Return what a message is known by on its way."""
    return hashlib.sha256(blob).hexdigest()


class Tidy:
    """Collects what the engine dropped; cheap, as all that was there at the start is left out."""

    def __init__(self) -> None:
        self._begun = False

    def __call__(self) -> None:
        """Tidy up, once a message or a round."""
        gc.collect()
        if not self._begun:
            self._begun = True
            gc.freeze()


@dataclasses.dataclass(eq=False)
class _InHand:
    """A message that is being answered."""

    answer: "Future[bytes]"
    began: threading.Event


class NodeSide(FLComponent):  # type: ignore[misc]
    """Hands messages to the training process, and answers back."""

    def __init__(self) -> None:
        super().__init__()
        self._root, self._name = Path(), secrets.token_hex(8)
        self._child: NodeProcess | None = None
        self._audit: AuditLog | None = None
        self._door: NodeChannel | None = None  # refuses what the server has not signed
        self._channels: OrderedDict[str, NodeChannel] = OrderedDict()
        self._asked: OrderedDict[str, _InHand] = OrderedDict()
        self._lock = threading.Lock()
        self._turn = threading.Lock()  # one message at a time is worked on
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="idiolect")
        self._answered = 0
        self._tidy = Tidy()

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Listen as soon as the node is registered; end the training process with the engine."""
        if event_type == EventType.SYSTEM_START:
            self._root = Path(fl_ctx.get_engine().args.workspace).resolve()
            cell = fl_ctx.get_engine().get_cell()
            cell.register_request_cb(channel=CHANNEL, topic=TOPIC, cb=self._received)
            threading.Thread(target=self._watch_server, args=(cell,), daemon=True).start()
        elif event_type == EventType.SYSTEM_END and self._child is not None:
            self._child.close()

    def _watch_server(self, cell: Any) -> None:
        """Greet the server now and then; where it no longer knows this node, register anew.

        A server with a new certificate drops what comes with a token that the old one signed, in
        silence, and the engine does not ask for another. State is on disk, and the process that
        follows this one is asked again, so ending is safe; only a training is not cut short.
        """
        misses, told = 0, False
        while True:
            reply = cell.send_request(
                channel=CHANNEL,
                topic=HELLO,
                target="server",
                request=new_cell_message({}, b""),
                timeout=5.0,
                optional=True,
            )
            code = reply.get_header(MessageHeaderKey.RETURN_CODE, ReturnCode.OK)
            misses = misses + 1 if code == ReturnCode.TIMEOUT else 0
            reached = code == ReturnCode.OK
            write_status(self._root / HOME, reached=reached, answered=self._answered)
            if misses >= _MISSES and not self._turn.locked():
                log.warning("the server does not answer this node's token; it registers anew")
                os._exit(_ANEW)
            if code == ReturnCode.OK and not told:
                told = self._compare(reply)
            time.sleep(_LOOK)

    def _compare(self, reply: Any) -> bool:
        """Say where the server's clock or version is another; return whether all was said."""
        said = reply.get_header(TIME_SAID)
        apart = time.time() - said if isinstance(said, float) else 0.0
        if abs(apart) > _SKEW:
            way = "ahead of" if apart > 0 else "behind"
            log.error(
                "CLOCK this machine's clock is %.0f s %s the server's; set both by NTP, else "
                "certificates and signatures are refused",
                abs(apart),
                way,
            )
        theirs = ascii(reply.get_header(VERSION_SAID, VERSION))[1:41].rstrip("'")
        if theirs != VERSION:
            log.warning("VERSION the server runs idiolect %s, this node %s", theirs, VERSION)
        return True

    def _received(self, request: Any) -> "Future[Any]":
        """Answer in a thread of our own, as the engine has few."""
        return self._threads.submit(self._told, request)

    def _told(self, request: Any) -> Any:
        """Say what became of a message, and its answer if it is there soon."""
        origin = str(request.get_header(MessageHeaderKey.ORIGIN, ""))
        mark, blob = str(request.get_header(MARK, "")), request.payload
        blob = bytes(blob) if isinstance(blob, bytes | bytearray | memoryview) else b""
        try:
            state, answer = self._answer(origin, mark, blob)
        except Exception:
            log.exception("a message could not be answered")
            state, answer = DONE, protocol.refusal("failed")
        return new_cell_message({STATE: state, PROCESS: self._name}, answer)

    def _answer(self, origin: str, mark: str, blob: bytes) -> tuple[str, bytes]:
        # The engine states who calls, but a member can forge that: what counts is the signature.
        sender, _, job = origin.partition(".")
        if sender != "server" or not job:
            log.error("refused with 'identity': called by %r; only the server is answered", origin)
            return DONE, protocol.refusal("identity")
        with self._lock:
            door = self._door = self._door or self._made_channel()
        if blob and not door.signed_by_server(blob):
            # Nothing of it is kept: it must not take the place of what the server has asked.
            return DONE, door.answer(blob, lambda body: protocol.refusal("identity"))
        with self._lock:
            asked = self._asked.get(mark)
            if asked is None and not blob:
                return UNKNOWN, b""
            if asked is None and mark_of(blob) == mark:
                asked = self._begin(job, mark, blob)
        if asked is None:
            return DONE, protocol.refusal("format")
        wait([asked.answer], TURN)
        if asked.answer.done():
            return DONE, asked.answer.result()
        return (WORKING if asked.began.is_set() else QUEUED), b""

    def _begin(self, job: str, mark: str, blob: bytes) -> _InHand:
        """Work on a message, in its turn; the signature is looked at at once."""
        channel, began = self._channel(job), threading.Event()

        def work(body: bytes) -> bytes:
            with self._turn:
                began.set()
                self._answered += 1
                return self._process().answer(body)

        asked = _InHand(self._threads.submit(channel.answer, blob, work), began)
        self._asked[mark] = asked
        done = [known for known, one in self._asked.items() if one.answer.done()]
        for known in done[: max(0, len(done) - _KEPT)]:
            del self._asked[known]
        return asked

    def _channel(self, job: str) -> NodeChannel:
        """Return the channel to a job of the server; none is without the kit's identity."""
        if job not in self._channels:
            self._channels[job] = self._made_channel()
            while len(self._channels) > _CHANNELS:
                self._channels.popitem(last=False)
        self._channels.move_to_end(job)
        return self._channels[job]

    def _made_channel(self) -> NodeChannel:
        own, authority = Identity.from_kit(self._root), Authority.from_kit(self._root)
        if self._audit is None:
            self._audit = AuditLog(self._root / HOME, own.name, own.role)
        return NodeChannel(own, authority, self._audit)

    def _process(self) -> NodeProcess:
        self._tidy()
        if self._child is None:
            path = self._root / HOME / NODE_FILE
            if not path.is_file():
                raise Refused("data", f"{path} is missing; start with `idiolect node`")
            # Whatever the file says: over this engine a node has the identity of its kit.
            site = NodeSettings.from_json(path.read_text())
            self._child = NodeProcess(dataclasses.replace(site, kit=self._root))
        return self._child
