"""What is read from certificates. Light to import."""

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from idiolect.errors import ConfigError

if TYPE_CHECKING:
    from cryptography.x509 import Certificate


def public_bytes(key: Any) -> bytes:
    """Write a public key, the same for the same key."""
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    return bytes(key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo))


def fingerprint(key: Any) -> str:
    """Write a public key so that two people can compare it: SHA-256, in groups of four."""
    digest = hashlib.sha256(public_bytes(key)).hexdigest()
    return " ".join(digest[place : place + 4] for place in range(0, 64, 4))


def same_fingerprint(given: str, found: str) -> bool:
    """Compare fingerprints, whatever stands between the digits."""
    digits = ["".join(c for c in one.lower() if c in "0123456789abcdef") for one in (given, found)]
    return digits[0] == digits[1]


def common_name(certificate: Any) -> str:
    """Return the name in a certificate, or in a request for one; empty without, or with several."""
    from cryptography.x509.oid import NameOID

    named = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    value = named[0].value if len(named) == 1 else ""
    return value if isinstance(value, str) else ""


def read_certificate(path: Path) -> "Certificate":
    """Read a certificate's file."""
    from cryptography.x509 import load_pem_x509_certificate

    try:
        return load_pem_x509_certificate(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is no certificate ({type(error).__name__})") from error
