"""What the columns of a table hold: numbers, booleans, categories, dates; and what is missing.

Types are inferred from the file unless they are declared. Whatever is guessed is remarked on, with
the line that corrects the guess.
"""

import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from idiolect.data.column_sums import ColumnPlan, RawColumn, RawTable
from idiolect.data.own.cell_values import (
    DAYS,
    SECONDS,
    Cells,
    arrow_compute,
    as_numbers,
    booleans,
    categories,
    dates,
    declared_column,
    is_date,
    leading_zeros,
    quick_numbers,
    shown,
    string_cells,
)
from idiolect.data.own.csv_files import PLAIN, TableSource
from idiolect.errors import DataError

EVERY_OTHER = "*"  # declares the columns that are not named

_ENOUGH = 20  # rows from which on a column of distinct strings is an identifier
_IDENTIFIER = re.compile(r"(^|[_ .-])(id|uid|nr|no|key|index|record|mrn)$|^(id|row|index)\b", re.I)
_PERSON = re.compile(r"(^|[_ .-])(id|uid|nr|no|key|record|mrn)$", re.I)
_TIMES = 20  # a value that stands in more rows on average is no person's or record's
_CLIENT = re.compile(
    r"(^|[_ .-])(site|hospital|clinic|client|cent(er|re)|user|school|bank|branch|region|store|"
    r"institution|facility|practice|device|silo|party)([_ .-]?(id|name|code|nr|no))?$",
    re.I,
)

Found: TypeAlias = tuple[ColumnPlan, NDArray[Any], tuple[str, ...]]


class Remark(NamedTuple):
    """Something worth knowing about a column, and the line that changes it."""

    column: str
    what: str
    remedy: str = ""


@dataclass(frozen=True)
class TableFacts:
    """What was found in a table beside its values."""

    source: TableSource
    remarks: tuple[Remark, ...] = ()
    spellings: Mapping[str, Mapping[str, int]] = ()  # type: ignore[assignment]
    clients: tuple[str, ...] = ()  # columns that look like the client
    labels: tuple[str, ...] = ()  # the names of the label columns
    client: str = ""  # of the client's, where there is one


def typed_columns(
    table: Any, names: Sequence[str], declared: Mapping[str, ColumnPlan], source: TableSource
) -> RawTable:
    """Type these columns of an Arrow table; what is declared is not guessed."""
    known = set(names) | set(table.column_names) | {EVERY_OTHER}
    everything = declared.get(EVERY_OTHER)
    places = {name: place for place, name in enumerate(table.column_names)}

    def one(name: str) -> tuple[RawColumn | str, list[Remark], dict[str, int]]:
        plan = declared.get(name, everything)
        try:
            return _column(name, table.column(places[name]).combine_chunks(), plan, source)
        except DataError as error:
            raise DataError(f"{source.path}: {error}") from None

    with ThreadPoolExecutor(4) as pool:
        found = dict(zip(names, pool.map(one, names), strict=True))
    columns = {name: own for name, (own, _, _) in found.items() if isinstance(own, RawColumn)}
    ignored = {name: own for name, (own, _, _) in found.items() if isinstance(own, str)}
    remarks = [remark for _, own, _ in found.values() for remark in own]
    remarks += [
        Remark(name, "is declared, and the table has no such column")
        for name in declared
        if name not in known
    ]
    spellings = {name: own for name, (_, _, own) in found.items() if own}
    clients = [name for name, own in columns.items() if _like_client(name, own)]
    facts = TableFacts(source, tuple(remarks), spellings, tuple(clients))
    return RawTable(columns, table.num_rows, ignored, facts)


def _like_client(name: str, column: RawColumn) -> bool:
    if not _CLIENT.search(name) or column.plan.kind not in ("category", "number"):
        return False
    distinct = len(np.unique(column.values[~column.absent]))
    return 2 <= distinct <= len(column.values) / 5


