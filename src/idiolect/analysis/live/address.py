"""Where a page is served: this machine alone, unless the user says otherwise."""

import ipaddress
from typing import NamedTuple

from idiolect.errors import ConfigError

HOST, PORT = "127.0.0.1", 8484


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
        """Give what to type into a browser."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{port}/"


def address(text: str = "", *, anyone: bool = False) -> Address:
    """Read HOST:PORT, HOST or PORT; what others could reach is refused unless anyone may see it."""
    found = _parsed(text)
    if not found.loopback and not anyone:
        raise ConfigError(
            f"{found.host} can be reached from other machines, and whoever reaches it sees the "
            f"run; serve at {HOST}, or add --serve-anyone if that is meant"
        )
    return found


def is_loopback(host: str) -> bool:
    """Tell whether a host's name or number means this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _parsed(text: str) -> Address:
    host, colon, port = text.rpartition(":")
    if text.isdigit() or not text:
        host, port = HOST, text
    elif not colon or text.endswith("]") or (":" in host and not host.startswith("[")):
        host, port = text, ""  # no port, as in `localhost`, `[::1]` or `::1`
    if port and not (port.isdigit() and int(port) < 65536):
        raise ConfigError(
            f"--serve-at: {text!r} is no address; expected HOST:PORT such as {HOST}:{PORT}"
        )
    return Address(host.strip("[]") or HOST, int(port) if port else PORT, bool(port))
