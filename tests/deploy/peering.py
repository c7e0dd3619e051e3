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


def install():
    """Make this process, a real node's, ask its peers whenever its server has asked it."""
    from nvflare.collab import collab

    honest, seen = signing.NodeChannel.answer, set()
    forger = Forger()

    def answer(self, blob, ask):
        forger.attach(next(iter(collab.clients)).backend.cell.core_cell)
        told = honest(self, blob, ask)
        body = signing._opened(blob).body
        message = protocol.unpack(body) if body else None
        if message and message.kind in KINDS and message.head["round"] == 1:
            if message.kind not in seen:
                seen.add(message.kind)
                server = signing._opened(blob).header.sender
                for peer in collab.clients:
                    if peer.name != self._identity.name:
                        _ask(self, peer, server, blob, message.kind)
                        if message.kind in ("step", "mask"):
                            forger.ask(peer, body)
        return told

    signing.NodeChannel.answer = answer


def _ask(own, peer, server, blob, kind):
    body = signing._opened(blob).body
    header = signing.Header(server, peer.name, "", 99, "", signing._sha256(body))
    letters = {
        "replayed": blob,
        "bare": body,
        "signed by a node": signing.sealed(own._identity, header, body),
    }
    for way, letter in letters.items():
        _note(peer=peer.name, kind=kind, way=way, told=_told(peer, letter))


def _told(peer, letter, seconds=20.0):
    try:
        answer = peer(timeout=seconds).answer(letter)
    except Exception as error:
        return f"nothing: {type(error).__name__}"
    with contextlib.suppress(Exception):
        answer = signing._opened(answer).body
    message = protocol.unpack(answer)
    return message.head.get("code", "?") if message.kind == "no" else f"a report: {message.kind}"


def _note(**told):
    with Path(os.environ[VARIABLE]).open("a") as file:
        file.write(json.dumps(told) + "\n")


class Forger:
    """Calls in the server's name: with its address and the token that its messages have."""

    def __init__(self):
        self._server, self._cell = {}, None
        self._forging = threading.Event()

    def attach(self, cell):
        if self._cell is None:
            self._cell = cell
            cell.add_incoming_filter("*", "*", self._listen)
            cell.add_outgoing_request_filter("*", "*", self._forge)

    def ask(self, peer, body):
        own, peer.backend.caller = peer.backend.caller, "server"
        self._forging.set()
        try:
            _note(peer=peer.name, way="forged", told=_told(peer, body, 4.0))
        finally:
            self._forging.clear()
            peer.backend.caller = own

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
