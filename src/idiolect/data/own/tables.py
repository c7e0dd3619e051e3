"""Own data in one file: Parquet, CSV or npz."""

from __future__ import annotations

import zipfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from idiolect.data.arrays import AnyArray, Rows
from idiolect.data.dataset import Dataset
from idiolect.data.own.codes import UNLABELLED, assembled, examples, origin_codes
from idiolect.data.own.texts import Reading, labelled, written
from idiolect.data.parquet import (
    decode_images,
    image_column,
    image_shape,
    read_parquet,
    refuse_bomb,
)
from idiolect.data.text.corpus import Stream
from idiolect.errors import DataError, IdiolectError


def read_table(
    path: Path, label: str, client: str, split: str, reading: Reading, labelled_rows: bool = True
) -> Dataset:
    """Read rows of numbers, of text or of encoded images, with a label, perhaps client and split.

    For the next word there is no label, and rows stand in the order they were written in. Rows that
    need not be labelled are of one class, `UNLABELLED`, where they are not.
    """
    table = read_parquet(path) if path.suffix == ".parquet" else _csv(path)
    if not table.num_rows:
        raise DataError(f"{path} has no rows; expected at least one example")
    names = list(table.column_names)
    if twice := [name for name, times in Counter(names).items() if times > 1]:
        raise DataError(f"{path} has two columns '{twice[0]}'; rename or remove one")
    texts = _texts(path, table, reading)
    if label not in names and not reading.next_word and labelled_rows:
        raise DataError(
            f"{path} has no column '{label}'; it has {', '.join(names)}: name the label column "
            "with the option label (data.options.label, --label)"
        )
    for option, column in (("client", client), ("split", split)):
        if column != option and column not in names:
            raise DataError(
                f"{path} has no column '{column}' for {option}; it has {', '.join(names)}"
            )
    clients = _values(path, table, client) if client in names else None
    origin = origin_codes(_values(path, table, split), str(path)) if split in names else None
    if texts is not None and reading.next_word:
        return written(path, _streams(texts, clients, origin), reading)
    if texts is not None:
        labels = _values(path, table, label) if label in names else np.full(len(texts), UNLABELLED)
        return labelled(path, texts, labels, clients, origin, reading, "table")
    special = {label, client, split}
    picture = image_column(table.schema) if path.suffix == ".parquet" else None
    columns = [name for name in names if name not in special] if picture is None else []
    if picture is None:
        x = _numbers(path, table, columns)
    else:
        x = np.empty((table.num_rows, *image_shape(path, picture)), np.uint8)
        decode_images([path], picture, x)
    labels = _values(path, table, label) if label in names else np.full(len(x), UNLABELLED)
    return assembled(path, x, labels, clients, origin, "table", tuple(columns))


def _texts(path: Path, table: Any, reading: Reading) -> list[str] | None:
    """Return the text column, if there is one of words."""
    from pyarrow import types

    names = table.column_names
    found = reading.text in names and (
        types.is_string(table[reading.text].type) or types.is_large_string(table[reading.text].type)
    )
    if found:
        return [str(value) for value in _values(path, table, reading.text)]
    if reading.next_word or reading.text != "text":
        raise DataError(
            f"{path} has no column '{reading.text}' of text; it has {', '.join(names)}: name it "
            "with the option text (data.options.text)"
        )
    return None


def _streams(
    texts: Sequence[str], clients: AnyArray | None, origin: Rows | None
) -> Iterator[Stream]:
    """Give each client's texts in their order, those of a test file apart."""
    held: dict[tuple[str, int], list[str]] = {}
    for row, text in enumerate(texts):
        user = "all" if clients is None else str(clients[row])
        held.setdefault((user, 0 if origin is None else int(origin[row])), []).append(text)
    for (user, part), own in sorted(held.items(), key=lambda entry: (entry[0][1], entry[0][0])):
        yield Stream(user, own, part)


