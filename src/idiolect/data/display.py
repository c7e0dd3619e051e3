"""Datasets and federations in a few words, and as pictures for a notebook."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

import numpy as np

from idiolect.errors import shortened

if TYPE_CHECKING:
    from idiolect.data.dataset import Dataset, Rows
    from idiolect.data.federation import Federation, TestData, TrainData

_MOST_ROWS, _MOST_COLUMNS = 30, 24  # of a heat map
_PALE, _STRONG = (236, 243, 250), (8, 69, 121)
_STYLE = (
    "font:13px/1.4 system-ui,sans-serif;color:#111;background:#fff;max-width:100%;"
    "overflow-x:auto;padding:8px"
)


def count(number: int, word: str, plural: str = "") -> str:
    """Write a number of things."""
    return f"{number:,} {word if number == 1 else plural or word + 's'}"


def dataset_text(dataset: Dataset) -> str:
    """Describe a dataset in two lines."""
    more = []
    if dataset.clients is not None:
        more.append(count(len(dataset.client_names), "client"))
    if dataset.unfitted or dataset.vocabulary:
        more.append("scaled by the training rows, once it is divided")
    beside = f"; {', '.join(more)}" if more else ""
    return (
        f"Dataset {shortened(dataset.name)!r}: {_contents(dataset)}\n  {_classes(dataset)}{beside}"
    )


def federation_text(federation: Federation) -> str:
    """Describe a federation in four lines."""
    parts = [(part, getattr(federation, part)) for part in ("train", "val", "test")]
    sums = ", ".join(f"{part} {sum(map(len, rows)):,}" for part, rows in parts)
    lines = [
        f"Federation of {count(federation.clients, 'client')}: {_contents(federation.dataset)}",
        f"  {_classes(federation.dataset)}",
        f"  rows: {sums}; {_range(_held(federation))} a client",
    ]
    if federation.description:
        lines.append(f"  {shortened(federation.description, 120)}")
    return "\n".join(lines)


def part_text(data: TrainData | TestData) -> str:
    """Describe the training or test part of a federation in one line."""
    held = {name: sum(map(len, getattr(data, name, ()))) for name in ("train", "val", "test")}
    rows = ", ".join(f"{name} {total:,}" for name, total in held.items() if hasattr(data, name))
    name = shortened(data.dataset.name)
    return f"{type(data).__name__} of {count(data.clients, 'client')} of {name!r}: rows {rows}"


def dataset_html(dataset: Dataset) -> str:
    """Describe a dataset, with a bar for each class."""
    body = ""
    if not dataset.sequential and len(dataset.columns) > 1:
        counts = dataset.counts()[None]
        body = heat_table(["rows"], list(dataset.columns), counts, "Rows of each kind", corner="")
    return _framed(dataset_text(dataset), body)


def federation_html(federation: Federation) -> str:
    """Describe a federation, with a heat map of who holds how many rows of what."""
    body = heat_table(
        list(federation.names),
        list(federation.columns),
        federation.counts(),
        "What each client holds: training, validation and test rows together",
    )
    return _framed(federation_text(federation), body + _notes(federation.warnings()))


def heat_table(
    names: Sequence[str], columns: Sequence[str], counts: Rows, caption: str, corner: str = "client"
) -> str:
    """Draw counts [row, column] as a table whose cells are darker where there is more.

    Of many rows or columns the first are shown, and the sum of the others.
    """
    names, counts = _folded(list(names), counts, _MOST_ROWS)
    columns, turned = _folded(list(columns), counts.T, _MOST_COLUMNS)
    counts = turned.T
    top = max(int(counts.max(initial=0)), 1)
    cell = "padding:2px 6px;text-align:right;border:1px solid #fff;white-space:nowrap"
    heads = "".join(f'<th style="{cell}">{escape(shortened(name, 18))}</th>' for name in columns)
    total = f'<th style="{cell}">all</th>' if len(columns) > 1 else ""
    rows = []
    for name, own in zip(names, counts, strict=True):
        cells = "".join(
            f'<td style="{cell};{_paint(int(value) / top)}">{int(value):,}</td>' for value in own
        )
        whole = f'<td style="{cell}">{int(own.sum()):,}</td>' if len(columns) > 1 else ""
        label = f'<th style="{cell};text-align:left">{escape(shortened(name))}</th>'
        rows.append(f"<tr>{label}{cells}{whole}</tr>")
    return (
        f'<div style="color:#444">{escape(caption)}</div>'
        f'<div style="overflow-x:auto"><table style="border-collapse:collapse;font-size:12px">'
        f'<thead><tr><th style="{cell};text-align:left">{escape(corner)}</th>{heads}{total}</tr>'
        f"</thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def _notes(texts: Sequence[str]) -> str:
    lines = [escape(shortened(text, 300)) for text in texts[:5]]
    return "".join(f'<div style="color:#7a4b00">note: {line}</div>' for line in lines)


def _framed(text: str, body: str) -> str:
    first, *rest = text.split("\n")
    lines = "".join(f'<div style="color:#444">{escape(line.strip())}</div>' for line in rest)
    return (
        f'<div class="idiolect" style="{_STYLE}"><div style="font-weight:600">{escape(first)}</div>'
        f'{lines}<div style="margin-top:6px">{body}</div></div>'
    )


def _folded(names: list[str], counts: Rows, most: int) -> tuple[list[str], Rows]:
    """Sum up rows past the most that are shown."""
    if len(names) <= most:
        return names, counts
    rest = counts[most - 1 :].sum(0, keepdims=True)
    kept = [*names[: most - 1], f"{len(names) - most + 1:,} more"]
    return kept, np.concatenate([counts[: most - 1], rest])


def _paint(share: float) -> str:
    """Return the colours of a cell: darker for a larger share, with letters that can be read."""
    if share <= 0:
        return "background:#fff;color:#999"
    share = min(share, 1.0) ** 0.6  # few rows should differ from none
    mixed = [round(a + (b - a) * share) for a, b in zip(_PALE, _STRONG, strict=True)]
    ink = "#fff" if share > 0.5 else "#111"
    return f"background:rgb({mixed[0]},{mixed[1]},{mixed[2]});color:{ink}"


def _contents(dataset: Dataset) -> str:
    """Say how many examples there are, and of what kind."""
    shape, rows = dataset.x.shape[1:], f"{len(dataset):,}"
    if dataset.words or dataset.vocabulary:
        return f"{rows} texts of up to {shape[0]} words"
    if dataset.x.dtype == np.uint8 and len(shape) == 3:
        kind = {1: "grey ", 3: "colour "}.get(shape[0], "")
        return f"{rows} {kind}images of {shape[2]}×{shape[1]}"
    if len(shape) == 1:
        return f"{count(len(dataset), 'row')} of {count(shape[0], 'feature')}"
    return f"{count(len(dataset), 'example')} of shape {'×'.join(map(str, shape))}"


def _classes(dataset: Dataset) -> str:
    """List the first classes."""
    if dataset.sequential:
        return f"the next of {len(dataset.words) or dataset.vocabulary:,} words is predicted"
    names = [shortened(name, 20) for name in dataset.classes[:6]]
    more = ", …" if len(dataset.classes) > 6 else ""
    if dataset.task.kind == "number":
        return f"a number is predicted: {names[0]}"
    if dataset.task.kind == "survival":
        events = int(dataset.counts()[0])
        return f"survival is predicted: {count(events, 'event')} in {count(len(dataset), 'row')}"
    if dataset.task.kind == "labels":
        return f"{count(len(dataset.classes), 'label')}: {', '.join(names)}{more}"
    return f"{count(len(dataset.classes), 'class', 'classes')}: {', '.join(names)}{more}"


def _held(federation: Federation) -> list[int]:
    return [
        len(a) + len(b) + len(c)
        for a, b, c in zip(federation.train, federation.val, federation.test, strict=True)
    ]


def _range(sizes: Sequence[int]) -> str:
    low, high = min(sizes), max(sizes)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"
