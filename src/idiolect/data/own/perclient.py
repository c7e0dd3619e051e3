"""Own data already divided by client: PFLlib's npz files and LEAF's JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from idiolect.data.arrays import AnyArray
from idiolect.data.dataset import Dataset
from idiolect.data.own.codes import assembled, examples
from idiolect.data.own.texts import Reading, labelled, leaf_texts, written
from idiolect.data.text.corpus import Stream
from idiolect.errors import DataError

# (client, origin, x, y) of one client in one file
_Piece = tuple[str, int, AnyArray, AnyArray]


def read_pfllib(folder: Path) -> Dataset:
    """Read PFLlib's layout: train/0.npz, test/0.npz and so on, one client per number.

    Each holds the arrays x and y. PFLlib itself writes them as one pickled object, `data`; loading
    a pickle runs whatever code it contains, so such files have to be written anew.
    """
    pieces: list[_Piece] = []
    for origin, part in enumerate(("train", "test")):
        files = sorted((folder / part).glob("*.npz"), key=lambda file: (len(file.stem), file.stem))
        for file in files:
            try:
                with np.load(file, allow_pickle=False) as arrays:
                    if "data" in arrays and "x" not in arrays:
                        raise DataError(
                            f"{file} is a pickle, and loading one can run any code its author put "
                            "there, so it is not read. If you trust the files, write each anew: "
                            "data = numpy.load(file, allow_pickle=True)['data'].item(); "
                            "numpy.savez(file, x=data['x'], y=data['y'])"
                        )
                    x, y = arrays["x"], arrays["y"]
            except (KeyError, ValueError, TypeError, OSError) as error:
                raise DataError(
                    f"{file} cannot be read ({error!r}); expected an npz with plain arrays x and y"
                ) from error
            pieces.append((f"client {file.stem}", origin, x, y))
    return _joined(folder, pieces, "PFLlib folder")


def read_leaf(path: Path, reading: Reading) -> Dataset:
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
    users = [(*user, origin) for file, origin in files for user in _leaf_users(file)]
    texts = [(user, leaf_texts(held["x"]), held, origin) for user, held, origin in users]
    texts = [entry for entry in texts if len(entry[2]["x"])]
    if reading.next_word:
        wrong = next((user for user, found, _, _ in texts if found is None), None)
        if wrong is not None:
            raise DataError(f"{path}: user '{wrong}' holds no text, which next_word needs")
        streams = [Stream(user, found or (), origin) for user, found, _, origin in texts]
        return written(path, streams, reading)
    if texts and all(found is not None for _, found, _, _ in texts):
        sizes = [len(found or ()) for _, found, _, _ in texts]
        origins = np.repeat([origin for *_, origin in texts], sizes)
        return labelled(
            path,
            [text for _, found, _, _ in texts for text in found or ()],
            np.concatenate([_array(path, user, held["y"], "y") for user, _, held, _ in texts]),
            np.repeat([user for user, *_ in texts], sizes),
            origins.astype(np.int64) if origins.any() else None,
            reading,
            "LEAF data",
        )
    pieces = [
        (user, origin, _array(path, user, held["x"], "x"), _array(path, user, held["y"], "y"))
        for user, _, held, origin in texts
    ]
    return _joined(path, pieces, "LEAF data")


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


def _leaf_users(file: Path) -> list[tuple[str, dict[str, Any]]]:
    try:
        held: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        users = [(str(user), held["user_data"][user]) for user in held["users"]]
        sizes = [(user, len(data["x"]), len(data["y"])) for user, data in users]
    except (ValueError, KeyError, TypeError, RecursionError, OSError) as error:
        raise DataError(
            f"{file} is not LEAF's JSON ({error!r}); expected users, and user_data with x and y "
            "for each user"
        ) from error
    for user, held_x, held_y in sizes:
        if held_x != held_y:
            raise DataError(
                f"{file}: user '{user}' has {held_x} x and {held_y} y; expected as many"
            )
    return users


def _joined(path: Path, pieces: list[_Piece], form: str) -> Dataset:
    pieces = [piece for piece in pieces if len(piece[2])]
    if not pieces:
        raise DataError(f"{path} has no rows; expected at least one client with examples")
    shape = pieces[0][2].shape[1:]
    for name, _, x, _ in pieces:
        if x.shape[1:] != shape:
            raise DataError(
                f"{path}: {name} has examples of shape {x.shape[1:]} and {pieces[0][0]} of {shape}"
                "; expected one shape"
            )
    origin = np.repeat([piece[1] for piece in pieces], [len(piece[2]) for piece in pieces])
    clients = np.repeat([piece[0] for piece in pieces], [len(piece[2]) for piece in pieces])
    return assembled(
        path,
        examples(np.concatenate([piece[2] for piece in pieces]), str(path)),
        np.concatenate([piece[3] for piece in pieces]),
        clients,
        origin.astype(np.int64) if origin.any() else None,
        form,
    )
