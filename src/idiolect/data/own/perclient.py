"""Own data already divided by client: PFLlib's npz files and LEAF's JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from idiolect.data.arrays import AnyArray
from idiolect.data.dataset import Dataset
from idiolect.data.own.codes import assembled, examples
from idiolect.errors import DataError

# (client, origin, x, y) of one client in one file
_Piece = tuple[str, int, AnyArray, AnyArray]


def read_pfllib(folder: Path, allow_pickle: bool) -> Dataset:
    """Read PFLlib's layout: train/0.npz, test/0.npz and so on, one client per number.

    The files hold pickled objects, and loading a pickle runs whatever code it contains.
    """
    if not allow_pickle:
        raise DataError(
            f"{folder} is in PFLlib's layout, whose files are pickles: loading one can run any "
            "code its author put there. If you made or trust the files, set allow_pickle = true "
            "(data.options.allow_pickle, --allow-pickle)"
        )
    pieces: list[_Piece] = []
    for origin, part in enumerate(("train", "test")):
        files = sorted((folder / part).glob("*.npz"), key=lambda file: (len(file.stem), file.stem))
        for file in files:
            try:
                with np.load(file, allow_pickle=True) as arrays:
                    held = arrays["data"].item()
                x, y = np.asarray(held["x"]), np.asarray(held["y"])
            except (KeyError, ValueError, TypeError, OSError) as error:
                raise DataError(
                    f"{file} cannot be read ({error!r}); expected an npz whose 'data' is a "
                    "dictionary with x and y"
                ) from error
            pieces.append((f"client {file.stem}", origin, x, y))
    return _joined(folder, pieces, "PFLlib folder")


def read_leaf(path: Path) -> Dataset:
    """Read LEAF's JSON: users and user_data, in one file or in folders train and test."""
    pieces: list[_Piece] = []
    if path.is_file():
        pieces += _leaf_file(path, 0)
    elif (path / "train").is_dir():
        for origin, part in enumerate(("train", "test")):
            for file in sorted((path / part).glob("*.json")):
                pieces += _leaf_file(file, origin)
    else:
        for file in sorted(path.glob("*.json")):
            pieces += _leaf_file(file, 0)
    return _joined(path, pieces, "LEAF data")


def _leaf_file(file: Path, origin: int) -> list[_Piece]:
    try:
        held: dict[str, Any] = json.loads(file.read_text())
        users = [(str(user), held["user_data"][user]) for user in held["users"]]
        pieces = [(user, origin, np.asarray(d["x"]), np.asarray(d["y"])) for user, d in users]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{file} is not LEAF's JSON ({error!r}); expected users, and user_data with x and y "
            "for each user"
        ) from error
    for user, _, x, y in pieces:
        if len(x) != len(y):
            raise DataError(
                f"{file}: user '{user}' has {len(x)} x and {len(y)} y; expected as many"
            )
        if x.dtype.kind in "US":
            raise DataError(f"{file}: user '{user}' holds text; text arrives with the text models")
    return pieces


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
