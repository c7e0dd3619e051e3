"""Turning whatever a user calls a label or a client into codes and names."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from idiolect.data.arrays import AnyArray, Rows
from idiolect.data.dataset import Dataset, default_decoding
from idiolect.errors import DataError

UNLABELLED = "unlabelled"  # the class of rows that have none


def label_codes(values: AnyArray, where: str) -> tuple[Rows, tuple[str, ...]]:
    """Code labels of any kind as 0, 1, ...; the names say what they were.

    Whole numbers stay as they are when at least half of 0..largest occur, so that a class nobody
    has keeps its number; otherwise, and for strings, classes are the sorted values.
    """
    if values.dtype.kind == "f":
        wrong = np.flatnonzero(~np.isfinite(values))
        if len(wrong):
            raise DataError(f"{where}: row {int(wrong[0])} has no label; fill or drop it")
        wrong = np.flatnonzero((values != np.round(values)) | (np.abs(values) > 2**53))
        if len(wrong):
            raise DataError(
                f"{where}: label {values[wrong[0]]} in row {int(wrong[0])} is not a class; "
                "expected whole numbers or strings"
            )
        values = values.astype(np.int64)
    if values.dtype.kind == "O":
        empty = [row for row, value in enumerate(values) if value is None]
        if empty:
            raise DataError(f"{where}: the label in row {empty[0]} is missing; fill or drop it")
        values = values.astype(str)
    found, codes = np.unique(values, return_inverse=True)
    if values.dtype.kind in "iu" and found[0] >= 0 and found[-1] < 2 * len(found):
        return values.astype(np.int64), tuple(str(i) for i in range(int(found[-1]) + 1))
    return codes.astype(np.int64).reshape(-1), tuple(str(value) for value in found)


def client_codes(values: AnyArray) -> tuple[Rows, tuple[str, ...]]:
    """Code clients of any kind by their sorted names, so that client 10 comes after client 9."""
    found, codes = np.unique(values, return_inverse=True)
    order = sorted(range(len(found)), key=lambda i: _by_number(str(found[i])))
    return np.argsort(order)[codes.reshape(-1)].astype(np.int64), tuple(
        str(found[i]) for i in order
    )


def _by_number(name: str) -> list[tuple[int, str]]:
    """Compare runs of digits as numbers and everything else as text."""
    return [(int(run), "") if run.isdecimal() else (-1, run) for run in re.split(r"(\d+)", name)]


def origin_codes(values: AnyArray, where: str) -> Rows:
    """Code a split column: 0 for train, 1 for test."""
    known = {"train": 0, "0": 0, "test": 1, "1": 1}
    for row, value in enumerate(values):
        if str(value) not in known:
            raise DataError(f"{where}: split '{value}' in row {row}; expected train or test")
    return np.array([known[str(value)] for value in values], np.int64)


def examples(x: AnyArray, where: str) -> AnyArray:
    """Bring features to a form a Dataset holds: uint8 images, float32 or int32."""
    if x.dtype.kind not in "buif":
        raise DataError(f"{where}: x is of type {x.dtype}; expected numbers")
    if x.dtype == np.uint8 and x.ndim in (3, 4):
        if x.ndim == 3:
            return x[:, None]
        last_is_channel = x.shape[3] in (1, 3) and x.shape[1] not in (1, 3)
        return np.ascontiguousarray(x.transpose(0, 3, 1, 2)) if last_is_channel else x
    if x.ndim == 1:
        x = x[:, None]
    return x.astype(np.int32 if x.dtype.kind in "iu" and x.dtype != np.uint8 else np.float32)


def assembled(
    path: Path,
    x: AnyArray,
    labels: AnyArray,
    clients: AnyArray | None,
    origin: Rows | None,
    form: str,
    features: tuple[str, ...] = (),
) -> Dataset:
    """Make a Dataset of columns read from `path`, checking what only the whole can show."""
    if not len(x):
        raise DataError(f"{path} has no rows; expected at least one example")
    if len(labels) != len(x):
        raise DataError(f"{path}: {len(labels)} labels for {len(x)} examples; expected as many")
    y, classes = label_codes(labels, str(path))
    if origin is not None and origin.any() and not origin.all():
        unseen = np.setdiff1d(y[origin == 1], y[origin == 0])
        if len(unseen):
            raise DataError(
                f"{path}: label '{classes[unseen[0]]}' occurs only in test rows; no model can "
                "learn it: move some of its rows to train, or drop them"
            )
    codes, names = (None, ()) if clients is None else client_codes(clients)
    shift, scale = default_decoding(x)
    return Dataset(
        name=path.stem,
        x=x,
        y=y,
        classes=classes,
        shift=shift,
        scale=scale,
        clients=codes,
        client_names=names,
        origin=origin,
        provenance=f"The user's own data, {form} {path.name}.",
        features=features,
    )
