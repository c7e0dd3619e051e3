"""Everything between what a user's file holds and what a network takes: `Preprocessing`."""

import io
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from idiolect.core.survival import task_from_json
from idiolect.core.task import Classes, Task
from idiolect.data.column_sums import ColumnPlan
from idiolect.data.columns import TableEncoder
from idiolect.data.dataset import (
    AnyArray,
    Dataset,
    Floats,
    Rows,
    coloured,
    encoded_by,
    with_classes,
)
from idiolect.data.own import read
from idiolect.data.own.column_types import EVERY_OTHER, typed_columns
from idiolect.data.own.csv_files import TableSource, is_csv
from idiolect.data.own.frames import frame_table
from idiolect.data.own.label_columns import (
    class_spellings,
    column_values,
    has_gap,
    joined_cells,
)
from idiolect.data.own.photographs import IMAGE_FILES, image_files, upright_image
from idiolect.data.own.tables import UNLABELLED, examples, read_cells, read_columns
from idiolect.data.parquet import image_column, picture
from idiolect.data.targets import targets
from idiolect.data.text import encoded_as, sentences
from idiolect.data.tokenisers import Tokeniser, refuse_other_tokeniser
from idiolect.errors import ConfigError, DataError

VERSION = 1
_DTYPES = ("uint8", "float32", "float64", "int32", "int64")  # what a Dataset holds
_NUMBERS = 1 << 24  # the most numbers of one example
_NAMES = 1 << 20  # the most classes, features or words
_LONGEST = 4096  # characters of a name
_COLUMNS = ("label", "client", "split", "text")  # options that name columns


class NewRows(NamedTuple):
    """Rows to predict, as a network with its scaling takes them."""

    x: AnyArray  # in the type and shape of the training examples, not scaled
    y: AnyArray | None  # labels, -1 where a row has none; None where no row has one
    names: tuple[str, ...]  # of each row
    column: str  # what the names are: `row`, counted from 1, or `file`
    remarks: tuple[str, ...] = ()  # what is worth knowing about how they were read