def _column(
    name: str, cells: Any, plan: ColumnPlan | None, source: TableSource
) -> tuple[RawColumn | str, list[Remark], dict[str, int]]:
    """Type one column: its values, or why it is ignored; with remarks and missing spellings."""
    from pyarrow import types

    compute = arrow_compute()

    if plan is not None and plan.kind == "ignore":
        return "declared so", [], {}
    kind = cells.type
    if types.is_dictionary(kind):
        cells, kind = cells.dictionary_decode(), kind.value_type
    if types.is_nested(kind) or types.is_binary(kind) or types.is_large_binary(kind):
        raise DataError(
            f"column '{name}' holds {kind}; expected one number, date or string a row: remove it, "
            f'or declare {quoted(name)} = "ignore"'
        )
    if types.is_null(kind):
        cells = cells.cast("string")
        kind = cells.type
    number = types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind)
    wanted = plan.kind if plan is not None else ""
    if types.is_temporal(kind):
        plain = types.is_timestamp(kind) or types.is_date(kind)
        if wanted in ("", "date") and plain:
            if types.is_timestamp(kind) and kind.tz:  # the time of the place, as in text
                cells = compute.local_timestamp(cells)
            seconds = compute.cast(compute.cast(cells, "timestamp[s]", safe=False), "int64")
            days = _floats(seconds) / SECONDS
            return RawColumn(plan or ColumnPlan("date"), days), [], _gaps(days)
        if not plain:
            cells, number = compute.cast(cells, "int64"), True
    if types.is_boolean(kind) and wanted != "category":
        values = _floats(compute.cast(cells, "int8"))
        return RawColumn(plan or ColumnPlan("boolean"), values), [], _gaps(values)
    if number and wanted in ("", "number", "boolean"):
        values = _floats(cells)
        return _judged_number(name, values, plan, source, _gaps(values))
    return _of_strings(name, cells if types.is_string(kind) else cells.cast("string"), plan, source)


def _floats(cells: Any) -> NDArray[np.float64]:
    values: NDArray[np.float64] = cells.cast("float64", safe=False).to_numpy(zero_copy_only=False)
    return values


def _gaps(values: NDArray[np.float64], spelling: str = "") -> dict[str, int]:
    gaps = int(np.isnan(values).sum())
    return {spelling: gaps} if gaps else {}


def quoted(name: str) -> str:
    """Write a column's name as a key of TOML."""
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else '"' + name.replace('"', '\\"') + '"'


def _of_strings(
    name: str, cells: Any, plan: ColumnPlan | None, source: TableSource
) -> tuple[RawColumn | str, list[Remark], dict[str, int]]:
    if plan is None and (values := quick_numbers(cells, source)) is not None:
        return _judged_number(name, values, None, source, _gaps(values, "nan"))
    own = string_cells(cells, () if plan is None else plan.missing)
    if plan is not None:
        made = declared_column(name, own, plan, source)
        if plan.kind == "number":
            _refuse_infinite(name, made.values, source)
        return made, [], own.spellings
    if not own.present:
        return "all cells are missing", [], own.spellings
    if (truths := booleans(own)) is not None:
        return RawColumn(ColumnPlan("boolean"), own.spread(truths)), [], own.spellings
    zeros = leading_zeros(own)
    if not zeros and (numbers := as_numbers(own.texts, source)) is not None:
        found = _judged_number(name, own.spread(numbers), None, source, own.spellings)
        return found[0], [*found[1], *_thousands(name, own, numbers, source)], found[2]
    if (dated := dates(own.texts, DAYS)) is not None:
        days, form, other = dated
        said = f"dates such as {own.texts[0].as_py()} are read as {form}"
        remedy = f'{quoted(name)} = {{ type = "date", format = "{other}" }}'
        remarks = [Remark(name, said, remedy)] if other else []
        if "%y" in form:
            said = "has years of two digits: 69 to 99 are read as 1969 to 1999, 00 to 68 as 2000 to"
            remarks.append(Remark(name, f"{said} 2068; where that is wrong, write four"))
        return RawColumn(ColumnPlan("date", format=form), own.spread(days)), remarks, own.spellings
    return _judged_strings(name, own, source, zeros)


