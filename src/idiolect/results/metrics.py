"""`metrics.parquet`: every score of every client, one row each."""

import io
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from idiolect.checkpoint import write_whole
from idiolect.results.outcome import Outcome

FILE = "metrics.parquet"


def write(folder: Path, outcomes: Sequence[Outcome]) -> None:
    """Write all curves and final scores, one row for each."""
    import pyarrow as pa
    from pyarrow import parquet

    parts = [part for outcome in outcomes for part in _parts(outcome)]
    names = ("seed", "method", "round", "client", "model", "metric", "value", "split")
    columns = [[value for part in parts for value in part[place]] for place in range(len(names))]
    word = pa.dictionary(pa.int32(), pa.string())
    kinds = (pa.int64(), word, pa.int32(), pa.string(), word, word, pa.float64(), word)
    table = pa.table(
        {n: pa.array(c, kind) for n, c, kind in zip(names, columns, kinds, strict=True)}
    )
    buffer = io.BytesIO()
    parquet.write_table(table, buffer, compression="zstd")
    write_whole(folder / FILE, buffer.getvalue())


def _parts(outcome: Outcome) -> Iterator[tuple[Sequence[object], ...]]:
    """Give columns for one seed, round and score at a time, in a fixed order."""
    for place, members in enumerate(outcome.members):
        for point, round in enumerate(outcome.evaluated):
            for key in sorted(outcome.curves):
                split, model, metric = key.split("/")
                values = outcome.curves[key][point, place]
                yield _columns(
                    outcome.label, members.names, members.seed, round, model, metric, values, split
                )
        for key in sorted(outcome.final):
            model, metric = key.split("/")
            values = outcome.final[key][place]
            yield _columns(
                outcome.label,
                members.names,
                members.seed,
                outcome.rounds,
                model,
                metric.removeprefix("val_"),
                values,
                "val" if metric.startswith("val_") else "test",
            )


def _columns(
    label: str,
    names: Sequence[str],
    seed: int,
    round: int,
    model: str,
    metric: str,
    values: np.ndarray,
    split: str,
) -> tuple[Sequence[object], ...]:
    n = len(names)
    scores = np.asarray(values, np.float64).tolist()
    return (
        [seed] * n,
        [label] * n,
        [round] * n,
        names,
        [model] * n,
        [metric] * n,
        scores,
        [split] * n,
    )
