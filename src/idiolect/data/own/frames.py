"""Data that is already in memory: DataFrames of any library, and arrays."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from idiolect.data.column_sums import ColumnPlan, RawColumn, RawTable
from idiolect.data.dataset import TABLE, AnyArray, Dataset
from idiolect.data.own.column_types import EVERY_OTHER, TableFacts
from idiolect.data.own.csv_files import TableSource
from idiolect.data.own.tables import (
    ReadOptions,
    array_columns,
    assembled,
    examples,
    table_dataset,
    targeted,
    unlabelled,
)
from idiolect.data.targets import TaskLike, make_task
from idiolect.errors import ConfigError, DataError, suggest

FRAME = Path("data frame")  # stands for the file's name in messages
_EXPECTED = (
    "a DataFrame (pandas, polars, or anything that speaks Arrow), a pyarrow.Table, a dict of "
    "columns or a list of rows as dicts"
)


def read_frame(frame: Any, options: ReadOptions) -> Dataset:
    """Make a dataset of a frame, as of a file with the same columns."""
    table = frame_table(frame)
    for name in options.columns:
        if name not in (*table.column_names, EVERY_OTHER):
            raise DataError(f"columns: there is no column {suggest(name, table.column_names)}")
    return table_dataset(FRAME, table, options)


def frame_table(frame: Any) -> Any:
    """Turn a frame into an Arrow table; an index of pandas is no column."""
    import pyarrow

    try:
        table = _table(frame)
    except (pyarrow.ArrowException, TypeError, ValueError, OverflowError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(
            f"the {type(frame).__name__} cannot be read as a table ({reason}); give each column "
            "values of one type"
        ) from error
    if table is None:
        hint = "; for arrays use Federation.from_arrays" if isinstance(frame, np.ndarray) else ""
        raise DataError(f"data is of type {type(frame).__name__}; expected {_EXPECTED}{hint}")
    for place, field in enumerate(table.schema):
        if pyarrow.types.is_dictionary(field.type):  # a category of pandas or polars
            plain = table.column(place).cast(field.type.value_type)
            table = table.set_column(place, field.name, plain)
    return table


def _table(frame: Any) -> Any:
    """Return an Arrow table, or None where it is no frame."""
    import pyarrow

    if isinstance(frame, pyarrow.Table):
        return frame
    if type(frame).__module__.partition(".")[0] == "pandas" and hasattr(frame, "columns"):
        named = frame.rename(columns=str)  # pandas allows numbers as names
        return pyarrow.Table.from_pandas(named, preserve_index=False).replace_schema_metadata()
    if isinstance(frame, Mapping):
        return pyarrow.table({str(name): _column(values) for name, values in frame.items()})
    if isinstance(frame, Sequence) and frame and all(isinstance(row, Mapping) for row in frame):
        return pyarrow.Table.from_pylist([dict(row) for row in frame])
    if hasattr(frame, "__arrow_c_stream__") and not hasattr(frame, "to_frame"):  # no Series
        return pyarrow.table(frame)
    if hasattr(frame, "__dataframe__"):
        return import_module("pyarrow.interchange").from_dataframe(frame)
    return None


def _column(values: Any) -> Any:
    """Bring a column to what Arrow takes: a list, or an array of one dimension."""
    return values if hasattr(values, "__arrow_c_array__") else array_of(values, "a column")


def column_name(option: str, given: Any) -> str:
    """Return the name of a column, which pandas may know as a number."""
    if not isinstance(given, str | int):
        raise ConfigError(f"{option} is {given!r}; expected the name of a column")
    return str(given)


def array_of(values: Any, what: str) -> AnyArray:
    """Return values as an array: of a list, NumPy, torch on the CPU, or a column of a frame."""
    try:
        found: AnyArray = np.asarray(values)
    except (TypeError, ValueError, RuntimeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(
            f"{what} is of type {type(values).__name__} and no array ({reason}); expected numbers, "
            "strings or a tensor on the CPU, one entry for each row"
        ) from error
    if found.dtype.kind in "VOM" and found.dtype.kind != "O":
        raise DataError(f"{what} is of type {found.dtype}; expected numbers or strings")
    return found


def read_arrays(
    x: Any,
    y: Any,
    clients: Any,
    features: Sequence[str] = (),
    task: TaskLike | None = None,
    scaled: bool = True,
) -> Dataset:
    """Make a dataset of arrays: x [row, ...], y [row], and whose each row is [row].

    Where x is [row, feature], features are numbers as in a table: `scaled`, and filled in where
    they are NaN.
    With task "labels" y is [row, label] of 0 and 1, with "survival" [row, 2]: time and event.
    """
    chosen = make_task(task)
    given = array_of(x, "x")
    numbers = scaled and given.ndim <= 2 and given.dtype.kind in "buif"
    raw = _number_columns(given, features) if numbers else None
    made = examples(given, "x") if raw is None else raw.placeholder()
    labels, owners = array_of(y, "y"), None if clients is None else array_of(clients, "clients")
    for name, own in (("y", labels), ("clients", owners)):
        wide = name == "y" and chosen.kind != "classes" and own is not None and own.ndim == 2
        if own is not None and own.shape[: 1 if wide else None] != (len(made),):
            raise DataError(
                f"{name} has shape {own.shape} and x has {len(made)} rows; expected one entry for "
                "each row"
            )
    if features and raw is None and (made.ndim != 2 or len(features) != made.shape[1]):
        raise DataError(f"{len(features)} names of features for x of shape {made.shape}")
    path, names = Path("arrays"), tuple(features) if raw is None else tuple(raw.columns)
    classes = chosen.kind == "classes"
    known = labels if classes else unlabelled(len(made))
    plain = assembled(path, made, known, owners, None, "arrays", names)
    if raw is not None:
        plain = replace(plain, table=raw, unfitted=TABLE)
    return plain if classes else targeted(plain, array_columns(labels, "y"), chosen, "arrays")


def _number_columns(x: AnyArray, names: Sequence[str]) -> RawTable:
    """Take the columns of x [row, feature] for numbers; NaN is a missing one."""
    wide = x.reshape(len(x), -1).astype(np.float64)
    if np.isinf(wide).any():
        row, column = (int(at) for at in np.argwhere(np.isinf(wide))[0])
        raise DataError(f"x is infinite in row {row}, feature {column}; make it NaN, or drop it")
    if names and len(names) != wide.shape[1]:
        raise DataError(f"{len(names)} names of features for x of shape {x.shape}")
    called = [str(name) for name in names] or [f"x{n}" for n in range(wide.shape[1])]
    columns = {
        name: RawColumn(ColumnPlan("number"), np.ascontiguousarray(wide[:, place]))
        for place, name in enumerate(called)
    }
    if len(columns) < wide.shape[1]:
        raise DataError("two features have the same name; give each its own")
    return RawTable(columns, len(wide), {}, TableFacts(TableSource(Path("arrays")), (), {}, ()))
