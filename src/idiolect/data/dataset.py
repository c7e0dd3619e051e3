"""A pool of labelled examples, not yet divided among clients."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from idiolect.core.task import Classes, Task
from idiolect.data import display
from idiolect.data.column_sums import RawTable
from idiolect.data.columns import TableEncoder, same_widths
from idiolect.data.tokenisers import Tokeniser
from idiolect.errors import ConfigError, DataError

Rows: TypeAlias = NDArray[np.int64]
Floats: TypeAlias = NDArray[np.float32]
AnyArray: TypeAlias = NDArray[Any]

# Enough rows to keep numpy busy, few enough that a memory-mapped pool is never read at once.
_BLOCK = 4096

TABLE = "table"  # of `Dataset.unfitted`: columns that are not encoded yet

NORMALISATIONS = ("unit", "channel", "pixel", "feature", "none")


def check_value(option: str, value: str, allowed: Iterable[str]) -> None:
    """Refuse a value that is not one of those allowed."""
    if value not in (known := tuple(allowed)):
        raise ConfigError(f"{option} '{value}' is unknown; expected one of {', '.join(known)}")


def check_options(what: str, options: Iterable[str], known: Iterable[str]) -> None:
    """Refuse options that a source or a partition does not have."""
    if wrong := sorted(set(options) - set(known)):
        has = ", ".join(sorted(known)) or "none"
        raise ConfigError(f"{what} has no option '{wrong[0]}'; it has {has}")


def check_positive(**options: int | float) -> None:
    """Refuse options that must be above zero."""
    for name, value in options.items():
        if not value > 0 or not np.isfinite(value):
            raise ConfigError(f"{name} is {value}; expected a number above 0")


@dataclass(frozen=True, eq=False)
class Dataset:
    """Examples, labels and how an example is decoded: (x - shift) / scale.

    uint8 and floating x are decoded; any other integers (tokens) are used as they are. Of text,
    `words` says what the tokens stand for; with a `vocabulary` they are still those of the whole
    corpus, and `federate` codes them anew by what the training rows hold. So too `unfitted`
    names a normalisation whose shift and scale `federate` takes from the training rows; until then
    nothing can be decoded.
    """

    name: str
    x: AnyArray  # [example, ...]: uint8 [example, channel, height, width], float32, or int32 tokens
    # Of classes [example], or [example, place]: a label for each place of a sequence, -1 for none;
    # of other tasks real numbers in the user's unit, see `core.task`.
    y: AnyArray
    classes: tuple[str, ...]  # a name for each output of a network: of classes theirs
    # Broadcastable to one example; by default images are brought to [-1, 1], all else stays.
    shift: Floats = field(default_factory=lambda: np.empty(0, np.float32))
    scale: Floats = field(default_factory=lambda: np.empty(0, np.float32))
    clients: Rows | None = None  # [example] natural client, an index into client_names
    client_names: tuple[str, ...] = ()
    origin: Rows | None = None  # [example] 0 = the source's training file, 1 = its test file
    provenance: str = ""
    features: tuple[str, ...] = ()  # names of a table's columns, in order
    words: tuple[str, ...] = ()  # of text: token -> word
    vocabulary: int = 0  # of text not coded yet: how many words a network is to know at most
    tokeniser: Tokeniser | None = None  # what coded the text, where that is no list of words
    # What waits for training rows: a normalisation (channel, pixel, feature), or a table's encoder.
    unfitted: str = ""
    task: Task = field(default_factory=Classes)  # what a label is; a federation fits it
    remarks: tuple[str, ...] = ()  # what reading changed about the data, for the user
    table: RawTable | None = None  # the typed columns as they were read, row by row as x
    encoder: TableEncoder | None = None  # how x was made of the table
    source: str = ""  # which named source it is; "" of somebody's own data

    def __post_init__(self) -> None:
        if not self.shift.size:
            shift, scale = default_decoding(self.x)
            object.__setattr__(self, "shift", shift)
            object.__setattr__(self, "scale", scale)
        rows = len(self.x)
        if rows == 0:
            raise DataError(f"dataset '{self.name}' has no rows; expected at least one example")
        if self.table is not None and len(self.table) != rows:
            raise DataError(f"dataset '{self.name}': {len(self.table)} rows of columns for {rows}")
        for name, column in (("y", self.y), ("clients", self.clients), ("origin", self.origin)):
            shape = (rows, *self.x.shape[1:]) if name == "y" and self.sequential else (rows,)
            if name == "y" and not self.sequential and self.task.kind != "classes":
                shape = (rows, *self.y.shape[1:])
            if column is not None and column.shape != shape:
                raise DataError(
                    f"dataset '{self.name}': {name} has shape {column.shape} and x has {rows} "
                    f"rows; expected {shape}"
                )
        if wrong := self.task.check(self.y, len(self.classes)):
            raise DataError(f"dataset '{self.name}', task {self.task.title}: {wrong}")
        if self.task.kind == "classes":
            self._check_range("label", self.y, len(self.classes), "classes")
        if self.clients is not None:
            self._check_range("client code", self.clients, len(self.client_names), "client names")
        if self.origin is not None:
            self._check_range("origin", self.origin, 2, "origins (0 train, 1 test)")
        for name, values in (("shift", self.shift), ("scale", self.scale)):
            try:
                fits = np.broadcast_shapes(values.shape, self.x.shape[1:]) == self.x.shape[1:]
            except ValueError:
                fits = False
            if not fits:
                raise DataError(
                    f"dataset '{self.name}': {name} has shape {values.shape}, which does not "
                    f"broadcast to one example of shape {self.x.shape[1:]}"
                )
        if not np.all(self.scale > 0):
            raise DataError(f"dataset '{self.name}': scale must be positive everywhere")
        if np.issubdtype(self.x.dtype, np.floating):
            self._check_finite()

    def _check_range(self, what: str, codes: Rows, bound: int, of: str) -> None:
        least = 0 if codes.ndim == 1 else -1  # a place without a label
        wrong = np.argwhere((codes < least) | (codes >= bound))
        if len(wrong):
            row, found = int(wrong[0][0]), int(codes[tuple(wrong[0])])
            raise DataError(
                f"dataset '{self.name}': {what} {found} in row {row} is outside "
                f"0..{bound - 1} ({bound} {of}); correct the row or the list"
            )

    def _check_finite(self) -> None:
        for start in range(0, len(self.x), _BLOCK):
            block = self.x[start : start + _BLOCK]
            finite = np.isfinite(block).reshape(len(block), -1)
            if not finite.all():
                row, column = (int(i) for i in np.argwhere(~finite)[0])
                raise DataError(
                    f"dataset '{self.name}': row {start + row} holds NaN or infinity (feature "
                    f"{column}); drop the row or fill the gap before loading"
                )

    def __len__(self) -> int:
        return len(self.x)

    def __repr__(self) -> str:
        return display.dataset_text(self)

    def _repr_html_(self) -> str:
        return display.dataset_html(self)

    @property
    def sequential(self) -> bool:
        """Whether every place of an example has a label of its own, as in next-word prediction."""
        return self.task.kind == "classes" and self.y.ndim == 2

    def with_remarks(self, remarks: Sequence[str]) -> Dataset:
        """Return the same with what its reader has to say about it."""
        return replace(self, remarks=(*self.remarks, *remarks))

    @property
    def decodes(self) -> bool:
        """Whether an example is shifted and scaled; tokens are not."""
        return self.x.dtype == np.uint8 or np.issubdtype(self.x.dtype, np.floating)

    def decoded(self, rows: Rows) -> AnyArray:
        """Decode these examples, as a model sees them."""
        examples = np.asarray(self.x[rows])
        if not self.decodes:
            return examples
        if self.unfitted:
            raise DataError(
                f"dataset '{self.name}': its {_waiting(self.unfitted)} is fitted on training rows, "
                "and these are not known yet; divide it with federate, or call "
                "fitted(dataset, rows)"
            )
        return (examples.astype(np.float32) - self.shift) / self.scale

    @property
    def embedded(self) -> tuple[tuple[int, int], ...]:
        """The categories of a table that a network is to embed."""
        return () if self.encoder is None else self.encoder.embedded

    @property
    def labels(self) -> tuple[str, ...]:
        """The label columns of a table."""
        return () if self.table is None else getattr(self.table.source, "labels", ())

    @property
    def columns(self) -> tuple[str, ...]:
        """What `tally` counts, by task: classes, labels, rows, or events and censored rows."""
        if self.sequential:
            return ("words",)
        return {"number": ("rows",), "survival": ("event", "censored")}.get(
            self.task.kind, self.classes
        )

    def tally(self, rows: Rows) -> Rows:
        """Return what each of these rows counts as: [row, column] of 0 and 1, or words."""
        own = self.y[rows]
        if self.sequential:
            own = (own >= 0).sum(1, keepdims=True)
        elif self.task.kind == "classes":
            own = own[:, None] == np.arange(len(self.classes))
        elif self.task.kind == "survival":
            own = np.stack([own[:, 1], 1 - own[:, 1]], 1)
        elif self.task.kind == "number":
            own = np.ones((len(rows), 1))
        return np.asarray(own, np.int64)

    def counts(self) -> Rows:
        """Labels per class; a class without rows counts zero. Of other tasks as `tally`."""
        if self.task.kind != "classes":
            return np.asarray(self.tally(np.arange(len(self))).sum(0), np.int64)
        return np.bincount(self.y[self.y >= 0], minlength=len(self.classes)).astype(np.int64)

    @property
    def strata(self) -> Rows | None:
        """A class for each row to divide rows by; None where rows have none.

        Of survival whether the event was seen, of labels whether there is any.
        """
        if self.sequential or self.task.kind == "number":
            return None
        if self.task.kind == "classes":
            return self.y
        found = self.y[:, 1] if self.task.kind == "survival" else (self.y > 0).any(1)
        return np.asarray(found, np.int64)

    def pool(self, which: str) -> Rows:
        """List the rows of the source's "train" file, of its "test" file, or of "all" rows.

        A source without separate files is one file, so "train" is all of it.
        """
        check_value("pool", which, ("train", "test", "all"))
        if which == "all" or (which == "train" and self.origin is None):
            return np.arange(len(self), dtype=np.int64)
        if self.origin is None:
            raise DataError(f"dataset '{self.name}' has no test file; use pool train or all")
        rows = np.flatnonzero(self.origin == ("train", "test").index(which)).astype(np.int64)
        if not len(rows):
            raise DataError(f"dataset '{self.name}' has no row in its {which} file; use pool all")
        return rows


def with_classes(dataset: Dataset, classes: tuple[str, ...], whose: str) -> Dataset:
    """Number labels by a given list of class names; refuse a name that is not in it.

    Of other tasks than classes there is nothing to number: the names of labels must be the same.
    """
    if dataset.task.kind != "classes":
        if dataset.task.kind == "labels" and dataset.classes != classes:
            raise DataError(
                f"{dataset.name} has labels {', '.join(dataset.classes)} and {whose} "
                f"{', '.join(classes)}; name the same columns in the same order"
            )
        return replace(dataset, classes=classes)
    codes = np.full(len(dataset.classes), -1, np.int64)
    for code in np.flatnonzero(dataset.counts()):
        name = dataset.classes[code]
        if name not in classes:
            shown = ", ".join(classes[:20]) + (", ..." if len(classes) > 20 else "")
            raise DataError(
                f"{dataset.name} has class {name!r}, which {whose} does not know; its classes are "
                f"{shown}: rename the label or drop its rows"
            )
        codes[code] = classes.index(name)
    return replace(dataset, y=codes[dataset.y], classes=classes)


def rows_of(dataset: Dataset, rows: Rows) -> Dataset:
    """Keep these rows only, as a set of examples without clients."""
    kept = taken(dataset, rows)
    return replace(kept, clients=None, client_names=(), origin=None)


def taken(dataset: Dataset, rows: Rows) -> Dataset:
    """Keep these rows, in this order, with all that is known of each."""
    return replace(
        dataset,
        x=np.asarray(dataset.x[rows]),
        y=dataset.y[rows],
        clients=None if dataset.clients is None else dataset.clients[rows],
        origin=None if dataset.origin is None else dataset.origin[rows],
        table=None if dataset.table is None else dataset.table.taken(rows),
    )


def without(dataset: Dataset, rows: Rows) -> Dataset:
    """Leave these rows out, so that public examples are not private ones too."""
    kept = np.setdiff1d(np.arange(len(dataset)), rows)
    if not len(kept):
        raise DataError(f"nothing is left of {dataset.name} beside its public examples")
    return taken(dataset, kept)


def default_decoding(x: AnyArray) -> tuple[Floats, Floats]:
    """Shift and scale: images to [-1, 1], anything else untouched."""
    middle = 127.5 if x.dtype == np.uint8 and x.ndim == 4 else 0.0
    return np.full(1, middle, np.float32), np.full(1, middle or 1.0, np.float32)


def normalised(dataset: Dataset, how: str) -> Dataset:
    """Decode the same rows otherwise: "unit", "channel", "pixel", "feature" or "none".

    "unit" and "none" are fixed. The others are statistics, and only noted here: `federate` takes
    them from the training rows of all clients, once it has decided which rows those are. So no
    validation or test row has a share in them, and two seeds that divide rows otherwise have
    statistics of their own.
    """
    plain = fixed_decoding(dataset, how)
    if dataset.table is not None and not dataset.table.plain:
        scaled = plain is None  # each column by its plan
        return dataset if scaled else replace(dataset, table=dataset.table.unscaled())
    return replace(dataset, unfitted=how) if plain is None else plain


def fitted(dataset: Dataset, rows: Rows) -> Dataset:
    """Take the statistics that a dataset's normalisation waits for from these rows."""
    if not dataset.unfitted:
        return dataset
    if dataset.table is not None and dataset.unfitted == TABLE:
        if not len(rows):
            raise DataError(f"dataset '{dataset.name}' has no training row to fit columns to")
        return encoded_by(dataset, TableEncoder.fit(dataset.table.plans, dataset.table.sums(rows)))
    how = dataset.unfitted
    if dataset.table is not None:
        _refuse_lost(dataset.name, dataset.table, rows)
    shift, scale = decoding(moments(dataset, how, rows), how, dataset.x.dtype == np.uint8)
    return replace(dataset, shift=shift, scale=scale, unfitted="")