@dataclass(frozen=True, eq=False)
class Preprocessing:
    """How examples are read, and scaled: (x - shift) / scale; and what outputs stand for.

    `columns` says which columns of a table were what: label, client, split, text.
    """

    shape: tuple[int, ...]  # of one example; of an image channel, height and width
    dtype: str
    classes: tuple[str, ...]
    shift: Floats
    scale: Floats
    features: tuple[str, ...] = ()  # of a table: names of the columns, in the network's order
    words: tuple[str, ...] = ()  # of text: token -> word
    sequential: bool = False  # a label for every place of a sequence: the next word
    columns: Mapping[str, str | tuple[str, ...]] = field(default_factory=dict)
    task: Task = field(default_factory=Classes)
    encoder: TableEncoder | None = None  # of a table with typed columns: how features are made
    tokeniser: Tokeniser | None = None  # of text: what makes tokens, where that is no list of words

    @classmethod
    def of(cls, dataset: Dataset, options: Mapping[str, Any] | None = None) -> "Preprocessing":
        """Describe how a divided dataset's examples are read; `options` are those of reading."""
        known = {"label": dataset.labels, **(options or {})}
        columns = {name: _column_names(known.get(name)) for name in _COLUMNS}
        return cls(
            tuple(dataset.x.shape[1:]),
            str(dataset.x.dtype),
            tuple(dataset.classes),
            np.asarray(dataset.shift, np.float32),
            np.asarray(dataset.scale, np.float32),
            tuple(dataset.features),
            tuple(dataset.words),
            dataset.sequential,
            {name: value for name, value in columns.items() if value},
            dataset.task,
            dataset.encoder,
            dataset.tokeniser,
        )

    @property
    def kind(self) -> str:
        """What examples are: images, numbers or text."""
        if self.words:
            return "text"
        return "images" if self.dtype == "uint8" and len(self.shape) == 3 else "numbers"

    @property
    def decodes(self) -> bool:
        """Whether an example is shifted and scaled; tokens are not."""
        return self.dtype == "uint8" or self.dtype.startswith("float")

    @property
    def reading(self) -> dict[str, Any]:
        """The options that own text or an own table must be read with to fit."""
        if self.encoder is not None:
            return {"columns": {**self.encoder.plans, EVERY_OTHER: ColumnPlan("ignore")}}
        if not self.words:
            return {}
        return {
            "length": self.shape[0],
            "next_word": self.sequential,
            **({"tokeniser": self.tokeniser} if self.tokeniser is not None else {}),
        }

    # As JSON.

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return {
            "version": VERSION,
            "kind": self.kind,
            "shape": list(self.shape),
            "dtype": self.dtype,
            "classes": [] if self.sequential else list(self.classes),  # there they are the words
            "shift": self.shift.tolist(),
            "scale": self.scale.tolist(),
            "features": list(self.features),
            "words": list(self.words),
            "sequential": self.sequential,
            "columns": {
                key: own if isinstance(own, str) else list(own) for key, own in self.columns.items()
            },
            "task": self.task.to_json(),
            **({"encoder": self.encoder.to_json()} if self.encoder is not None else {}),
            **({"tokeniser": self.tokeniser.json} if self.tokeniser is not None else {}),
        }

    @classmethod
    def from_json(cls, given: Any, where: str) -> "Preprocessing":
        """Read what `to_json` gave, trusting nothing in it."""
        try:
            return cls._from_json(given)
        except (_Malformed, KeyError, TypeError, ValueError, OverflowError, ConfigError) as error:
            said = f"no {error}" if isinstance(error, KeyError) else error
            raise DataError(
                f"{where} is no preprocessing of idiolect ({said}); export the model again"
            ) from None

    @classmethod
    def _from_json(cls, given: Any) -> "Preprocessing":
        _check(isinstance(given, dict), "expected an object")
        _check(given["version"] == VERSION, f"version {given['version']!r}, this idiolect reads 1")
        shape, dtype = given["shape"], given["dtype"]
        _check(
            isinstance(shape, list)
            and 0 < len(shape) <= 8
            and all(type(size) is int and size > 0 for size in shape)
            and math.prod(shape) <= _NUMBERS,
            "shape is no list of sizes",
        )
        _check(dtype in _DTYPES, f"dtype is none of {', '.join(_DTYPES)}")
        _check(type(given["sequential"]) is bool, "sequential is neither true nor false")
        columns = given["columns"]
        _check(isinstance(columns, dict) and set(columns) <= set(_COLUMNS), "columns")
        words = _names(given, "words")
        for key, own in columns.items():
            _check(isinstance(own, str) or key == "label", f"column {key}")
            _texts([own] if isinstance(own, str) else own, f"column {key}")
        _check(isinstance(given["task"], dict), "task is no table")
        made = cls(
            tuple(shape),
            dtype,
            words if given["sequential"] else _names(given, "classes"),
            _numbers(given, "shift", shape),
            _numbers(given, "scale", shape),
            _names(given, "features"),
            words,
            given["sequential"],
            {key: own if isinstance(own, str) else tuple(own) for key, own in columns.items()},
            task_from_json(given["task"]),
            TableEncoder.from_json(given["encoder"]) if "encoder" in given else None,
            _tokeniser(given["tokeniser"]) if "tokeniser" in given else None,
        )
        _check(
            made.tokeniser is None or made.tokeniser.words == words,
            "the tokeniser has other tokens",
        )
        _check(
            made.encoder is None or made.encoder.features == made.features,
            "the encoder makes other features",
        )
        _check(bool((made.scale > 0).all()), "scale is not above 0 everywhere")
        _check(bool(made.classes), "no classes")
        _check(not made.features or [len(made.features)] == shape, "features do not fit the shape")
        _check(given["kind"] == made.kind, f"kind is {given['kind']!r}, expected {made.kind!r}")
        return made

    # Other data in the same form.

    def matched(self, dataset: Dataset) -> Dataset:
        """Give newcomers' data the run's classes, matched by name, and scaling; refuse misfits."""
        if (own := _text_kind(dataset)) != (kind := self._text_kind):
            raise DataError(
                f"{dataset.name} is {own or 'no'} text and the run was on {kind or 'no'} text; "
                "give data of the same kind"
            )
        if self.encoder is not None:
            dataset = encoded_by(dataset, self.encoder)
        if self.features and dataset.features and dataset.features != self.features:
            dataset = _reordered(dataset, self.features)
        if dataset.x.shape[1:] != self.shape:
            raise DataError(
                f"examples of {dataset.name} have shape {dataset.x.shape[1:]} and the run's "
                f"{self.shape}; bring them to that shape"
            )
        if str(dataset.x.dtype) != self.dtype:
            # The run's shift and scale are in the units of its own numbers, bytes say.
            raise DataError(
                f"examples of {dataset.name} are {dataset.x.dtype} and the run's {self.dtype}; "
                "give them in the same units and type"
            )
        dataset = self._coded(dataset)
        if dataset.sequential:
            return dataset
        if dataset.task.kind != self.task.kind:
            raise DataError(
                f"{dataset.name} has labels for task {dataset.task.kind} and the run was on "
                f"{self.task.kind}; read them alike"
            )
        known = replace(with_classes(dataset, self.classes, "the run"), task=self.task)
        return replace(known, shift=self.shift, scale=self.scale, unfitted="")

    def _coded(self, dataset: Dataset) -> Dataset:
        """Code text as the run's was; tokens of another tokeniser are refused."""
        if not self.words:
            return dataset
        if self.tokeniser is None and dataset.tokeniser is None:
            return encoded_as(dataset, self.words)
        refuse_other_tokeniser(dataset.tokeniser, self.tokeniser, dataset.name, "the run")
        return dataset

    @property
    def _text_kind(self) -> str:
        return ("next word" if self.sequential else "labelled") if self.words else ""

    def blank(self, rows: int) -> Dataset:
        """Return a dataset of zeros in this form."""
        y: AnyArray = np.zeros((rows, *self.shape) if self.sequential else rows, np.int64)
        if self.task.kind != "classes":
            width = {"labels": (len(self.classes),), "number": (), "survival": (2,)}[self.task.kind]
            y = np.ones((rows, *width), np.float32)
        return Dataset(
            "blank",
            np.zeros((rows, *self.shape), np.dtype(self.dtype)),
            y,
            self.classes,
            self.shift,
            self.scale,
            words=self.words,
            task=self.task,
            tokeniser=self.tokeniser,
        )

    # Rows to predict.

    def rows(self, given: Any, options: Mapping[str, Any] | None = None) -> NewRows:
        """Read rows to predict, labelled or not.

        `given` is the path of a file or of a folder of images, a DataFrame or an Arrow table, an
        array or a tensor, a list of texts, or one or more images. `options` are those of `read`.
        """
        columns: dict[str, Any] = {**self.columns, **(options or {})}
        if isinstance(given, str | Path):
            return self._file(Path(given).expanduser(), columns)
        if (table := _arrow(given)) is not None:
            return self._table(table, columns, "the table")
        if self.kind == "text" and _all(given, str):
            return self._texts(list(given))
        if self.kind == "images" and (pictures := _pictures(given)) is not None:
            return _numbered(np.concatenate([self._image(one, "the image") for one in pictures]))
        if self.encoder is not None and (table := self._raw_columns(given)) is not None:
            return self._table(table, columns, "the rows")
        return _numbered(self._array(given))

    def _raw_columns(self, given: Any) -> Any:
        """Take an array [row, column] for the columns of training in their order; else None."""
        assert self.encoder is not None
        names = [name for name, plan in self.encoder.plans.items() if plan.kind != "ignore"]
        x = np.asarray(given.detach().cpu() if hasattr(given, "detach") else given)
        if x.dtype.kind not in "buif" or x.ndim not in (1, 2) or x.shape[-1] != len(names):
            return None
        import pyarrow

        wide = x.reshape(-1, len(names))
        return pyarrow.table({name: wide[:, place] for place, name in enumerate(names)})

    def _file(self, path: Path, columns: dict[str, Any]) -> NewRows:
        if self.kind == "images" and path.suffix.lower() not in (".npz", ".parquet", ".csv"):
            return self._images(path)
        tabular = is_csv(path) or path.suffix.lower() in (".parquet", ".txt")
        if tabular and self.encoder is not None:
            table, source = read_cells(path)
            return self._table(table, columns, str(path), source)
        if tabular and not self.sequential:
            table = read_columns(path)
            if self.kind == "images" and (image := image_column(table.schema)) is not None:
                return self._encoded_images(path, table, image, columns)
            return self._table(table, columns, str(path))
        if self.kind == "numbers" and path.suffix.lower() in IMAGE_FILES:
            raise DataError(f"{path} is an image, and the model reads numbers or a table")
        dataset = read(path, labelled=False, **{**columns, **self.reading})
        if self.words:
            if not dataset.words:
                raise DataError(f"{dataset.name} holds no text, and the model reads text")
            dataset = self._coded(dataset)
        if self.features and dataset.features and dataset.features != self.features:
            dataset = _reordered(dataset, self.features)
        self._refuse_misfit(dataset.x, dataset.name)
        if dataset.sequential:
            return _numbered(dataset.x, dataset.y)
        if dataset.classes == (UNLABELLED,):
            return _numbered(dataset.x)
        return _numbered(dataset.x, with_classes(dataset, self.classes, "the model").y)

    def _images(self, path: Path) -> NewRows:
        """Read one image, or every image below a folder."""
        if not path.exists():
            raise DataError(f"{path} does not exist; expected an image or a folder of images")
        files = image_files(path) if path.is_dir() else [path]
        if not files:
            raise DataError(f"{path} holds no image; expected .png, .jpg, .webp or .bmp files")
        x = np.concatenate([self._image(file.read_bytes(), str(file)) for file in files])
        names = [str(file.relative_to(path)) if path.is_dir() else file.name for file in files]
        parents = [file.parent.name for file in files] if path.is_dir() else []
        # A folder of class/image or client/class/image says what each one is.
        known = bool(parents) and all(parent in self.classes for parent in parents)
        y = np.array([self.classes.index(parent) for parent in parents]) if known else None
        return NewRows(x, y, tuple(names), "file")

    def _encoded_images(
        self, path: Path, table: Any, column: str, columns: dict[str, Any]
    ) -> NewRows:
        """Read the images that a column of a table holds."""
        held = [one["bytes"] if isinstance(one, dict) else one for one in table[column].to_pylist()]
        x = [self._image(one, f"{path}, row {row}") for row, one in enumerate(held, 1)]
        return _numbered(
            np.concatenate(x), self._labels(table, columns, str(path), TableSource(path))
        )

    def _image(self, given: Any, where: str) -> AnyArray:
        """Bring one image to the model's size and channels: [1, channel, height, width]."""
        channels, height, width = self.shape
        if isinstance(given, bytes):
            pixels = picture(upright_image(given, where), where, (width, height))
        else:
            pixels = _resized(given, (width, height))
        if len(pixels) != channels:
            if channels not in (1, 3):
                raise DataError(
                    f"{where} has {len(pixels)} channels and the model takes {channels}"
                )
            return coloured(pixels[None], channels)
        return pixels[None]

    def _texts(self, texts: Sequence[str]) -> NewRows:
        if self.sequential:
            raise DataError("a model of the next word reads a file of text; give the path of one")
        coded = sentences(texts, self.shape[0], 1 << 30, self.tokeniser)
        blank = Dataset("texts", coded.x, np.zeros(len(coded.x), np.int64), (UNLABELLED,))
        return _numbered(self._coded(coded.given_to(blank)).x)

    def _table(
        self, table: Any, columns: dict[str, Any], where: str, source: TableSource | None = None
    ) -> NewRows:
        """Take the features out of a table by their names, whatever else it holds."""
        if not table.num_rows:
            raise DataError(f"{where} has no rows; expected at least one to predict")
        source = source or TableSource(Path(where))
        y = self._labels(table, columns, where, source)
        if self.kind == "text":
            name = columns.get("text", "text")
            if name not in table.column_names:
                raise DataError(
                    f"{where} has no column {name!r} of text; it has "
                    f"{_listed(table.column_names)}: name it with --text"
                )
            texts = [str(one or "") for one in table[name].to_pylist()]
            return self._texts(texts)._replace(y=y)
        if self.kind == "images":
            raise DataError(f"{where} is a table, and the model reads images of {self.shape}")
        if self.encoder is not None:
            x, absent = self._encoded(table, source)
            said = f"{where} has no column {_listed(absent)}; its cells count as missing"
            return _numbered(x, y)._replace(remarks=(said,) if absent else ())
        return _numbered(self._features(table, where), y)

    def _encoded(self, table: Any, source: TableSource) -> tuple[AnyArray, tuple[str, ...]]:
        """Encode the columns that the model knows; a column that is not there counts as missing."""
        assert self.encoder is not None
        plans = self.encoder.plans
        names = [name for name in table.column_names if name in plans]
        if not names:
            raise DataError(
                f"{source.path} has none of the columns that the model reads, "
                f"{_listed(list(plans))}; it has {_listed(table.column_names)}"
            )
        held = typed_columns(table, names, plans, source)
        return self.encoder.encode(held), self.encoder.absent(held)

    def _features(self, table: Any, where: str) -> AnyArray:
        names = self.features
        if not names:
            taken: set[str] = set()
            for key in ("label", "client", "split"):
                own = self.columns.get(key, key)
                taken |= {own} if isinstance(own, str) else set(own)
            names = tuple(name for name in table.column_names if name not in taken)
        if missing := [name for name in names if name not in table.column_names]:
            raise DataError(
                f"{where} has no column {missing[0]!r}, which the model reads ("
                f"{len(missing)} of {len(names)} are missing); it has "
                f"{_listed(table.column_names)}"
            )
        x = np.empty((table.num_rows, len(names)), np.dtype(self.dtype))
        for place, name in enumerate(names):
            x[:, place] = _number_column(table[name], name, where)
        self._refuse_misfit(x, where)
        return x

    def _labels(
        self, table: Any, columns: Mapping[str, Any], where: str, source: TableSource
    ) -> AnyArray | None:
        """Return the labels, where the table has them."""
        name = columns.get("label", "label")
        if self.task.kind != "classes":
            names = [name] if isinstance(name, str) else list(name)
            return self._targets(table, names, where, source)
        if name not in table.column_names or name in self.features:
            return None
        known = {one: code for code, one in enumerate(self.classes)}
        y = np.full(table.num_rows, -1, np.int64)
        for row, spelled in enumerate(class_spellings(table, name, source)):
            if not spelled:
                continue
            y[row] = next((known[one] for one in spelled if one in known), -1)
            if y[row] < 0:
                raise DataError(
                    f"{where} has class {spelled[0]!r} in row {row + 1}, which the model does not "
                    f"know; its classes are {_listed(self.classes)}"
                )
        return y if (y >= 0).any() else None

    def _targets(
        self, table: Any, names: list[str], where: str, source: TableSource
    ) -> AnyArray | None:
        """Return what the task learns of whole label columns; None where one is not there."""
        if not set(names) <= set(table.column_names) - set(self.features):
            return None
        cells = joined_cells(table, names[0], True) if self._joins(names) else None
        if cells is None and any(has_gap(table, name) for name in names):
            return None
        held = {name: column_values(table, name, source) for name in names if cells is None}
        held = held if cells is None else {names[0]: cells}
        y, known = targets(held, self.task, where, self.classes)
        if self.task.kind != "labels":
            return y
        if unknown := [name for name in known if name not in self.classes]:
            raise DataError(
                f"{where} has label {unknown[0]!r}, which the model does not know; its labels are "
                f"{_listed(self.classes)}"
            )
        places = [list(known).index(one) if one in known else -1 for one in self.classes]
        return np.concatenate([y, np.zeros((len(y), 1), y.dtype)], 1)[:, places]

    def _joins(self, names: Sequence[str]) -> bool:
        """Return whether a cell may hold several labels."""
        return self.task.kind == "labels" and len(names) == 1

    def _array(self, given: Any) -> AnyArray:
        """Bring an array to the form of the training examples; one example may stand alone."""
        x = np.asarray(given.detach().cpu() if hasattr(given, "detach") else given)
        if x.dtype.kind not in "buif":
            raise DataError(
                f"the rows are of type {x.dtype}; expected numbers of shape {self.shape} each"
            )
        if x.shape == self.shape:
            x = x[None]
        if self.kind == "images" and x.dtype.kind in "iu" and x.shape[1:] != self.shape:
            x = examples(x.astype(np.uint8), "the images")
        if x.shape[1:] != self.shape:
            raise DataError(
                f"the rows have shape {x.shape[1:]} each and the model takes {self.shape}"
            )
        if self.dtype == "uint8" and (x.dtype != np.uint8):
            if x.size and (x.min() < 0 or x.max() > 255 or (x.dtype.kind == "f" and x.max() <= 1)):
                raise DataError(
                    f"pixels run from {x.min():g} to {x.max():g}; the model takes them as they "
                    "are read from a file, 0 to 255, and scales them itself"
                )
            x = np.rint(x)
        x = x.astype(np.dtype(self.dtype))
        if x.dtype.kind == "f" and not np.isfinite(x).all():
            row = int(np.argwhere(~np.isfinite(x))[0][0])
            raise DataError(f"row {row + 1} holds NaN or infinity; fill the gap")
        return x

    def _refuse_misfit(self, x: AnyArray, name: str) -> None:
        if x.shape[1:] != self.shape or str(x.dtype) != self.dtype:
            raise DataError(
                f"examples of {name} are {x.dtype} {x.shape[1:]} and the model's {self.dtype} "
                f"{self.shape}; bring them to that form"
            )


