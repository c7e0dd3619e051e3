"""A small stand-in for the hub: redirects, digests, ranges, and the ways a transfer goes wrong."""

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Hub:
    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = files
        self.fault = ""  # "", "corrupt", "cut", "missing"
        self.states_digest = True
        self.requests: list[tuple[str, str]] = []
        self.address = ""


@contextmanager
def serving(files: dict[str, bytes]) -> Iterator[Hub]:
    hub = Hub(files)

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            hub.requests.append((self.path, self.headers.get("Range", "")))
            name = self.path.removeprefix("/storage")
            if name not in hub.files or hub.fault == "missing":
                self.send_error(404)
                return
            content = hub.files[name]
            if not self.path.startswith("/storage"):
                self.send_response(302)
                if hub.states_digest:
                    digest = hashlib.sha256(content).hexdigest()
                    self.send_header("X-Linked-Etag", f'"{digest}"')
                self.send_header("Location", f"{hub.address}/storage{name}")
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            self._send(content)

        def _send(self, content: bytes) -> None:
            start = 0
            wanted = self.headers.get("Range")
            if wanted:
                start = int(wanted.removeprefix("bytes=").rstrip("-"))
                if start >= len(content):
                    self.send_error(416)
                    return
            body = content[start:]
            self.send_response(206 if start else 200)
            self.send_header("ETag", '"not-a-digest"')
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if hub.fault == "corrupt":
                body = body[:-1] + bytes([body[-1] ^ 1])
            self.wfile.write(body[: len(body) // 2] if hub.fault == "cut" else body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.address = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
