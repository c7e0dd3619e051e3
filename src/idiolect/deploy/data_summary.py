"""What a node states about its data when it joins: form, sizes and statistics.

Statistics are used before any robust rule is at work: one mean of 1e12 would scale everyone's
examples to nothing. So impossible ones are refused, and a column in which a site is far from the
others is scaled by medians over the sites instead of by all rows together.
"""

import dataclasses
import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np

from idiolect.core.survival import task_from_json
from idiolect.core.task import Classes, Task
from idiolect.data import Dataset, Federation
from idiolect.data.dataset import Moments
from idiolect.data.description import far_from_others, far_words
from idiolect.data.federation import TrainData
from idiolect.deploy import protocol
from idiolect.deploy.messenger import Answer
from idiolect.deploy.protocol import Refused
from idiolect.errors import ConfigError, DeployError

_WORDS = 4096  # characters of the longest text a node may send
_NUMBERS = 1 << 24  # the most numbers of one example
_DTYPES = ("uint8", "float32", "float64", "int32", "int64")  # what a Dataset holds


@dataclass(frozen=True)
class ExampleForm:
    """Shape, type, classes and words of a node's data, and how many public examples it holds."""

    shape: list[int]
    dtype: str
    classes: list[str]
    sequential: bool  # a label for every place of a sequence
    words: list[str]  # of text: token -> word
    public: int | None
    public_labels: bool  # whether public examples are of the same classes
    task: dict[str, Any] = field(default_factory=lambda: Classes().to_json())  # before it is fitted

    @classmethod
    def of(cls, federation: Federation, task: Task) -> "ExampleForm":
        """Describe a node's data; `task` is what was asked for."""
        dataset, public = federation.dataset, federation.public
        return cls(
            list(dataset.x.shape[1:]),
            str(dataset.x.dtype),
            list(dataset.classes),
            dataset.sequential,
            list(dataset.words),
            None if public is None else len(public),
            public is not None and public.classes == dataset.classes,
            task.to_json(),
        )

    @classmethod
    def read(cls, given: Any) -> "ExampleForm":
        """Read the form out of a message, trusting nothing in it."""
        good = isinstance(given, dict) and set(given) == set(cls.__dataclass_fields__)
        if not (
            good
            and is_list(given["shape"], int)
            and is_list(given["classes"], str)
            and given["classes"]
            and given["shape"]
            and is_list(given["words"], str)
            and all(isinstance(given[key], bool) for key in ("sequential", "public_labels"))
            and (
                given["public"] is None
                or (isinstance(given["public"], int) and given["public"] > 0)
            )
            and all(is_text(one) for one in (*given["classes"], *given["words"]))
            and given["dtype"] in _DTYPES
            and 0 < math.prod(given["shape"]) <= _NUMBERS
            and all(size > 0 for size in given["shape"])
        ):
            raise Refused("format", "data described in another form")
        try:
            task_from_json(given["task"])
        except (ConfigError, TypeError, ValueError, AttributeError) as error:
            raise Refused("format", "data with an unknown task") from error
        return cls(**given)

    def plain(self) -> dict[str, Any]:
        """Return the form as JSON has it."""
        return asdict(self)

    def blank(self, rows: int, shift: Any = (0.0,), scale: Any = (1.0,)) -> Dataset:
        """Return a dataset of zeros in this form, and of the same label throughout."""
        task = dataclasses.replace(task_from_json(self.task), fitted=True)
        y = np.zeros((rows, *self.shape) if self.sequential else rows, np.int64)
        if task.kind != "classes":
            width = {"labels": (len(self.classes),), "survival": (2,)}.get(task.kind, ())
            y = np.ones((rows, *width), np.float32)
        return Dataset(
            "blank",
            np.zeros((rows, *self.shape), np.dtype(self.dtype)),
            y,
            tuple(self.classes),
            np.array(shift, np.float32),
            np.array(scale, np.float32),
            words=tuple(self.words),
            task=task,
        )

    def blank_client(self) -> tuple[TrainData, np.ndarray]:
        """Return the training data of a client of a few blank examples, and its test rows."""
        public = None
        if self.public is not None:
            classes = tuple(self.classes) if self.public_labels else ("any", "other")
            public = dataclasses.replace(self.blank(self.public), classes=classes)
        rows = np.arange(4)
        train = TrainData(self.blank(4), (rows[:2],), (rows[2:3],), ("nobody",), public)
        return train, rows[3:]


