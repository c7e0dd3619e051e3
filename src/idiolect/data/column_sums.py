"""Typed columns of a table as they were read, and the sums of them that an encoder is fitted to.

`ColumnSums` holds counts, moments, a histogram and category counts, which add up over places: a
federation, whose rows never meet, comes to the same sums as a simulation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from idiolect.errors import ConfigError, DataError, suggest

Numbers: TypeAlias = NDArray[np.float64]
Values: TypeAlias = NDArray[Any]

KINDS = ("number", "boolean", "category", "date", "ignore")
ENCODINGS = ("one-hot", "embedding")
IMPUTATIONS = ("median", "mean", "mode", "none")

_OWN_IMPUTATION = {"number": "median", "date": "median", "boolean": "mode", "category": "none"}
_PER_OCTAVE = 4096  # bins of the histogram: 0.017 % wide
_ZERO = 1 << 23  # above the largest exponent in bins
LONGEST = 4096  # characters of a name


@dataclass(frozen=True)
class ColumnPlan:
    """The type of a column and how it is encoded; `impute` is empty for the type's own."""

    kind: str
    encode: str = "one-hot"
    impute: str = ""
    scale: bool = True
    missing: tuple[str, ...] = ()  # spellings of a missing cell in this column, beside the usual
    format: str = ""  # of a date, such as %d/%m/%Y; empty: recognised

    def __post_init__(self) -> None:
        for key, allowed in (("kind", KINDS), ("encode", ENCODINGS), ("impute", IMPUTATIONS)):
            value = getattr(self, key)
            if value not in allowed and not (key == "impute" and value == ""):
                word = "type" if key == "kind" else key
                raise ConfigError(f"{word} {suggest(str(value), allowed)}")
        if self.impute == "none" and self.kind != "category":
            raise ConfigError(
                f"impute 'none' is for categories, and this is a {self.kind}; use median, mean or "
                "mode"
            )
        if self.kind == "category" and self.impute in ("median", "mean"):
            raise ConfigError(f"impute '{self.impute}' is for numbers; use mode or none")

    @property
    def imputation(self) -> str:
        """What stands for a missing value."""
        return self.impute or _OWN_IMPUTATION.get(self.kind, "")

    @classmethod
    def of(cls, given: str | Mapping[str, Any], where: str) -> ColumnPlan:
        """Read what a user declared: a type, or a table with a type and options."""
        options: dict[str, Any] = {"type": given} if isinstance(given, str) else dict(given)
        known = {"type": "kind", "encode": "encode", "impute": "impute", "scale": "scale"}
        known |= {"missing": "missing", "format": "format"}
        for key in options:
            if key not in known:
                raise ConfigError(f"{where}: unknown key {suggest(str(key), list(known))}")
        if "type" not in options:
            raise ConfigError(f"{where}: type is missing; expected one of {', '.join(KINDS)}")
        if not isinstance(options.get("scale", True), bool):
            raise ConfigError(f"{where}: scale is {options['scale']!r}; expected true or false")
        try:
            if "missing" in options:
                options["missing"] = tuple(str(one) for one in options["missing"])
            return cls(**{known[key]: value for key, value in options.items()})
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None
        except TypeError as error:
            raise ConfigError(f"{where}: {error}; expected a type and its options") from None


@dataclass(frozen=True, eq=False)
class RawColumn:
    """A column as it was read: numbers, days since 1970 or 0 and 1 with NaN for missing, or codes.

    The codes of a category are places in `names`, -1 for missing.
    """

    plan: ColumnPlan
    values: Values
    names: tuple[str, ...] = ()

    @property
    def absent(self) -> NDArray[np.bool_]:
        """Whether each cell is missing."""
        return self.values < 0 if self.plan.kind == "category" else np.isnan(self.values)


