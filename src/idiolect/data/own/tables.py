"""Own data in one file (Parquet, CSV or npz), and how columns become a Dataset."""

import re
import zipfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from idiolect.core.task import Classes, Task
from idiolect.data.dataset import AnyArray, Dataset, Rows
from idiolect.data.parquet import (
    decode_images,
    image_column,
    image_shape,
    read_parquet,
    refuse_bomb,
)
from idiolect.data.targets import targets
from idiolect.data.text import Tokens, UserText, sentences, streams
from idiolect.errors import DataError, IdiolectError

UNLABELLED = "unlabelled"  # the class of rows that have none


class ReadOptions(NamedTuple):
    """How own data is to be read; see `own.read`."""

    label: str
    client: str
    split: str
    size: tuple[int, int] | None
    text: str
    length: int
    vocabulary: int
    next_word: bool
    labelled: bool
    task: Task = Classes()  # what the label columns hold
    labels: tuple[str, ...] = ()  # their names, where the task is another than classes

    @property
    def words(self) -> int:
        """Words in an example: by default 200 of a labelled text, 20 for the next word."""
        return self.length or (20 if self.next_word else 200)


def read_table(path: Path, options: ReadOptions) -> Dataset:
    """Read rows of numbers, text or encoded images, with a label, perhaps client and split."""
    return table_dataset(path, read_columns(path), options)


def read_columns(path: Path) -> Any:
    """Read a file as an Arrow table, its columns as they are."""
    if not path.is_file():
        raise DataError(f"{path} does not exist; expected a .csv or .parquet file")
    return read_parquet(path) if path.suffix == ".parquet" else _csv(path)


def table_dataset(path: Path, table: Any, options: ReadOptions) -> Dataset:
    """Make a dataset of an Arrow table; `path` is the file it was read from, or a name for it.

    For the next word there is no label, and rows stand in the order they were written in. Rows that
    need not be labelled are of one class, `UNLABELLED`, where they are not.
    """
    if options.task.kind != "classes":
        return _with_targets(path, table, options)
    label, client, split = options.label, options.client, options.split
    if not table.num_rows:
        raise DataError(f"{path} has no rows; expected at least one example")
    names = list(table.column_names)
    if twice := [name for name, times in Counter(names).items() if times > 1]:
        raise DataError(f"{path} has two columns '{twice[0]}'; rename or remove one")
    texts = _texts(path, table, options)
    if label not in names and not options.next_word and options.labelled:
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
    if texts is not None and options.next_word:
        return next_word_texts(path, _user_texts(texts, clients, origin), options)
    labels = _values(path, table, label) if label in names else unlabelled(table.num_rows)
    if texts is not None:
        return labelled_texts(path, texts, labels, clients, origin, options, "table")
    image = image_column(table.schema) if path.suffix == ".parquet" else None
    if image is not None:
        x = np.empty((table.num_rows, *image_shape(path, image)), np.uint8)
        decode_images([path], image, x)
        return assembled(path, x, labels, clients, origin, "table")
    features = tuple(name for name in names if name not in (label, client, split))
    x = _numbers(path, table, features)
    return assembled(path, x, labels, clients, origin, "table", features)


def _with_targets(path: Path, table: Any, options: ReadOptions) -> Dataset:
    """Make a dataset with labels of another task than classes: first of the rows without them."""
    names, task = table.column_names, options.task
    found = [name for name in options.labels if name in names]
    if options.labelled and (missing := [name for name in options.labels if name not in names]):
        raise DataError(
            f"{path} has no column '{missing[0]}'; it has {', '.join(names)}: name the label "
            f"{'columns' if task.kind == 'survival' else 'column'} of task {task.kind} with the "
            "option label (data.options.label, --label)"
        )
    plain = options._replace(label=options.labels[0], labelled=False, task=Classes())
    kept = table.select([name for name in names if name not in found])
    if not kept.num_columns:
        raise DataError(f"{path} has no feature column beside the label; expected at least one")
    dataset = table_dataset(path, kept, plain)
    if len(found) < len(options.labels):
        return dataset
    cells = task.kind == "labels" and len(found) == 1  # may be empty: no label
    columns = {
        name: np.asarray(table[name].to_pylist()) if cells else _values(path, table, name)
        for name in found
    }
    return targeted(dataset, columns, task, str(path))


