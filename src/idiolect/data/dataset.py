"""A pool of labelled examples, not yet divided among clients."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from idiolect.data.arrays import AnyArray, Floats, Rows
from idiolect.errors import ConfigError, DataError

# Enough rows to keep numpy busy, few enough that a memory-mapped pool is never read at once.
_BLOCK = 4096

NORMALISATIONS = ("unit", "channel", "pixel", "feature", "none")


@dataclass(frozen=True, eq=False)
class Dataset:
    """Examples, labels and how an example is decoded: (x - shift) / scale.

    uint8 and floating x are decoded; any other integers (tokens) are used as they are.
    """

    name: str
    x: AnyArray  # [example, ...]: uint8 [example, channel, height, width], float32, or int32 tokens
    y: Rows  # [example]
    classes: tuple[str, ...]
    shift: Floats  # broadcastable to one example
    scale: Floats
    clients: Rows | None = None  # [example] natural client, an index into client_names
    client_names: tuple[str, ...] = ()
    origin: Rows | None = None  # [example] 0 = the source's training file, 1 = its test file
    provenance: str = ""

    def __post_init__(self) -> None:
        rows = len(self.x)
        if rows == 0:
            raise DataError(f"dataset '{self.name}' has no rows; expected at least one example")
        for field, column in (("y", self.y), ("clients", self.clients), ("origin", self.origin)):
            if column is not None and column.shape != (rows,):
                raise DataError(
                    f"dataset '{self.name}': {field} has shape {column.shape} and x has {rows} "
                    f"rows; expected one entry per row"
                )
        self._check_range("label", self.y, len(self.classes), "classes")
        if self.clients is not None:
            self._check_range("client code", self.clients, len(self.client_names), "client names")
        if self.origin is not None:
            self._check_range("origin", self.origin, 2, "origins (0 train, 1 test)")
        for field, values in (("shift", self.shift), ("scale", self.scale)):
            try:
                fits = np.broadcast_shapes(values.shape, self.x.shape[1:]) == self.x.shape[1:]
            except ValueError:
                fits = False
            if not fits:
                raise DataError(
                    f"dataset '{self.name}': {field} has shape {values.shape}, which does not "
                    f"broadcast to one example of shape {self.x.shape[1:]}"
                )
        if not np.all(self.scale > 0):
            raise DataError(f"dataset '{self.name}': scale must be positive everywhere")
        if np.issubdtype(self.x.dtype, np.floating):
            self._check_finite()

    def _check_range(self, what: str, codes: Rows, bound: int, of: str) -> None:
        wrong = np.flatnonzero((codes < 0) | (codes >= bound))
        if len(wrong):
            row = int(wrong[0])
            raise DataError(
                f"dataset '{self.name}': {what} {int(codes[row])} in row {row} is outside "
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

    @property
    def decodes(self) -> bool:
        """Whether an example is shifted and scaled; tokens are not."""
        return self.x.dtype == np.uint8 or np.issubdtype(self.x.dtype, np.floating)

    def decoded(self, rows: Rows) -> AnyArray:
        """Decode these examples, as a model sees them."""
        examples = np.asarray(self.x[rows])
        if not self.decodes:
            return examples
        return (examples.astype(np.float32) - self.shift) / self.scale

    def counts(self) -> Rows:
        """Rows per class; a class that nobody has counts zero."""
        return np.bincount(self.y, minlength=len(self.classes)).astype(np.int64)

    def pool(self, which: str) -> Rows:
        """List the rows of the source's "train" file, of its "test" file, or of "all" rows.

        A source without separate files is one file, so "train" is all of it.
        """
        if which not in ("train", "test", "all"):
            raise ConfigError(f"pool '{which}' is unknown; expected train, test or all")
        if which == "all" or (which == "train" and self.origin is None):
            return np.arange(len(self), dtype=np.int64)
        if self.origin is None:
            raise DataError(f"dataset '{self.name}' has no test file; use pool train or all")
        rows = np.flatnonzero(self.origin == ("train", "test").index(which)).astype(np.int64)
        if not len(rows):
            raise DataError(f"dataset '{self.name}' has no row in its {which} file; use pool all")
        return rows


def default_decoding(x: AnyArray) -> tuple[Floats, Floats]:
    """Shift and scale: images to [-1, 1], anything else untouched."""
    middle = 127.5 if x.dtype == np.uint8 and x.ndim == 4 else 0.0
    return np.full(1, middle, np.float32), np.full(1, middle or 1.0, np.float32)


def normalised(dataset: Dataset, how: str) -> Dataset:
    """Decode the same rows otherwise: "unit", "channel", "pixel", "feature" or "none".

    Means and deviations are taken over the rows with origin != 1: never over a source's test file,
    but over every row where the source has no files of its own. They know no clients, so a
    validation or test row drawn later from the training file has had a share in them.
    """
    if how not in NORMALISATIONS:
        raise ConfigError(f"normalisation '{how}' is unknown; expected one of {NORMALISATIONS}")
    if not dataset.decodes:
        raise DataError(f"dataset '{dataset.name}' holds tokens, which cannot be normalised")
    images = dataset.x.ndim == 4
    if how in ("channel", "pixel") and not images:
        raise DataError(
            f"normalisation '{how}' needs images; '{dataset.name}' has examples of shape "
            f"{dataset.x.shape[1:]}: use feature"
        )
    if how == "none":
        shift, scale = np.zeros(1, np.float32), np.ones(1, np.float32)
    elif how == "unit":
        shift, scale = default_decoding(dataset.x)
    else:
        mean, deviation = _statistics(dataset, per_channel=how == "channel")
        # A pixel or column that never varies has deviation 0. Pixels get a floor of 0.001 of their
        # range (pFedMe's script adds a bare 0.001); a constant channel or feature is only centred.
        if how == "pixel":
            deviation = deviation + 0.001 * (255.0 if dataset.x.dtype == np.uint8 else 1.0)
        else:
            deviation = np.where(deviation > 0, deviation, 1.0)
        shift, scale = mean.astype(np.float32), deviation.astype(np.float32)
    return replace(dataset, shift=shift, scale=scale)


def _statistics(dataset: Dataset, per_channel: bool) -> tuple[AnyArray, AnyArray]:
    rows = (
        np.arange(len(dataset)) if dataset.origin is None else np.flatnonzero(dataset.origin != 1)
    )
    if not len(rows):
        raise DataError(f"dataset '{dataset.name}' has no training row to take statistics from")
    axes = (0, 2, 3) if per_channel else (0,)
    shape = (-1, 1, 1) if per_channel else dataset.x.shape[1:]
    blocks = [rows[start : start + _BLOCK] for start in range(0, len(rows), _BLOCK)]
    # Two passes in float64: one pass over squares loses the small deviations of constant pixels.
    mean = sum(np.asarray(dataset.x[b]).sum(axes, dtype=np.float64) for b in blocks)
    per_row = dataset.x[0].size // np.asarray(mean).size
    centre = (np.asarray(mean) / (len(rows) * per_row)).reshape(shape)
    squares = sum(((dataset.x[b] - centre) ** 2).sum(axes) for b in blocks)
    return centre, np.sqrt(np.asarray(squares) / (len(rows) * per_row)).reshape(shape)
