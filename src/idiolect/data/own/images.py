"""Own data as a folder of image files: class/*.png or client/class/*.png."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from idiolect.data.arrays import AnyArray
from idiolect.data.dataset import Dataset
from idiolect.data.own.codes import assembled
from idiolect.data.parquet import picture
from idiolect.errors import DataError

_SUFFIXES = {".png", ".jpg", ".jpeg", ".webp", ".bmp"}


def image_files(folder: Path) -> list[Path]:
    """List every image below a folder, in the order of their names."""
    return sorted(file for file in folder.rglob("*") if file.suffix.lower() in _SUFFIXES)


def read_images(folder: Path, size: tuple[int, int] | None) -> Dataset:
    """Read a folder of images; `size` (width, height) defaults to that of the first.

    One colour image makes all of them RGB.
    """
    files = image_files(folder)
    places = [file.relative_to(folder).parts for file in files]
    depths = {len(parts): file for parts, file in zip(places, files, strict=True)}
    if len(depths) != 1 or not depths.keys() <= {2, 3}:
        shown = ", ".join(str(file.relative_to(folder)) for file in depths.values())
        raise DataError(
            f"{folder} holds {shown}; expected class/image or client/class/image throughout"
        )
    if size is None:
        _, height, width = _decode(files[0], None).shape
        size = (width, height)
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        pictures = list(pool.map(lambda file: _decode(file, size), files))
    channels = max(len(pixels) for pixels in pictures)
    x = np.stack([np.broadcast_to(p, (channels, *p.shape[1:])) for p in pictures])
    labels = np.array([parts[-2] for parts in places])
    clients = np.array([parts[0] for parts in places]) if len(places[0]) == 3 else None
    return assembled(folder, x, labels, clients, None, "image folder")


def _decode(file: Path, size: tuple[int, int] | None) -> AnyArray:
    return picture(file.read_bytes(), str(file), size)
