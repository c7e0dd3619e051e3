"""What data holds and what will be done about it, with the line that corrects a wrong guess."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from idiolect.data.column_sums import ColumnSums, RawColumn
from idiolect.data.columns import ColumnEncoder, rare_below
from idiolect.data.dataset import Dataset
from idiolect.data.own.column_types import TableFacts, quoted, spelled_alike
from idiolect.errors import DataError

_SHOWN = 5  # categories or classes that are named
_RARE = 0.1  # a class with a smaller share makes accuracy a poor measure
_DAY = np.timedelta64(1, "D")


class Advice(NamedTuple):
    """Something worth knowing, and the line to write about it (perhaps none)."""

    what: str
    remedy: str = ""
    where: str = ""  # the table of an experiment file that the line belongs to


class ColumnView(NamedTuple):
    """One column: its type, how much is missing, what it holds and what is done with it."""

    name: str
    kind: str  # number, boolean, category, date or ignored; label, client
    missing: float  # share of the rows
    holds: str
    done: str


class Inspection(NamedTuple):
    """What was found in data."""

    form: str  # how a file is written, or what an example is
    rows: int
    task: str
    columns: tuple[ColumnView, ...]  # the label, the client, and the columns of a table
    advice: tuple[Advice, ...]


def inspected(dataset: Dataset) -> Inspection:
    """Look at a dataset as it was read: columns, label, clients, and what to know about them."""
    table, facts = dataset.table, table_facts(dataset)
    views = [_label(dataset)]
    if dataset.clients is not None:
        views.append(_clients(dataset))
    advice = [Advice(one) for one in dataset.remarks]
    if facts is not None and dataset.clients is None and facts.clients:
        advice.append(client_advice(facts.clients[0]))
    if pair := spelled_alike(dataset.client_names):
        said = f"'{pair[0]}' and '{pair[1]}' are two clients; if they are one, write them alike"
        advice.append(Advice(said))
    advice += _label_advice(dataset)
    form = f"examples of {'x'.join(map(str, dataset.x.shape[1:]))}, {dataset.x.dtype}"
    if table is not None and facts is not None:
        form = facts.source.form
        views += [_column(dataset, name, column) for name, column in table.columns.items()]
        views += [ColumnView(name, "ignored", 0.0, "", why) for name, why in table.ignored.items()]
        advice += _remarks(facts)
        advice += _missing_advice(table.columns, facts)
    return Inspection(form, len(dataset), dataset.task.title, tuple(views), tuple(advice))


def table_facts(dataset: Dataset) -> TableFacts | None:
    """Return what reading found beside the values of a table."""
    found = None if dataset.table is None else dataset.table.source
    return found if isinstance(found, TableFacts) else None


def refuse_unclear(dataset: Dataset, partition: str | None) -> None:
    """Refuse rows of one class only or without an event, and rows whose owner stands there unnamed.

    A `partition` that was asked for divides rows by something else.
    """
    if dataset.task.kind == "classes" and not dataset.sequential:
        held = np.flatnonzero(dataset.counts())
        if len(held) == 1:
            raise DataError(
                f"{dataset.name}: all {len(dataset):,} labels are '{dataset.classes[held[0]]}'; "
                "expected at least two classes: name another label column, or add rows"
            )
    if dataset.task.kind == "survival" and not dataset.y[:, 1].any():
        raise DataError(
            f"{dataset.name}: no row has an event, so there is nothing to learn; expected 1 in the "
            "second label column where the event was seen"
        )
    facts = table_facts(dataset)
    if partition is None and dataset.clients is None and facts is not None and facts.clients:
        name = facts.clients[0]
        raise DataError(
            f"{dataset.name}: '{name}' looks like the client, and no client column is named; add "
            f'client = "{name}" (in an experiment [data.options]), or choose a partition such as '
            "iid to divide the rows otherwise"
        )


def client_advice(name: str) -> Advice:
    """Suggest a column as the client."""
    return Advice(f"{name} looks like the client", f'client = "{name}"', "data.options")


def _label(dataset: Dataset) -> ColumnView:
    y, kind, facts = dataset.y, dataset.task.kind, table_facts(dataset)
    name = ", ".join(() if facts is None else facts.labels) or "label"
    if dataset.sequential:
        return ColumnView(name, "label", 0.0, "the words", "each next word is predicted")
    if kind == "number":
        return ColumnView(name, "label", 0.0, _span(y), "predicted; scaled for training")
    if kind == "survival":
        seen = float(y[:, 1].mean())
        holds = f"times {_span(y[:, 0])}, {seen:.0%} with an event"
        return ColumnView(name, "label", 0.0, holds, "the risk is predicted")
    counts = dataset.counts()
    order = np.argsort(-counts, kind="stable")[:_SHOWN]
    shown = [f"{dataset.classes[place]} {_percent(counts[place] / len(y))}" for place in order]
    more = [f"{len(counts) - _SHOWN} more"] * (len(counts) > _SHOWN)
    done = "one class is predicted" if kind == "classes" else "each label is predicted"
    return ColumnView(name, "label", 0.0, ", ".join([*shown, *more]), done)


def _percent(share: float) -> str:
    return f"{share:.1%}" if share < 0.1 else f"{share:.0%}"


def _clients(dataset: Dataset) -> ColumnView:
    owners = np.zeros(0, np.int64) if dataset.clients is None else dataset.clients
    sizes = np.bincount(owners, minlength=len(dataset.client_names))
    facts = table_facts(dataset)
    name = (facts.client if facts is not None else "") or "client"
    holds = f"{len(dataset.client_names)} of {sizes.min():,} to {sizes.max():,} rows"
    return ColumnView(name, "client", 0.0, holds, "each is a client")


def _label_advice(dataset: Dataset) -> list[Advice]:
    if dataset.task.kind != "classes" or dataset.sequential:
        return []
    counts = dataset.counts()
    held = counts[counts > 0]
    if pair := spelled_alike(dataset.classes):
        return [
            Advice(
                f"'{pair[0]}' and '{pair[1]}' are two classes; if they are one, write them alike"
            )
        ]
    if len(held) == 1:
        return [Advice("all labels are of one class: there is nothing to learn", "label = ...")]
    least, most = held.min() / held.sum(), held.max() / held.sum()
    if len(held) != 2 or least >= _RARE:
        return []
    said = (
        f"{_percent(least)} are of the rarer class: always guessing the other is right in "
        f"{_percent(most)}"
    )
    return [
        Advice(said, 'metric = "auroc"', "evaluate"),
        Advice("a rare class can count more in training", 'class_weights = "balanced"', "data"),
    ]


def _span(values: np.ndarray) -> str:
    return f"{values.min():.4g} to {values.max():.4g}, mean {values.mean():.4g}"


def _column(dataset: Dataset, name: str, column: RawColumn) -> ColumnView:
    """Describe a column; what is done is what all rows as training rows would lead to."""
    sums = ColumnSums.of(column)
    kind = column.plan.kind
    made = ColumnEncoder.fit(name, column.plan, sums, rare_below(sums.rows))
    share = sums.missing / max(sums.rows, 1)
    if kind == "category":
        order = sorted(sums.counts, key=lambda one: (-sums.counts[one], one))
        short = [one if len(one) <= 20 else one[:19] + "…" for one in order[:_SHOWN]]
        more = [f"{len(order) - _SHOWN:,} more"] * (len(order) > _SHOWN)
        holds = f"{len(order):,}: {', '.join([*short, *more])}"
    elif not sums.present:
        holds = "nothing"
    elif kind == "date":
        held = column.values[~np.isnan(column.values)]
        first, last = (
            np.datetime64("1970-01-01") + int(one) * _DAY for one in (held.min(), held.max())
        )
        holds = f"{first} to {last}"
    elif kind == "boolean":
        holds = f"{_percent(sums.mean)} true"
    else:
        holds = _span(column.values[~np.isnan(column.values)])
    return ColumnView(name, kind, share, holds, _done(dataset, column, made))


def _done(dataset: Dataset, column: RawColumn, made: ColumnEncoder) -> str:
    if not made.used:
        return "left out: it is constant"
    plain = dataset.table is not None and dataset.table.plain and dataset.unfitted != "table"
    if plain and dataset.encoder is None:
        return "scaled" if dataset.unfitted else "as it is"
    kind = column.plan.kind
    if kind == "category":
        places = len(made.categories)
        words = f"{'embedded' if column.plan.encode == 'embedding' else 'one-hot'}, {places} places"
        words += ", rare ones share one more" * made.other
        gap = "most frequent, and a flag" if column.plan.imputation == "mode" else "a flag"
    else:
        words = "scaled" if column.plan.scale and kind != "boolean" else "as it is"
        words = "days, scaled, and its place in year and week" if kind == "date" else words
        words = words if made.value else "only its gaps vary"
        gap = f"{column.plan.imputation}, and a flag"
    return f"{words}; missing: {gap}" if made.flag else words


def _remarks(facts: TableFacts) -> list[Advice]:
    found = []
    for remark in facts.remarks:
        whole = remark.remedy.startswith(("task", "options"))
        about_label = remark.what.startswith(("the label", "cells", "'"))
        what = remark.what if about_label else f"{remark.column} {remark.what}"
        where = "" if not remark.remedy else "data" if whole else "data.columns"
        found.append(Advice(what.rstrip(":"), remark.remedy, where))
    return found


def _missing_advice(columns: Mapping[str, RawColumn], facts: TableFacts) -> list[Advice]:
    found = []
    spelled: dict[str, int] = {}
    for own in facts.spellings.values():
        for spelling, times in own.items():
            spelled[spelling] = spelled.get(spelling, 0) + times
    if spelled:
        order = sorted(spelled, key=lambda one: -spelled[one])
        shown = ", ".join(f"{one or 'empty'} ({spelled[one]:,})" for one in order[:8])
        found.append(Advice(f"cells that count as missing: {shown}"))
    for name, column in columns.items():
        share = float(column.absent.mean())
        if share > 0.5:
            said = f"{name} is missing in {_percent(share)} of the rows; to leave it out"
            found.append(Advice(said, f'{quoted(name)} = "ignore"', "data.columns"))
    return found
