"""Reading a user's own data, whichever common layout it is in."""

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from idiolect.data.dataset import Dataset
from idiolect.data.own.folders import (
    read_leaf,
    read_pfllib,
    read_user_files,
    user_files,
)
from idiolect.data.own.frames import read_frame
from idiolect.data.own.photographs import image_files, read_image_folder
from idiolect.data.own.tables import ReadOptions, read_npz, read_table
from idiolect.data.targets import TaskLike, make_task
from idiolect.errors import ConfigError, DataError

_EXPECTED = (
    "a .parquet, .csv, .npz or LEAF .json file, a folder of images (class/*.png or "
    "client/class/*.png), a PFLlib or LEAF folder with train/ and test/, or, for the next word, a "
    "folder with a .jsonl, .csv or .txt file for each user"
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
) -> Dataset:
    """Read own data: a path, whose layout is recognised, or a DataFrame.

    `label`, `client` and `split` name columns (the last two need not exist); `size` is the (width,
    height) that a folder's images are brought to. A
    column (or field) of words named `text` makes it text, cut to `length` words, of which a network
    knows the `vocabulary` most frequent; with `next_word` there are no labels but the words. Rows
    to predict need not be `labelled`, in a table or an npz file. `task` says what the label is, if
    not a class: "labels" (several columns of 0 and 1, or cells such as a|b), "number", "survival"
    (label = [time, event]), or a table with options, see `targets.make_task`.
    """
    chosen, names = make_task(task), (label,) if isinstance(label, str) else tuple(label)
    if not names or (chosen.kind == "classes" and len(names) > 1):
        raise ConfigError(
            f"label names {len(names)} columns, and task classes has one; say task = 'labels', or "
            "task = 'survival' for [time, event]"
        )
    options = ReadOptions(
        *(names[0], client, split, size, text, length, vocabulary, next_word, labelled),
        *(chosen, names),
    )
    if not isinstance(path, str | Path):
        return read_frame(path, options)
    where = Path(path).expanduser()
    if not where.exists():
        raise DataError(f"{where} does not exist; expected {_EXPECTED}")
    if chosen.kind != "classes" and where.suffix not in (".parquet", ".csv", ".npz"):
        raise DataError(f"task {chosen.kind} is read from .parquet, .csv and .npz; {where} is not")
    if where.is_dir():
        return _read_folder(where, options)
    if where.suffix in (".parquet", ".csv"):
        return read_table(where, options)
    if where.suffix == ".npz":
        return read_npz(where, options)
    if where.suffix == ".json":
        return read_leaf(where, options)
    raise DataError(f"{where} is a '{where.suffix}' file; expected {_EXPECTED}")


def reading_options(given: dict[str, Any]) -> dict[str, Any]:
    """Take the options of `read` out of others; `split` is not among them, which may be shares."""
    known = inspect.signature(read).parameters.keys() - {"path", "split"}
    return {name: given.pop(name) for name in list(given) if name in known}


def _read_folder(folder: Path, options: ReadOptions) -> Dataset:
    if any((folder / "train").glob("*.npz")):
        return read_pfllib(folder)
    if any((folder / "train").glob("*.json")) or any(folder.glob("*.json")):
        return read_leaf(folder, options)
    if options.next_word and user_files(folder):
        return read_user_files(folder, options)
    if image_files(folder):
        return read_image_folder(folder, options.size)
    raise DataError(f"{folder} holds nothing that can be read; expected {_EXPECTED}")
