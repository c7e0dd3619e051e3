"""Health and metrics of a server or a node, for Prometheus: text on a port of this machine only.

Everything is read from files when it is asked for, so that nothing is kept, and nothing costs.
"""

import http.server
import json
import os
import shutil
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from idiolect.deploy.flare.job_layout import DOING, PROGRESS, STATUS
from idiolect.deploy.flare.watchdog import Console, WatchedKit

_PATIENCE = 5.0  # seconds that a connection has to ask
_STALE = 60.0  # seconds without a word of the engine after which it counts as ill

Sample = tuple[str, str, dict[str, str], float]
"""A metric's name, its meaning, its labels and its value."""


def read_json(path: Path) -> dict[str, Any]:
    """Read a small file that another process writes; empty where it is missing or torn."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def expiry(kit: WatchedKit) -> float:
    """Return when a kit's certificate expires, in seconds since 1970; 0 if that cannot be said."""
    name = "server.crt" if kit.role == "server" else "client.crt"
    try:
        decoded: Any = ssl._ssl._test_decode_cert(str(kit.folder / "startup" / name))  # type: ignore[attr-defined]
        return float(ssl.cert_time_to_seconds(decoded["notAfter"]))
    except (OSError, ValueError, KeyError):
        return 0.0


def samples(kit: WatchedKit, events: int = 0) -> Iterator[Sample]:
    """Say how a server or a node is."""
    status = read_json(kit.home / STATUS)
    seen = time.time() - float(status.get("time", 0))
    yield "idiolect_up", "1 where the engine gave a sign within a minute", {}, float(seen < _STALE)
    yield "idiolect_events_total", "lines said on the console", {}, events
    yield "idiolect_certificate_expiry_seconds", "when it expires, since 1970", {}, expiry(kit)
    yield "idiolect_disk_free_bytes", "of the kit's disk", {}, shutil.disk_usage(kit.folder).free
    for site, there in sorted(status.get("sites", {}).items()):
        yield "idiolect_site_connected", "1 where a site is connected", {"site": site}, float(there)
    if "answered" in status:
        yield "idiolect_messages_total", "messages answered", {}, float(status["answered"])
        yield "idiolect_server_reached", "1 where the server answers", {}, float(status["reached"])
    for path in sorted((kit.home / DOING).glob(f"*/{PROGRESS}")):
        yield from _of_run(path.parent.name, read_json(path))


def _of_run(run: str, told: dict[str, Any]) -> Iterator[Sample]:
    about = {"run": run, "method": str(told.get("label", ""))}
    if "round" in told:
        yield "idiolect_run_round", "the last whole round", about, float(told["round"])
        yield "idiolect_run_rounds", "rounds in all", about, float(told["rounds"])
    absent = len(told.get("absent", ()))
    yield "idiolect_run_sites_absent", "sites that are passed over now", about, float(absent)


def text(kit: WatchedKit, events: int = 0) -> str:
    """Write samples as Prometheus reads them."""
    lines, known = [], set()
    for name, meaning, labels, value in samples(kit, events):
        if name not in known:
            known.add(name)
            kind = "counter" if name.endswith("_total") else "gauge"
            lines += [f"# HELP {name} {meaning}", f"# TYPE {name} {kind}"]
        inner = ",".join(f'{key}="{_escaped(word)}"' for key, word in labels.items())
        lines.append(f"{name}{{{inner}}} {value:g}" if inner else f"{name} {value:.15g}")
    return "\n".join(lines) + "\n"


def _escaped(word: str) -> str:
    return word.replace("\\", "\\\\").replace('"', '\\"').replace("\n", " ")


def healthy(kit: WatchedKit) -> bool:
    """Say whether the engine gave a sign within a minute, and a node reaches its server."""
    status = read_json(kit.home / STATUS)
    fresh = time.time() - float(status.get("time", 0)) < _STALE
    return fresh and bool(status.get("reached", True))


def serve_metrics(kit: WatchedKit, console: Console, port: int) -> http.server.HTTPServer:
    """Answer /metrics and /health on a port of this machine, in a thread."""

    class MetricsPage(http.server.BaseHTTPRequestHandler):
        timeout = _PATIENCE

        def do_GET(self) -> None:
            if self.path == "/metrics":
                self._send(200, text(kit, console.events), "text/plain; version=0.0.4")
            elif self.path == "/health":
                fine = healthy(kit)
                self._send(200 if fine else 503, "ok\n" if fine else "ill\n", "text/plain")
            else:
                self._send(404, "/metrics or /health\n", "text/plain")

        def _send(self, code: int, content: str, kind: str) -> None:
            self.send_response(code)
            self.send_header("Content-Type", kind)
            self.end_headers()
            self.wfile.write(content.encode())

        def log_message(self, format: str, *args: Any) -> None:
            return

    server = http.server.ThreadingHTTPServer(("127.0.0.1", port), MetricsPage)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    console.say(f"health and metrics at http://127.0.0.1:{server.server_address[1]}/metrics")
    return server


def write_status(home: Path, **facts: Any) -> None:
    """Leave word of how the engine is, for `samples`; a torn file is read as none."""
    path = home / STATUS
    rest = path.with_suffix(f".{os.getpid()}")
    rest.write_text(json.dumps({"time": time.time(), **facts}))
    rest.replace(path)
