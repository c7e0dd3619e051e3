"""Write the small part of TOML that experiments use; the standard library only reads it."""

import json
import re
from collections.abc import Mapping
from typing import Any

_BARE = re.compile(r"[A-Za-z0-9_-]+")


def dumps(content: Mapping[str, Any]) -> str:
    """Write values, then tables, then lists of tables; None is left out, for TOML has none."""
    lines = [f"{_key(key)} = {_value(value)}" for key, value in _kept(content) if not _table(value)]
    for key, value in _kept(content):
        if isinstance(value, Mapping):
            lines += ["", f"[{_key(key)}]", *_entries(value)]
    for key, value in _kept(content):
        if _table(value) and not isinstance(value, Mapping):
            for entry in value:
                lines += ["", f"[[{_key(key)}]]", *_entries(entry)]
    return "\n".join(lines).strip() + "\n"


def _entries(content: Mapping[str, Any]) -> list[str]:
    return [f"{_key(key)} = {_value(value)}" for key, value in _kept(content)]


def _kept(content: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return [(key, value) for key, value in content.items() if value is not None]


def _table(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return bool(value) and all(isinstance(entry, Mapping) for entry in value)
    return isinstance(value, Mapping)


def _key(key: str) -> str:
    return key if _BARE.fullmatch(key) else _quoted(key)


def _quoted(text: str) -> str:
    """Quote as JSON does: its escapes are TOML's, save that TOML wants DEL escaped too."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)  # of inf and nan too, it is what TOML calls them
    if isinstance(value, str):
        return _quoted(value)
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_value(inner) for inner in value) + "]"
    if isinstance(value, Mapping):
        inner = ", ".join(_entries(value))
        return "{ " + inner + " }" if inner else "{}"
    raise TypeError(f"TOML has no {type(value).__name__}")
