"""What a server's state said round by round: one file a method, `traces/LABEL.safetensors`.

A method chooses what is worth recording (`Method.trace`): KT-pFL its matrix of who learns from
whom, say. The file holds only the rounds asked for by `evaluate.trace`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from idiolect.core import checkpoint
from idiolect.errors import DataError
from idiolect.results.run_files import folder_name

FOLDER = "traces"


@dataclass(frozen=True, eq=False)
class Trace:
    """Recorded rounds of a method; each array of `values` is [record, seed, ...]."""

    label: str
    rounds: tuple[int, ...]  # of each record
    seeds: tuple[int, ...]
    clients: tuple[str, ...]  # names under the first seed
    values: Mapping[str, NDArray[Any]]

    def matrix(self, seed: int | None = None) -> tuple[str, NDArray[Any]]:
        """Return the name and course [record, receiver, sender] of a matrix over clients.

        Of one seed, or the mean over all; their clients may differ, as their data do.
        """
        count = len(self.clients)
        found = [name for name, own in self.values.items() if own.shape[2:] == (count, count)]
        if not found:
            raise DataError(
                f"{self.label} recorded {', '.join(self.values) or 'nothing'}, and no matrix over "
                f"its {count} clients"
            )
        values = self.values[found[0]]
        if seed is None:
            return found[0], values.mean(1)
        if seed not in self.seeds:
            raise DataError(
                f"there is no seed {seed}; the run has {', '.join(map(str, self.seeds))}"
            )
        return found[0], values[:, self.seeds.index(seed)]


def joined_traces(traces: Sequence[Trace], seeds: Sequence[int]) -> Trace | None:
    """Join what a method recorded under different seeds, in their order: rounds that all recorded.

    None where some seed recorded nothing.
    """
    places = {seed: (one, n) for one in reversed(traces) for n, seed in enumerate(one.seeds)}
    if not seeds or not all(seed in places for seed in seeds):
        return None
    used = [places[seed] for seed in seeds]
    rounds = [r for r in used[0][0].rounds if all(r in one.rounds for one, _ in used)]
    names = [name for name in used[0][0].values if all(name in one.values for one, _ in used)]
    values = {
        name: [own.values[name][[own.rounds.index(r) for r in rounds], n] for own, n in used]
        for name in names
    }
    alike = {
        name: np.stack(own, axis=1)
        for name, own in values.items()
        if len({one.shape for one in own}) == 1
    }
    if not rounds or not alike:
        return None
    first = used[0][0]
    return Trace(first.label, tuple(rounds), tuple(seeds), first.clients, alike)


def trace_path(folder: Path, label: str) -> Path:
    """Return where a method's trace stands."""
    return folder / FOLDER / f"{folder_name(label)}.safetensors"


def write_trace(folder: Path, trace: Trace) -> None:
    """Write a trace, whole."""
    kept = {name: torch.from_numpy(np.ascontiguousarray(own)) for name, own in trace.values.items()}
    meta = {
        "label": trace.label,
        "rounds": list(trace.rounds),
        "seeds": list(trace.seeds),
        "clients": list(trace.clients),
    }
    checkpoint.save(trace_path(folder, trace.label), kept, meta)


def read_trace(run_dir: str | Path, label: str) -> Trace:
    """Read what a method of a run recorded."""
    path = trace_path(Path(run_dir), label)
    if not path.is_file():
        there = traced_labels(run_dir)
        known = f"it holds those of {', '.join(there)}" if there else "no method in it records any"
        raise DataError(f"{run_dir} holds no trace of {label!r}; {known}")
    return _opened(path)


def traced_labels(run_dir: str | Path) -> list[str]:
    """List the methods of a run that recorded something."""
    found = sorted((Path(run_dir) / FOLDER).glob("[!.]*.safetensors"))
    return [_opened(path).label for path in found]


def _opened(path: Path) -> Trace:
    named, meta = checkpoint.read(path)
    return Trace(
        meta["label"],
        tuple(meta["rounds"]),
        tuple(meta["seeds"]),
        tuple(meta["clients"]),
        {name: leaf.numpy() for name, leaf in named.items()},
    )


def similar_order(matrix: NDArray[Any]) -> list[int]:
    """Order clients so that those who learn from each other, and alike, stand together.

    A walk from client to client, each time to the unvisited one with the most in common: what the
    two give each other, and how alike their rows and columns are. It starts at the client that has
    least in common with the rest, so that a group is walked through from its rim.
    """
    count = len(matrix)
    mutual = np.asarray(matrix, np.float64) + np.asarray(matrix, np.float64).T
    np.fill_diagonal(mutual, 0.0)
    centred = mutual - mutual.mean(1, keepdims=True)
    length = np.linalg.norm(centred, axis=1)
    alike = centred @ centred.T / np.maximum(np.outer(length, length), 1e-12)
    near = alike + mutual / max(float(mutual.max()), 1e-12)
    np.fill_diagonal(near, -np.inf)
    rest = np.where(np.isinf(near), 0.0, near).sum(1)
    order = [int(rest.argmin())] if count else []
    while len(order) < count:
        reach = near[order[-1]].copy()
        reach[order] = -np.inf
        order.append(int(reach.argmax()))
    return order


