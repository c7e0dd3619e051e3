"""Who signed a message: keys and certificates of the members' kits, under the federation's root.

A kit holds a private key and a certificate that the federation's authority signed; it names the
member, and of an admin the role. `Identity` signs with the key; `Authority` checks a signature:
that the certificate is of this authority, valid today, of the expected member in the expected role,
and that the signature is of exactly these bytes.
"""

import tomllib
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from idiolect.deploy.refusals import Refused
from idiolect.errors import DeployError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.padding import PSS
    from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey, RSAPublicKey
    from cryptography.x509 import Certificate

# The kits' keys sign for TLS and for the engine too. What we sign begins with these bytes and has
# salts of another length than theirs, so that no signature of one can pass for one of another.
_DOMAIN = b"idiolect signature 1\0"
_ABOUT = "idiolect.toml"  # what a kit says about itself
_STARTUP = "startup"  # in a kit: key, certificate and the authority's certificate
_CN_LIMIT = 64  # characters of a name in a certificate; the engine cuts a longer host name

SERVER, NODE, ADMIN = "server", "node", "admin"


class Signed(NamedTuple):
    """A signature and the certificate (DER) of the key it was made with."""

    certificate: bytes
    signature: bytes


def server_name(host: str) -> str:
    """Return the name that the server's certificate has."""
    return host[:_CN_LIMIT]


class Identity:
    """A member that can sign: its name, its role and its private key."""

    def __init__(self, name: str, role: str, key: "RSAPrivateKey", certificate: bytes) -> None:
        self.name = name
        self.role = role
        self.certificate = certificate
        self._key = key

    @classmethod
    def from_kit(cls, folder: Path) -> "Identity":
        """Read the identity of a kit's owner; the certificate must be of the name it goes by."""
        from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey
        from cryptography.hazmat.primitives.serialization import (
            Encoding,
            PublicFormat,
            load_pem_private_key,
        )
        from cryptography.x509 import load_pem_x509_certificate

        name, role, _ = _about(folder)
        base = folder / _STARTUP / (SERVER if role == SERVER else "client")
        try:
            key = load_pem_private_key(base.with_suffix(".key").read_bytes(), password=None)
            found = load_pem_x509_certificate(base.with_suffix(".crt").read_bytes())
            named = _common_name(found)
        except (OSError, ValueError, TypeError, Refused) as error:
            raise DeployError(
                f"{base}.key or .crt cannot be read ({type(error).__name__}); copy the kit again"
            ) from error
        if not isinstance(key, RSAPrivateKey):
            raise DeployError(f"{base}.key is no RSA key; make the kit anew")
        form = Encoding.DER, PublicFormat.SubjectPublicKeyInfo
        if key.public_key().public_bytes(*form) != found.public_key().public_bytes(*form):
            raise DeployError(f"{base}.key is not the key of {base}.crt; copy the kit again")
        if named != name:
            raise DeployError(
                f"the kit {folder} says it is of {name!r}, and its certificate is of {named!r}; "
                "copy the kit again"
            )
        return cls(name, role, key, found.public_bytes(Encoding.DER))

    def sign(self, context: bytes) -> Signed:
        """Sign bytes; they must say all that the signature is to be bound to."""
        from cryptography.hazmat.primitives.hashes import SHA256

        return Signed(self.certificate, self._key.sign(_DOMAIN + context, _padding(), SHA256()))


class Authority:
    """The federation's root certificate: says whether a member signed something."""

    def __init__(self, root: bytes, server: str) -> None:
        """`root`: the authority's certificate as PEM; `server`: the name of the server's."""
        from cryptography.x509 import load_pem_x509_certificate

        try:
            self._root = load_pem_x509_certificate(root)
        except ValueError as error:
            raise DeployError(
                "the authority's certificate is damaged; copy the kit again"
            ) from error
        self.server = server
        self._issued: dict[bytes, Certificate] = {}  # certificates whose issuer was checked

    @classmethod
    def from_kit(cls, folder: Path) -> "Authority":
        """Read the root certificate of a kit, and the name of the kit's server."""
        path = folder / _STARTUP / "rootCA.pem"
        try:
            return cls(path.read_bytes(), _about(folder)[2])
        except OSError as error:
            raise DeployError(f"{path} cannot be read; copy the kit again") from error

    def verify(self, signed: Signed, context: bytes, *, name: str, role: str) -> None:
        """Refuse what the member `name`, in the role `role`, has not signed."""
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.hashes import SHA256

        key = self._member(signed.certificate, name, role)
        try:
            key.verify(signed.signature, _DOMAIN + context, _padding(), SHA256())
        except InvalidSignature:
            raise Refused("identity", f"not what {name} has signed") from None

    def _member(self, certificate: bytes, name: str, role: str) -> "RSAPublicKey":
        """Return the key of a certificate that is of the expected member, and valid today."""
        from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey
        from cryptography.x509.oid import NameOID

        found = self._issued.get(certificate) or self._checked(certificate)
        now = datetime.now(UTC)
        for one in (found, self._root):
            if not one.not_valid_before_utc <= now <= one.not_valid_after_utc:
                raise Refused("identity", f"a certificate that is not valid today, of {name}?")
        named = _common_name(found)
        # Only an admin's certificate has a role in it; the server is the one with its name.
        if found.subject.get_attributes_for_oid(NameOID.UNSTRUCTURED_NAME):
            own = ADMIN
        else:
            own = SERVER if named == self.server else NODE
        if (named, own) != (name, role):
            raise Refused("identity", f"signed by {own} {named}, expected {role} {name}")
        key = found.public_key()
        if not isinstance(key, RSAPublicKey) or key.key_size < 2048:
            raise Refused("identity", f"{name} has no RSA key of 2048 bits or more")
        return key

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
    from cryptography.x509.oid import NameOID

    named = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    if len(named) != 1 or not isinstance(named[0].value, str):
        raise Refused("identity", "a certificate without a name, or with several")
    return named[0].value


def _about(folder: Path) -> tuple[str, str, str]:
    """Return a kit's name and role, and the name of its server."""
    path = folder / _ABOUT
    try:
        known = tomllib.loads(path.read_text())
        name, role, host = (str(known[key]) for key in ("name", "role", "host"))
    except (OSError, ValueError, KeyError) as error:
        raise DeployError(f"{path} cannot be read; copy the kit again") from error
    return (server_name(name) if role == SERVER else name), role, server_name(host)
