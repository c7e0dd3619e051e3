"""Trees and a little JSON in one safetensors file, written whole or not at all; no pickle."""

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from idiolect.core import tree
from idiolect.core.tree import Tree
from idiolect.errors import CheckpointError, IdiolectError

Meta = dict[str, Any]
"""Anything JSON can hold."""

_KEY = "idiolect"  # where the metadata stands in the safetensors header


def save(path: Path, kept: Tree, meta: Mapping[str, Any], *, private: bool = True) -> None:
    """Write a tree and its metadata; whatever happens, `path` holds the old file or the new one.

    A `private` file, and a folder that is made for it, can be read by its owner alone: models and
    personal state reveal something of the data they were trained on.
    """
    from safetensors.torch import save as encoded

    named = tree.named(kept)
    if len(named) != len(tree.leaves(kept)):
        raise CheckpointError(
            f"{path.name}: two leaves share a name; rename a key with a dot in it"
        )
    # Copies, because safetensors refuses tensors that share memory, as views of a stack do.
    tensors = {
        name: leaf.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        for name, leaf in named.items()
    }
    # allow_nan stays on: infinity and NaN are honest values of a metric.
    content = encoded(tensors, metadata={_KEY: json.dumps(dict(meta))})
    write_whole(path, content, private=private)


def read(path: Path) -> tuple[dict[str, Tensor], Meta]:
    """Return a file's named leaves and metadata."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            named = {name: file.get_tensor(name) for name in file.keys()}
        meta = json.loads(header[_KEY])
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist; start the run without --resume") from None
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise CheckpointError(
            f"{path} is damaged or no checkpoint of idiolect ({_short(error)}); delete it, and the "
            "run starts that method again"
        ) from error
    return named, meta


def fitted(template: Tree, values: Mapping[str, Tensor], path: Path) -> Tree:
    """Give named leaves the template's form; raise where another method or network wrote them."""
    for name, leaf in tree.named(template).items():
        if name not in values:
            continue  # raised below, with the count
        found, wanted = values[name], leaf
        if found.shape != wanted.shape or found.dtype != wanted.dtype:
            raise CheckpointError(
                f"{path}: {name} is {_kind(found)}, expected {_kind(wanted)}; it was written for "
                "another network or federation: use another --out"
            )
    try:
        return tree.like(template, values)
    except CheckpointError as error:
        raise CheckpointError(
            f"{path}: {error}; it was written for another method: use another --out"
        ) from error


def write_whole(path: Path, content: bytes, *, private: bool = False) -> None:
    """Replace a file's content in one step that a crash cannot halve.

    The new content reaches the disk under another name in the same folder before it takes the
    final one, and the folder is synced so that the new name survives a power cut too.
    """
    try:
        if private and not path.parent.exists():
            path.parent.mkdir(0o700, parents=True, exist_ok=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, part = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            if not private:  # as it is made, only its owner can read it
                os.chmod(part, 0o666 & ~_umask())
            os.replace(part, path)
        except BaseException:
            Path(part).unlink(missing_ok=True)
            raise
        _sync_folder(path.parent)
    except OSError as error:
        raise IdiolectError(
            f"cannot write {path}: {error.strerror or error}; free some space or choose another "
            "--out, then go on with --resume"
        ) from error


def _umask() -> int:
    """Return the process's file mode mask, which can only be read by setting it."""
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


def _sync_folder(folder: Path) -> None:
    if os.name != "posix":  # elsewhere a folder cannot be opened
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _kind(leaf: Tensor) -> str:
    return f"{str(leaf.dtype).removeprefix('torch.')} {tuple(leaf.shape)}"


def _short(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
