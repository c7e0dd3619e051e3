"""What examples look like, without the examples: enough to make networks and rehearse messages."""

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from idiolect.data import Dataset, Federation
from idiolect.data.federation import TrainData
from idiolect.deploy.refusals import Refused

_WORDS = 4096  # the longest text a node may tell
_NUMBERS = 1 << 24  # the most numbers of one example
_DTYPES = ("uint8", "float32", "float64", "int32", "int64")  # what a Dataset holds


@dataclass(frozen=True)
class Form:
    """Shape, type, classes and words of a node's data, and how many public examples it holds."""

    shape: list[int]
    dtype: str
    classes: list[str]
    sequential: bool  # a label for every place of a sequence
    words: list[str]  # of text: token -> word
    public: int | None
    public_labels: bool  # whether public examples are of the same classes

    @classmethod
    def of(cls, federation: Federation) -> "Form":
        """Describe a node's data."""
        dataset, public = federation.dataset, federation.public
        return cls(
            list(dataset.x.shape[1:]),
            str(dataset.x.dtype),
            list(dataset.classes),
            dataset.sequential,
            list(dataset.words),
            None if public is None else len(public),
            public is not None and public.classes == dataset.classes,
        )

    @classmethod
    def read(cls, told: Any) -> "Form":
        """Read what another side told, trusting nothing in it."""
        good = isinstance(told, dict) and set(told) == set(cls.__dataclass_fields__)
        if not (
            good
            and listed(told["shape"], int)
            and listed(told["classes"], str)
            and told["classes"]
            and told["shape"]
            and listed(told["words"], str)
            and all(isinstance(told[key], bool) for key in ("sequential", "public_labels"))
            and (told["public"] is None or (isinstance(told["public"], int) and told["public"] > 0))
            and all(word(one) for one in (*told["classes"], *told["words"]))
            and told["dtype"] in _DTYPES
            and 0 < math.prod(told["shape"]) <= _NUMBERS
            and all(size > 0 for size in told["shape"])
        ):
            raise Refused("format", "data described in another form")
        return cls(**told)

    def plain(self) -> dict[str, Any]:
        """Return the form as JSON has it."""
        return asdict(self)

    def blank(self, rows: int, shift: Any = (0.0,), scale: Any = (1.0,)) -> Dataset:
        """Make a dataset of nothing in this form."""
        return self._blank(rows, tuple(self.classes), shift, scale)

    def _blank(self, rows: int, classes: tuple[str, ...], shift: Any, scale: Any) -> Dataset:
        return Dataset(
            "blank",
            np.zeros((rows, *self.shape), np.dtype(self.dtype)),
            np.zeros((rows, *self.shape) if self.sequential else rows, np.int64),
            classes,
            np.array(shift, np.float32),
            np.array(scale, np.float32),
            words=tuple(self.words),
        )

    def lessons(self) -> tuple[TrainData, np.ndarray]:
        """Make a client of a few blank examples: what it learns from, and its test rows."""
        public = None
        if self.public is not None:
            classes = tuple(self.classes) if self.public_labels else ("any", "other")
            public = self._blank(self.public, classes, (0.0,), (1.0,))
        rows = np.arange(4)
        lessons = TrainData(self.blank(4), (rows[:2],), (rows[2:3],), ("nobody",), public)
        return lessons, rows[3:]


def word(value: Any) -> bool:
    """Say whether a value is a text of a decent length."""
    return isinstance(value, str) and len(value) <= _WORDS


def listed(value: Any, kind: type, length: int | None = None) -> bool:
    """Say whether a value is a list of a kind, and of a length where one is given."""
    return (
        isinstance(value, list)
        and all(type(one) is kind for one in value)
        and (length is None or len(value) == length)
    )
