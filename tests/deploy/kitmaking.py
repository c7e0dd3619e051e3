"""Kits with keys and certificates only, as the engine would provision them, in milliseconds."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

HOST = "hub.example.org"


def _name(common, role=None):
    parts = [x509.NameAttribute(NameOID.COMMON_NAME, common)]
    if role:
        parts.append(x509.NameAttribute(NameOID.UNSTRUCTURED_NAME, role))
    return x509.Name(parts)


class Maker:
    """An authority that makes kits in a folder."""

    def __init__(self, folder: Path, name: str = "test") -> None:
        self.folder, self._name = folder, name
        self._key = rsa.generate_private_key(65537, 2048)
        self.root = self._issued(_name(name), self._key.public_key(), ca=True)

    def _issued(self, subject, key, ca=False, start=-1, days=360, signer=None):
        now = datetime.now(UTC) + timedelta(days=start)
        made = x509.CertificateBuilder(
            issuer_name=_name(self._name),
            subject_name=subject,
            public_key=key,
            serial_number=x509.random_serial_number(),
            not_valid_before=now,
            not_valid_after=now + timedelta(days=days),
        ).add_extension(x509.BasicConstraints(ca, None), critical=True)
        return made.sign(signer or self._key, SHA256())

    def kit(self, name, role="node", *, common=None, rights=None, signer=None, start=-1, days=360):
        """Make a kit; the certificate may be made wrong in one way or another."""
        folder = self.folder / name
        (folder / "startup").mkdir(parents=True)
        key = rsa.generate_private_key(65537, 2048)
        rights = rights or ("lead" if role == "admin" else None)
        found = self._issued(
            _name(common or name, rights), key.public_key(), start=start, days=days, signer=signer
        )
        base = "server" if role == "server" else "client"
        plain = key.private_bytes(Encoding.PEM, PrivateFormat.TraditionalOpenSSL, NoEncryption())
        (folder / "startup" / f"{base}.key").write_bytes(plain)
        (folder / "startup" / f"{base}.crt").write_bytes(found.public_bytes(Encoding.PEM))
        (folder / "startup" / "rootCA.pem").write_bytes(self.root.public_bytes(Encoding.PEM))
        about = f'name = "{common or name}"\nrole = "{role}"\nhost = "{HOST}"\n'
        (folder / "idiolect.toml").write_text(about)
        return folder
