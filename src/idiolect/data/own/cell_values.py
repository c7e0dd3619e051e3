"""The texts of a table's cells, and what they say: numbers, truths, dates, categories, nothing."""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from idiolect.data.column_sums import ColumnPlan, RawColumn
from idiolect.data.own.csv_files import COMMAS, PLAIN, TableSource
from idiolect.errors import DataError

MISSING = ("", "na", "n/a", "nan", "null", "?", "-", ".", "#n/a", "<na>", "nat")
"""Spellings of a missing cell, in any case; "-" is a value beside "+"."""

SECONDS = 86_400.0  # of a day

_BOOLEAN = {
    "true": 1.0,
    "false": 0.0,
    "yes": 1.0,
    "no": 0.0,
    "y": 1.0,
    "n": 0.0,
    "t": 1.0,
    "f": 0.0,
}
_PAIRS = ({"true", "false"}, {"yes", "no"}, {"y", "n"}, {"t", "f"})
_TIMES = ("", " %H:%M:%S", "T%H:%M:%S", " %H:%M", "T%H:%M")
DAYS: tuple[str, ...] = (
    *("%Y-%m-%d", "%Y/%m/%d", "%d.%m.%Y", "%d/%m/%Y", "%m/%d/%Y", "%d-%m-%Y", "%m-%d-%Y"),
    *("%d %b %Y", "%b %d, %Y", "%b %d %Y", "%d-%b-%Y", "%d/%m/%y", "%m/%d/%y", "%d.%m.%y"),
)
"""Forms of dates that are recognised; a time of day may follow."""


def arrow_compute() -> Any:
    """Import Arrow's functions; their stubs know less than they do."""
    from pyarrow import compute

    return compute


