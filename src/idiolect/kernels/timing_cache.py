"""What was measured on this machine, kept in a JSON file; without a file nothing is kept.

A file that is damaged, or cannot be written, costs a measurement and never a run.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def read(file: Path | None) -> dict[str, Any]:
    """Return what is kept."""
    if file is None or not file.is_file():
        return {}
    try:
        known = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def add(file: Path | None, new: Mapping[str, Any]) -> None:
    """Keep something more, beside what others may have added since."""
    if file is None:
        return
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(f".{os.getpid()}.part")
        part.write_text(json.dumps({**read(file), **new}, indent=1, sort_keys=True))
        part.replace(file)
    except OSError:
        pass