class _Malformed(Exception):
    pass


def _check(good: bool, what: str) -> None:
    if not good:
        raise _Malformed(what)


def _texts(values: Any, what: str) -> tuple[str, ...]:
    _check(
        isinstance(values, list)
        and len(values) <= _NAMES
        and all(isinstance(one, str) and len(one) <= _LONGEST for one in values),
        f"{what} is no list of names",
    )
    return tuple(values)


def _names(given: Mapping[str, Any], key: str) -> tuple[str, ...]:
    names = _texts(given[key], key)
    _check(len(set(names)) == len(names), f"{key} holds a name twice")
    return names


def _numbers(given: Mapping[str, Any], key: str, shape: Iterable[int]) -> Floats:
    """Read numbers that can be broadcast to one example."""
    if json.dumps(given[key]).count(",") > _NUMBERS:
        raise _Malformed(f"{key} has too many numbers")
    values = np.array(given[key])
    _check(values.dtype.kind in "if", f"{key} holds other than numbers")
    values = values.astype(np.float32)
    _check(bool(np.isfinite(values).all()), f"{key} holds NaN or infinity")
    fits = np.broadcast_shapes(values.shape, tuple(shape)) == tuple(shape)
    _check(fits, f"{key} does not fit the shape")
    return values


def _tokeniser(given: Any) -> Tokeniser:
    _check(isinstance(given, str), "tokeniser is no text")
    made = Tokeniser(given)
    try:
        made.words  # noqa: B018
    except DataError as error:
        raise _Malformed(str(error)) from error
    return made


