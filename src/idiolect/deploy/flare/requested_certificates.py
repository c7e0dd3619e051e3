"""FLARE's certificate builder, for members that made their own keys too."""

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from nvflare.lighter.constants import ParticipantType, PropKey
from nvflare.lighter.impl.cert import DEFAULT_CERT_VALID_DAYS, CertBuilder
from nvflare.lighter.utils import serialize_cert


class RequestedCertificates(CertBuilder):  # type: ignore[misc]
    """Signs the public keys that are given, and makes pairs for everyone else."""

    def __init__(self, root_valid_days: int, requested: Mapping[str, bytes]) -> None:
        super().__init__(root_valid_days)
        self._requested = requested

    def _build_write_cert_pair(self, participant: Any, base_name: str, ctx: Any) -> None:
        from cryptography.hazmat.primitives.serialization import load_pem_public_key

        pem = self._requested.get(participant.name)
        if pem is None:
            super()._build_write_cert_pair(participant, base_name, ctx)
            return
        folder = Path(ctx.get_kit_dir(participant))
        made = self._signed(participant, load_pem_public_key(pem))
        (folder / f"{base_name}.crt").write_bytes(serialize_cert(made))
        (folder / "rootCA.pem").write_bytes(self.serialized_cert)

    def _signed(self, participant: Any, key: Any) -> Any:
        """Sign a key as FLARE signs those it makes itself: the same names, roles and time."""
        now, end = datetime.now(UTC), self.root_cert.not_valid_after_utc
        admin, server = ParticipantType.ADMIN, ParticipantType.SERVER
        return self._generate_cert(
            participant.subject,
            participant.org,
            self.issuer,
            self.pri_key,
            key,
            role=participant.get_prop(PropKey.ROLE) if participant.type == admin else None,
            server=participant if participant.type == server else None,
            not_valid_before=now,
            not_valid_after=min(end, now + timedelta(days=DEFAULT_CERT_VALID_DAYS)),
        )
