"""Own text: a column of a table with labels, or what each user wrote, for the next word."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from idiolect.data.arrays import AnyArray, Rows
from idiolect.data.dataset import Dataset
from idiolect.data.own.codes import assembled, client_codes
from idiolect.data.text import sentences, streams
from idiolect.data.text.corpus import Stream, Tokens
from idiolect.errors import DataError


class Reading(NamedTuple):
    """How own text is to be read."""

    text: str  # the column or field of the text
    length: int  # words in an example; 0: 200 of a labelled text, 20 for the next word
    vocabulary: int
    next_word: bool

    @property
    def words(self) -> int:
        """Words in an example."""
        return self.length or (20 if self.next_word else 200)


def labelled(
    path: Path,
    texts: Sequence[Tokens],
    labels: AnyArray,
    clients: AnyArray | None,
    origin: Rows | None,
    reading: Reading,
    form: str,
) -> Dataset:
    """Make a dataset of texts with labels."""
    x, words = sentences(texts, reading.words, reading.vocabulary)
    made = assembled(path, x, labels, clients, origin, form)
    return replace(made, words=words, vocabulary=reading.vocabulary)


def written(path: Path, users: Iterator[Stream] | list[Stream], reading: Reading) -> Dataset:
    """Make a next-word dataset of what users wrote, in the order of their names."""
    made = streams(
        path.stem, users, reading.words, reading.vocabulary, f"The user's own text, {path.name}."
    )
    assert made.clients is not None
    codes, names = client_codes(np.array(made.client_names))
    return replace(made, clients=codes[made.clients], client_names=names)


def read_users(folder: Path, reading: Reading) -> Dataset:
    """Read a file for each user, named after the user: JSON lines, CSV, or text with a line each.

    Lines with a time (`created_utc`) are put in its order; other files are taken as they are.
    """

    def users() -> Iterator[Stream]:
        for file in user_files(folder):
            yield Stream(file.stem, _texts(file, reading.text))

    return written(folder, users(), reading)


def user_files(folder: Path) -> list[Path]:
    """List the files of a per-user folder."""
    return sorted(f for f in folder.iterdir() if f.suffix in (".jsonl", ".csv", ".txt"))


def _texts(file: Path, field: str) -> list[str]:
    try:
        with file.open(encoding="utf-8", newline="") as lines:
            if file.suffix == ".txt":
                return [line.strip() for line in lines if line.strip()]
            rows: list[dict[str, Any]] = (
                list(csv.DictReader(lines))
                if file.suffix == ".csv"
                else [json.loads(line) for line in lines if line.strip()]
            )
        if rows and all(row.get("created_utc") for row in rows):
            rows.sort(key=lambda row: float(row["created_utc"]))
    except (OSError, ValueError, TypeError, AttributeError, RecursionError, csv.Error) as error:
        raise DataError(f"{file} cannot be read ({error}); mend or remove it") from error
    return [_text(row, field, file, number) for number, row in enumerate(rows, 1)]


def _text(row: dict[str, Any], field: str, file: Path, number: int) -> str:
    for name in (field, "body"):  # what Reddit's dumps call it
        if isinstance(row.get(name), str):
            return str(row[name])
    raise DataError(
        f"{file}: entry {number} has no text '{field}'; it has {', '.join(map(str, row))}: name "
        "the field with the option text (data.options.text)"
    )


def leaf_texts(x: Any) -> list[Tokens] | None:
    """Return LEAF's x as texts, where it is text: strings, or words in lists, however nested."""
    if not isinstance(x, list) or not x or not all(_is_text(entry) for entry in x):
        return None
    return [entry if isinstance(entry, str) else list(_flat(entry)) for entry in x]


def _is_text(entry: Any) -> bool:
    if isinstance(entry, list):
        return bool(entry) and all(_is_text(inner) for inner in entry)
    return isinstance(entry, str)


def _flat(entry: list[Any]) -> Iterator[str]:
    for inner in entry:
        if isinstance(inner, list):
            yield from _flat(inner)
        elif inner not in ("<PAD>", "<BOS>", "<EOS>"):  # LEAF's own; ours are put in their place
            yield inner.lower()