def _refuse_lost(name: str, table: RawTable, rows: Rows) -> None:
    """Refuse columns that vary by less than single precision can tell, such as 1.7e9 ± 50."""
    for column, own in table.columns.items():
        values = own.values[rows].astype(np.float64)
        lost = np.abs(values.astype(np.float32) - values).max(initial=0.0)
        if lost > 1e-3 * values.std() > 0:
            raise DataError(
                f"dataset '{name}': column '{column}' varies by {values.std():.3g} about "
                f"{values.mean():.6g}, which a normalisation of single precision loses; leave "
                "normalise out, and columns are scaled as they are read"
            )


def encoded_by(dataset: Dataset, encoder: TableEncoder) -> Dataset:
    """Make the features of a dataset that was read from a table, by a fitted encoder."""
    if dataset.table is None:
        raise DataError(f"dataset '{dataset.name}' holds no table, and the encoder reads tables")
    return replace(
        dataset,
        x=encoder.encode(dataset.table),
        features=encoder.features,
        encoder=encoder,
        unfitted="",
        shift=np.zeros(1, np.float32),
        scale=np.ones(1, np.float32),
    )


def encoded_alike(datasets: Sequence[Dataset]) -> list[Dataset]:
    """Bring datasets whose tables were encoded for several seeds to one number of features."""
    encoders = [one.encoder for one in datasets if one.encoder is not None]
    if len(encoders) < len(datasets) or len({one.features for one in encoders}) == 1:
        return list(datasets)
    made = []
    for own, old, new in zip(datasets, encoders, same_widths(encoders), strict=True):
        same = old.features == new.features
        x = own.x if same else new.respaced(own.x, old)
        made.append(own if same else replace(own, x=x, features=new.features, encoder=new))
    return made