@dataclass(frozen=True, eq=False)
class RawTable:
    """The feature columns of a table before they are encoded; ignored ones have a plan only."""

    columns: Mapping[str, RawColumn]
    rows: int
    ignored: Mapping[str, str] = field(default_factory=dict)  # name -> why
    source: Any = None  # what the reader found, for `inspection`

    def __len__(self) -> int:
        return self.rows

    @property
    def plans(self) -> dict[str, ColumnPlan]:
        """The plan of every column that is used, in the order of the table."""
        return {name: column.plan for name, column in self.columns.items()}

    @property
    def plain(self) -> bool:
        """Whether all columns are numbers without a gap, so that nothing but scaling is open."""
        return all(
            c.plan.kind in ("number", "boolean") and c.plan.scale and not np.isnan(c.values).any()
            for c in self.columns.values()
        )

    def taken(self, rows: NDArray[np.int64]) -> RawTable:
        """Keep these rows, in this order."""
        kept = {n: replace(c, values=c.values[rows]) for n, c in self.columns.items()}
        return replace(self, columns=kept, rows=len(rows))

    def unscaled(self) -> RawTable:
        """Return the same columns, none of which is to be scaled."""
        kept = {n: replace(c, plan=replace(c.plan, scale=False)) for n, c in self.columns.items()}
        return replace(self, columns=kept)

    def matrix(self) -> NDArray[np.float32]:
        """Return the numbers of a plain table as they are."""
        x = np.empty((self.rows, len(self.columns)), np.float32)
        for place, column in enumerate(self.columns.values()):
            x[:, place] = column.values
        return x

    def placeholder(self) -> NDArray[np.float32]:
        """Stand for the features until they are encoded: the numbers of a plain table, or zeros."""
        if self.plain:
            return self.matrix()
        return np.broadcast_to(np.zeros((), np.float32), (self.rows, len(self.columns)))

    def sums(self, rows: NDArray[np.int64] | None = None) -> dict[str, ColumnSums]:
        """Sum up every column, over these rows or all."""
        taken = self if rows is None else self.taken(np.sort(rows))
        return {name: ColumnSums.of(column) for name, column in taken.columns.items()}


