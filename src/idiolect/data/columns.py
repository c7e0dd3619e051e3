"""The encoder of a table: how typed columns become the numbers that a network takes.

It is fitted from the `ColumnSums` of training rows alone, travels with the model as JSON, and takes
raw tables: columns by name, in any order, with gaps and categories that nobody saw in training.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from idiolect.data.column_sums import (
    LONGEST,
    ColumnPlan,
    ColumnSums,
    RawColumn,
    RawTable,
    is_number,
)
from idiolect.errors import ConfigError, DataError

DATE_FEATURES = ("days", "year sin", "year cos", "week sin", "week cos")

_MOST = {"one-hot": 100, "embedding": 1000}  # categories of a column
_YEAR, _WEEK, _MONDAY = 365.2425, 7.0, 3.0  # days; 1970-01-01 was a Thursday
_BLOCK = 2048  # rows that are written at once
_MOST_COLUMNS, _WIDEST = 20_000, 1 << 20
_FIELDS = ("name", "width", "value", "fill", "shift", "scale", "categories", "other", "flag")


class EncodedColumn(NamedTuple):
    """The features of a column, short of their zeros."""

    values: NDArray[np.float32] | None = None  # [row, feature], the first ones
    places: NDArray[np.int64] | None = None  # [row]: which feature is 1; -1 for none
    flag: tuple[int, NDArray[np.bool_]] | None = None  # a feature that is 1 in these rows

    def write(self, out: NDArray[np.float32], rows: slice) -> None:
        """Write some rows into zeros [row, feature]."""
        if self.values is not None:
            out[:, : self.values.shape[1]] = self.values[rows]
        if self.places is not None:
            places = self.places[rows]
            there = np.flatnonzero(places >= 0)
            out[there, places[there]] = 1.0
        if self.flag is not None:
            out[:, self.flag[0]] = self.flag[1][rows]


@dataclass(frozen=True)
class ColumnEncoder:
    """How one column becomes features: its value or categories, a flag for missing, then nothing.

    `width` may be larger than what is used, so that encoders of several seeds have one shape.
    """

    name: str
    plan: ColumnPlan
    width: int
    value: bool = False  # of a number: whether it varied in training; else only its gaps are told
    fill: float = 0.0
    shift: float = 0.0
    scale: float = 1.0
    categories: tuple[str, ...] = ()
    other: bool = False  # a place for categories that were rare in training
    flag: bool = False  # a place that says that the cell was missing

    @classmethod
    def fit(cls, name: str, plan: ColumnPlan, sums: ColumnSums, minimum: int) -> ColumnEncoder:
        """Fit a column's encoder to sums of training rows."""
        flag = sums.missing > 0 and sums.present > 0
        if plan.kind == "category":
            order = sorted(sums.counts, key=lambda one: (-sums.counts[one], one))
            kept = [one for one in order if sums.counts[one] >= minimum][: _MOST[plan.encode]]
            pooled = sums.present > sum(sums.counts[one] for one in kept)
            if len(kept) + pooled < 2:
                kept, pooled = [], False  # of one category only its gaps tell anything
            names = tuple(sorted(kept))
            made = cls(name, plan, 0, categories=names, other=pooled, flag=flag)
            if plan.imputation == "mode" and kept:
                made = replace(made, fill=float(names.index(kept[0])))
            return replace(made, width=made.used)
        # The mean of equal numbers may differ from them in the last bit.
        varies = sums.deviation > max(1e-10 * abs(sums.mean), 1e-150)
        made = cls(name, plan, 0, value=varies, flag=flag)
        if varies:
            of = {"median": sums.quantile(0.5), "mean": sums.mean, "mode": sums.mode}
            fill = of[plan.imputation]
            # No histogram: all its cells were too small to be told. Or they are wider than the
            # values vary, as of 1e9 ± 1, and the middle of one lies far from all of them.
            vague = math.isnan(fill) or sums.width_at(fill) > 0.1 * sums.deviation
            made = replace(made, fill=sums.mean if vague else fill)
            if plan.scale and plan.kind != "boolean":
                made = replace(made, shift=sums.mean, scale=sums.deviation)
        return replace(made, width=made.used)

    @property
    def used(self) -> int:
        """How many features carry something."""
        own = len(DATE_FEATURES) if self.plan.kind == "date" else 1
        return self.value * own + len(self.categories) + self.other + self.flag

    @property
    def features(self) -> tuple[str, ...]:
        """The name of each feature."""
        dated = self.plan.kind == "date"
        own = [f"{self.name} {one}" for one in DATE_FEATURES] if dated else [self.name]
        names = own if self.value else []
        names = names + [f"{self.name}={one}" for one in self.categories]
        names += [f"{self.name}=(other)"] * self.other + [f"{self.name} missing"] * self.flag
        unused = range(1, self.width - self.used + 1)
        return (*names, *(f"{self.name} unused {n}" for n in unused))

    def encoded(self, column: RawColumn | None, rows: int) -> EncodedColumn:
        """Encode the cells of a column; None is a column that is absent."""
        numbers = {"number", "boolean"}  # what is a boolean here may be a number elsewhere
        if column is not None and not (
            column.plan.kind == self.plan.kind or {column.plan.kind, self.plan.kind} <= numbers
        ):
            raise DataError(
                f"column '{self.name}' is a {column.plan.kind} here, and a {self.plan.kind} where "
                f'the encoder was fitted; declare {self.name} = "{self.plan.kind}"'
            )
        if not self.used or not rows:
            return EncodedColumn()
        absent = np.ones(rows, bool) if column is None else column.absent
        flag = (self.used - 1, absent) if self.flag else None
        if self.plan.kind == "category":
            return EncodedColumn(places=self._places(column, absent), flag=flag)
        if not self.value:
            return EncodedColumn(flag=flag)
        values = np.full(rows, self.fill) if column is None else column.values
        filled = np.where(absent, self.fill, values)
        scaled = ((filled - self.shift) / self.scale).astype(np.float32)[:, None]
        if self.plan.kind != "date":
            return EncodedColumn(scaled, flag=flag)
        turns = np.stack([filled / _YEAR, (filled + _MONDAY) / _WEEK], 1) * (2 * np.pi)
        cycle = np.stack([np.sin(turns), np.cos(turns)], 2).reshape(rows, 4)
        cycle = np.where(absent[:, None], 0.0, cycle).astype(np.float32)
        return EncodedColumn(np.concatenate([scaled, cycle], 1), flag=flag)

    def _places(self, column: RawColumn | None, absent: NDArray[np.bool_]) -> NDArray[np.int64]:
        """Return which of the features is 1 in every row, -1 for none."""
        known = {name: place for place, name in enumerate(self.categories)}
        elsewhere = len(known) if self.other else -1
        names = () if column is None else column.names
        lookup = np.array([known.get(name, elsewhere) for name in names] + [-1], np.int64)
        codes = np.full(len(absent), -1) if column is None else column.values
        places = lookup[codes]  # a missing cell has code -1, which is the last
        if self.plan.imputation == "mode" and known:
            places = np.where(absent, int(self.fill), places)
        return np.asarray(places, np.int64)


