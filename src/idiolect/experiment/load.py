"""From a TOML file and --set options to a raw table, with errors that name the place."""

import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from idiolect.errors import ConfigError
from idiolect.experiment.suggestions import meant
from idiolect.methods import METHODS

Raw = dict[str, Any]

_DEPTH = 20  # tables in tables that a file may have


def read_toml(path: Path, wanted: str = "an experiment file") -> Raw:
    """Read a file; a slip of syntax is told with its line and column."""
    try:
        return parse_toml(path.read_text(encoding="utf-8"), str(path))
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist; give the path of {wanted}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not UTF-8 text; expected a TOML file") from None
    except OSError as error:
        raise ConfigError(
            f"cannot read {path}: {error.strerror}; give the path of {wanted}"
        ) from error


def parse_toml(text: str, where: str) -> Raw:
    """Parse TOML text."""
    try:
        raw = tomllib.loads(text)
        if _deeper(raw, _DEPTH):
            raise RecursionError
        return raw
    except RecursionError:
        raise ConfigError(f"{where}: tables nested deeper than {_DEPTH}; take some out") from None
    except tomllib.TOMLDecodeError as error:
        said = str(error)
        place = re.search(r"\(at (?:line (\d+), column (\d+)|end of document)\)", said)
        line = f":{place[1]}:{place[2]}" if place and place[1] else ""
        raise ConfigError(f"{where}{line}: not valid TOML: {said}") from None


def _deeper(value: Any, depth: int) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return any(depth == 0 or _deeper(one, depth - 1) for one in inner)


def with_overrides(raw: Raw, overrides: Sequence[str]) -> Raw:
    """Apply --set key=value in turn; keys are those of the file, methods also by label or name."""
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"--set {override!r}: expected key=value, such as training.lr=0.1")
        raw = _put(raw, _steps(raw, key.strip(), override), _parsed(value.strip()), override)
    return raw


def _parsed(value: str) -> Any:
    """Read a value as TOML; a bare word is a string."""
    try:
        return tomllib.loads(f"value = {value}")["value"]
    except (tomllib.TOMLDecodeError, RecursionError):
        return value


def _steps(raw: Raw, key: str, override: str) -> list[str | int]:
    """Part a dotted key; `methods.LABEL.lr` becomes `methods[place].lr`."""
    if found := re.fullmatch(r"methods\[(\d+)\]\.(.+)", key):
        place = int(found[1])
        if place >= len(raw.get("methods", ())):
            raise ConfigError(
                f"--set {override!r}: there are {len(raw.get('methods', ()))} methods"
            )
        return ["methods", place, found[2]]
    if not key.startswith("methods."):
        return list(key.split("."))
    rest = key.removeprefix("methods.")
    names = []
    for place, method in enumerate(raw.get("methods", ())):
        own = method.get("name")
        shown = METHODS[own].title if own in METHODS else None  # its label, where none is given
        for name in (method.get("label") or shown, own):
            names += [name] if name else []
            if name and rest.startswith(f"{name}."):
                return ["methods", place, rest.removeprefix(f"{name}.")]
    raise ConfigError(f"--set {override!r}: unknown method {meant(rest.rpartition('.')[0], names)}")


def _put(table: Any, steps: Sequence[str | int], value: Any, override: str) -> Any:
    """Return the table with one value replaced; a bare name grows into a table of its options."""
    if not steps:
        return value
    first, rest = steps[0], steps[1:]
    if isinstance(first, int):
        return [
            _put(entry, rest, value, override) if place == first else entry
            for place, entry in enumerate(table)
        ]
    if isinstance(table, str):
        table = {"name": table}
    if not isinstance(table, dict):
        raise ConfigError(f"--set {override!r}: {first!r} lies in {table!r}, which is no table")
    return {**table, first: _put(table.get(first, {}), rest, value, override)}
