"""What a server's state said round by round: one file a method, `traces/LABEL.safetensors`.

A method chooses what is worth recording (`Method.trace`): KT-pFL its matrix of who learns from
whom, say. The file holds only the rounds asked for by `evaluate.trace`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from idiolect.core import checkpoint
from idiolect.errors import DataError
from idiolect.results.models import folder_name

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


def joined(traces: Sequence[Trace], seeds: Sequence[int]) -> Trace | None:
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


def path_of(folder: Path, label: str) -> Path:
    """Say where a method's trace stands."""
    return folder / FOLDER / f"{folder_name(label)}.safetensors"


def write(folder: Path, trace: Trace) -> None:
    """Write a trace, whole."""
    kept = {name: torch.from_numpy(np.ascontiguousarray(own)) for name, own in trace.values.items()}
    meta = {
        "label": trace.label,
        "rounds": list(trace.rounds),
        "seeds": list(trace.seeds),
        "clients": list(trace.clients),
    }
    checkpoint.save(path_of(folder, trace.label), kept, meta)


def read(run_dir: str | Path, label: str) -> Trace:
    """Read what a method of a run recorded."""
    path = path_of(Path(run_dir), label)
    if not path.is_file():
        there = labels(run_dir)
        told = f"it holds those of {', '.join(there)}" if there else "no method in it records any"
        raise DataError(f"{run_dir} holds no trace of {label!r}; {told}")
    return _opened(path)


def labels(run_dir: str | Path) -> list[str]:
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