@dataclass(frozen=True)
class TableEncoder:
    """How a raw table becomes the numbers that a network takes: by name, column after column."""

    columns: tuple[ColumnEncoder, ...]

    @classmethod
    def fit(
        cls,
        plans: Mapping[str, ColumnPlan],
        sums: Mapping[str, ColumnSums],
        minimum: int | None = None,
    ) -> TableEncoder:
        """Fit to sums of training rows; categories of fewer than `minimum` rows are pooled.

        Without a minimum it is one row in a hundred, but at least 2 and at most 10.
        """
        made = []
        for name, plan in plans.items():
            if plan.kind == "ignore":
                continue
            least = rare_below(sums[name].rows) if minimum is None else minimum
            made.append(ColumnEncoder.fit(name, plan, sums[name], least))
        found = cls(tuple(made))
        if not found.width:
            raise DataError(
                f"no column varies over the training rows ({', '.join(plans) or 'there is none'}); "
                "expected at least one to learn from"
            )
        return found

    @property
    def width(self) -> int:
        """The number of features."""
        return sum(column.width for column in self.columns)

    @property
    def features(self) -> tuple[str, ...]:
        """The name of each feature; of two of one name the later is numbered."""
        held: dict[str, None] = {}
        for name in (name for column in self.columns for name in column.features):
            copies = (f"{name} ({n})" for n in itertools.count(2))
            held[next(one for one in itertools.chain([name], copies) if one not in held)] = None
        return tuple(held)

    @property
    def plans(self) -> dict[str, ColumnPlan]:
        """The plan of every column, to read another table by."""
        return {column.name: column.plan for column in self.columns}

    @property
    def embedded(self) -> tuple[tuple[int, int], ...]:
        """First feature and width of every category that a network is to embed."""
        starts = np.cumsum([0, *(column.width for column in self.columns)]).tolist()
        return tuple(
            (start, column.width)
            for start, column in zip(starts, self.columns, strict=False)
            if column.plan.encode == "embedding" and column.plan.kind == "category" and column.width
        )

    def encode(self, table: RawTable) -> NDArray[np.float32]:
        """Encode the rows of a table: [row, feature]."""
        x = np.zeros((len(table), self.width), np.float32)
        made, start = [], 0
        for column in self.columns:
            own = column.encoded(table.columns.get(column.name), len(table))
            made.append((slice(start, start + column.width), own))
            start += column.width
        for first in range(0, len(table), _BLOCK):  # so many rows fit a cache
            rows = slice(first, first + _BLOCK)
            for places, own in made:
                own.write(x[rows, places], rows)
        return x

    def respaced(self, x: NDArray[np.float32], narrow: TableEncoder) -> NDArray[np.float32]:
        """Bring features of an encoder that was enlarged to this one to its width."""
        wide = np.zeros((len(x), self.width), np.float32)
        start = place = 0
        for column, old in zip(self.columns, narrow.columns, strict=True):
            wide[:, start : start + old.used] = x[:, place : place + old.used]
            start, place = start + column.width, place + old.width
        return wide

    def absent(self, table: RawTable) -> tuple[str, ...]:
        """List the columns that a table lacks; all their cells count as missing."""
        return tuple(c.name for c in self.columns if c.width and c.name not in table.columns)

    def enlarged(self, widths: Sequence[int]) -> TableEncoder:
        """Give every column a width at least as large as it uses."""
        pairs = zip(self.columns, widths, strict=True)
        return TableEncoder(tuple(replace(one, width=width) for one, width in pairs))

    def to_json(self) -> dict[str, Any]:
        """Return the encoder as JSON has it."""
        return {"version": 1, "columns": [_column_json(column) for column in self.columns]}

    @classmethod
    def from_json(cls, given: Any) -> TableEncoder:
        """Read an encoder that may come from outside; anything malformed is refused."""
        if not isinstance(given, dict) or given.get("version") != 1:
            version = given.get("version") if isinstance(given, dict) else None
            raise DataError(f"a table's encoder is of version {version!r}; this idiolect knows 1")
        columns = given.get("columns")
        if set(given) != {"version", "columns"} or not isinstance(columns, list):
            raise DataError("a table's encoder is malformed; expected a list of columns")
        made = cls(tuple(_column_of(one) for one in columns[:_MOST_COLUMNS]))
        names = [column.name for column in made.columns]
        if len(columns) > _MOST_COLUMNS or len(set(names)) < len(names) or not made.width:
            raise DataError("a table's encoder has columns twice, too many or none that is used")
        return made