def _waiting(unfitted: str) -> str:
    return "encoder of columns" if unfitted == TABLE else f"normalisation {unfitted}"


def fixed_decoding(dataset: Dataset, how: str) -> Dataset | None:
    """Check a normalisation; do it where it needs no statistics, else return None."""
    check_value("normalisation", how, NORMALISATIONS)
    if not dataset.decodes:
        raise DataError(f"dataset '{dataset.name}' holds tokens, which cannot be normalised")
    if how in ("channel", "pixel") and dataset.x.ndim != 4:
        raise DataError(
            f"normalisation '{how}' needs images; '{dataset.name}' has examples of shape "
            f"{dataset.x.shape[1:]}: use feature"
        )
    if how not in ("unit", "none"):
        return None
    if dataset.table is not None and not dataset.table.plain:
        return dataset
    shift, scale = np.zeros(1, np.float32), np.ones(1, np.float32)
    if how == "unit":
        shift, scale = default_decoding(dataset.x)
    return replace(dataset, shift=shift, scale=scale, unfitted="")


class Moments(NamedTuple):
    """How many numbers were seen, their mean and the sum of squares about it; float64."""

    seen: float
    mean: AnyArray
    squares: AnyArray

    def merged(self, other: Moments) -> Moments:
        """Return the moments of both together, as if the examples lay in one place."""
        seen = self.seen + other.seen
        apart = other.mean - self.mean
        mean = self.mean + apart * (other.seen / seen)
        squares = self.squares + other.squares + apart**2 * (self.seen * other.seen / seen)
        return Moments(seen, mean, squares)


