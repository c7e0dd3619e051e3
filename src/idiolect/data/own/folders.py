"""Own data in folders: PFLlib's and LEAF's clients, a text file for each user."""

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from idiolect.data.dataset import AnyArray, Dataset, Rows
from idiolect.data.own.json_lines import json_lines_texts
from idiolect.data.own.pickled_arrays import read_pickled
from idiolect.data.own.tables import (
    ReadOptions,
    assembled,
    examples,
    labelled_texts,
    next_word_texts,
)
from idiolect.data.text import Tokens, UserText
from idiolect.errors import DataError


class _Share(NamedTuple):
    """The examples of one client in one file."""

    client: str
    origin: int  # 0 train, 1 test
    x: Any
    y: Any


def _owners(shares: list[_Share]) -> tuple[AnyArray, Rows | None]:
    """Return the client and the origin of each example."""
    sizes = [len(share.x) for share in shares]
    origin = np.repeat([share.origin for share in shares], sizes).astype(np.int64)
    return np.repeat([share.client for share in shares], sizes), origin if origin.any() else None


def read_pfllib(folder: Path) -> Dataset:
    """Read PFLlib's layout: train/0.npz, test/0.npz and so on, one client per number.

    Each holds the arrays x and y, plain or, as PFLlib writes them, pickled in one object, `data`.
    """
    shares = []
    for origin, part in enumerate(("train", "test")):
        files = sorted((folder / part).glob("*.npz"), key=lambda file: (len(file.stem), file.stem))
        for file in files:
            try:
                with np.load(file, allow_pickle=False) as arrays:
                    if "data" in arrays and "x" not in arrays:
                        x, y = read_pickled(file, "data", ("x", "y"))
                    else:
                        x, y = arrays["x"], arrays["y"]
            except (KeyError, ValueError, TypeError, OSError) as error:
                raise DataError(
                    f"{file} cannot be read ({_said(error)}); expected an npz with plain arrays x "
                    "and y"
                ) from error
            if not x.ndim or y.shape != x.shape[:1] or "O" in (x.dtype.kind, y.dtype.kind):
                raise DataError(
                    f"{file}: x has shape {x.shape} and type {x.dtype}, y {y.shape} and {y.dtype}; "
                    "expected numbers, and one y for each example"
                )
            shares.append(_Share(f"client {file.stem}", origin, x, y))
    return _joined(folder, shares, "PFLlib folder")


def read_leaf(path: Path, options: ReadOptions) -> Dataset:
    """Read LEAF's JSON: users and user_data, in one file or in folders train and test.

    Where x is text it is learnt with its y, or, for the next word, without it.
    """
    if path.is_file():
        files = [(path, 0)]
    elif (path / "train").is_dir():
        parts = enumerate(("train", "test"))
        files = [(f, n) for n, part in parts for f in sorted((path / part).glob("*.json"))]
    else:
        files = [(file, 0) for file in sorted(path.glob("*.json"))]
    shares = [share for file, origin in files for share in _leaf_shares(file, origin)]
    texts = [_leaf_texts(share.x) for share in shares]
    if options.next_word:
        users = []
        for share, own in zip(shares, texts, strict=True):
            if own is None:
                raise DataError(f"{path}: user '{share.client}' has no text, which next_word needs")
            users.append(UserText(share.client, own, share.origin))
        return next_word_texts(path, users, options)
    y = [_array(path, share.client, share.y, "y") for share in shares]
    if shares and None not in texts:
        flat = [text for own in texts for text in own or ()]
        clients, origin = _owners(shares)
        return labelled_texts(path, flat, np.concatenate(y), clients, origin, options, "LEAF data")
    x = [_array(path, share.client, share.x, "x") for share in shares]
    shares = [s._replace(x=own, y=labels) for s, own, labels in zip(shares, x, y, strict=True)]
    return _joined(path, shares, "LEAF data")


