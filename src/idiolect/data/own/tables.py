"""Own data in one file (Parquet, CSV or npz), and how columns become a Dataset."""

import re
import zipfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from idiolect.core.task import Classes, Task
from idiolect.data.column_sums import ColumnPlan
from idiolect.data.dataset import TABLE, AnyArray, Dataset, Rows
from idiolect.data.own.column_types import plainly_typed, typed_columns
from idiolect.data.own.csv_files import TableSource, read_csv
from idiolect.data.own.label_columns import Decided, class_names_of, column_values, decided_task
from idiolect.data.parquet import (
    decode_images,
    image_column,
    image_shape,
    read_parquet,
    refuse_bomb,
)
from idiolect.data.targets import targets
from idiolect.data.text import Tokens, UserText, sentences, streams
from idiolect.data.tokenisers import Tokeniser
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
    task: Task | None = None  # None: the label columns of a table decide; else classes
    labels: tuple[str, ...] = ("label",)  # the names of all label columns
    columns: Mapping[str, ColumnPlan] = MappingProxyType({})  # declared types
    delimiter: str = ""  # of text; empty: recognised
    encoding: str = ""  # the same
    tokeniser: Tokeniser | None = None  # of text; None: words
    learn: str = ""  # of conversations: whose part is learnt

    @property
    def words(self) -> int:
        """Words in an example: by default 200 of a labelled text, 20 for the next word.

        Of a tokeniser's tokens 128.
        """
        if self.tokeniser is not None:
            return self.length or 128
        return self.length or (20 if self.next_word else 200)


def read_table(path: Path, options: ReadOptions) -> Dataset:
    """Read rows of typed columns, text or images, with a label, perhaps client and split."""
    table, source = read_cells(path, options.delimiter, options.encoding)
    return table_dataset(path, table, options, source)


def read_cells(path: Path, delimiter: str = "", encoding: str = "") -> tuple[Any, TableSource]:
    """Read a file as an Arrow table, the cells of text as strings; and say how it was written."""
    if not path.is_file():
        raise DataError(f"{path} does not exist; expected a .csv or .parquet file")
    if path.suffix == ".parquet":
        return read_parquet(path), TableSource(path)
    return read_csv(path, delimiter, encoding)


def read_columns(path: Path) -> Any:
    """Read a file as an Arrow table: of text, columns of numbers where all cells are some."""
    table, source = read_cells(path)
    return plainly_typed(table, source) if source.delimiter else table


def table_dataset(
    path: Path, table: Any, options: ReadOptions, source: TableSource | None = None
) -> Dataset:
    """Make a dataset of an Arrow table; `path` is the file it was read from, or a name for it.

    For the next word there is no label, and rows stand in the order they were written in. Rows that
    need not be labelled are of one class, `UNLABELLED`, where they are not. Columns stay as they
    were read until training rows are known, see `Dataset.table`.
    """
    source = source or TableSource(path)
    if not table.num_rows:
        raise DataError(f"{path} has no rows; expected at least one example")
    names = list(table.column_names)
    if twice := [name for name, times in Counter(names).items() if times > 1]:
        raise DataError(f"{path} has two columns '{twice[0]}'; rename or remove one")
    texts = _texts(path, table, options, source)
    labels = options.labels
    if absent := [one for one in labels if one not in names]:
        if options.labelled and not options.next_word:
            raise DataError(
                f"{path} has no column '{absent[0]}'; it has {_listed(names)}: name the label "
                f"column with the option label (data.options.label, --label){_headless(names)}"
            )
        labels = ()
    for option, column in (("client", options.client), ("split", options.split)):
        if column != option and column not in names:
            raise DataError(
                f"{path} has no column '{column}' for {option}; it has {_listed(names)}"
            )
    clients = _owners(table, options.client, source) if options.client in names else None
    origin = None
    if options.split in names:
        origin = origin_codes(column_values(table, options.split, source), str(path), source)
    if texts is not None and options.next_word:
        return next_word_texts(path, _user_texts(texts, clients, origin), options)
    values, decided = unlabelled(table.num_rows), Decided(options.task or Classes())
    if labels:
        decided = decided_task(table, labels, options.task, source)
        if decided.task.kind == "classes":
            values = column_values(table, labels[0], source)
    made = _examples(path, table, options, texts, values, clients, origin, source)
    if made.table is not None:
        facts = replace(
            made.table.source,
            remarks=(*decided.remarks, *made.table.source.remarks),
            labels=tuple(labels),
            client="" if clients is None else options.client,
        )
        made = replace(made, table=replace(made.table, source=facts))
    if not labels:
        return made
    if decided.task.kind == "classes":
        known = class_names_of(table, labels[0], values)
        return made if known is None else replace(made, y=values.astype(np.int64), classes=known)
    return targeted(made, decided.columns, decided.task, str(path))


def _examples(
    path: Path,
    table: Any,
    options: ReadOptions,
    texts: list[str] | None,
    labels: AnyArray,
    clients: AnyArray | None,
    origin: Rows | None,
    source: TableSource,
) -> Dataset:
    """Make a dataset of a table's text, images or columns."""
    if texts is not None:
        return labelled_texts(path, texts, labels, clients, origin, options, "table")
    image = image_column(table.schema) if path.suffix == ".parquet" else None
    if image is not None:
        x = np.empty((table.num_rows, *image_shape(path, image)), np.uint8)
        decode_images([path], image, x)
        return assembled(path, x, labels, clients, origin, "table")
    apart = (*options.labels, options.client, options.split)
    features = tuple(name for name in table.column_names if name not in apart)
    if not features:
        raise DataError(f"{path} has no feature column beside the label; expected at least one")
    raw = typed_columns(table, features, options.columns, source)
    if not raw.columns:
        why = "; ".join(f"{name}: {reason}" for name, reason in raw.ignored.items())
        raise DataError(
            f"{path} has no column to learn from ({why}); declare one in data.columns, or, if it "
            "is the text to learn from, name it with the option text"
        )
    made = assembled(path, raw.placeholder(), labels, clients, origin, "table", tuple(raw.columns))
    return replace(made, table=raw, unfitted=TABLE)