def decoding(found: Moments, how: str, as_bytes: bool) -> tuple[Floats, Floats]:
    """Turn moments into shift and scale.

    A pixel or column that never varies has deviation 0. Pixels get a floor of 0.001 of their range
    (pFedMe's script adds a bare 0.001); a constant channel or feature is only centred.
    """
    deviation = np.sqrt(found.squares / found.seen)
    if how == "pixel":
        deviation = deviation + 0.001 * (255.0 if as_bytes else 1.0)
    else:
        deviation = np.where(deviation > 0, deviation, 1.0)
    return found.mean.astype(np.float32), deviation.astype(np.float32)


def moments(dataset: Dataset, how: str, rows: Rows) -> Moments:
    """Take the moments of some rows: of each channel, or of each feature."""
    per_channel = how == "channel"
    if not len(rows):
        raise DataError(f"dataset '{dataset.name}' has no training row to take statistics from")
    axes = (0, 2, 3) if per_channel else (0,)
    shape = (-1, 1, 1) if per_channel else dataset.x.shape[1:]
    rows = np.sort(rows)  # a memory map is read in order, and sums do not depend on who holds what
    blocks = [rows[start : start + _BLOCK] for start in range(0, len(rows), _BLOCK)]
    if dataset.x.dtype == np.uint8:
        return _byte_moments(dataset.x, blocks, axes, shape)
    # Two passes in float64: one pass over squares loses the small deviations of constant pixels.
    mean = sum(np.asarray(dataset.x[b]).sum(axes, dtype=np.float64) for b in blocks)
    per_row = dataset.x[0].size // np.asarray(mean).size
    centre = (np.asarray(mean) / (len(rows) * per_row)).reshape(shape)
    squares = sum(((dataset.x[b] - centre) ** 2).sum(axes) for b in blocks)
    return Moments(len(rows) * per_row, centre, np.asarray(squares).reshape(shape))