def _judged_number(
    name: str,
    values: NDArray[np.float64],
    plan: ColumnPlan | None,
    source: TableSource,
    spellings: dict[str, int],
) -> tuple[RawColumn | str, list[Remark], dict[str, int]]:
    """Accept a column of numbers, unless they only number the rows."""
    _refuse_infinite(name, values, source)
    if plan is not None:
        return RawColumn(plan, values), [], spellings
    present = values[~np.isnan(values)]
    if not len(present):
        return "all cells are missing", [], spellings
    if len(values) < _ENOUGH:
        return RawColumn(ColumnPlan("number"), values), [], spellings
    whole = bool((present == np.round(present)).all())
    distinct = np.unique(present) if whole else present[:0]
    remarks = []
    if whole and len(distinct) == len(values) >= _ENOUGH:
        unnamed = name.startswith(("column ", "Unnamed"))
        counting = bool(len(distinct) and distinct[-1] - distinct[0] == len(distinct) - 1)
        if _IDENTIFIER.search(name) or (counting and unnamed):
            return "it numbers the rows", [_override(name, "number")], spellings
    if whole and (why := _repeated(name, len(distinct), len(present))):
        return why, _split_by_hand(name, why, "number"), spellings
    if whole and 3 <= len(distinct) <= 10 and len(values) >= 2 * _ENOUGH:
        shown = ", ".join(f"{one:g}" for one in distinct)
        said = f"holds only the whole numbers {shown} and is read as a number; if they are codes:"
        remarks.append(Remark(name, said, f'{quoted(name)} = "category"'))
    return RawColumn(ColumnPlan("number"), values), remarks, spellings


def _repeated(name: str, distinct: int, rows: int) -> str:
    """Say that a column names persons or records that stand in several rows; else nothing."""
    several = _ENOUGH <= distinct < rows <= _TIMES * distinct
    several = several and bool(_PERSON.search(name)) and not _CLIENT.search(name)
    return f"{distinct:,} identifiers in {rows:,} rows" if several else ""


def _split_by_hand(name: str, why: str, kind: str) -> list[Remark]:
    said = (
        f"holds {why}, and is ignored. Rows of one may be trained and tested on alike, which makes "
        'scores too good: write a column that says train or test, with split = "file"'
    )
    return [Remark(name, said), _override(name, kind)]


def _override(name: str, kind: str) -> Remark:
    return Remark(name, "is ignored; to use it all the same:", f'{quoted(name)} = "{kind}"')


def _refuse_infinite(name: str, values: NDArray[Any], source: TableSource) -> None:
    if values.dtype.kind == "f" and len(wrong := np.flatnonzero(np.isinf(values))):
        raise DataError(
            f"{source.place(int(wrong[0]))}: column '{name}' is infinite; fill or drop the row"
        )


def _judged_strings(
    name: str, own: Cells, source: TableSource, zeros: bool
) -> tuple[RawColumn | str, list[Remark], dict[str, int]]:
    """Take strings as categories, unless they look like text, identifiers, a split or typos."""
    lower = {one.lower() for one in own.some(20)}
    if {"train", "test"} <= lower and len(own.texts) <= 6:
        exact = lower == {"train", "test"}
        remedy = f'options = {{ split = "{name}" }}' if exact else ""
        said = "says train and test, and is ignored as a feature"
        said += '; to split by it, with split = "file":' if exact else ""
        return "it says train and test", [Remark(name, said, remedy)], own.spellings
    _refuse_stray(name, own, source)
    distinct, sample = len(own.texts), own.some()
    words = np.mean([len(one.split()) for one in sample])
    length = np.mean([len(one) for one in sample])
    many = own.present >= _ENOUGH
    if many and (said := _several_forms(own)):
        return "its dates are of several forms", [Remark(name, said)], own.spellings
    if many and (words >= 4 or length > 60) and distinct > own.present / 2:
        said = "is free text and is ignored; to learn from the text alone:"
        remark = Remark(name, said, f'options = {{ text = "{name}" }}')
        return "it is free text", [remark], own.spellings
    if many and distinct > 0.9 * own.present:
        why = f"{distinct:,} of {own.present:,} values differ: an identifier"
        return why, _half_numbers(name, own) or [_override(name, "category")], own.spellings
    if why := _repeated(name, distinct, own.present):
        return why, _split_by_hand(name, why, "category"), own.spellings
    remarks = _alike(name, own) + _half_numbers(name, own)
    if zeros:
        said = "has leading zeros and is read as a category; if they are numbers:"
        remarks.append(Remark(name, said, f'{quoted(name)} = "number"'))
    if many and distinct > 100:
        said = f"has {distinct:,} categories, of which rare ones share a place; or leave it out:"
        remarks.append(Remark(name, said, f'{quoted(name)} = "ignore"'))
    return categories(own, ColumnPlan("category")), remarks, own.spellings


