"""Who signs: keys and certificates of the members' kits, under the federation's root.

A kit holds a private key and a certificate that the federation's authority signed; it names the
member, and of an admin the role. `Identity` signs with the key; `Authority` checks a signature:
that the certificate is of this authority, valid today, of the expected member in the expected role,
and that the signature is of exactly these bytes.
"""

import logging
import tomllib
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from idiolect.deploy.certificates import common_name, public_bytes
from idiolect.deploy.protocol import Refused
from idiolect.deploy.revocation import REVOKED_FILE, Revocations
from idiolect.errors import DeployError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.padding import PSS
    from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey
    from cryptography.x509 import Certificate

log = logging.getLogger("idiolect.channel")

# The kits' keys sign for TLS and for the engine too. What we sign begins with these bytes and has
# salts of another length than theirs, so that no signature of one can pass for one of another.
_DOMAIN = b"idiolect signature 1\0"
_ABOUT = "idiolect.toml"  # what a kit says about itself
HOME = "idiolect"  # in a kit: what idiolect writes
_STARTUP = "startup"  # in a kit: key, certificate and the authority's certificate
_CN_LIMIT = 64  # characters of a name in a certificate; the engine cuts a longer host name
_SLACK = timedelta(days=1)  # of clocks, when records of the past are checked
SERVER, NODE, ADMIN = "server", "node", "admin"


class Signed(NamedTuple):
    """A signature and the certificate (DER) of the key it was made with."""

    certificate: bytes
    signature: bytes


def server_name(host: str) -> str:
    """Return the name that the server's certificate has."""
    return host[:_CN_LIMIT]


class Identity:
    """A member that can sign: its name, its role and its private key.

    A kit's key and certificate are read again when they were replaced: renewal needs no restart.
    """

    def __init__(self, name: str, role: str, key: "RSAPrivateKey", certificate: bytes) -> None:
        self.name = name
        self.role = role
        self._key, self._certificate = key, certificate
        self._files: tuple[Path, Path] | None = None  # of a kit: key and certificate
        self._stamp = _stamp(())

    @classmethod
    def from_kit(cls, folder: Path) -> "Identity":
        """Read the identity of a kit's owner; the certificate must be of the name it goes by."""
        name, role, _ = _read_about(folder)
        files = key_path(folder, role), key_path(folder, role).with_suffix(".crt")
        stamp = _stamp(files)
        key, certificate = _read_pair(*files, name)
        made = cls(name, role, key, certificate)
        made._files, made._stamp = files, stamp
        return made

    @property
    def certificate(self) -> bytes:
        """The certificate (DER) as it is now."""
        return self._current()[1]

    def sign(self, context: bytes) -> Signed:
        """Sign bytes; they must say all that the signature is to be bound to."""
        from cryptography.hazmat.primitives.hashes import SHA256

        key, certificate = self._current()
        return Signed(certificate, key.sign(_DOMAIN + context, _padding(), SHA256()))

    def _current(self) -> "tuple[RSAPrivateKey, bytes]":
        stamp = _stamp(self._files or ())
        if self._files is not None and stamp != self._stamp:
            try:
                self._key, self._certificate = _read_pair(*self._files, self.name)
                self._stamp = stamp
                log.info("the certificate of %s was renewed", self.name)
            except DeployError as error:  # one of the two files is new, the other not yet
                log.warning("%s; going on with the old certificate", error)
        return self._key, self._certificate


def key_path(folder: Path, role: str) -> Path:
    """Return where a kit's private key is; the certificate lies beside it as .crt."""
    return folder / _STARTUP / f"{SERVER if role == SERVER else 'client'}.key"


def _stamp(files: Sequence[Path]) -> tuple[tuple[int, int], ...]:
    """Return what changes when files are replaced."""
    found = []
    for path in files:
        try:
            stat = path.stat()
            found.append((stat.st_mtime_ns, stat.st_ino))
        except OSError:
            found.append((0, 0))
    return tuple(found)


def _read_pair(key_file: Path, file: Path, name: str) -> "tuple[RSAPrivateKey, bytes]":
    """Read a key and its certificate (DER), which must be of that name."""
    from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey
    from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key
    from cryptography.x509 import load_pem_x509_certificate

    try:
        key = load_pem_private_key(key_file.read_bytes(), password=None)
        found = load_pem_x509_certificate(file.read_bytes())
        named = _common_name(found)
    except (OSError, ValueError, TypeError, Refused) as error:
        raise DeployError(
            f"{key_file} or {file.name} cannot be read ({type(error).__name__}); copy the kit again"
        ) from error
    if not isinstance(key, RSAPrivateKey):
        raise DeployError(f"{key_file} is no RSA key; make the kit anew")
    if public_bytes(key.public_key()) != public_bytes(found.public_key()):
        raise DeployError(f"{key_file} is not the key of {file}; copy the kit again")
    if named != name:
        raise DeployError(
            f"the kit {file.parent.parent} says it is of {name!r}, and its certificate is of "
            f"{named!r}; copy the kit again"
        )
    return key, found.public_bytes(Encoding.DER)


