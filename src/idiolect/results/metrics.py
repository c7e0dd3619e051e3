"""`metrics.parquet`: every score of every client, one row each."""

import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from idiolect.core.checkpoint import write_whole
from idiolect.engine.outcome import RIGHT, Outcome

FILE = "metrics.parquet"


class _Part(NamedTuple):
    """One score of many clients."""

    seed: int
    method: str
    round: int
    clients: Sequence[str]
    model: str
    metric: str
    values: NDArray[Any]  # [client]
    split: str


def write(folder: Path, outcomes: Sequence[Outcome]) -> None:
    """Write all curves and final scores, one row for each client that was scored."""
    import pyarrow as pa
    from pyarrow import parquet

    word = pa.dictionary(pa.int32(), pa.string())
    kinds: tuple[Any, ...] = (
        pa.int64(),
        word,
        pa.int32(),
        pa.string(),
        word,
        word,
        pa.float64(),
        word,
    )
    names = ("seed", "method", "round", "client", "model", "metric", "value", "split")
    tables = [
        pa.table(dict(zip(names, _columns(part, kinds), strict=True)))
        for outcome in outcomes
        for part in _parts(outcome)
    ]
    schema = pa.schema(list(zip(names, kinds, strict=True)))
    # Words are the same few in all tables, but each table has numbered them for itself.
    table = pa.concat_tables(tables or [schema.empty_table()]).unify_dictionaries()
    buffer = io.BytesIO()
    parquet.write_table(table, buffer, compression="zstd")
    write_whole(folder / FILE, buffer.getvalue())


def _columns(part: _Part, kinds: Sequence[Any]) -> list[Any]:
    """Lay out a part without a Python object for each of its rows."""
    import pyarrow as pa

    rows = len(part.clients)

    def repeated(value: str) -> Any:
        return pa.DictionaryArray.from_arrays(np.zeros(rows, np.int32), pa.array([value]))

    return [
        pa.array(np.full(rows, part.seed), kinds[0]),
        repeated(part.method),
        pa.array(np.full(rows, part.round, np.int32), kinds[2]),
        pa.array(part.clients, kinds[3]),
        repeated(part.model),
        repeated(part.metric),
        pa.array(np.asarray(part.values, np.float64), kinds[6]),
        repeated(part.split),
    ]


def _parts(outcome: Outcome) -> Iterator[_Part]:
    """Give one seed, round and score at a time, in a fixed order."""
    for place, members in enumerate(outcome.members):
        watched: Sequence[str] = members.names
        if outcome.watched:
            watched = [members.names[client] for client in outcome.watched[place]]
        for point, round in enumerate(outcome.evaluated):
            for key in sorted(outcome.curves):
                split, model, metric = key.split("/")
                values = outcome.curves[key][point, place]
                yield _Part(
                    members.seed, outcome.label, round, watched, model, metric, values, split
                )
        scored: Sequence[str] = members.names
        if outcome.scored:
            scored = [members.names[client] for client in outcome.scored[place]]
        for key in sorted(outcome.final):
            model, metric = key.split("/")
            values = outcome.final[key][place]
            if metric == RIGHT:
                continue
            if outcome.scored:
                values = values[outcome.scored[place]]
            split = "val" if metric.startswith("val_") else "test"
            metric = metric.removeprefix("val_")
            yield _Part(
                members.seed, outcome.label, outcome.rounds, scored, model, metric, values, split
            )
