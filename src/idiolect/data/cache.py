"""Decoded datasets on disk, memory-mapped when they are used again."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from idiolect.data.dataset import Dataset
from idiolect.errors import DataError

# Part of every key: raise it when the layout or the decoding changes.
_FORMAT = 1

_COLUMNS = ("y", "clients", "origin")


def cache_root(cache_dir: str | Path | None) -> Path:
    """Where decoded data lives: the argument, IDIOLECT_CACHE, or ~/.cache/idiolect."""
    chosen = cache_dir or os.environ.get("IDIOLECT_CACHE") or Path.home() / ".cache" / "idiolect"
    return Path(chosen).expanduser()


def file_digest(path: Path) -> str:
    """Compute a file's sha256, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def cache_key(name: str, digests: list[str]) -> str:
    """Name a dataset by its source and the sha256 of its files."""
    joined = "\n".join([str(_FORMAT), *digests])
    return f"{name}-{hashlib.sha256(joined.encode()).hexdigest()[:16]}"


def cached(root: Path, key: str, write: Callable[[Path], Dataset]) -> Dataset:
    """Map the dataset with this key, writing it first if it is not there.

    `write` gets an empty folder, may put a memory-mapped x.npy there, and returns the dataset. The
    folder takes its final name only when complete, so a reader never meets half a dataset, and of
    two processes that write at once the second finds the work done.
    """
    folder = root / key
    if not (folder / "meta.json").exists():
        try:
            root.mkdir(parents=True, exist_ok=True)
            unfinished = Path(tempfile.mkdtemp(prefix=f".{key}-", dir=root))
        except OSError as error:
            raise DataError(
                f"the cache {root} cannot be written ({error}); set IDIOLECT_CACHE to a folder "
                "that can"
            ) from error
        try:
            _save(unfinished, write(unfinished))
            try:
                unfinished.rename(folder)
            except OSError:
                if not (folder / "meta.json").exists():
                    raise
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    return _open(folder)


def _save(folder: Path, dataset: Dataset) -> None:
    if (folder / "x.npy").exists():
        if isinstance(dataset.x, np.memmap):
            dataset.x.flush()
    else:
        np.save(folder / "x.npy", dataset.x)
    for column in _COLUMNS:
        values = getattr(dataset, column)
        if values is not None:
            np.save(folder / f"{column}.npy", values)
    np.savez(folder / "decoding.npz", shift=dataset.shift, scale=dataset.scale)
    about = {
        "name": dataset.name,
        "classes": dataset.classes,
        "client_names": dataset.client_names,
        "provenance": dataset.provenance,
        "words": dataset.words,
        "vocabulary": dataset.vocabulary,
    }
    (folder / "meta.json").write_text(json.dumps(about, indent=1))


def _open(folder: Path) -> Dataset:
    try:
        about: dict[str, Any] = json.loads((folder / "meta.json").read_text())
        columns = {
            column: np.load(folder / f"{column}.npy")
            for column in _COLUMNS
            if (folder / f"{column}.npy").exists()
        }
        x = np.load(folder / "x.npy", mmap_mode="r")
        decoding = np.load(folder / "decoding.npz")
        return Dataset(
            name=about["name"],
            x=x,
            y=columns["y"],
            classes=tuple(about["classes"]),
            shift=decoding["shift"],
            scale=decoding["scale"],
            clients=columns.get("clients"),
            client_names=tuple(about["client_names"]),
            origin=columns.get("origin"),
            provenance=about["provenance"],
            words=tuple(about.get("words", ())),
            vocabulary=about.get("vocabulary", 0),
        )
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"the cache folder {folder} is damaged ({error}); delete it") from error
