"""A small web server beside a run: the page at `/`, its news at `/events`."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socket import AF_INET, AF_INET6
from typing import Any

from idiolect.analysis.live.address import Address, is_loopback
from idiolect.analysis.live.onlooker import Onlooker
from idiolect.analysis.live.painter import Painter
from idiolect.analysis.report import read
from idiolect.errors import IdiolectError

_MOST = 16  # browsers at once
_CONNECTIONS = 64  # connections at once; more are closed unheard
_PATIENCE = 10.0  # seconds in which a connection must have asked for something
_BEAT = 10.0  # seconds after which a silent line is tried
_FAREWELL = 2.0  # seconds in which those who look hear the last words

DONE = "Finished. This page shows the result."
STOPPED = "Stopped before the end. This page shows how far it came."


class Live(Onlooker):
    """A watch whose page is served at `url`."""

    url = ""


@contextmanager
def serving(folder: Path, at: Address | None = None, command: str = "") -> Iterator[Live]:
    """Serve the page of the run in a folder for as long as the block lasts."""
    live = Live(folder)
    painter = Painter(live, command)
    server = _bound(at or Address(), painter)
    live.url = server.address_given.url(server.server_address[1])
    threading.Thread(target=server.serve_forever, name="idiolect-serve", daemon=True).start()
    painter.start()
    words = STOPPED
    try:
        yield live
        words = DONE
    finally:
        _farewell(painter, words, folder)
        painter.stopped = True
        server.shutdown()
        server.server_close()


def _farewell(painter: Painter, words: str, folder: Path) -> None:
    """Show those who look the end, and give them a moment to hear it."""
    last = None
    if painter.looking and words == DONE:
        with suppress(Exception):  # a run without a folder of results: what was heard will do
            last = read(folder)
    painter.end(words, last)
    until = time.monotonic() + _FAREWELL
    while painter.looking and time.monotonic() < until:
        time.sleep(0.02)


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, at: Address, port: int, painter: Painter) -> None:
        self.address_family = AF_INET6 if ":" in at.host else AF_INET
        self.address_given = at
        self.painter = painter
        self._places = threading.BoundedSemaphore(_CONNECTIONS)
        super().__init__((at.host, port), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread of its own, if one is left."""
        if self._places.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Give the place back when the connection is over."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()


def _bound(at: Address, painter: Painter) -> _Server:
    try:
        return _Server(at, at.port, painter)
    except OSError as error:
        if not at.chosen:  # ours to choose: any free one will do
            with suppress(OSError):
                return _Server(at, 0, painter)
        told = error.strerror or str(error)
        raise IdiolectError(
            f"cannot serve at {at.host}:{at.port}: {told}; choose another with --serve-at HOST:PORT"
        ) from error


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"
    timeout = _PATIENCE

    def do_GET(self) -> None:
        """Answer a browser; a page of another site that asks in our name is refused."""
        if not self._addressed():
            self._answer(HTTPStatus.FORBIDDEN, "text/plain", "this page answers to its own address")
        elif self.path == "/":
            self._answer(HTTPStatus.OK, "text/html; charset=utf-8", self.server.painter.page())
        elif self.path == "/events":
            self._events()
        else:
            self._answer(HTTPStatus.NOT_FOUND, "text/plain", "there is only / here")

    def log_message(self, format: str, *arguments: object) -> None:
        """Keep the run's screen clean."""

    def _addressed(self) -> bool:
        """Refuse names that are not ours: a foreign name may lead here (DNS rebinding)."""
        if not self.server.address_given.loopback:
            return True
        host = (self.headers.get("Host") or "").rsplit(":", 1)[0].strip("[]")
        return is_loopback(host)

    def _answer(self, status: HTTPStatus, kind: str, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(body)

    def _events(self) -> None:
        painter = self.server.painter
        if painter.looking >= _MOST:
            self._answer(HTTPStatus.SERVICE_UNAVAILABLE, "text/plain", "too many are looking")
            return
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Cache-Control", "no-store")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        painter.look(+1)
        try:
            self._tell(painter)
        except OSError:  # the browser is gone
            pass
        finally:
            painter.look(-1)

    def _tell(self, painter: Painter) -> None:
        seen, over = -1, ""
        while not over and not painter.stopped:
            number, text, over = painter.next(seen, _BEAT)
            if text:
                self._event("content", text)
            else:
                self.wfile.write(b":\n\n")
            seen = number
        if over:
            self._event("over", json.dumps(over))
        self.wfile.flush()

    def _event(self, name: str, text: str) -> None:
        self.wfile.write(f"event: {name}\ndata: {text}\n\n".encode())
