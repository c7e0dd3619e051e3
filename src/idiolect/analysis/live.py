"""The report of a run in training: a page that grows with it, served to this machine alone."""

import ipaddress
import json
import threading
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socket import AF_INET, AF_INET6
from typing import Any, NamedTuple

from idiolect.analysis.report.page import page_content, page_html, page_update
from idiolect.analysis.report.report_data import ReportData, curves_of, experiment_text, read_run
from idiolect.engine.outcome import Outcome, Silent, Stage, Tick
from idiolect.errors import ConfigError, IdiolectError
from idiolect.results import document, run_files

HOST, PORT = "127.0.0.1", 8484
_SECONDS = 1.0  # between two updates of the page
_SHARE = 20  # after an update that took s seconds, the next waits at least 20 s
_BROWSERS = 16  # at once
_CONNECTIONS = 64  # at once; more are closed unanswered
_PATIENCE = 10.0  # seconds in which a connection must have asked for something
_HEARTBEAT = 10.0  # seconds without news after which a browser's connection is tested
_FAREWELL = 2.0  # seconds in which browsers receive the last update

DONE = "Finished. This page shows the result."
STOPPED = "Stopped before the end. This page shows how far it came."


class Address(NamedTuple):
    """A host and a port; `chosen` says that the user named the port."""

    host: str = HOST
    port: int = PORT
    chosen: bool = False

    @property
    def loopback(self) -> bool:
        """Whether only this machine can reach it."""
        return is_loopback(self.host)

    def url(self, port: int) -> str:
        """Return what to type into a browser."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{port}/"


def address(text: str = "", *, anyone: bool = False) -> Address:
    """Parse HOST:PORT, HOST or PORT; refuse what others could reach unless `anyone` may see it."""
    host, colon, port = text.rpartition(":")
    if text.isdigit() or not text:
        host, port = HOST, text
    elif not colon or text.endswith("]") or (":" in host and not host.startswith("[")):
        host, port = text, ""  # no port, as in `localhost`, `[::1]` or `::1`
    if port and not (port.isdigit() and int(port) < 65536):
        raise ConfigError(
            f"--serve-at: {text!r} is no address; expected HOST:PORT such as {HOST}:{PORT}"
        )
    found = Address(host.strip("[]") or HOST, int(port) if port else PORT, bool(port))
    if not found.loopback and not anyone:
        raise ConfigError(
            f"{found.host} can be reached from other machines, and whoever reaches it sees the "
            f"run; serve at {HOST}, or add --serve-anyone if that is meant"
        )
    return found


def is_loopback(host: str) -> bool:
    """Return whether a host's name or number means this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class LiveRun(Silent):
    """A callback that keeps the latest scores of every method; its page is served at `url`.

    The run only stores what happened; the page is made by the thread that sends it.
    """

    url = ""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._label = ""
        self._outcomes: dict[str, Callable[[], Outcome]] = {}
        self._status: dict[str, str] = {}
        self.changed = threading.Condition()
        self.changes = 0

    def begin(self, label: str, round: int, rounds: int) -> None:
        """Note that a method starts."""
        self._label = label
        self._note(label, "starts" if not round else f"goes on after round {round} of {rounds}")

    def tick(self, tick: Tick) -> None:
        """Note the round."""
        self._note(tick.label, f"round {tick.round} of {tick.rounds}")

    def stage(self, stage: Stage) -> None:
        """Note what is done after the rounds."""
        if stage.label and stage.name != "rounds":
            of = f", {stage.done:.0f} of {stage.clients} clients" if stage.clients > 1 else ""
            self._note(stage.label, f"{stage.name}{of}")

    def scored(self, outcome: Callable[[], Outcome]) -> None:
        """Keep the latest scores without computing them."""
        with self.changed:
            self._outcomes[self._label] = outcome

    def end(self, label: str, seconds: float) -> None:
        """Note that a method is done."""
        self._note(label, f"done in {seconds:.0f} s")

    def _note(self, label: str, words: str) -> None:
        with self.changed:
            self._status[label] = words
            self.changes += 1
            self.changed.notify_all()

    def data(self) -> tuple[int, ReportData]:
        """Return the number of changes so far, and the report's data as they are now."""
        with self.changed:
            changes, status, made = self.changes, dict(self._status), dict(self._outcomes)
        outcomes = [make() for make in made.values()]
        scored = [outcome for outcome in outcomes if outcome.final]
        text, holdings = experiment_text(self._folder), run_files.read_holdings(self._folder)
        experiment = tomllib.loads(text)
        source = Path(str(experiment.get("data", {}).get("source", ""))).name
        about: dict[str, Any] = {"source": source}
        if holdings:
            about["clients"] = len(holdings[0].names)
            about["classes"] = list(holdings[0].classes)
        name = experiment.get("name", self._folder.name)
        content = document.build_document({"name": name, "data": about}, scored, complete=False)
        if not scored and outcomes:
            content["seeds"] = [members.seed for members in outcomes[0].members]
        curves = [curve for outcome in outcomes for curve in curves_of(outcome)]
        folder = str(self._folder)
        return changes, ReportData(content, curves, holdings, text, folder, status=status)


