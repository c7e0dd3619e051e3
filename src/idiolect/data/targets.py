"""From label columns to what a task learns: classes, labels, a number, or time and event."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from idiolect.core.survival import INTERVALS, Cox, Discrete
from idiolect.core.task import KINDS, Classes, Labels, Number, Task
from idiolect.data.dataset import AnyArray, Dataset
from idiolect.errors import ConfigError, DataError

_YES = ("1", "1.0", "true", "yes", "y", "t")
_NO = ("0", "0.0", "false", "no", "n", "f")
_BETWEEN = ("|", ";", ",")  # labels that share a cell

TaskLike = str | Mapping[str, Any] | Task


def make_task(given: TaskLike | None) -> Task:
    """Make a task of its name, or of a table such as {name = "survival", form = "discrete"}."""
    if given is None or isinstance(given, Task):
        return given or Classes()
    options = {"name": given} if isinstance(given, str) else dict(given)
    name = options.pop("name", None)
    if name not in KINDS:
        raise ConfigError(f"task {name!r} is unknown; expected one of {', '.join(KINDS)}")
    if name == "number":
        form = _one_of(name, options, "loss", ("squared", "huber"))
        task: Task = Number(huber=form == "huber")
    elif name == "survival":
        if _one_of(name, options, "form", ("cox", "discrete")) == "cox":
            task = Cox()
        else:
            task = _discrete(options)
    else:
        task = Classes() if name == "classes" else Labels()
    if options:
        known = {"number": "loss", "survival": "form, and of the discrete form intervals and cuts"}
        raise ConfigError(
            f"task {name} has no option {next(iter(options))!r}; it has {known.get(name, 'none')}"
        )
    return task


def _one_of(task: str, options: dict[str, Any], option: str, known: Sequence[str]) -> str:
    found = options.pop(option, known[0])
    if found not in known:
        raise ConfigError(f"task {task}: {option} is {found!r}, expected one of {', '.join(known)}")
    return str(found)


def _discrete(options: dict[str, Any]) -> Discrete:
    given = options.pop("cuts", ())
    good = isinstance(given, list | tuple) and all(
        isinstance(one, int | float) and not isinstance(one, bool) for one in given
    )
    cuts = tuple(float(one) for one in given) if good else ()
    ascending = all(low < high for low, high in zip((0.0, *cuts), cuts, strict=False))
    if not good or not ascending or not np.isfinite(cuts).all():
        raise ConfigError(
            f"task survival: cuts are {given!r}, expected times above 0 that ascend, such as "
            "[30, 90, 365]"
        )
    intervals = options.pop("intervals", len(cuts) + 1 if cuts else INTERVALS)
    if not isinstance(intervals, int) or isinstance(intervals, bool) or intervals < 2:
        raise ConfigError(f"task survival: intervals is {intervals!r}, expected 2 or more")
    if cuts and intervals != len(cuts) + 1:
        raise ConfigError(
            f"task survival: {len(cuts)} cuts make {len(cuts) + 1} intervals, and intervals is "
            f"{intervals}; leave one of them out"
        )
    return Discrete(intervals=intervals, cuts=cuts)


def output_names(task: Task, names: Sequence[str]) -> tuple[str, ...]:
    """Name the outputs of a network; `names` are those of the label columns."""
    if isinstance(task, Cox):
        return ("log risk",)
    if isinstance(task, Discrete):
        return tuple(f"interval {n + 1}" for n in range(task.intervals))
    return tuple(names)


def targets(
    columns: Mapping[str, AnyArray], task: Task, where: str, known: Sequence[str] = ()
) -> tuple[AnyArray, Sequence[str]]:
    """Turn label columns into y and the names of the outputs; classes are coded elsewhere.

    `known` are the labels that a model knows already.
    """
    names = list(columns)
    if task.kind == "number":
        if len(names) != 1:
            raise DataError(
                f"{where}: task number learns one column, and label names {len(names)}: "
                f"{', '.join(names)}; name one"
            )
        return _floats(columns[names[0]], names[0], where), output_names(task, names)
    if task.kind == "survival":
        if len(names) != 2:
            raise DataError(
                f"{where}: task survival needs two label columns, time and event, and label names "
                f"{', '.join(names) or 'none'}; write label = ['days', 'event']"
            )
        time, event = columns[names[0]], columns[names[1]]
        y = np.stack([_floats(time, names[0], where), _flags(event, names[1], where)], 1)
        return y, output_names(task, names)
    if len(names) == 1 and columns[names[0]].dtype.kind in "UOS":
        return _shared_cells(columns[names[0]], names[0], where, known)
    return np.stack([_flags(columns[name], name, where) for name in names], 1), names


def _floats(values: AnyArray, name: str, where: str) -> AnyArray:
    """Read a column of numbers."""
    try:
        found = values.astype(np.float64)
    except (TypeError, ValueError) as error:
        wrong = next((row for row, one in enumerate(values) if not _is_number(one)), 0)
        raise DataError(
            f"{where}: column '{name}' has {str(values[wrong])!r} in row {wrong + 1}, expected a "
            "number"
        ) from error
    gaps = np.flatnonzero(~np.isfinite(found))
    if len(gaps):
        raise DataError(
            f"{where}: column '{name}' has no number in row {int(gaps[0]) + 1}; fill or drop it"
        )
    kept = found.astype(np.float32)
    lost, spread = float(np.abs(kept - found).max(initial=0.0)), float(found.std())
    if lost > 1e-3 * spread > 0:
        raise DataError(
            f"{where}: column '{name}' varies by {spread:.3g} about {found.mean():.6g}, which is "
            "lost in single precision; subtract a number near its mean first"
        )
    return np.asarray(kept)


def _is_number(value: Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return True


def _flags(values: AnyArray, name: str, where: str) -> AnyArray:
    """Read a column of yes and no: 1 and 0, true and false, yes and no."""
    words = np.char.lower(np.char.strip(values.astype(str)))
    found = np.isin(words, _YES)
    wrong = np.flatnonzero(~found & ~np.isin(words, _NO))
    if len(wrong):
        raise DataError(
            f"{where}: column '{name}' has {str(values[wrong[0]])!r} in row {int(wrong[0]) + 1}, "
            "expected 1 or 0 (or true or false, yes or no)"
        )
    return found.astype(np.float32)


def _parted(cells: Sequence[str], mark: str) -> list[set[str]]:
    return [{part.strip() for part in cell.split(mark)} - {""} for cell in cells]


def _shared_cells(
    values: AnyArray, name: str, where: str, known: Sequence[str]
) -> tuple[AnyArray, Sequence[str]]:
    """Read labels that share a cell, such as "asthma|smoker"; an empty cell has none."""
    cells = ["" if one is None else str(one) for one in values]
    counts = {one: sum(one in cell for cell in cells) for one in _BETWEEN}
    # A bar is what cells are recognised by; beside it commas belong to names.
    mark = "|" if counts["|"] else max(_BETWEEN, key=counts.__getitem__)
    if known:
        mark = min(_BETWEEN, key=lambda one: len(set().union(*_parted(cells, one)) - {*known}))
    held = _parted(cells, mark)
    names = sorted(set().union(*held))
    if not names:
        raise DataError(f"{where}: column '{name}' holds no label in any row")
    y = np.array([[one in own for one in names] for own in held], np.float32)
    return y, names


def with_task(dataset: Dataset, task: Task) -> Dataset:
    """Give a dataset another form of its task, such as discrete survival; refuse another task."""
    if dataset.task.kind != task.kind:
        raise ConfigError(
            f"{dataset.name} holds labels for task {dataset.task.kind}, and data.task is "
            f"{task.kind}; leave it out, or read an own file"
        )
    names = output_names(task, dataset.classes) if task.kind == "survival" else dataset.classes
    return dataclasses.replace(dataset, task=task, classes=tuple(names))


def with_class_weights(dataset: Dataset, weights: str | Mapping[str, float]) -> Dataset:
    """Let rare classes count more in training: "balanced", or a weight for each named class."""
    if not isinstance(dataset.task, Classes) or dataset.sequential:
        what = "words" if dataset.sequential else dataset.task.kind
        raise ConfigError(
            f"data.class_weights is for classes, and {dataset.name} has task {what}; leave it out"
        )
    if isinstance(weights, str):
        if weights != "balanced":
            raise ConfigError(
                f"data.class_weights is {weights!r}, expected 'balanced' or a table such as "
                "{yes = 10.0, no = 1.0}"
            )
        return dataclasses.replace(dataset, task=Classes(balanced=True))
    for name, weight in weights.items():
        if name not in dataset.classes:
            raise ConfigError(
                f"data.class_weights names class {name!r}, which {dataset.name} lacks; it has "
                f"{', '.join(dataset.classes[:20])}"
            )
        if not 0 < weight < float("inf"):
            raise ConfigError(f"data.class_weights: {name} is {weight}, expected above 0")
    each = tuple(float(weights.get(name, 1.0)) for name in dataset.classes)
    return dataclasses.replace(dataset, task=Classes(weights=each))
