"""What a lead signs when it submits: who asks for which run of which experiment.

A node believes a submitter's name by this signature, not because its server says so.
"""

import base64
import hashlib
import json
from pathlib import Path
from typing import Any

from idiolect.deploy.identity import ADMIN, Authority, Identity, Signed
from idiolect.deploy.protocol import Refused


def sign(kit: Path, run: str, kind: str, experiment: str) -> str:
    """Sign a submission with an admin's kit; `experiment` is its text, empty to `adapt`."""
    own = Identity.from_kit(kit)
    statement = json.dumps(
        {"submitter": own.name, "run": run, "kind": kind, "experiment": _digest(experiment)},
        sort_keys=True,
    )
    signed = own.sign(_context(statement))
    whole = {
        "statement": statement,
        "certificate": base64.b64encode(signed.certificate).decode(),
        "signature": base64.b64encode(signed.signature).decode(),
    }
    return base64.b64encode(json.dumps(whole).encode()).decode()


def verify(
    authority: Authority, given: Any, submitter: str, run: str, kind: str, experiment: str
) -> bytes:
    """Refuse a run that its submitter has not signed for; return the submitter's certificate."""
    try:
        whole = json.loads(base64.b64decode(given, validate=True))
        statement = whole["statement"]
        signed = Signed(
            *(base64.b64decode(whole[key], validate=True) for key in ("certificate", "signature"))
        )
        found = json.loads(statement)
        told = [found[key] for key in ("submitter", "run", "kind", "experiment")]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise Refused("submitter", f"nobody's signature is on run {run}") from error
    text = "" if kind == "adapt" else experiment  # newcomers get the text of the run that is over
    if told != [submitter, run, kind, _digest(text)]:
        raise Refused("submitter", f"{submitter} signed for something else than run {run}")
    authority.verify(signed, _context(statement), name=submitter, role=ADMIN)
    return signed.certificate


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest() if text else ""


def _context(statement: str) -> bytes:
    return b"submission\0" + statement.encode()