def targeted(dataset: Dataset, columns: Mapping[str, AnyArray], task: Task, where: str) -> Dataset:
    """Give a dataset label columns of another task than classes."""
    y, outputs = targets(columns, task, where)
    return replace(dataset, y=y, classes=tuple(outputs), task=task)


def _texts(path: Path, table: Any, options: ReadOptions) -> list[str] | None:
    """Return the text column, if there is one of words."""
    from pyarrow import types

    names = table.column_names
    found = options.text in names and (
        types.is_string(table[options.text].type) or types.is_large_string(table[options.text].type)
    )
    if found:
        return [str(value) for value in _values(path, table, options.text)]
    if options.next_word or options.text != "text":
        raise DataError(
            f"{path} has no column '{options.text}' of text; it has {', '.join(names)}: name it "
            "with the option text (data.options.text)"
        )
    return None


def _user_texts(
    texts: Sequence[str], clients: AnyArray | None, origin: Rows | None
) -> list[UserText]:
    """Collect each client's texts in their order, those of a test file apart."""
    held: dict[tuple[int, str], list[str]] = {}
    for row, text in enumerate(texts):
        user = "all" if clients is None else str(clients[row])
        held.setdefault((0 if origin is None else int(origin[row]), user), []).append(text)
    return [UserText(user, held[part, user], part) for part, user in sorted(held)]


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


def _numbers(path: Path, table: Any, names: tuple[str, ...]) -> AnyArray:
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


def read_npz(path: Path, options: ReadOptions) -> Dataset:
    """Read arrays x and y, and perhaps client and split, from an npz file."""
    label = "y" if options.label == "label" else options.label
    client, split = options.client, options.split
    try:
        _refuse_false_sizes(path)
        with np.load(path, allow_pickle=False) as arrays:
            needed = ("x", label) if options.labelled else ("x",)
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
    labels = found[label] if label in found else unlabelled(len(x))
    if options.task.kind == "classes" or label not in found:
        return assembled(path, x, labels, found.get(client), origin, "file")
    if len(labels) != len(x) or labels.ndim > 2:
        raise DataError(
            f"{path}: y has shape {labels.shape} for {len(x)} examples; expected as many"
        )
    plain = assembled(path, x, unlabelled(len(x)), found.get(client), origin, "file")
    return targeted(plain, array_columns(labels, label), options.task, str(path))


def array_columns(labels: AnyArray, name: str) -> dict[str, AnyArray]:
    """Give the columns of an array of labels names."""
    if labels.ndim == 1:
        return {name: labels}
    return {f"{name} {place + 1}": own for place, own in enumerate(labels.T)}


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
    return Dataset(
        name=path.stem,
        x=x,
        y=y,
        classes=classes,
        clients=codes,
        client_names=names,
        origin=origin,
        provenance=f"The user's own data, {form} {path.name}.",
        features=features,
    )


def unlabelled(rows: int) -> AnyArray:
    """Return the labels of rows that have none."""
    return np.full(rows, UNLABELLED)


def labelled_texts(
    path: Path,
    texts: Sequence[Tokens],
    labels: AnyArray,
    clients: AnyArray | None,
    origin: Rows | None,
    options: ReadOptions,
    form: str,
) -> Dataset:
    """Make a dataset of texts with labels."""
    x, words = sentences(texts, options.words, options.vocabulary)
    made = assembled(path, x, labels, clients, origin, form)
    return replace(made, words=words, vocabulary=options.vocabulary)


def next_word_texts(path: Path, users: Iterable[UserText], options: ReadOptions) -> Dataset:
    """Make a next-word dataset of what users wrote, in the order of their names."""
    provenance = f"The user's own text, {path.name}."
    made = streams(path.stem, users, options.words, options.vocabulary, provenance)
    assert made.clients is not None
    codes, names = client_codes(np.array(made.client_names))
    return replace(made, clients=codes[made.clients], client_names=names)