class Cells(NamedTuple):
    """The cells of a column of strings: each text once, and which one every row has."""

    texts: Any  # Arrow strings, trimmed
    codes: NDArray[np.int64]  # [row], -1 for missing
    times: NDArray[np.int64]  # rows of each text
    spellings: dict[str, int]  # of missing cells

    @property
    def present(self) -> int:
        """How many cells are there."""
        return int(self.times.sum())

    def spread(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Give every row the value of its text."""
        return np.append(values, np.nan)[self.codes]

    def some(self, most: int = 200) -> list[str]:
        """Return the first distinct texts."""
        return list(self.texts[:most].to_pylist())


def string_cells(cells: Any, extra: Sequence[str] = (), usual: Sequence[str] = MISSING) -> Cells:
    """Find the distinct texts of a column of strings, and set missing ones apart."""
    import pyarrow

    compute = arrow_compute()

    coded = cells.dictionary_encode()
    codes = coded.indices.fill_null(-1).to_numpy().astype(np.int64)
    texts = compute.utf8_trim_whitespace(coded.dictionary)
    if not texts.equals(coded.dictionary):
        again = texts.dictionary_encode()
        codes = np.append(again.indices.to_numpy().astype(np.int64), -1)[codes]
        texts = again.dictionary
    lower = compute.utf8_lower(texts)
    blank = compute.is_in(lower, pyarrow.array([*usual, *(one.lower() for one in extra)]))
    absent = blank.to_numpy(zero_copy_only=False).copy()
    if "-" not in extra and "+" in texts.to_pylist()[:5]:
        absent &= compute.not_equal(texts, "-").to_numpy(zero_copy_only=False)
    times = np.bincount(codes[codes >= 0], minlength=len(texts)).astype(np.int64)
    spellings = {texts[int(p)].as_py(): int(times[p]) for p in np.flatnonzero(absent)[:50]}
    if nulls := int((codes < 0).sum()):
        spellings[""] = spellings.get("", 0) + nulls
    if absent.any():
        place = np.where(absent, -1, np.cumsum(~absent) - 1)
        codes = np.append(place, -1)[codes]
        texts, times = texts.filter(pyarrow.array(~absent)), times[~absent]
    return Cells(texts, codes, times, spellings)


def categories(own: Cells, plan: ColumnPlan) -> RawColumn:
    """Code categories by their sorted names; 1.0 and 1 are one name."""
    names = [re.sub(r"^([+-]?\d+)\.0*$", r"\1", one) for one in own.texts.to_pylist()]
    order = {one: place for place, one in enumerate(sorted(set(names)))}
    lookup = np.array([order[one] for one in names] + [-1], np.int32)
    return RawColumn(plan, lookup[own.codes], tuple(order))


def booleans(own: Cells) -> NDArray[np.float64] | None:
    """Read texts as 0 and 1; None where they are no truths."""
    if not 1 <= len(own.texts) <= 6:
        return None
    lower = [one.lower() for one in own.texts.to_pylist()]
    held = set(lower)
    if not any(held == pair or (held < pair and len(next(iter(held))) > 1) for pair in _PAIRS):
        return None
    return np.array([_BOOLEAN[one] for one in lower])


def leading_zeros(own: Cells) -> bool:
    """Return whether numbers are codes such as 00123."""
    compute = arrow_compute()

    if not any(len(one) > 1 and one[0] == "0" and one.isdigit() for one in own.some()):
        return False
    return bool(compute.all(compute.match_substring_regex(own.texts, r"^\d+$")).as_py())


def quick_numbers(cells: Any, source: TableSource) -> NDArray[np.float64] | None:
    """Read a column whose cells are all plain numbers, without a gap or a code such as 007."""
    import pyarrow

    if cells.null_count or not len(cells):
        return None
    try:
        values: NDArray[np.float64] = cells.cast("float64").to_numpy(zero_copy_only=False)
    except pyarrow.ArrowInvalid:
        return None
    compute = arrow_compute()
    # Dots may stand between thousands where the file has decimal commas.
    unclear = r"^0\d|\." if source.commas else r"^0\d"
    return None if compute.any(compute.match_substring_regex(cells, unclear)).as_py() else values


def as_numbers(texts: Any, source: TableSource | None = None) -> NDArray[np.float64] | None:
    """Read texts as numbers; None where one is none. A comma is read as files of a form have it."""
    import pyarrow

    compute = arrow_compute()

    def cast(texts: Any) -> NDArray[np.float64] | None:
        try:
            values: NDArray[np.float64] = texts.cast("float64").to_numpy(zero_copy_only=False)
        except pyarrow.ArrowInvalid:
            return None
        return values

    def fits(pattern: str) -> bool:
        return bool(compute.all(compute.match_substring_regex(texts, f"^({pattern})$")).as_py())

    german = source is not None and source.delimiter in (";", "\t", "|") and fits(COMMAS)
    dotted = german and source is not None and source.commas  # 1.200 beside 3,5 is no 1.2
    if not dotted and (values := cast(texts)) is not None:
        return values
    if german:
        whole = compute.replace_substring(texts, ".", "")
        return cast(compute.replace_substring(whole, ",", "."))
    if fits(rf"[+-]?\d{{1,3}}(,\d{{3}})+(\.\d+)?|{PLAIN}"):
        return cast(compute.replace_substring(texts, ",", ""))
    return None


def dates(texts: Any, forms: Sequence[str]) -> tuple[NDArray[np.float64], str, str] | None:
    """Read texts as days since 1970; return also the form, and another that would do as well."""
    if not len(texts) or not all(_may_be_date(one) for one in texts[:20].to_pylist()):
        return None
    first = [form for form in forms if _parsed(texts[:200], form) is not None]
    found = []
    for form in first:
        days = _parsed(texts, form)
        if days is not None:
            found.append((days, form))
    if not found:
        return None
    days, form = found[0]
    swapped = {"%d/%m": "%m/%d", "%d-%m": "%m-%d"}.get(form[:5])
    other = [one for _, one in found[1:] if swapped and one.startswith(swapped)]
    same = other and np.array_equal(days, next(d for d, one in found if one == other[0]))
    return days, form, other[0] if other and not same else ""


def is_date(text: str, form: str) -> bool:
    """Return whether one text is a date of this form."""
    import pyarrow

    return _may_be_date(text) and _parsed(pyarrow.array([text]), form) is not None


def _may_be_date(text: str) -> bool:
    return 6 <= len(text) <= 40 and text[0].isalnum() and sum(c.isdigit() for c in text) >= 3


def _parsed(texts: Any, form: str) -> NDArray[np.float64] | None:
    compute = arrow_compute()

    rest = texts
    if ":" in (texts[0].as_py() or ""):
        rest = compute.replace_substring_regex(texts, r"(:\d\d)\.\d+", r"\1")
        rest = compute.replace_substring_regex(rest, r"(:\d\d) ?(Z|[+-]\d\d:?\d\d)$", r"\1")
    parsed = None
    for time in _TIMES:
        one = compute.strptime(rest, format=form + time, unit="s", error_is_null=True)
        parsed = one if parsed is None else compute.coalesce(parsed, one)
        if not parsed.null_count:
            days = parsed.cast("int64").to_numpy() / SECONDS
            # Two digits are a year for %Y too: of the first century.
            return days if days.min() > -250_000 else None
    return None


def declared_column(name: str, own: Cells, plan: ColumnPlan, source: TableSource) -> RawColumn:
    """Read a column as it was declared; the first cell that does not fit is named."""
    import pyarrow

    if plan.kind == "category":
        return categories(own, plan)
    if not own.present:
        return RawColumn(plan, np.full(len(own.codes), np.nan))
    whole: Callable[[Any], NDArray[np.float64] | None]
    if plan.kind == "number":
        expected = "a number"

        def whole(texts: Any) -> NDArray[np.float64] | None:
            return as_numbers(texts, source)

    elif plan.kind == "boolean":
        expected = "true or false, yes or no, 1 or 0"

        def whole(texts: Any) -> NDArray[np.float64] | None:
            known = _BOOLEAN | {"1": 1.0, "0": 0.0, "1.0": 1.0, "0.0": 0.0}
            lower = [one.lower() for one in texts.to_pylist()]
            return np.array([known[one] for one in lower]) if set(lower) <= set(known) else None

    else:
        expected = f"a date like {plan.format}" if plan.format else "a date such as 2024-01-31"
        forms = (plan.format,) if plan.format else (*DAYS, "%Y%m%d", "%Y-%m", "%Y")

        def whole(texts: Any) -> NDArray[np.float64] | None:
            for form in forms:
                if (days := _parsed(texts, form)) is not None:
                    return days
            return None

    values = whole(own.texts)
    if values is None and plan.kind == "date" and plan.format:
        values = _parsed(own.texts, "%Y-%m-%d")  # which is never mistaken for another form
    if values is not None:
        if plan.kind == "date" and not plan.format:
            used = [form for form in forms if _parsed(own.texts, form) is not None]
            plan = replace(plan, format=used[0])
        return RawColumn(plan, own.spread(values))
    for place in range(len(own.texts)):
        text = own.texts[place].as_py()
        if whole(pyarrow.array([text])) is None:
            row = int(np.flatnonzero(own.codes == place)[0])
            raise DataError(
                f"{source.place(row)}: column '{name}' is {shown(text)}; expected {expected}, or "
                f"an empty cell where it is missing"
            )
    raise DataError(f"column '{name}' mixes several forms; expected {expected} throughout")


def shown(text: str) -> str:
    """Quote a cell, shortened."""
    return repr(text if len(text) <= 40 else text[:39] + "…")