def _array(path: Path, user: str, values: Any, name: str) -> AnyArray:
    """Make an array of nested lists; those of unequal length make none."""
    try:
        made = np.asarray(values)
    except (ValueError, OverflowError) as error:
        raise DataError(
            f"{path}: {name} of user '{user}' is no array ({error}); expected lists of one length"
        ) from error
    if made.dtype.kind not in "biufU" or (name == "y" and made.ndim != 1):
        raise DataError(
            f"{path}: {name} of user '{user}' is of type {made.dtype} and shape {made.shape}; "
            f"expected {'one label' if name == 'y' else 'numbers'} for each example"
        )
    return made


def _leaf_shares(file: Path, origin: int) -> list[_Share]:
    """Read the users of one file who have examples."""
    try:
        held: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        users = [(str(user), held["user_data"][user]) for user in held["users"]]
        shares = [_Share(user, origin, data["x"], data["y"]) for user, data in users]
        sizes = [(len(share.x), len(share.y)) for share in shares]
    except (ValueError, KeyError, TypeError, RecursionError, OSError) as error:
        raise DataError(
            f"{file} is not LEAF's JSON ({_said(error)}); expected users, and user_data with x "
            "and y for each user"
        ) from error
    for share, (x, y) in zip(shares, sizes, strict=True):
        if x != y:
            raise DataError(f"{file}: user '{share.client}' has {x} x and {y} y; expected as many")
    return [share for share in shares if len(share.x)]


def _said(error: Exception) -> str:
    """Put into words what a file lacks."""
    if isinstance(error, KeyError):
        return f"it has no {error}"
    return str(error) or type(error).__name__


def _joined(path: Path, shares: list[_Share], form: str) -> Dataset:
    shares = [share for share in shares if len(share.x)]
    if not shares:
        raise DataError(f"{path} has no rows; expected at least one client with examples")
    first = shares[0]
    for share in shares:
        if share.x.shape[1:] != first.x.shape[1:]:
            raise DataError(
                f"{path}: {share.client} has examples of shape {share.x.shape[1:]} and "
                f"{first.client} of {first.x.shape[1:]}; expected one shape"
            )
    x = examples(np.concatenate([share.x for share in shares]), str(path))
    clients, origin = _owners(shares)
    labels = np.concatenate([share.y for share in shares])
    return assembled(path, x, labels, clients, origin, form)


def read_user_files(folder: Path, options: ReadOptions) -> Dataset:
    """Read a file for each user, named after the user: JSON lines, CSV, or text with a line each.

    Rows with a time (`created_utc`) are put in its order; other files are taken as they are.
    """
    users = (UserText(file.stem, _texts(file, options)) for file in user_files(folder))
    return next_word_texts(folder, users, options)


def user_files(folder: Path) -> list[Path]:
    """List the files of a per-user folder."""
    return sorted(f for f in folder.iterdir() if f.suffix in (".jsonl", ".csv", ".txt"))


def _texts(file: Path, options: ReadOptions) -> list[Tokens]:
    if file.suffix == ".jsonl":
        return json_lines_texts(file, options)
    try:
        with file.open(encoding="utf-8", newline="") as lines:
            if file.suffix == ".txt":
                return [line.strip() for line in lines if line.strip()]
            rows: list[dict[str, Any]] = list(csv.DictReader(lines))
        if rows and all(row.get("created_utc") for row in rows):
            rows.sort(key=lambda row: float(row["created_utc"]))
    except (OSError, ValueError, TypeError, AttributeError, RecursionError, csv.Error) as error:
        raise DataError(f"{file} cannot be read ({error}); mend or remove it") from error
    return [_text(row, options.text, file, number) for number, row in enumerate(rows, 1)]


def _text(row: dict[str, Any], field: str, file: Path, number: int) -> str:
    for name in (field, "body"):  # what Reddit's dumps call it
        if isinstance(row.get(name), str):
            return str(row[name])
    raise DataError(
        f"{file}: entry {number} has no text '{field}'; it has {', '.join(map(str, row))}: name "
        "the field with the option text (data.options.text)"
    )


def _leaf_texts(x: Any) -> list[Tokens] | None:
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