def _column_json(column: ColumnEncoder) -> dict[str, Any]:
    plan = column.plan
    kept: dict[str, Any] = {"type": plan.kind, "encode": plan.encode, "impute": plan.imputation}
    kept |= {"missing": list(plan.missing)} if plan.missing else {}
    kept |= {"format": plan.format} if plan.format else {}
    own = {key: getattr(column, key) for key in _FIELDS}
    return kept | {"scaled": plan.scale} | own | {"categories": list(column.categories)}


def _column_of(given: Any) -> ColumnEncoder:
    """Read one column's encoder, trusting nothing in it."""
    wanted = {*_FIELDS, "type", "encode", "impute", "scaled"}
    if not isinstance(given, dict) or not wanted <= set(given) <= wanted | {"missing", "format"}:
        raise DataError("a table's encoder is malformed: a column has other keys than expected")
    names, spellings = given["categories"], given.get("missing", [])
    good = (
        _are_names([given["name"]])
        and _are_names(names)
        and _are_names(spellings)
        and _are_names([given.get("format", "")])
        and len(set(names)) == len(names) <= max(_MOST.values())
        and all(isinstance(given[key], bool) for key in ("value", "other", "flag", "scaled"))
        and all(is_number(given[key]) for key in ("fill", "shift", "scale"))
        and given["scale"] > 0
        and all(isinstance(given[key], str) for key in ("type", "encode", "impute"))
        and type(given["width"]) is int
    )
    if not good:
        raise DataError("a table's encoder is malformed: a column holds impossible values")
    try:
        own = (given["type"], given["encode"], given["impute"], given["scaled"])
        plan = ColumnPlan(*own, tuple(spellings), given.get("format", ""))
    except ConfigError as error:
        raise DataError(f"a table's encoder is malformed: {error}") from None
    fields = {key: given[key] for key in _FIELDS} | {"categories": tuple(names)}
    made = ColumnEncoder(plan=plan, **fields)
    category = plan.kind == "category"
    consistent = (
        made.used <= made.width <= _WIDEST
        and (not made.value or not category)
        and (category or not (names or made.other))
        and (not category or 0 <= made.fill < max(len(names), 1))
        and plan.kind != "ignore"
    )
    if not consistent:
        raise DataError(f"a table's encoder is malformed: column '{made.name[:40]}' is impossible")
    return made


def _are_names(given: Any) -> bool:
    return isinstance(given, list) and all(
        isinstance(one, str) and len(one) <= LONGEST for one in given
    )


def embedded_blocks(encoders: Sequence[TableEncoder | None]) -> tuple[tuple[int, int], ...]:
    """Return the categories that a network is to embed; encoders of several seeds have one form."""
    first = encoders[0] if encoders else None
    return () if first is None else first.embedded


def rare_below(rows: int) -> int:
    """Return how many training rows a category needs for a place of its own."""
    return min(10, max(2, rows // 100))


def same_widths(encoders: Iterable[TableEncoder]) -> list[TableEncoder]:
    """Enlarge encoders of the same columns to one shape: networks of several seeds have one."""
    held = list(encoders)
    widths = np.array([[column.width for column in one.columns] for one in held]).max(0).tolist()
    return [one.enlarged(widths) for one in held]
