"""Parquet files: tables, encoded images, and the readers of the named sources in `sources`."""

import io
import json
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from idiolect.data.dataset import AnyArray, Dataset, Rows, check_value, taken
from idiolect.data.text import UserText, dealt, sentences, streams
from idiolect.data.tokenisers import as_tokeniser
from idiolect.errors import ConfigError, DataError

_BATCH = 1024
IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF")
_UNPACKED = 256 << 20  # bytes that any file may unpack to
_RATIO = 200  # larger ones by this factor at most
MOST_PIXELS = 50_000_000  # of one image: a small file can claim to be a huge one


def open_parquet(path: Path, as_codes: Sequence[str] = ()) -> Any:
    """Open a Parquet file; a damaged one is a DataError. Some columns may be read as codes."""
    import pyarrow
    from pyarrow import parquet

    try:
        return parquet.ParquetFile(path, read_dictionary=list(as_codes) or None)
    except (pyarrow.ArrowException, OSError) as error:
        raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> DataError:
    return DataError(f"{path} cannot be read as Parquet ({error}); fetch it again")


def read_parquet(path: Path) -> Any:
    """Read a whole Parquet file; one that claims far more rows than its bytes hold is refused."""
    import pyarrow

    opened = open_parquet(path)
    packed = path.stat().st_size
    try:
        _refuse_claims(path, packed, opened)
        return opened.read()
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise _damaged(path, error) from error


_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "INT96": 12, "FLOAT": 4, "DOUBLE": 8}
_PLACE = 4  # bytes beside each string that say where it ends


