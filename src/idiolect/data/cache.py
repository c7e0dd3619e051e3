"""Files on disk: datasets decoded once and memory-mapped, and downloads from the hub."""

import hashlib
import http.client
import json
import os
import re
import shutil
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import numpy as np

from idiolect.data.dataset import Dataset
from idiolect.errors import DataError

# Part of every key: raise it when the layout or the decoding changes.
_FORMAT = 1

_COLUMNS = ("y", "clients", "origin")
_FIELDS = ("name", "classes", "client_names", "provenance", "words", "vocabulary")

_BLOCK = 1 << 18
_PATIENCE_S = 30.0


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
    about = {field: getattr(dataset, field) for field in _FIELDS}
    (folder / "meta.json").write_text(json.dumps(about, indent=1))


def _open(folder: Path) -> Dataset:
    try:
        fields: dict[str, Any] = json.loads((folder / "meta.json").read_text())
        fields |= {key: tuple(fields[key]) for key in ("classes", "client_names", "words")}
        for column in _COLUMNS:
            if (folder / f"{column}.npy").exists():
                fields[column] = np.load(folder / f"{column}.npy")
        with np.load(folder / "decoding.npz") as decoding:
            fields.update(decoding)
        return Dataset(x=np.load(folder / "x.npy", mmap_mode="r"), **fields)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"the cache folder {folder} is damaged ({error}); delete it") from error


class _RememberDigest(urllib.request.HTTPRedirectHandler):
    """The hub states a file's sha256 on the redirect, not on the storage it redirects to."""

    def __init__(self) -> None:
        self.stated = ""

    def redirect_request(
        self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        """Note the digest, then follow."""
        self.stated = self.stated or _digest_in(headers)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def hub_url(repository: str, path: str) -> str:
    """Name a file of a dataset repository; IDIOLECT_HUB replaces the hub's address."""
    base = os.environ.get("IDIOLECT_HUB", "https://huggingface.co").rstrip("/")
    if not base.startswith(("https://", "http://")):
        raise DataError(f"IDIOLECT_HUB is '{base}'; expected an https:// address")
    return f"{base}/datasets/{repository}/resolve/main/{path}"


def recorded_digest(target: Path) -> str | None:
    """Read the sha256 that stands beside a completed download; None if it is not complete."""
    record = target.with_name(target.name + ".sha256")
    if not target.exists() or not record.exists():
        return None
    return record.read_text().strip()


def download_file(url: str, target: Path) -> str:
    """Fetch a file to `target` and return its sha256, also recorded beside it.

    Bytes gather in a .part file, which a later call continues; the target appears only when its
    length and, where the hub states one, its sha256 are right.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(target.name + ".part")
    try:
        stated, expected = _fetch(url, part)
    except (urllib.error.URLError, http.client.HTTPException, OSError) as error:
        raise DataError(f"{url} could not be downloaded ({error})") from error
    received = part.stat().st_size
    if expected is not None and received < expected:
        raise DataError(
            f"{url} broke off after {received} of {expected} bytes; load again to continue"
        )
    digest = file_digest(part)
    wrong_length = expected is not None and received > expected
    if wrong_length or (stated and digest != stated):
        part.unlink()
        raise DataError(
            f"{url} arrived damaged: sha256 {digest}, {received} bytes; expected "
            f"{stated or 'any'}, {expected} bytes. It was thrown away; load again"
        )
    os.replace(part, target)
    target.with_name(target.name + ".sha256").write_text(digest + "\n")
    return digest


def _fetch(url: str, part: Path) -> tuple[str, int | None]:
    """Append what is missing to the part file; return the stated sha256 and the full length."""
    memory = _RememberDigest()
    opener = urllib.request.build_opener(memory)
    have = part.stat().st_size if part.exists() else 0
    headers = {"User-Agent": "idiolect", "Accept-Encoding": "identity"}
    if have:
        headers["Range"] = f"bytes={have}-"
    try:
        response = opener.open(urllib.request.Request(url, headers=headers), timeout=_PATIENCE_S)
    except urllib.error.HTTPError as error:
        if error.code != 416:  # 416: nothing is missing, or the part is longer than the file
            raise
        error.close()
        part.unlink()
        return _fetch(url, part)
    stated = memory.stated or _digest_in(response.headers)
    if have and not stated:
        # Without a digest a change of the file since the first half would go unnoticed.
        response.close()
        part.unlink()
        return _fetch(url, part)
    with response:
        if response.status != 206:
            have = 0
        length = response.headers.get("Content-Length")
        expected = None if length is None else have + int(length)
        with part.open("ab" if have else "wb") as file:
            _copy(response, file, url.rsplit("/", 1)[-1], have, expected)
        return stated, expected


def _copy(response: Any, file: IO[bytes], label: str, have: int, expected: int | None) -> None:
    from rich.console import Console
    from rich.progress import DownloadColumn, Progress, TransferSpeedColumn

    console = Console(stderr=True)
    columns = (*Progress.get_default_columns()[:2], DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(label, total=expected, completed=have)
        while block := response.read(_BLOCK):
            file.write(block)
            progress.advance(task, len(block))


def _digest_in(headers: http.client.HTTPMessage) -> str:
    """Take a sha256 from X-Linked-Etag or ETag; a tag of any other form says nothing."""
    for name in ("X-Linked-Etag", "ETag"):
        tag = (headers.get(name) or "").removeprefix("W/").strip('"').lower()
        if re.fullmatch("[0-9a-f]{64}", tag):
            return tag
    return ""
