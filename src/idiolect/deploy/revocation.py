"""Certificates that hold no more: a list that the federation's authority signs.

An entry names a member and a moment: all its certificates that were made until then are revoked,
and what it is given later holds. Members pass the list on in their messages; one of a higher number
takes the place of one of a lower. Light to import: the
engine's long-running processes check it too.
"""

import base64
import json
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from idiolect.errors import ConfigError, DeployError

if TYPE_CHECKING:
    from cryptography.x509 import Certificate

REVOKED_FILE = "revoked.json"  # in a member's home, and beside the kits
LARGEST = 1 << 19  # bytes of a list
_DOMAIN = b"idiolect revocation 1\0"


@dataclass(frozen=True)
class Revoked:
    """A member whose certificates of until a moment are revoked."""

    name: str
    before: int  # seconds since 1970
    why: str = ""


@dataclass(frozen=True)
class RevocationList:
    """All that is revoked; `number` counts the lists of an authority."""

    number: int = 0
    entries: tuple[Revoked, ...] = ()

    def holds(self, certificate: "Certificate", name: str) -> bool:
        """Return whether a certificate of that name is revoked."""
        return self.covers(name, certificate.not_valid_before_utc.timestamp())

    def covers(self, name: str, made: float) -> bool:
        """Return whether what was made for that name at a moment is revoked."""
        return any(one.name == name and made <= one.before for one in self.entries)

    def with_entries(self, new: Sequence[Revoked]) -> "RevocationList":
        """Return the next list."""
        kept = [one for one in self.entries if one.name not in {own.name for own in new}]
        latest = {one.name: one.before for one in self.entries}
        moved = [
            Revoked(own.name, max(own.before, latest.get(own.name, 0)), own.why) for own in new
        ]
        return RevocationList(self.number + 1, (*kept, *moved))

    def signed(self, root_key: str) -> bytes:
        """Write the list, signed with the authority's private key (PEM)."""
        from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.serialization import load_pem_private_key

        key = load_pem_private_key(root_key.encode(), password=None)
        if not isinstance(key, RSAPrivateKey):
            raise ConfigError("the authority's key is no RSA key")
        text = json.dumps({"number": self.number, "revoked": [asdict(o) for o in self.entries]})
        signature = key.sign(_DOMAIN + text.encode(), padding(), SHA256())
        whole = {"list": text, "signature": base64.b64encode(signature).decode()}
        blob = (json.dumps(whole) + "\n").encode()
        if len(blob) > LARGEST:
            raise ConfigError("the list of revoked members is too long; make all kits anew")
        return blob


def read_list(blob: bytes, root: "Certificate") -> RevocationList:
    """Read a list that this authority signed; `DeployError` for anything else."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey
    from cryptography.hazmat.primitives.hashes import SHA256

    try:
        if len(blob) > LARGEST:
            raise ValueError("too long")
        whole: Any = json.loads(blob)
        text, key = whole["list"], root.public_key()
        if not isinstance(key, RSAPublicKey):
            raise ValueError("no RSA key")
        signature = base64.b64decode(whole["signature"], validate=True)
        key.verify(signature, _DOMAIN + text.encode(), padding(), SHA256())
        plain = json.loads(text)
        entries = tuple(
            Revoked(str(one["name"]), int(one["before"]), str(one["why"]))
            for one in plain["revoked"]
        )
        return RevocationList(int(plain["number"]), entries)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise DeployError(f"no list of revoked certificates ({error})") from error
    except InvalidSignature:
        raise DeployError(
            "a list of revoked certificates that this authority has not signed"
        ) from None


class Revocations:
    """The list on a member's disk, read again whenever the file changes."""

    def __init__(self, path: Path | None, root: "Certificate") -> None:
        self.path, self._root = path, root
        self._stamp: tuple[int, int, int] | None = None
        self._blob, self._list = b"", RevocationList()
        self._lock = threading.Lock()

    def current(self) -> RevocationList:
        """Return the list as it is now; a damaged file is an error: nobody is trusted then."""
        if self.path is None:
            return self._list
        with self._lock:
            try:
                stat = self.path.stat()
                stamp = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
            except FileNotFoundError:
                return self._list
            if stamp != self._stamp:
                blob = self.path.read_bytes()
                found = read_list(blob, self._root)
                if found.number >= self._list.number:  # an old copy revives nobody
                    self._list, self._blob = found, blob
                self._stamp = stamp
            return self._list

    @property
    def number(self) -> int:
        """The number of the list as it is now; 0 where it is damaged."""
        try:
            return self.current().number
        except (OSError, DeployError):
            return 0

    def newer_than(self, number: int) -> bytes:
        """Return the signed list if it is newer than one of that number."""
        return self._blob if self.number > number else b""

    def take(self, blob: bytes) -> bool:
        """Keep a list that came in a message, if the authority signed it and it is newer."""
        from idiolect.core.checkpoint import write_whole

        found = read_list(blob, self._root)
        if found.number <= self.current().number:
            return False
        if self.path is None:
            with self._lock:
                self._list, self._blob = found, blob
        else:
            write_whole(self.path, blob)
        return True


def padding() -> Any:
    """Return the padding of the authority's own signatures."""
    from cryptography.hazmat.primitives.asymmetric.padding import MGF1, PSS
    from cryptography.hazmat.primitives.hashes import SHA256

    return PSS(MGF1(SHA256()), PSS.DIGEST_LENGTH)


def revoke(
    path: Path, root: tuple[str, str], names: Sequence[str], why: str, before: float | None = None
) -> RevocationList:
    """Add members to an authority's own list; `root`: its certificate and private key, as PEM."""
    from cryptography.x509 import load_pem_x509_certificate

    from idiolect.core.checkpoint import write_whole

    known = RevocationList()
    if path.exists():
        known = read_list(path.read_bytes(), load_pem_x509_certificate(root[0].encode()))
    moment = int(time.time() if before is None else before)
    made = known.with_entries([Revoked(name, moment, why[:200]) for name in names])
    write_whole(path, made.signed(root[1]))
    return made