def _csv(path: Path) -> Any:
    import pyarrow
    from pyarrow import csv

    try:
        table = csv.read_csv(path)
        names, kinds = table.column_names, table.schema.types
        foreign = [n for n, k in zip(names, kinds, strict=True) if pyarrow.types.is_binary(k)]
    except UnicodeDecodeError:
        foreign = ["the names of columns"]
    except (pyarrow.ArrowException, ValueError) as error:
        raise DataError(f"{path} cannot be read as CSV ({error}); mend the file") from error
    if foreign:
        raise DataError(
            f"{path} is not UTF-8 text (see {foreign[0]}); save it as UTF-8, for example with "
            "`iconv -f LATIN1 -t UTF-8`"
        )
    return table


def _values(path: Path, table: Any, name: str) -> AnyArray:
    from pyarrow import types

    column = table[name]
    if types.is_nested(column.type) or types.is_binary(column.type):
        raise DataError(
            f"{path}: column '{name}' holds {column.type}; expected one number or string a row"
        )
    if column.null_count:
        row = column.is_null().to_pylist().index(True)
        raise DataError(f"{path}: column '{name}' is empty in row {row}; fill or drop the row")
    values: AnyArray = np.asarray(column.to_pylist())
    blank = np.flatnonzero(values == "")  # what CSV makes of missing text
    if len(blank):
        raise DataError(
            f"{path}: column '{name}' is empty in row {int(blank[0])}; fill or drop the row"
        )
    return values


def _numbers(path: Path, table: Any, names: list[str]) -> AnyArray:
    from pyarrow import types

    if not names:
        raise DataError(f"{path} has no feature column beside the label; expected at least one")
    x = np.empty((table.num_rows, len(names)), np.float32)
    for place, name in enumerate(names):
        kind = table[name].type
        numeric = types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)
        if not numeric:
            raise DataError(
                f"{path}: column '{name}' is {kind}, not numeric; encode it as numbers, remove it, "
                "or, if it is the text to learn from, name it with the option text"
            )
        column = table[name].to_numpy().astype(np.float32)
        missing = np.flatnonzero(~np.isfinite(column))
        if len(missing):
            raise DataError(
                f"{path}: column '{name}' is empty, NaN or infinite in row {int(missing[0])}; fill "
                "or drop the row"
            )
        x[:, place] = column
    return x


def read_npz(
    path: Path, label: str, client: str, split: str, labelled_rows: bool = True
) -> Dataset:
    """Read arrays x and y, and perhaps client and split, from an npz file."""
    label = "y" if label == "label" else label
    try:
        _refuse_false_sizes(path)
        with np.load(path, allow_pickle=False) as arrays:
            needed = ("x", label) if labelled_rows else ("x",)
            missing = [name for name in needed if name not in arrays]
            if missing:
                raise DataError(
                    f"{path} has no array '{missing[0]}'; it has {', '.join(arrays) or 'none'}: "
                    "expected x and y, and perhaps client and split"
                )
            found = {name: arrays[name] for name in ("x", label, client, split) if name in arrays}
    except IdiolectError:
        raise
    except Exception as error:  # a damaged zip or array makes numpy raise anything
        raise DataError(
            f"{path} cannot be read ({error}); expected an npz file of plain number arrays"
        ) from error
    origin = origin_codes(found[split], str(path)) if split in found else None
    x = examples(found["x"], str(path))
    labels = found[label] if label in found else np.full(len(x), UNLABELLED)
    return assembled(path, x, labels, found.get(client), origin, "file")


def _refuse_false_sizes(path: Path) -> None:
    """Refuse a zip that unpacks to very much, and arrays that claim more than lies there."""
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
        refuse_bomb(path, path.stat().st_size, sum(one.file_size for one in members))
        for one in members:
            with archive.open(one) as file:
                shape, _, dtype = _header(file)
            claimed = int(np.prod([int(size) for size in shape], dtype=object)) * dtype.itemsize
            if claimed > one.file_size:
                raise DataError(
                    f"{path}: array '{one.filename}' claims {claimed:,} bytes and has "
                    f"{one.file_size:,}; write the file again"
                )


def _header(file: Any) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    from numpy.lib import format

    read = {(1, 0): format.read_array_header_1_0}.get(
        format.read_magic(file), format.read_array_header_2_0
    )
    return read(file)