class PageUpdates(threading.Thread):
    """Makes the page's updates, once for all browsers, and only while there is one."""

    def __init__(self, run: LiveRun, command: str) -> None:
        super().__init__(name="idiolect-live", daemon=True)
        self._run = run
        self._command = command
        self._seen = -1  # changes of the run when it was last drawn
        self._ready = threading.Condition()
        self.number = -1  # of the update in `text`
        self.text = ""
        self.browsers = 0
        self.over = ""  # the last words, once the run is over
        self.stopped = False

    def run(self) -> None:
        """Make an update whenever there are changes and a browser to show them."""
        while not self.stopped:
            with self._run.changed:
                self._run.changed.wait_for(self._due, timeout=1.0)
            if self._due():
                began = time.perf_counter()
                self.update()
                spent = time.perf_counter() - began
                time.sleep(max(_SECONDS, _SHARE * spent) if not self.over else 0.0)

    def _due(self) -> bool:
        return self.stopped or (self.browsers > 0 and self._run.changes > self._seen)

    def update(self, last: ReportData | None = None) -> None:
        """Make an update; an error is shown in the browser and never reaches the run."""
        try:
            self._seen, data = self._run.data()
            text = json.dumps(page_update(page_content([last or data], self._command)))
        except Exception as error:
            self._seen, text = self._run.changes, json.dumps({"trouble": f"{error}"})
        with self._ready:
            self.number, self.text = self.number + 1, text
            self._ready.notify_all()

    def page(self) -> str:
        """Return the whole page as it is now."""
        _, data = self._run.data()
        return page_html(page_content([data], self._command), live=True)

    def end(self, words: str, folder: Path) -> None:
        """Send the finished run if there is one, then the last words, and wait a moment."""
        if self.browsers:
            last = None
            if words == DONE:
                with suppress(Exception):  # a run without a folder of results
                    last = read_run(folder)
            self.update(last)
        with self._ready:
            self.over = words
            self._ready.notify_all()
        until = time.monotonic() + _FAREWELL
        while self.browsers and time.monotonic() < until:
            time.sleep(0.02)
        self.stopped = True

    def next(self, seen: int, timeout: float) -> tuple[int, str, str]:
        """Wait for an update after `seen`; return its number, its text and the last words."""

        def ready() -> Any:
            return self.number > seen or self.over or self.stopped

        with self._ready:
            self._ready.wait_for(ready, timeout)
            return self.number, self.text if self.number > seen else "", self.over

    @contextmanager
    def browser(self) -> Iterator[None]:
        """Count a browser for as long as the block lasts."""
        with self._ready:
            self.browsers += 1
        try:
            yield
        finally:
            with self._ready:
                self.browsers -= 1


@contextmanager
def serving(folder: Path, at: Address | None = None, command: str = "") -> Iterator[LiveRun]:
    """Serve the page of the run in a folder for as long as the block lasts."""
    live = LiveRun(folder)
    updates = PageUpdates(live, command)
    server = _bound(at or Address(), updates)
    live.url = server.address_given.url(server.server_address[1])
    threading.Thread(target=server.serve_forever, name="idiolect-serve", daemon=True).start()
    updates.start()
    words = STOPPED
    try:
        yield live
        words = DONE
    finally:
        updates.end(words, folder)
        server.shutdown()
        server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, at: Address, port: int, updates: PageUpdates) -> None:
        self.address_family = AF_INET6 if ":" in at.host else AF_INET
        self.address_given = at
        self.updates = updates
        self._places = threading.BoundedSemaphore(_CONNECTIONS)
        super().__init__((at.host, port), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread of its own, if one is left."""
        if self._places.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Free the place when the connection is over."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()


def _bound(at: Address, updates: PageUpdates) -> _Server:
    try:
        return _Server(at, at.port, updates)
    except OSError as error:
        if not at.chosen:  # the user named no port: any free one will do
            with suppress(OSError):
                return _Server(at, 0, updates)
        reason = error.strerror or str(error)
        raise IdiolectError(
            f"cannot serve at {at.host}:{at.port}: {reason}; choose another with --serve-at "
            "HOST:PORT"
        ) from error


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"
    timeout = _PATIENCE

    def do_GET(self) -> None:
        """Answer a browser; a request under another host name is refused."""
        host = (self.headers.get("Host") or "").rsplit(":", 1)[0].strip("[]")
        # A foreign name may be made to lead here (DNS rebinding).
        if self.server.address_given.loopback and not is_loopback(host):
            self._answer(HTTPStatus.FORBIDDEN, "text/plain", "this page answers to its own address")
        elif self.path == "/":
            self._answer(HTTPStatus.OK, "text/html; charset=utf-8", self.server.updates.page())
        elif self.path == "/events":
            self._events()
        else:
            self._answer(HTTPStatus.NOT_FOUND, "text/plain", "there is only / here")

    def log_message(self, format: str, *arguments: object) -> None:
        """Keep the run's screen clean."""

    def _head(self, status: HTTPStatus, kind: str, **more: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Cache-Control", "no-store")
        for name, value in more.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()

    def _answer(self, status: HTTPStatus, kind: str, text: str) -> None:
        body = text.encode()
        more = {"Content_Length": str(len(body)), "X_Content_Type_Options": "nosniff"}
        self._head(status, kind, **more)
        self.wfile.write(body)

    def _events(self) -> None:
        updates = self.server.updates
        if updates.browsers >= _BROWSERS:
            self._answer(HTTPStatus.SERVICE_UNAVAILABLE, "text/plain", "too many are looking")
            return
        self._head(HTTPStatus.OK, "text/event-stream", Connection="close")
        self.close_connection = True
        with updates.browser(), suppress(OSError):  # the browser may be gone
            number, over = -1, ""
            while not over and not updates.stopped:
                number, text, over = updates.next(number, _HEARTBEAT)
                event = f"event: content\ndata: {text}\n\n" if text else ":\n\n"
                self.wfile.write(event.encode())
            if over:
                self.wfile.write(f"event: over\ndata: {json.dumps(over)}\n\n".encode())
            self.wfile.flush()