# A matrix over clients as a standalone SVG: who learns from whom, at the end and over time.


_SMALL = 6  # earlier rounds beside the last one; more would not be looked at
_INK = "#1f4e8c"


def matrix_svg(
    title: str, names: Sequence[str], rounds: Sequence[int], course: NDArray[Any]
) -> str:
    """Draw the last matrix [receiver, sender] large and earlier ones [record, ...] small above.

    Clients stand in the order of the last round's similarity, in every picture alike; darker is
    more, on one scale for all, which starts at zero.
    """
    order = similar_order(course[-1])
    named = [names[place] for place in order]
    drawn = course[:, order][:, :, order]
    top = max(float(drawn[np.isfinite(drawn)].max(initial=0.0)), 1e-12)
    side = max(6, min(18, 720 // max(len(named), 1)))
    left, head = 14 + 6 * max((len(name) for name in named), default=0), 40
    wide = len(named) * side
    small = _chosen(len(rounds))
    edge = max(60.0, (left + wide) / _SMALL - 6)  # a small picture is as wide as its caption
    tiny = edge / max(len(named), 1)
    strip = 0 if not small else edge + 34
    size = (
        max(left + wide + 70, 8 + len(small) * (edge + 6)),
        head + strip + wide + 20 + 6 * max(map(len, named), default=0),
    )
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size[0]:.0f} {size[1]:.0f}" '
        f'width="{size[0]:.0f}" height="{size[1]:.0f}" font-family="sans-serif" font-size="10">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="8" y="18" font-size="13">{escape(title)}</text>',
        f'<text x="8" y="32">rows learn from columns; round {rounds[-1]}; darkest {top:.3g}</text>',
    ]
    for number, place in enumerate(small):
        x = 8 + number * (edge + 6)
        lines.append(f'<text x="{x:.1f}" y="{head + 12}">round {rounds[place]}</text>')
        lines += _cells(drawn[place], x, head + 18, tiny, top, None)
    y = head + strip
    lines += _cells(drawn[-1], left, y, side, top, named)
    for place, name in enumerate(named):
        at = y + place * side + side / 2 + 3
        lines.append(f'<text x="{left - 6}" y="{at:.1f}" text-anchor="end">{escape(name)}</text>')
        x, down = left + place * side + side / 2 - 3, y + wide + 8
        lines.append(
            f'<text transform="translate({x:.1f} {down:.1f}) rotate(90)">{escape(name)}</text>'
        )
    lines += _scale(left + wide + 16, y, min(wide, 160), top)
    return "\n".join([*lines, "</svg>", ""])


def _chosen(records: int) -> list[int]:
    """Pick a few earlier records, evenly, the first among them."""
    earlier = max(records - 1, 0)
    return sorted({int(place) for place in np.linspace(0, earlier, _SMALL + 1)[:-1]} - {earlier})


def _cells(
    matrix: NDArray[Any], x: float, y: float, side: float, top: float, names: list[str] | None
) -> list[str]:
    count = len(matrix)
    edge = side * count
    lines = [
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{edge:.1f}" height="{edge:.1f}" fill="none" '
        'stroke="#bbb" stroke-width="0.5"/>'
    ]
    for row in range(count):
        for column in range(count):
            value = float(matrix[row, column])
            shade = min(max(value / top, 0.0), 1.0) if np.isfinite(value) else 0.0
            if round(shade, 3) == 0:
                continue
            title = ""
            if names is not None:
                title = (
                    f"<title>{escape(names[row])} from {escape(names[column])}: {value:.4f}</title>"
                )
            lines.append(
                f'<rect x="{x + column * side:.1f}" y="{y + row * side:.1f}" '
                f'width="{side:.1f}" height="{side:.1f}" fill="{_INK}" '
                f'fill-opacity="{shade:.3f}">{title}</rect>'
            )
    return lines


def _scale(x: float, y: float, height: float, top: float) -> list[str]:
    """Draw the shades beside their numbers."""
    steps = 8
    lines = []
    for step in range(steps):
        share = 1 - step / (steps - 1)
        at = y + step * height / steps
        lines.append(
            f'<rect x="{x:.1f}" y="{at:.1f}" width="10" height="{height / steps:.1f}" '
            f'fill="{_INK}" fill-opacity="{share:.3f}"/>'
        )
    lines.append(f'<text x="{x + 14:.1f}" y="{y + 9:.1f}">{top:.3g}</text>')
    lines.append(f'<text x="{x + 14:.1f}" y="{y + height:.1f}">0</text>')
    return lines
