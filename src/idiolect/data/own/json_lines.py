"""JSON lines: what clients wrote or said, a line each.

A line is `{"client": "anna", "text": "..."}`, or has `messages`, a list of `{"role", "content"}`,
in place of `text`; `label` makes it an example of a class, `split` (train or test) says which part
it is of. In a folder a file is a client's, unless its lines say otherwise.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from idiolect.data.dataset import AnyArray, Dataset
from idiolect.data.own.tables import ReadOptions, labelled_texts, next_word_texts, unlabelled
from idiolect.data.text import Chat, Tokens, UserText
from idiolect.errors import DataError

_EXAMPLE = '{"client": "anna", "text": "..."}'
_TIME = "created_utc"  # by which the lines of a file are put in order, where all have it


class _Line(NamedTuple):
    """One line; None for what it does not say."""

    where: str  # file:line, for messages
    client: str | None
    text: Tokens
    label: str | None
    origin: int  # 0 train, 1 test
    time: float | None


def json_lines_files(folder: Path) -> list[Path]:
    """List the .jsonl files of a folder."""
    return sorted(file for file in folder.iterdir() if file.suffix == ".jsonl")


def json_lines_texts(file: Path, options: ReadOptions) -> list[Tokens]:
    """Return the texts of a file that is one user's."""
    return [line.text for line in _in_order(file, options, True)]


def read_json_lines(path: Path, options: ReadOptions) -> Dataset:
    """Read a .jsonl file, or every one of a folder.

    With labels they are texts of classes; without, each next word is predicted.
    """
    files = json_lines_files(path) if path.is_dir() else [path]
    lines = [line for file in files for line in _in_order(file, options, path.is_dir())]
    if not lines:
        raise DataError(f"{path} has no line; expected lines such as {_EXAMPLE}")
    owners = [line.client for line in lines]
    clients = np.array(owners) if _all_have(lines, "client", owners, options.client) else None
    labels = [line.label for line in lines]
    labelled = not options.next_word and (
        _all_have(lines, "label", labels, options.label) if options.labelled else None not in labels
    )
    if options.next_word or (options.labelled and not labelled):
        return _next_words(path, lines, clients, options._replace(next_word=True))
    parts = np.array([line.origin for line in lines], np.int64)
    return labelled_texts(
        path,
        [line.text for line in lines],
        np.array(labels) if labelled else unlabelled(len(lines)),
        clients,
        parts if parts.any() else None,
        options,
        "JSON lines",
    )


def _all_have(lines: Sequence[_Line], what: str, found: Sequence[str | None], key: str) -> bool:
    """Say whether all lines have something; some with and some without are refused."""
    absent = [one is None for one in found]
    if any(absent) and not all(absent):
        raise DataError(
            f"{lines[absent.index(True)].where} has no {what} ('{key}'), and other lines have; "
            "give every line one"
        )
    return not any(absent)


def _next_words(
    path: Path, lines: Sequence[_Line], clients: AnyArray | None, options: ReadOptions
) -> Dataset:
    held: dict[tuple[int, str], list[Tokens]] = {}
    for row, line in enumerate(lines):
        user = "all" if clients is None else str(clients[row])
        held.setdefault((line.origin, user), []).append(line.text)
    users = [UserText(user, texts, part) for (part, user), texts in sorted(held.items())]
    made = next_word_texts(path, users, options)
    return made if clients is not None else replace(made, clients=None, client_names=())


def _in_order(file: Path, options: ReadOptions, owned: bool) -> list[_Line]:
    """Read a file's lines, in the order of their times where all have one."""
    lines = list(_lines(file, options, file.stem if owned else None))
    if any(line.time is None for line in lines):
        return lines
    return sorted(lines, key=lambda line: line.time or 0.0)


def _lines(file: Path, options: ReadOptions, owner: str | None) -> Iterator[_Line]:
    try:
        with file.open(encoding="utf-8-sig") as opened:  # with a mark of its encoding, or without
            for number, raw in enumerate(opened, 1):
                if raw.strip():
                    yield _line(raw, f"{file}:{number}", options, owner)
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file} cannot be read ({error}); expected JSON lines in UTF-8") from error


def _line(raw: str, where: str, options: ReadOptions, owner: str | None) -> _Line:
    try:
        held = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where} is no JSON ({error}); expected a line {_EXAMPLE}") from error
    if not isinstance(held, dict):
        raise DataError(f"{where} is no object; expected a line {_EXAMPLE}")
    if "\\ud" in raw.lower():  # only written so can there be any
        _refuse_halves(held, where)
    client, label = (_name(held, key, where) for key in (options.client, options.label))
    part = held.get(options.split, "train")
    if part not in ("train", "test"):
        raise DataError(f"{where}: {options.split} is {part!r}; expected train or test")
    time = held.get(_TIME)
    try:
        when = None if time is None else float(time)
    except (TypeError, ValueError):
        raise DataError(f"{where}: {_TIME} is {time!r}; expected a number of seconds") from None
    text = _text(held, where, options)
    return _Line(where, client or owner, text, label, int(part == "test"), when)


def _refuse_halves(held: Any, where: str) -> None:
    """Refuse text with half of a character, which no file or tokeniser can hold."""
    parts = held.values() if isinstance(held, dict) else held if isinstance(held, list) else ()
    for one in parts:
        _refuse_halves(one, where)
    if isinstance(held, str):
        try:
            held.encode()
        except UnicodeEncodeError as error:
            half = ascii(held[error.start])[1:-1]
            raise DataError(f"{where} has half of a character ({half}); mend or drop it") from None


def _name(held: dict[str, Any], key: str, where: str) -> str | None:
    """Return whose a line is, or its class."""
    value = held.get(key)
    if value is None:
        return None
    if not isinstance(value, str | int | float) or value == "":
        raise DataError(f"{where}: {key} is {value!r}; expected a name or a number")
    return str(value)


def _text(held: dict[str, Any], where: str, options: ReadOptions) -> Tokens:
    found = next((held[key] for key in (options.text, "body") if held.get(key) is not None), None)
    if isinstance(found, str) and found.strip():
        return found
    if found is not None:
        raise DataError(f"{where}: {options.text} is {found!r}; expected some words")
    if "messages" not in held:
        raise DataError(
            f"{where} has neither '{options.text}' nor 'messages'; it has {', '.join(held)}: name "
            "the field with the option text (data.options.text)"
        )
    messages = held["messages"]
    if not isinstance(messages, list) or not messages:
        raise DataError(f"{where}: messages is {messages!r:.40}; expected a list of messages")
    parts: list[tuple[str, bool]] = []
    for place, one in enumerate(messages):
        role, said = (one.get(k) if isinstance(one, dict) else None for k in ("role", "content"))
        if not isinstance(role, str) or not isinstance(said, str) or not role:
            raise DataError(
                f'{where}: messages[{place}] is {one!r:.60}; expected {{"role": "user", "content": '
                '"..."} with text'
            )
        wanted = options.learn in ("", role)
        parts += [(f"{role}: ", options.learn == ""), (f"{said}\n", wanted)]
    if not any(said.strip() for said, _ in parts[1::2]):
        raise DataError(f"{where}: no message has a word; expected some")
    return Chat(tuple(parts))