def targeted(dataset: Dataset, columns: Mapping[str, AnyArray], task: Task, where: str) -> Dataset:
    """Give a dataset label columns of another task than classes."""
    y, outputs = targets(columns, task, where)
    return replace(dataset, y=y, classes=tuple(outputs), task=task)


def _owners(table: Any, name: str, source: TableSource) -> AnyArray:
    """Return whose each row is, as written."""
    values = column_values(table, name, source)
    strings = table.schema.field(name).type in ("string", "large_string")
    if not strings or values.dtype.kind in "US":
        return values
    return np.asarray([str(one).strip() for one in table[name].to_pylist()])


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:40]) + (f" and {len(names) - 40} more" if len(names) > 40 else "")


def _headless(names: Sequence[str]) -> str:
    """Say where the line of names may be missing."""
    numbers = [name for name in names if re.fullmatch(r"[-+.\deE]+", name)]
    missing = len(numbers) == len(names) and names != [str(n) for n in range(len(names))]
    return "; line 1 holds numbers: is the line of column names missing?" if missing else ""


def _texts(path: Path, table: Any, options: ReadOptions, source: TableSource) -> list[str] | None:
    """Return the text column, if there is one of words."""
    from pyarrow import types

    names = table.column_names
    found = options.text in names and (
        types.is_string(table[options.text].type) or types.is_large_string(table[options.text].type)
    )
    if found and options.columns.get(options.text) is None:
        values = column_values(table, options.text, source)
        if values.dtype.kind in "US":
            return [str(value) for value in table[options.text].to_pylist()]
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


def read_npz(path: Path, options: ReadOptions) -> Dataset:
    """Read arrays x and y, and perhaps client and split, from an npz file."""
    label, task = "y" if options.label == "label" else options.label, options.task or Classes()
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
    if task.kind == "classes" or label not in found:
        return assembled(path, x, labels, found.get(client), origin, "file")
    if len(labels) != len(x) or labels.ndim > 2:
        raise DataError(
            f"{path}: y has shape {labels.shape} for {len(x)} examples; expected as many"
        )
    plain = assembled(path, x, unlabelled(len(x)), found.get(client), origin, "file")
    return targeted(plain, array_columns(labels, label), task, str(path))


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

    Of two classes, of strings and of scattered whole numbers the classes are the sorted values. Of
    whole numbers of which at least half of 0..largest occur, a class between the smallest and the
    largest that nobody has keeps its place.
    """
    if values.dtype.kind == "f":
        wrong = np.flatnonzero(~np.isfinite(values))
        if len(wrong):
            raise DataError(f"{where}: row {int(wrong[0]) + 1} has no label; fill or drop it")
        wrong = np.flatnonzero((values != np.round(values)) | (np.abs(values) > 2**53))
        if len(wrong):
            raise DataError(
                f"{where}: label {values[wrong[0]]} in row {int(wrong[0]) + 1} is not a class; "
                "expected whole numbers or strings"
            )
        values = values.astype(np.int64)
    if values.dtype.kind == "O":
        empty = [row for row, value in enumerate(values) if value is None]
        if empty:
            raise DataError(f"{where}: the label in row {empty[0] + 1} is missing; fill or drop it")
        values = values.astype(str)
    found, codes = np.unique(values, return_inverse=True)
    numbered = values.dtype.kind in "iu" and 0 <= found[0] and found[-1] < 2 * len(found)
    if numbered and len(found) != 2:
        names = tuple(str(i) for i in range(int(found[0]), int(found[-1]) + 1))
        return values.astype(np.int64) - int(found[0]), names
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


def origin_codes(values: AnyArray, where: str, source: TableSource | None = None) -> Rows:
    """Code a split column: 0 for train, 1 for test."""
    known = {"train": 0, "0": 0, "test": 1, "1": 1}
    found, codes = np.unique(values, return_inverse=True)
    for place, value in enumerate(found):
        if str(value) not in known:
            row = int(np.flatnonzero(codes.reshape(-1) == place)[0])
            at = f"row {row + 1}" if source is None else source.place(row)
            raise DataError(f"{where}: split '{value}' in {at}; expected train or test")
    return np.array([known[str(value)] for value in found], np.int64)[codes.reshape(-1)]


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
    coded = sentences(texts, options.words, options.vocabulary, options.tokeniser)
    return coded.given_to(assembled(path, coded.x, labels, clients, origin, form))


def next_word_texts(path: Path, users: Iterable[UserText], options: ReadOptions) -> Dataset:
    """Make a next-word dataset of what users wrote, in the order of their names."""
    provenance = f"The user's own text, {path.name}."
    made = streams(
        *(path.stem, users, options.words, options.vocabulary, provenance), options.tokeniser
    )
    assert made.clients is not None
    codes, names = client_codes(np.array(made.client_names))
    return replace(made, clients=codes[made.clients], client_names=names)
