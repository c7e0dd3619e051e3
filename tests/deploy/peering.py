"""A node's false program: it asks the other nodes of its job for their reports, in several ways."""

import contextlib
import json
import os
import threading
from pathlib import Path

from idiolect.deploy import protocol, signing

VARIABLE = "IDIOLECT_TEST_PEER"  # names the file where it notes what it was told
KINDS = ("step", "keys", "shares", "mask")  # after each of these, in the second round

HEADERS = ("cn__origin", "client_name", "__token__", "__token_signature__", "ssid")  # of FLARE


PEERS = ("site-0", "site-1", "site-2")


def install():
    """Make this process, a real node's, ask its peers whenever its server has asked it."""
    from idiolect.deploy.flare.node_side import NodeSide

    honest, seen = signing.NodeChannel.answer, set()
    forger, started = Forger(), NodeSide.handle_event

    def handle(self, event_type, fl_ctx):
        if forger.cell is None and fl_ctx.get_engine().get_cell() is not None:
            forger.attach(fl_ctx.get_engine().get_cell())
        started(self, event_type, fl_ctx)

    def answer(self, blob, ask):
        told = honest(self, blob, ask)
        body = signing._opened(blob).body
        message = protocol.unpack(body) if body else None
        if message and message.kind in KINDS and message.head["round"] == 1:
            if (mark := (message.head["run"], message.kind)) not in seen:
                seen.add(mark)
                server = signing._opened(blob).header.sender
                for peer in PEERS:
                    if peer != self._identity.name:
                        _ask(self, forger, peer, server, blob, message.kind)
                        if message.kind in ("step", "mask"):
                            forger.ask(peer, body)
        return told

    signing.NodeChannel.answer, NodeSide.handle_event = answer, handle


def _ask(own, forger, peer, server, blob, kind):
    body = signing._opened(blob).body
    header = signing.Header(server, peer, "", 99, "", signing._sha256(body))
    letters = {
        "replayed": blob,
        "bare": body,
        "signed by a node": signing._signed(own._identity, header, body).blob,
    }
    for way, letter in letters.items():
        _note(peer=peer, kind=kind, way=way, told=forger.told(peer, letter))


def _note(**told):
    with Path(os.environ[VARIABLE]).open("a") as file:
        file.write(json.dumps(told) + "\n")


class Forger:
    """Calls in the server's name: with its address and the token that its messages have."""

    def __init__(self):
        self._server, self.cell = {}, None
        self._forging = threading.Event()

    def attach(self, cell):
        self.cell = cell
        cell.core_cell.add_incoming_filter("*", "*", self._listen)
        cell.core_cell.add_outgoing_request_filter("*", "*", self._forge)

    def told(self, peer, letter, seconds=20.0):
        """What a peer answers to a letter: a code, a report, or nothing."""
        from nvflare.fuel.f3.cellnet.utils import new_cell_message

        from idiolect.deploy.flare.job_layout import CHANNEL, MARK, TOPIC
        from idiolect.deploy.flare.node_side import mark_of

        reply = self.cell.send_request(
            channel=CHANNEL,
            topic=TOPIC,
            target=peer,
            request=new_cell_message({MARK: mark_of(letter)}, letter),
            timeout=seconds,
        )
        if not isinstance(reply.payload, bytes | bytearray | memoryview) or not reply.payload:
            return "nothing"
        answer = bytes(reply.payload)
        with contextlib.suppress(Exception):
            answer = signing._opened(answer).body
        message = protocol.unpack(answer)
        code = message.head.get("code", "?")
        return code if message.kind == "no" else f"a report: {message.kind}"

    def ask(self, peer, body):
        self._forging.set()
        try:
            _note(peer=peer, way="forged", told=self.told(peer, body, 4.0))
        finally:
            self._forging.clear()

    def _listen(self, message):
        if str(message.get_header("cn__origin", "")).startswith("server."):
            self._server |= {name: message.get_header(name) for name in HEADERS}
        return None

    def _forge(self, message):
        if self._forging.is_set():
            for name, value in self._server.items():
                if value is not None:
                    message.set_header(name, value)
        return None