def _thousands(
    name: str, own: Cells, numbers: NDArray[np.float64], source: TableSource
) -> list[Remark]:
    """Say how a dot is read in a file whose other columns have decimal commas."""
    dotted = [n for n, one in enumerate(own.some()) if "." in one] if source.commas else []
    if not dotted:
        return []
    said = f"has dots between thousands: {own.texts[dotted[0]].as_py()} is read as"
    return [Remark(name, f"{said} {numbers[dotted[0]]:g}, since the file has decimal commas")]


def _several_forms(own: Cells) -> str:
    """Say that strings are dates, but not all of one form."""
    sample = own.some()
    forms = [next((form for form in DAYS if is_date(one, form)), "") for one in sample]
    if not all(forms):
        return ""
    other = next((n for n, form in enumerate(forms) if form != forms[0]), 0)
    pair = f"{sample[0]} and {sample[other]}" if other else f"{sample[0]}, day and month swapped"
    return f"holds dates of several forms, such as {pair}, and is ignored; write them in one"


def _alike(name: str, own: Cells) -> list[Remark]:
    """Say which categories differ in upper and lower case only."""
    pair = spelled_alike(own.some())
    said = f"holds {shown(pair[0])} and {shown(pair[1])} as two categories" if pair else ""
    return [Remark(name, f"{said}; if they are one, write them alike")] if pair else []


def _half_numbers(name: str, own: Cells) -> list[Remark]:
    """Say which words stand between numbers, such as <0.5, that made a column of categories."""
    sample = own.some()
    wrong = [one for one in sample if not re.fullmatch(PLAIN, one)]
    if not wrong or len(sample) - len(wrong) < max(5, len(wrong)):
        return []
    said = f"is not read as a number for {', '.join(map(shown, wrong[:3]))} in it; if"
    listed = ", ".join('"' + one.replace('"', '\\"') + '"' for one in wrong[:20])
    remedy = f'{quoted(name)} = {{ type = "number", missing = [{listed}] }}'
    return [Remark(name, f"{said} such cells count as missing:", remedy)]


def spelled_alike(names: Sequence[str]) -> tuple[str, str] | None:
    """Return two names that differ in upper and lower case only, if there are any."""
    held: dict[str, str] = {}
    for name in names:
        if (other := held.setdefault(name.casefold(), name)) != name:
            return other, name
    return None


def _refuse_stray(name: str, own: Cells, source: TableSource) -> None:
    """Refuse a column of numbers with a few words in it: nobody meant it as categories."""
    compute = arrow_compute()

    fits = compute.match_substring_regex(own.texts, f"^({PLAIN})$")
    wrong = np.flatnonzero(~fits.to_numpy(zero_copy_only=False))
    if not 0 < len(wrong) <= 3 or own.times[wrong].sum() > own.present / 10:
        return
    if len(own.texts) - len(wrong) < 5:
        return
    text = own.texts[int(wrong[0])].as_py()
    row = int(np.flatnonzero(own.codes == wrong[0])[0])
    key = quoted(name)
    raise DataError(
        f"{source.place(row)}: column '{name}' is {shown(text)}, and nearly all others are "
        f'numbers; if it means missing: [data.columns] {key} = {{ type = "number", missing = '
        f'["{text[:40]}"] }}, else {key} = "category"'
    )


def plainly_typed(table: Any, source: TableSource) -> Any:
    """Turn columns of strings into numbers where all cells that are there are numbers."""
    import pyarrow

    columns = []
    for column in table.columns:
        own = string_cells(column.combine_chunks())
        numbers = None if leading_zeros(own) else as_numbers(own.texts, source)
        if numbers is None or not own.present:
            columns.append(column)
        else:
            values = own.spread(numbers)
            columns.append(pyarrow.array(values, mask=np.isnan(values)))
    return pyarrow.table(columns, names=table.column_names)