@dataclass(frozen=True)
class ColumnSums:
    """What is summed up of a column: enough to fit its encoder, and mergeable."""

    rows: int
    missing: int
    mean: float = 0.0  # of the values that are there
    squares: float = 0.0  # about the mean
    whole: bool = True  # whether all values are whole numbers
    bins: Mapping[int, int] = field(default_factory=dict)  # histogram: bin -> values
    counts: Mapping[str, int] = field(default_factory=dict)  # category -> rows

    @classmethod
    def of(cls, column: RawColumn) -> ColumnSums:
        """Sum up the cells of a column."""
        rows = len(column.values)
        if column.plan.kind == "category":
            held = np.bincount(column.values[column.values >= 0], minlength=len(column.names))
            counts = {column.names[place]: int(held[place]) for place in np.flatnonzero(held)}
            return cls(rows, rows - int(held.sum()), counts=counts)
        values = column.values[~np.isnan(column.values)]
        if not len(values):
            return cls(rows, rows)
        mean = float(values.mean())
        bins, times = np.unique(bin_numbers(values), return_counts=True)
        return cls(
            rows,
            rows - len(values),
            mean,
            float(((values - mean) ** 2).sum()),
            bool((values == np.round(values)).all()),
            dict(zip(bins.tolist(), times.tolist(), strict=True)),
        )

    @property
    def present(self) -> int:
        """How many cells hold a value."""
        return self.rows - self.missing

    @property
    def deviation(self) -> float:
        """The standard deviation of the values."""
        return math.sqrt(self.squares / self.present) if self.present else 0.0

    def merged(self, other: ColumnSums) -> ColumnSums:
        """Return the sums of both together, as if the rows lay in one place."""
        one, two = self.present, other.present
        both = max(one + two, 1)
        apart = other.mean - self.mean if one and two else 0.0
        mean = self.mean + apart * (two / both) if one else other.mean
        return ColumnSums(
            self.rows + other.rows,
            self.missing + other.missing,
            mean,
            self.squares + other.squares + apart**2 * (one * two / both),
            self.whole and other.whole,
            _added(self.bins, other.bins),
            _added(self.counts, other.counts),
        )

    def quantile(self, share: float) -> float:
        """Return a quantile of the values, exact to a bin; whole numbers stay whole to 5,000."""
        if not self.bins:
            return math.nan
        keys = sorted(self.bins)
        ends = np.cumsum([self.bins[key] for key in keys])
        place = (int(ends[-1]) - 1) * share
        low, high = (
            self._middle(keys[int(np.searchsorted(ends, spot, side="right"))])
            for spot in (math.floor(place), math.ceil(place))
        )
        return low + (high - low) * (place - math.floor(place))

    @property
    def mode(self) -> float:
        """The most frequent value, the smallest of several."""
        if not self.bins:
            return math.nan
        return self._middle(min(self.bins, key=lambda key: (-self.bins[key], key)))

    def _middle(self, key: int) -> float:
        if key == 0:
            return 0.0
        value = math.copysign(2.0 ** ((abs(key) - _ZERO + 0.5) / _PER_OCTAVE), key)
        return float(round(value)) if self.whole else value

    def width_at(self, value: float) -> float:
        """Return how wide the bin of a value is; 0 where a bin holds one whole number."""
        width = abs(value) * (2.0 ** (1 / _PER_OCTAVE) - 1)
        return 0.0 if self.whole and width < 1 else width

    def masked(self, minimum: int) -> ColumnSums:
        """Tell no cell of fewer than `minimum` rows: small bins are pooled, small categories too.

        The rows of pooled categories remain in `rows`, so that everyone sees that there are some.
        """
        counts = {name: n for name, n in self.counts.items() if n >= minimum}
        bins: dict[int, int] = {}
        waiting = 0
        for key in sorted(self.bins):
            waiting += self.bins[key]
            if waiting >= minimum:
                bins[key], waiting = waiting, 0
        if waiting and bins:
            bins[max(bins)] += waiting
        return replace(self, bins=bins, counts=counts)

    def to_json(self) -> dict[str, Any]:
        """Return the sums as JSON has them."""
        bins = [[key, self.bins[key]] for key in sorted(self.bins)]
        plain: dict[str, Any] = {"rows": self.rows, "missing": self.missing}
        if bins or self.mean or self.squares:
            plain |= {"mean": self.mean, "squares": self.squares, "whole": self.whole, "bins": bins}
        if self.counts:
            plain["counts"] = dict(self.counts)
        return plain

    @classmethod
    def from_json(cls, given: Any) -> ColumnSums:
        """Read sums that may come from outside; what no column has is refused."""
        known = {"rows", "missing", "mean", "squares", "whole", "bins", "counts"}
        if not isinstance(given, dict) or not set(given) <= known:
            raise DataError("sums of a column are of another form; expected rows, missing, ...")
        rows, missing = given.get("rows", -1), given.get("missing", -1)
        bins, counts = given.get("bins", []), given.get("counts", {})
        mean, squares = given.get("mean", 0.0), given.get("squares", 0.0)
        good = (
            _is_count(rows)
            and _is_count(missing)
            and missing <= rows
            and is_number(mean)
            and is_number(squares)
            and squares >= 0
            and isinstance(given.get("whole", True), bool)
            and isinstance(bins, list)
            and all(isinstance(one, list) and len(one) == 2 for one in bins)
            and all(type(key) is int and abs(key) < 1 << 24 and _is_count(n) for key, n in bins)
            and isinstance(counts, dict)
            and all(len(key) <= LONGEST and _is_count(n) for key, n in counts.items())
            and sum(n for _, n in bins) <= rows - missing
            and sum(counts.values()) <= rows - missing
        )
        if not good:
            raise DataError("sums of a column are impossible; write them again")
        found = dict((key, n) for key, n in bins)
        whole = given.get("whole", True)
        return cls(rows, missing, float(mean), float(squares), whole, found, dict(counts))


def bin_numbers(values: Numbers) -> NDArray[np.int64]:
    """Number the bin of each value: equal steps of the logarithm on both sides of zero."""
    size = np.where(values == 0, 1.0, np.abs(values))
    keys = np.sign(values) * (np.floor(np.log2(size) * _PER_OCTAVE) + _ZERO)
    numbered: NDArray[np.int64] = keys.astype(np.int64)
    return numbered


def _added(one: Mapping[Any, int], two: Mapping[Any, int]) -> dict[Any, int]:
    total = dict(one)
    for key, times in two.items():
        total[key] = total.get(key, 0) + times
    return total


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 53


def is_number(value: Any) -> bool:
    """Return whether a value from outside is a number that can be computed with."""
    return type(value) in (int, float) and math.isfinite(value) and abs(value) < 1e300