def _column_names(given: Any) -> str | tuple[str, ...] | None:
    """Return the name of a column, or the names of several."""
    if isinstance(given, str):
        return given
    names = tuple(map(str, given)) if isinstance(given, list | tuple) else ()
    return names[0] if len(names) == 1 else names or None


def _text_kind(dataset: Dataset) -> str:
    if not dataset.words:
        return ""
    return "next word" if dataset.sequential else "labelled"


def _reordered(dataset: Dataset, features: tuple[str, ...]) -> Dataset:
    """Put a table's columns into the run's order; refuse other columns."""
    own = dataset.features
    if missing := [name for name in features if name not in own]:
        raise DataError(
            f"{dataset.name} has no column {missing[0]!r}, which the model reads; it has "
            f"{_listed(own)}"
        )
    places = [own.index(name) for name in features]
    return replace(dataset, x=np.ascontiguousarray(dataset.x[:, places]), features=features)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:20]) + (", ..." if len(names) > 20 else "")


def _numbered(x: AnyArray, y: Rows | None = None) -> NewRows:
    return NewRows(x, y, tuple(str(row) for row in range(1, len(x) + 1)), "row")


def _number_column(column: Any, name: str, where: str) -> AnyArray:
    from pyarrow import types

    kind = column.type
    if not (types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)):
        raise DataError(
            f"{where}: column {name!r} is {kind}, and the model was trained on numbers there"
        )
    values: AnyArray = column.to_numpy().astype(np.float32)
    missing = np.flatnonzero(~np.isfinite(values))
    if len(missing):
        raise DataError(
            f"{where}: column {name!r} is empty, NaN or infinite in row {int(missing[0]) + 1}; "
            "fill the gap"
        )
    return values


