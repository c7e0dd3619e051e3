"""What a table's label columns hold: classes, several labels, a number, or survival times.

Without a task the labels decide, by one rule, and what they decided is remarked on.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from idiolect.core.survival import Cox
from idiolect.core.task import Classes, Labels, Number, Task
from idiolect.data.dataset import AnyArray
from idiolect.data.own.cell_values import as_numbers, string_cells
from idiolect.data.own.column_types import Remark
from idiolect.data.own.csv_files import TableSource
from idiolect.data.parquet import class_names
from idiolect.errors import DataError

MOST_CLASSES = 20  # whole numbers of more values are a number to predict, unless a task is given
_FEW_CLASSES = 5  # whole numbers of more values may be counts
_ABSENT = ("", "na", "n/a", "nan", "null", "?", "#n/a", "<na>", "nat")  # "-" may be a class
_TRUTHS = ("true", "false")


class Decided(NamedTuple):
    """What label columns are taken for, and their values unless they are classes."""

    task: Task
    columns: dict[str, AnyArray] = {}  # noqa: RUF012
    remarks: tuple[Remark, ...] = ()


def column_values(table: Any, name: str, source: TableSource) -> AnyArray:
    """Return a column without gaps: whole numbers, numbers, truths, or strings as written."""
    from pyarrow import types

    column = table[name].combine_chunks()
    kind = column.type
    if types.is_dictionary(kind):
        column, kind = column.dictionary_decode(), kind.value_type
    if types.is_nested(kind) or types.is_binary(kind):
        raise DataError(
            f"{source.path}: column '{name}' holds {kind}; expected one number or string a row"
        )
    if not (types.is_string(kind) or types.is_large_string(kind)):
        if column.null_count:
            raise _empty(name, source, column.is_null().to_pylist().index(True))
        values: AnyArray = np.asarray(column.to_pylist())
        return values
    own = string_cells(column.cast("string"), usual=_ABSENT)
    if (own.codes < 0).any():
        raise _empty(name, source, int(np.flatnonzero(own.codes < 0)[0]))
    texts = np.array(own.texts.to_pylist())
    if {one.lower() for one in texts[:3]} <= {"true", "false"} and len(texts) <= 6:
        return np.array([one.lower() == "true" for one in texts])[own.codes]
    numbers = as_numbers(own.texts, source)
    if numbers is None or any(_coded(one) for one in texts[:200]):
        return texts[own.codes]
    whole = bool((numbers == np.round(numbers)).all() and (np.abs(numbers) < 2**53).all())
    written = all("." not in one and "," not in one for one in texts[:1000].tolist())
    return (numbers.astype(np.int64) if whole and written else numbers)[own.codes]


def class_spellings(table: Any, name: str, source: TableSource) -> list[tuple[str, ...]]:
    """Return for each row what its class may be called, nothing where it is missing.

    A file and a frame write the same class as TRUE or true, 1 or 1.0, with blanks or without.
    """
    from pyarrow import types

    column = table[name].combine_chunks()
    kind = column.type
    if not (types.is_string(kind) or types.is_large_string(kind)):
        return [_spelled(one) for one in column.to_pylist()]
    own = string_cells(column.cast("string"), usual=_ABSENT)
    texts, numbers = own.texts.to_pylist(), as_numbers(own.texts, source)
    names = [
        (text, *_spelled(text.lower() == "true" if text.lower() in _TRUTHS else None), *_spelled(n))
        for text, n in zip(texts, [None] * len(texts) if numbers is None else numbers, strict=True)
    ]
    return [names[code] if code >= 0 else () for code in own.codes.tolist()]


def _spelled(value: Any) -> tuple[str, ...]:
    if value is None or value != value:
        return ()
    if isinstance(value, bool):
        return (str(value), str(int(value)))
    if isinstance(value, float) and value.is_integer():
        return (str(int(value)), str(value))
    return (str(value),)


def has_gap(table: Any, name: str) -> bool:
    """Return whether a cell of a label column is missing."""
    from pyarrow import types

    column = table[name].combine_chunks()
    if types.is_string(column.type) or types.is_large_string(column.type):
        return bool((string_cells(column.cast("string"), usual=_ABSENT).codes < 0).any())
    return any(one is None or one != one for one in column.to_pylist())


def _coded(text: str) -> bool:
    return len(text) > 1 and text[0] == "0" and text.isdigit()


def _empty(name: str, source: TableSource, row: int) -> DataError:
    return DataError(
        f"{source.path}: column '{name}' is empty in {source.place(row)}; fill or drop the row"
    )


def decided_task(
    table: Any, names: Sequence[str], task: Task | None, source: TableSource
) -> Decided:
    """Decide what label columns hold, unless it is given.

    Several columns are labels, or, of two whose first is a number, a time and an event. One column
    is labels where a cell holds `|`, a number where it holds fractions or more than 20 different
    whole numbers, and classes otherwise.
    """
    if task is not None and task.kind == "classes":
        return Decided(task)
    if len(names) == 1 and (task is None or task.kind == "labels"):
        cells = joined_cells(table, names[0], task is not None)
        if cells is not None:
            said = "cells such as a|b hold several labels, so the task is labels; if each is one:"
            remarks = () if task else (Remark(names[0], said, 'task = "classes"'),)
            return Decided(task or Labels(), {names[0]: cells}, remarks)
    columns = {name: column_values(table, name, source) for name in names}
    if task is not None:
        return Decided(task, columns)
    first = columns[names[0]]
    if len(names) > 1:
        timed = len(names) == 2 and first.dtype.kind in "iuf" and first.max() > 1
        said = (
            f"'{names[0]}' is read as a time and '{names[1]}' as its event; if they are two labels:"
        )
        remarks = (Remark(names[0], said, 'task = "labels"'),) if timed else ()
        return Decided(Cox() if timed else Labels(), columns, remarks)
    if said := _a_number(first, names[0]):
        remedy = 'task = "classes"' if "fractions" not in said else ""
        return Decided(Number(), columns, (Remark(names[0], said, remedy),))
    if first.dtype.kind in "iuf" and (distinct := len(np.unique(first))) > _FEW_CLASSES:
        said = (
            f"the label's {distinct} whole numbers are read as classes; if they count or measure:"
        )
        return Decided(Classes(), remarks=(Remark(names[0], said, 'task = "number"'),))
    return Decided(Classes())


def class_names_of(table: Any, name: str, values: AnyArray) -> tuple[str, ...] | None:
    """Return class names that are written into the schema, as the Hugging Face hub does."""
    if not (table.schema.metadata or {}).get(b"huggingface") or values.dtype.kind not in "iu":
        return None
    try:
        found = class_names(table.schema, name, values)
    except (ValueError, TypeError, AttributeError):
        return None
    good = values.min() >= 0 and values.max() < len(found) and len(set(found)) == len(found)
    return found if good else None


def _a_number(values: AnyArray, name: str) -> str:
    """Say why a label is a number to predict, if it is."""
    if values.dtype.kind == "f" and not (values == np.round(values)).all():
        return f"the label holds fractions, so the task is to predict a number ('{name}')"
    if values.dtype.kind in "iuf" and (distinct := len(np.unique(values))) > MOST_CLASSES:
        return (
            f"the label holds {distinct:,} different whole numbers, more than {MOST_CLASSES}, so "
            "the task is to predict a number; if they are classes:"
        )
    return ""


def joined_cells(table: Any, name: str, told: bool) -> AnyArray | None:
    """Return cells that hold several labels, such as a|b, or nothing; None where there are none."""
    from pyarrow import types

    column = table[name].combine_chunks()
    if not (types.is_string(column.type) or types.is_large_string(column.type)):
        return None
    own = string_cells(column.cast("string"), usual=_ABSENT)
    texts = own.texts.to_pylist()
    numbers = as_numbers(own.texts) is not None
    if numbers or not (told or any("|" in one for one in texts)):
        return None
    return np.array([*texts, ""])[own.codes]