def _byte_moments(
    x: AnyArray, blocks: list[Rows], axes: tuple[int, ...], shape: tuple[int, ...]
) -> Moments:
    """Take the moments of bytes in one pass, exactly: sums and squares are whole numbers."""
    total, squared = np.zeros((), np.uint64), np.zeros((), np.uint64)
    for block in blocks:
        held = np.asarray(x[block]).astype(np.uint16)
        total = total + held.sum(axes, dtype=np.uint64)
        squared = squared + (held * held).sum(axes, dtype=np.uint64)
    seen = sum(len(block) for block in blocks) * (x[0].size // total.size)
    whole, squares = total.astype(object), squared.astype(object)  # of any length
    about = (squares * seen - whole * whole) / seen
    mean = (whole / seen).astype(np.float64).reshape(shape)
    return Moments(seen, mean, about.astype(np.float64).reshape(shape))


_LUMINANCE = np.array([0.299, 0.587, 0.114])  # of red, green and blue (ITU-R BT.601)


def alike(dataset: Dataset, shape: tuple[int, ...], private: str) -> Dataset:
    """Bring images to a shape: grey is repeated, colour weighed, the middle cut out or padded.

    So 28x28 digits serve a network for 32x32 photographs, and the other way round. Anything but
    stored images has to be of the right shape already.
    """
    own = tuple(dataset.x.shape[1:])
    if own == shape:
        return dataset
    images = dataset.x.dtype == np.uint8 and len(own) == len(shape) == 3
    if not images or not {own[0], shape[0]} <= {1, 3}:
        raise DataError(
            f"public examples of {dataset.name} are {own} and the private ones of {private} "
            f"{shape}; choose a public source of the same shape"
        )
    x = coloured(np.asarray(dataset.x), shape[0])
    x = _sized(_sized(x, 2, shape[1]), 3, shape[2])
    provenance = f"{dataset.provenance} Images of {own} brought to {shape}.".strip()
    return replace(dataset, x=np.ascontiguousarray(x), provenance=provenance)


def coloured(x: AnyArray, channels: int) -> AnyArray:
    """Bring images [example, channel, height, width] to 1 or 3 channels."""
    if x.shape[1] == channels:
        return x
    if channels == 3:
        return np.repeat(x, 3, axis=1)
    grey = np.tensordot(x, _LUMINANCE, axes=(1, 0))
    weighed: AnyArray = np.rint(grey).astype(np.uint8)[:, None]
    return weighed


def _sized(x: AnyArray, axis: int, size: int) -> AnyArray:
    """Cut the middle out of an axis, or pad it with zeros on both sides."""
    spare = x.shape[axis] - size
    if spare >= 0:
        return x.take(np.arange(spare // 2, spare // 2 + size), axis)
    before = -spare // 2
    widths = [(0, 0)] * x.ndim
    widths[axis] = (before, -spare - before)
    return np.pad(x, widths)