def _arrow(given: Any) -> Any:
    """Return a DataFrame, or rows as dicts, as an Arrow table; None where it is neither."""
    if isinstance(given, Mapping):
        single = not any(np.ndim(value) for value in given.values())
        return frame_table([given] if single else given)
    if _all(given, Mapping):
        return frame_table(given)
    if type(given).__module__.partition(".")[0] == "pandas" and not hasattr(given, "columns"):
        given = given.to_frame().T.infer_objects()  # one row of a DataFrame
    frame = any(hasattr(given, name) for name in ("__arrow_c_stream__", "__dataframe__"))
    return frame_table(given) if frame or hasattr(given, "columns") else None


def _all(given: Any, kind: type) -> bool:
    return (
        isinstance(given, list | tuple)
        and bool(given)
        and all(isinstance(one, kind) for one in given)
    )


def _pictures(given: Any) -> list[Any] | None:
    """Return Pillow's images as a list; None where it is something else."""
    some = list(given) if isinstance(given, list | tuple) else [given]
    if some and all(hasattr(one, "convert") and hasattr(one, "resize") for one in some):
        return some
    if some and all(isinstance(one, str | Path) for one in some):
        return [Path(one).expanduser().read_bytes() for one in some]
    return None


def _resized(image: Any, size: tuple[int, int]) -> AnyArray:
    """Decode one of Pillow's images as a file's would be."""
    from PIL import ImageOps

    kept = io.BytesIO()
    ImageOps.exif_transpose(image).save(kept, "PNG")
    return picture(upright_image(kept.getvalue(), "the image"), "the image", size)
