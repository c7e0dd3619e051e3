"""Reading a user's own data, whichever common layout it is in."""

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from idiolect.data.column_sums import ColumnPlan
from idiolect.data.dataset import Dataset
from idiolect.data.own.csv_files import is_csv
from idiolect.data.own.folders import (
    read_leaf,
    read_pfllib,
    read_user_files,
    user_files,
)
from idiolect.data.own.frames import read_frame
from idiolect.data.own.json_lines import json_lines_files, read_json_lines
from idiolect.data.own.photographs import image_files, read_image_folder
from idiolect.data.own.tables import ReadOptions, read_npz, read_table
from idiolect.data.targets import TaskLike, make_task
from idiolect.data.tokenisers import Tokeniser, as_tokeniser
from idiolect.errors import ConfigError, DataError

_EXPECTED = (
    "a .parquet, .csv, .tsv, .csv.gz, .npz, .jsonl or LEAF .json file, a folder of images "
    "(class/*.png or client/class/*.png), a PFLlib or LEAF folder with train/ and test/, a folder "
    "with a .jsonl file for each client, or, for the next word, with a .csv or .txt file for each "
    "user"
)


def read(
    path: Any,
    *,
    label: str | Sequence[str] = "label",
    client: str = "client",
    split: str = "split",
    size: tuple[int, int] | None = None,
    text: str = "text",
    length: int = 0,
    vocabulary: int = 50_000,
    next_word: bool = False,
    labelled: bool = True,
    task: TaskLike | None = None,
    columns: Mapping[str, Any] | None = None,
    delimiter: str = "",
    encoding: str = "",
    tokeniser: str | Tokeniser = "",
    learn: str = "",
) -> Dataset:
    """Read own data: a path, whose layout is recognised, or a DataFrame.

    `label`, `client` and `split` name columns (the last two need not exist); `size` is the (width,
    height) that a folder's images are brought to. A
    column (or field) of words named `text` makes it text, cut to `length` words, of which a network
    knows the `vocabulary` most frequent; with `next_word` there are no labels but the words. With a
    `tokeniser` (a tokenizer.json, a folder that holds one, or "embedded") words are its tokens. Of
    conversations in JSON lines, `learn` names the role whose part is learnt; else all is. Rows
    to predict need not be `labelled`, in a table or an npz file. `task` says what the label is:
    "classes", "labels" (several columns of 0 and 1, or cells such as a|b), "number", "survival"
    (label = [time, event]), or a table with options, see `targets.make_task`; of a table the label
    decides, if it is absent.

    `columns` declares the types of a table's columns, such as {"zip": "category"}, "*" for those
    that are not named; `delimiter` and `encoding` of a CSV file are recognised.
    """
    chosen = None if task is None else make_task(task)
    # pandas may know a column as a number.
    names = tuple(map(str, (label,) if isinstance(label, str | int) else label))
    client, split = str(client), str(split)
    if not names or (chosen is not None and chosen.kind == "classes" and len(names) > 1):
        raise ConfigError(
            f"label names {len(names)} columns, and task classes has one; say task = 'labels', or "
            "task = 'survival' for [time, event]"
        )
    plans = {name: _plan(name, given) for name, given in (columns or {}).items()}
    options = ReadOptions(
        *(names[0], client, split, size, text, length, vocabulary, next_word, labelled),
        *(chosen, names, plans, delimiter, encoding),
        tokeniser=as_tokeniser(tokeniser),
        learn=learn,
    )
    if not isinstance(path, str | Path):
        return read_frame(path, options)
    where = Path(path).expanduser()
    if not where.exists():
        raise DataError(f"{where} does not exist; expected {_EXPECTED}")
    tabular = where.suffix in (".parquet", ".npz") or is_csv(where)
    if chosen is not None and chosen.kind != "classes" and not tabular:
        raise DataError(f"task {chosen.kind} is read from .parquet, .csv and .npz; {where} is not")
    if where.is_dir():
        return _read_folder(where, options)
    if where.suffix == ".parquet" or is_csv(where):
        return read_table(where, options)
    if where.suffix == ".npz":
        return read_npz(where, options)
    if where.suffix == ".json":
        return read_leaf(where, options)
    if where.suffix == ".jsonl":
        return read_json_lines(where, options)
    raise DataError(f"{where} is a '{where.suffix}' file; expected {_EXPECTED}")


def _plan(name: str, given: Any) -> ColumnPlan:
    return given if isinstance(given, ColumnPlan) else ColumnPlan.of(given, f"columns.{name}")


def reading_options(given: dict[str, Any]) -> dict[str, Any]:
    """Take the options of `read` out of others; `split` is not among them, which may be shares."""
    known = inspect.signature(read).parameters.keys() - {"path", "split"}
    return {name: given.pop(name) for name in list(given) if name in known}


def _read_folder(folder: Path, options: ReadOptions) -> Dataset:
    if any((folder / "train").glob("*.npz")):
        return read_pfllib(folder)
    if any((folder / "train").glob("*.json")) or any(folder.glob("*.json")):
        return read_leaf(folder, options)
    lines = json_lines_files(folder)
    if lines and (not options.next_word or len(lines) == len(user_files(folder))):
        return read_json_lines(folder, options)
    if options.next_word and user_files(folder):
        return read_user_files(folder, options)
    if image_files(folder):
        return read_image_folder(folder, options.size)
    raise DataError(f"{folder} holds nothing that can be read; expected {_EXPECTED}")
