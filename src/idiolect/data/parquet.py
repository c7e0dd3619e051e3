"""Parquet tables of encoded images, in the layout of the Hugging Face hub."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from idiolect.data.arrays import AnyArray
from idiolect.errors import DataError

_BATCH = 1024
_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF")
_UNPACKED = 256 << 20  # bytes that any file may unpack to
_RATIO = 200  # larger ones by this factor at most
_PIXELS = 50_000_000  # of one image: a small file can claim to be a huge one


def open_parquet(path: Path) -> Any:
    """Open a Parquet file; a damaged one is a DataError."""
    import pyarrow
    from pyarrow import parquet

    try:
        return parquet.ParquetFile(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> DataError:
    return DataError(f"{path} cannot be read as Parquet ({error}); fetch it again")


def read_parquet(path: Path) -> Any:
    """Read a whole Parquet file; one that claims far more rows than its bytes hold is refused."""
    import pyarrow

    opened = open_parquet(path)
    refuse_bomb(path, path.stat().st_size, _unpacked(opened.metadata))
    try:
        return opened.read()
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise _damaged(path, error) from error


def _unpacked(metadata: Any) -> int:
    groups = (metadata.row_group(place) for place in range(metadata.num_row_groups))
    return sum(group.total_byte_size for group in groups)


def refuse_bomb(path: Path, packed: int, unpacked: int) -> None:
    """Refuse a small file that unpacks to very much."""
    if unpacked > max(_UNPACKED, _RATIO * packed):
        raise DataError(
            f"{path} has {packed:,} bytes and unpacks to {unpacked:,}; expected at most {_RATIO} "
            "times as many: if it is meant, write it again without compression"
        )


def image_column(schema: Any) -> str | None:
    """Find the column of encoded images: a struct with `bytes`, or plain binary."""
    from pyarrow import types

    for field in schema:
        kind = field.type
        if types.is_struct(kind) and kind.get_field_index("bytes") >= 0:
            return str(field.name)
        if types.is_binary(kind) or types.is_large_binary(kind):
            return str(field.name)
    return None


def class_names(schema: Any, label: str) -> tuple[str, ...]:
    """Read the class names that the hub writes into the schema, if it did."""
    written = (schema.metadata or {}).get(b"huggingface")
    if written is None:
        return ()
    features = json.loads(written).get("info", {}).get("features", {})
    return tuple(str(name) for name in features.get(label, {}).get("names", ()))


def picture(encoded: bytes, where: str, size: tuple[int, int] | None = None) -> AnyArray:
    """Decode one image to uint8 [channel, height, width]: grey stays grey, all else is RGB.

    `size` is (width, height); an image of another size is resized to it.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(encoded), formats=_FORMATS) as opened:
            if opened.width * opened.height > _PIXELS:
                raise ValueError(f"{opened.width} x {opened.height} pixels, at most {_PIXELS:,}")
            image = opened if opened.mode in ("L", "RGB") else opened.convert(_plain(opened.mode))
            if size is not None and image.size != size:
                image = image.resize(size, Image.Resampling.BILINEAR)
            pixels = np.asarray(image)
    except Exception as error:  # a damaged image makes Pillow's decoders raise anything
        known = ", ".join(_FORMATS)
        said = f"none of {known}" if isinstance(error, UnidentifiedImageError) else error
        raise DataError(f"{where}: the image cannot be decoded ({said}); replace it") from error
    return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)


def _plain(mode: str) -> str:
    return "L" if mode in ("1", "LA", "La", "I", "I;16", "F") else "RGB"


def image_shape(path: Path, column: str) -> tuple[int, ...]:
    """Look at the first image to learn [channel, height, width] of all."""
    batch = next(open_parquet(path).iter_batches(1, columns=[column]), None)
    if batch is None or not len(batch):
        raise DataError(f"{path} has no rows; expected at least one image")
    return picture(_encoded(batch.column(0), path, 0)[0], f"{path} row 0").shape


def decode_images(paths: Sequence[Path], column: str, out: AnyArray) -> None:
    """Decode every image of the files, in order, into `out` [example, channel, height, width].

    Threads serve because Pillow lets go of the interpreter while it decodes.
    """
    workers = min(8, os.cpu_count() or 1)
    with ThreadPoolExecutor(workers) as pool:
        for _ in pool.map(lambda batch: _decode_batch(batch, out), _batches(paths, column)):
            pass


def _batches(paths: Sequence[Path], column: str) -> Iterator[tuple[Any, Path, int, int]]:
    start = 0
    for path in paths:
        first = start
        for batch in open_parquet(path).iter_batches(_BATCH, columns=[column]):
            yield batch.column(0), path, start - first, start
            start += len(batch)


def _decode_batch(batch: tuple[Any, Path, int, int], out: AnyArray) -> None:
    images, path, row, start = batch
    for offset, encoded in enumerate(_encoded(images, path, row)):
        pixels = picture(encoded, f"{path} row {row + offset}")
        if pixels.shape != out.shape[1:]:
            raise DataError(
                f"{path} row {row + offset}: image is {pixels.shape} and the first one is "
                f"{out.shape[1:]} (channel, height, width); bring all to one size and mode"
            )
        out[start + offset] = pixels


def _encoded(images: Any, path: Path, row: int) -> list[bytes]:
    from pyarrow import types

    values = images.field("bytes") if types.is_struct(images.type) else images
    if values.null_count:
        raise DataError(f"{path}: an image at or after row {row} is missing; drop the row")
    return list(values.to_pylist())