@dataclass(frozen=True)
class NodeEntry:
    """What one node stated when it joined."""

    site: str
    client: int
    name: str
    sizes: list[list[int]]  # for each seed: training, validation and test rows
    form: ExampleForm
    features: str
    source: str
    clients: int
    descriptions: list[str]
    table: str = ""  # "plain": of numbers without gaps; "typed": other columns too; else no table


def is_text(value: Any) -> bool:
    """Return whether a value is a text of a limited length."""
    return isinstance(value, str) and len(value) <= _WORDS


def is_list(value: Any, kind: type, length: int | None = None) -> bool:
    """Return whether a value is a list of a type, and of a length where one is given."""
    return (
        isinstance(value, list)
        and all(type(one) is kind for one in value)
        and (length is None or len(value) == length)
    )


_LARGEST = 1e15  # no measurement; squared and summed it still fits
_FAR = 10.0  # times the typical spread within and between sites
_FEWEST = 3  # sites: of two that differ nobody can say which one is wrong


def _refuse_impossible(site: str, seen: Moments, rows: int, form: ExampleForm) -> None:
    """Refuse statistics that no data of this form has, `rows` being the stated training rows."""
    shape = tuple(form.shape)
    mean, squares = np.asarray(seen.mean), np.asarray(seen.squares)
    fits = mean.shape == squares.shape and len(mean.shape) == len(shape)
    if not fits or any(own not in (1, size) for own, size in zip(mean.shape, shape, strict=True)):
        raise Refused("statistics", f"{site} stated statistics of shape {mean.shape}, not {shape}")
    numbers = rows * (int(np.prod(shape)) // max(1, mean.size))
    if seen.seen != numbers:
        raise Refused(
            "statistics", f"{site} stated statistics of {seen.seen:g} numbers, and has {numbers}"
        )
    low, high = (0.0, 255.0) if form.dtype == "uint8" else (-_LARGEST, _LARGEST)
    if mean.min() < low or mean.max() > high:
        raise Refused("statistics", f"{site} stated a mean of {_worst(mean):g}")
    widest = squares.max() / numbers
    # Of numbers between two bounds the variance is at most a quarter of their distance squared.
    if squares.min() < 0 or widest > ((high - low) / 2) ** 2 * (1 + 1e-6):
        raise Refused("statistics", f"{site} stated a variance of {widest:g}")


def joined(moments: Mapping[str, Moments], robust: bool) -> tuple[Moments, list[str]]:
    """Return the joint statistics, and the sites that are far from the others in a column.

    They are those of all rows together, but medians over the sites in columns where one is far,
    and in all columns if `robust`.
    """
    sites = sorted(moments)
    total = moments[sites[0]]
    for site in sites[1:]:
        total = total.merged(moments[site])
    mean = np.stack([moments[site].mean for site in sites])
    spread = np.sqrt(np.stack([moments[site].squares / moments[site].seen for site in sites]))
    centre = np.median(mean, axis=0)
    apart = np.abs(mean - centre)
    bound = _FAR * (np.median(spread, axis=0) + np.median(apart, axis=0))
    # Where most sites have one and the same number, whatever another has spoils nothing for them.
    far = (bound > 0) & ((apart > bound) | (spread > bound))
    if len(sites) < _FEWEST:
        far = np.zeros_like(far)
    names = [site for site, own in zip(sites, far, strict=True) if own.any()]
    columns = far.any(axis=0) if not robust or len(sites) < _FEWEST else np.ones_like(far[0])
    typical = np.median(spread**2 + apart**2, axis=0)
    return Moments(
        total.seen,
        np.where(columns, centre, total.mean),
        np.where(columns, typical * total.seen, total.squares),
    ), names


_MOST_NAMED = 3  # columns of one site


def unlike_means(moments: Mapping[str, Moments], shown: Collection[str]) -> list[tuple[str, str]]:
    """Return each site that is far from those that are shown in some column, with words on it.

    Names of columns stay at the sites, so columns are counted.
    """
    if any(one.mean.ndim != 1 for one in moments.values()):
        return []
    found = []
    for site in sorted(moments):
        sites = sorted({site, *(one for one in moments if one in shown)})
        if len(sites) < 2:
            continue
        place = sites.index(site)
        mean = np.stack([np.ravel(moments[one].mean) for one in sites])
        squares = np.stack([np.ravel(moments[one].squares) for one in sites])
        counts = np.array([[moments[one].seen] for one in sites], np.float64)
        spread = np.sqrt(squares / counts)
        far = far_from_others(mean, spread, np.broadcast_to(counts, mean.shape))[place]
        for column in np.flatnonzero(far)[:_MOST_NAMED]:
            others = np.delete(mean[:, column], place).tolist()
            name = f"column {column + 1}"
            found.append((site, far_words(site, name, float(mean[place, column]), others)))
    return found


def _worst(values: np.ndarray) -> float:
    return float(values.flat[np.abs(values).argmax()])


Scaling = tuple[np.ndarray, np.ndarray]  # shift and scale


def read_scalings(path: Path, seeds: int) -> list[Scaling]:
    """Read the agreed shift and scale under each seed, in the experiment's order."""
    known = json.loads(path.read_text())
    # Earlier runs had one scaling for all seeds.
    each = known["seeds"] if "seeds" in known else [known] * seeds
    return [
        (np.array(one["shift"], np.float32), np.array(one["scale"], np.float32)) for one in each
    ]


def refuse_impossible(site: str, answer: Answer, entry: NodeEntry, seeds: int) -> None:
    """Refuse a node's statistics that are impossible for its stated data."""
    try:
        given = read_statistics(answer, seeds)
    except DeployError as error:
        raise Refused("statistics", f"{site}: {error}") from error
    for one, sizes in zip(given, entry.sizes, strict=True):
        if isinstance(one, Moments):
            _refuse_impossible(site, one, sizes[0], entry.form)


def read_statistics(answer: Answer, seeds: int) -> list[Moments | Scaling]:
    """Read a node's statistics under each seed, or the scaling it uses."""
    leaves = {name: leaf.numpy() for name, leaf in answer.message.leaves.items()}
    protocol.refuse_nonfinite(answer.message.leaves)
    if any(leaf.ndim == 0 or len(leaf) != seeds for leaf in leaves.values()):
        raise DeployError(f"a node stated the scaling of its data for other than {seeds} seeds")
    if set(leaves) == {"shift", "scale"}:
        return list(zip(leaves["shift"], leaves["scale"], strict=True))
    counts: Any = answer.message.head.get("count")
    if set(leaves) != {"mean", "squares"} or not (
        is_list(counts, float, seeds) and all(0 < count < math.inf for count in counts)
    ):
        raise DeployError("a node stated its data's statistics in another form")
    return [
        Moments(count, mean, squares)
        for count, mean, squares in zip(counts, leaves["mean"], leaves["squares"], strict=True)
    ]


SAME = {
    "form.shape": "the shape of an example",
    "form.dtype": "the type of its numbers",
    "form.classes": "the classes",
    "form.sequential": "whether every place of a sequence has a label",
    "form.words": "the words that its tokens stand for",
    "form.task": "the task, or its settings",
    "form.public": "the number of public examples",
    "form.public_labels": "whether public examples are of the same classes",
    "features": "the names or the order of a table's columns, or the vocabulary of text",
    "source": "the source of the data",
    "clients": "the number of clients of the partition",
}


SAME_FOR_NEWCOMERS = (
    "form.shape",
    "form.dtype",
    "form.classes",
    "form.sequential",
    "form.words",
    "form.task",
    "features",
)

OF_COLUMNS = ("form.shape", "form.dtype", "features")
"""What may differ where an encoder makes the same features of all tables."""


def read_entries(path: Path) -> dict[str, NodeEntry]:
    """Read each site's entry from a file."""
    known = json.loads(path.read_text())
    return {
        site: NodeEntry(**{**entry, "form": ExampleForm(**entry["form"])})
        for site, entry in known.items()
    }


def refuse_unlike(
    name: str, one: NodeEntry, others: Sequence[NodeEntry], keys: Sequence[str]
) -> None:
    """Refuse entries that differ from one in a field that must be the same."""
    for other in others:
        for key in keys:
            if attrgetter(key)(other) != attrgetter(key)(one):
                raise DeployError(
                    f"{name} and {other.site} differ in {SAME[key]}; bring their data to one form "
                    "before they learn together"
                )


def read_entry(site: str, answer: Answer, seeds: int) -> NodeEntry:
    """Read what a node stated, trusting nothing in it."""
    head: dict[str, Any] = {
        key: answer.message.head.get(key) for key in NodeEntry.__dataclass_fields__
    }
    good = (
        all(type(head[key]) is int and head[key] >= 0 for key in ("client", "clients"))
        and all(is_text(head[key]) for key in ("name", "features", "source"))
        and head["table"] in ("", "plain", "typed")
        and is_list(head["descriptions"], str, seeds)
        and all(is_text(one) for one in head["descriptions"])
        and is_list(head["sizes"], list, seeds)
        and all(is_list(one, int, 3) and min(one) >= 0 for one in head["sizes"])
    )
    if not good:
        raise Refused("format", f"{site} joined with an answer of another form")
    return NodeEntry(**{**head, "site": site, "form": ExampleForm.read(head["form"])})