def _refuse_claims(path: Path, packed: int, opened: Any) -> None:
    """Refuse a file whose cells take very much memory, though each value may be stored once.

    A dictionary, or a prefix that values share, makes a megabyte of a few bits. So strings that
    are stored in such ways, and could be too much, are measured before they are read as strings.
    """
    metadata, names, prefixed = opened.metadata, set[str](), set[str]()
    claimed = most = largest = 0
    for group in map(metadata.row_group, range(metadata.num_row_groups)):
        for place in range(group.num_columns):
            chunk, fixed = group.column(place), opened.schema.column(place).length
            values, stored = max(chunk.num_values, group.num_rows), chunk.total_uncompressed_size
            width = fixed if fixed > 0 else _WIDTHS.get(chunk.physical_type, 0)
            claimed += max(stored, values * (width or _PLACE))
            if width:
                continue
            # How they are stored is what the file says; that it says so may be a lie.
            most += values * stored
            names.add(chunk.path_in_schema)
            largest = max(largest, stored)
            if "DELTA_BYTE_ARRAY" in chunk.encodings:  # which is never read as codes
                prefixed.add(chunk.path_in_schema)
    refuse_bomb(path, packed, claimed)
    if claimed + most <= _allowed(packed):
        return
    as_codes = open_parquet(path, tuple(names - prefixed))
    # No value is longer than what is stored of its column.
    batch = max(1, _UNPACKED // largest) if prefixed else 1 << 20
    for group in range(metadata.num_row_groups):  # each has dictionaries of its own
        for part in as_codes.iter_batches(batch, [group], sorted(names)):
            claimed += sum(_decoded(column) for column in part.columns)
            refuse_bomb(path, packed, claimed)


def _decoded(column: Any) -> int:
    """Return how many bytes the strings of a column are, in whatever it is nested."""
    from pyarrow import compute, types

    kind = column.type
    if types.is_dictionary(kind):
        sizes = compute.binary_length(column.dictionary)
        return int(compute.sum(sizes.take(column.indices)).as_py() or 0)
    if types.is_map(kind):
        return _decoded(column.keys) + _decoded(column.items)
    if types.is_struct(kind):
        return sum(_decoded(own) for own in column.flatten())
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return _decoded(column.flatten())
    return int(column.nbytes)


def _allowed(packed: int) -> int:
    return max(_UNPACKED, _RATIO * packed)


def refuse_bomb(path: Path, packed: int, unpacked: int) -> None:
    """Refuse a small file that unpacks to very much."""
    if unpacked > _allowed(packed):
        raise DataError(
            f"{path} has {packed:,} bytes and unpacks to {unpacked:,}; expected at most {_RATIO} "
            "times as many: if it is meant, write it again without compression or dictionaries"
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


def class_names(schema: Any, label: str, y: Rows) -> tuple[str, ...]:
    """Read the class names that the hub writes into the schema; without them, number classes."""
    written = json.loads((schema.metadata or {}).get(b"huggingface", "{}"))
    column = written.get("info", {}).get("features", {}).get(label, {})
    return tuple(map(str, column.get("names", ()) or range(int(y.max()) + 1)))


def picture(encoded: bytes, where: str, size: tuple[int, int] | None = None) -> AnyArray:
    """Decode one image to uint8 [channel, height, width]: grey stays grey, all else is RGB.

    `size` is (width, height); an image of another size is resized to it.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(encoded), formats=IMAGE_FORMATS) as opened:
            if opened.width * opened.height > MOST_PIXELS:
                raise ValueError(
                    f"{opened.width} x {opened.height} pixels, at most {MOST_PIXELS:,}"
                )
            image = opened if opened.mode in ("L", "RGB") else opened.convert(_plain(opened.mode))
            if size is not None and image.size != size:
                image = image.resize(size, Image.Resampling.BILINEAR)
            pixels = np.asarray(image)
    except Exception as error:  # a damaged image makes Pillow's decoders raise anything
        known = ", ".join(IMAGE_FORMATS)
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


class SourceFiles(NamedTuple):
    """The Parquet files of a named source, for its reader."""

    name: str
    paths: list[Path]
    label: str  # the column of labels
    provenance: str
    folder: Path  # where a reader may put a memory-mapped x.npy

    def origin(self, rows: Sequence[int]) -> Rows | None:
        """Mark the rows of test files with 1; None if there is no test file."""
        from_test = np.repeat([int(path.name.startswith("test")) for path in self.paths], rows)
        return from_test.astype(np.int64) if from_test.any() else None


def read_images(
    files: SourceFiles, *, only: tuple[str, ...] = (), augmented: str = "none"
) -> Dataset:
    """Read encoded images with labels, and natural clients where there is such a column.

    `only` names the classes that are kept, in their new order. augmented "once" crops and mirrors
    every image at random before anything else, test images too, as data that were written to a
    file after augmentation are: four pixels of black around it, a window of the old size, and
    every other one mirrored.
    """
    check_value("augmented", augmented, ("none", "once"))
    opened = [open_parquet(path) for path in files.paths]
    schema = opened[0].schema_arrow
    image = image_column(schema)
    label = files.label if files.label in schema.names else "label"
    if image is None or label not in schema.names:
        raise DataError(
            f"{files.paths[0]} has columns {', '.join(schema.names)}; expected image "
            f"{{bytes, path}} and {files.label}"
        )
    rows = [file.metadata.num_rows for file in opened]
    shape = (sum(rows), *image_shape(files.paths[0], image))
    x = np.lib.format.open_memmap(files.folder / "x.npy", mode="w+", dtype=np.uint8, shape=shape)
    decode_images(files.paths, image, x)
    columns = [column for column in (label, "client") if column in schema.names]
    tables = [file.read(columns=columns) for file in opened]
    y = np.concatenate([table[label].to_numpy() for table in tables]).astype(np.int64)
    clients, client_names = None, tuple[str, ...]()
    if "client" in schema.names:
        held = [str(client) for table in tables for client in table["client"].to_pylist()]
        clients, client_names = _sorted_codes(held)
    whole = Dataset(
        name=files.name,
        x=x,
        y=y,
        classes=class_names(schema, label, y),
        clients=clients,
        client_names=client_names,
        origin=files.origin(rows),
        provenance=files.provenance,
    )
    if augmented == "once":
        _augment(x)
    if not only:
        return whole
    kept = _with_only(whole, only)
    (files.folder / "x.npy").unlink()  # of all classes
    return kept


def _augment(images: AnyArray, border: int = 4) -> None:
    """Crop and mirror each image in place."""
    draw = np.random.default_rng(0)
    count, _, height, width = images.shape
    down, right = draw.integers(0, 2 * border + 1, (2, count))
    mirrored = draw.integers(0, 2, (count,))
    around = ((0, 0), (border, border), (border, border))
    for place in range(count):
        top, left = down[place], right[place]
        window = np.pad(images[place], around)[:, top : top + height, left : left + width]
        images[place] = window[:, :, ::-1] if mirrored[place] else window


def _with_only(data: Dataset, only: Sequence[str]) -> Dataset:
    """Keep the rows of some classes, and number these anew."""
    if len(set(only)) < len(only) or len(only) < 2 or set(only) - set(data.classes):
        raise ConfigError(
            f"only names {', '.join(only)}; expected two or more of the classes of {data.name}, "
            f"each once: {', '.join(data.classes)}"
        )
    codes = np.full(len(data.classes), -1, np.int64)
    codes[[data.classes.index(name) for name in only]] = np.arange(len(only))
    rows = np.flatnonzero(codes[data.y] >= 0)
    return replace(taken(data, rows), y=codes[data.y[rows]], classes=tuple(only))


def read_reviews(
    files: SourceFiles,
    *,
    length: int = 200,
    vocabulary: int = 20_000,
    leave_out: tuple[str, ...] = (),
    tokeniser: str = "",
) -> Dataset:
    """Read texts with a label, one natural client for each source; `leave_out` names clients."""
    tables = [_columns(path, "text", "label", "client") for path in files.paths]
    present = sorted({str(client) for table in tables for client in table["client"].to_pylist()})
    for client in leave_out:
        if client not in present:
            raise ConfigError(
                f"leave_out names '{client}', and {files.name} has the clients {', '.join(present)}"
            )
    kept = [
        [row for row in table.to_pylist() if str(row["client"]) not in leave_out]
        for table in tables
    ]
    rows = [row for part in kept for row in part]
    if not rows:
        raise DataError(f"{files.name} has no text left; leave out fewer clients")
    texts = [row["text"] for row in rows]
    coded = sentences(texts, length, vocabulary, as_tokeniser(tokeniser))
    y = np.array([row["label"] for row in rows], np.int64)
    clients, client_names = _sorted_codes([str(row["client"]) for row in rows])
    made = Dataset(
        name=files.name,
        x=coded.x,
        y=y,
        classes=class_names(tables[0].schema, "label", y),
        clients=clients,
        client_names=client_names,
        origin=files.origin([len(part) for part in kept]),
        provenance=files.provenance,
    )
    return coded.given_to(made)


def read_products(
    files: SourceFiles,
    *,
    length: int = 200,
    vocabulary: int = 20_000,
    leave_out: tuple[str, ...] = ("phones_in",),
    tokeniser: str = "",
) -> Dataset:
    """Read reviews of the five products of the paper; `leave_out = []` keeps the sixth client."""
    return read_reviews(
        files, length=length, vocabulary=vocabulary, leave_out=leave_out, tokeniser=tokeniser
    )


def read_users(
    files: SourceFiles,
    *,
    length: int = 20,
    vocabulary: int = 50_000,
    tokeniser: str = "",
    users: Literal["all", "pretraining", "study", "newcomers"] = "all",
) -> Dataset:
    """Read what each user wrote, for next-word prediction.

    `users`: all; the half that a base may be pretrained on; of the other half those to study it
    on, or the quarter that is kept for newcomers.
    """
    check_value("users", users, ("all", "pretraining", "study", "newcomers"))
    chosen = []
    for path in files.paths:
        held: dict[str, list[str]] = {}
        for row in _columns(path, "text", "client").to_pylist():
            if users not in ("all", dealt(str(row["client"]))):
                continue
            held.setdefault(str(row["client"]), []).append(row["text"])
        origin = int(path.name.startswith("test"))
        chosen += [UserText(client, held[client], origin) for client in sorted(held)]
    given = as_tokeniser(tokeniser)
    return streams(files.name, chosen, length, vocabulary, files.provenance, given)


def _columns(path: Path, *wanted: str) -> Any:
    opened = open_parquet(path)
    names = opened.schema_arrow.names
    if not set(wanted) <= set(names):
        raise DataError(f"{path} has columns {', '.join(names)}; expected {', '.join(wanted)}")
    return opened.read(columns=list(wanted))


def _sorted_codes(values: list[str]) -> tuple[Rows, tuple[str, ...]]:
    found, codes = np.unique(values, return_inverse=True)
    return codes.astype(np.int64), tuple(str(value) for value in found)