class Authority:
    """The federation's root certificate: says whether a member signed something."""

    def __init__(self, root: bytes, server: str, revoked: Path | None = None) -> None:
        """`root`: the authority's certificate as PEM; `server`: the name of the server's.

        `revoked`: where the list of revoked certificates is, or will be.
        """
        from cryptography.x509 import load_pem_x509_certificate

        try:
            self._root = load_pem_x509_certificate(root)
        except ValueError as error:
            raise DeployError(
                "the authority's certificate is damaged; copy the kit again"
            ) from error
        self.server = server
        self.revocations = Revocations(revoked, self._root)
        self._issued: dict[bytes, Certificate] = {}  # certificates whose issuer was checked

    @classmethod
    def from_kit(cls, folder: Path) -> "Authority":
        """Read the root certificate of a kit, and the name of the kit's server."""
        path = folder / _STARTUP / "rootCA.pem"
        try:
            revoked = folder / HOME / REVOKED_FILE
            return cls(path.read_bytes(), _read_about(folder)[2], revoked)
        except OSError as error:
            raise DeployError(f"{path} cannot be read; copy the kit again") from error

    def verify(self, signed: Signed, context: bytes, *, name: str, role: str) -> None:
        """Refuse what the member `name`, in the role `role`, has not signed."""
        self._verify(self._member(signed.certificate, name, role), signed, context, name)

    def signer(self, signed: Signed, context: bytes, when: datetime) -> tuple[str, str]:
        """Return name and role of the member that signed something when its certificate was valid.

        For records of the past: a certificate that has expired or was revoked since is no matter.
        """
        found, name, role = self._named(signed.certificate)
        if not found.not_valid_before_utc - _SLACK <= when <= found.not_valid_after_utc + _SLACK:
            raise Refused("identity", f"a certificate of {name} that was not valid then")
        self._verify(found, signed, context, name)
        return name, role

    def _member(self, certificate: bytes, name: str, role: str) -> "Certificate":
        """Return a certificate that is of the expected member, and valid today."""
        found, named, own = self._named(certificate)
        now = datetime.now(UTC)
        for one in (found, self._root):
            if not one.not_valid_before_utc <= now <= one.not_valid_after_utc:
                raise Refused("identity", f"a certificate that is not valid today, of {name}?")
        if (named, own) != (name, role):
            raise Refused("identity", f"signed by {own} {named}, expected {role} {name}")
        self.refuse_revoked(certificate)
        return found

    def refuse_revoked(self, certificate: bytes) -> None:
        """Refuse a certificate that is on the authority's list, as it is now."""
        found, name, _ = self._named(certificate)
        try:
            revoked = self.revocations.current()
        except (OSError, DeployError) as error:
            words = f"{self.revocations.path} cannot be read ({error}); nobody is trusted"
            raise Refused("identity", words) from error
        if revoked.holds(found, name):
            raise Refused("revoked", f"the certificate of {name} was revoked")

    def expires(self, certificate: bytes) -> datetime:
        """Return until when a certificate of this authority is valid."""
        return min(one.not_valid_after_utc for one in (self._named(certificate)[0], self._root))

    def _named(self, certificate: bytes) -> "tuple[Certificate, str, str]":
        """Return a certificate of this authority with the name and the role in it."""
        from cryptography.x509.oid import NameOID

        found = self._issued.get(certificate) or self._checked(certificate)
        named = _common_name(found)
        # Only an admin's certificate has a role in it; the server is the one with its name.
        if found.subject.get_attributes_for_oid(NameOID.UNSTRUCTURED_NAME):
            return found, named, ADMIN
        return found, named, SERVER if named == self.server else NODE

    def _verify(self, found: "Certificate", signed: Signed, context: bytes, name: str) -> None:
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey
        from cryptography.hazmat.primitives.hashes import SHA256

        key = found.public_key()
        if not isinstance(key, RSAPublicKey) or key.key_size < 2048:
            raise Refused("identity", f"{name} has no RSA key of 2048 bits or more")
        try:
            key.verify(signed.signature, _DOMAIN + context, _padding(), SHA256())
        except InvalidSignature:
            raise Refused("identity", f"not what {name} has signed") from None

    def _checked(self, certificate: bytes) -> "Certificate":
        """Read a certificate that this authority issued to a member."""
        from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
        from cryptography.x509 import load_der_x509_certificate

        try:
            found = load_der_x509_certificate(certificate)
            found.verify_directly_issued_by(self._root)
        except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm) as error:
            raise Refused("identity", "a certificate that is not of this federation") from error
        if found == self._root:
            raise Refused("identity", "the authority itself is no member")
        if len(self._issued) >= 4096:
            self._issued.clear()
        self._issued[certificate] = found
        return found


def _padding() -> "PSS":
    from cryptography.hazmat.primitives.asymmetric.padding import MGF1, PSS
    from cryptography.hazmat.primitives.hashes import SHA256

    return PSS(MGF1(SHA256()), PSS.DIGEST_LENGTH)


def _common_name(certificate: "Certificate") -> str:
    named = common_name(certificate)
    if not named:
        raise Refused("identity", "a certificate without a name, or with several")
    return named


def _read_about(folder: Path) -> tuple[str, str, str]:
    """Return a kit's name and role, and the name of its server."""
    path = folder / _ABOUT
    try:
        known = tomllib.loads(path.read_text())
        name, role, host = (str(known[key]) for key in ("name", "role", "host"))
    except (OSError, ValueError, KeyError) as error:
        raise DeployError(f"{path} cannot be read; copy the kit again") from error
    return (server_name(name) if role == SERVER else name), role, server_name(host)
