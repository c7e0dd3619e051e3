"""How long a large table takes from file to features: reading, typing, fitting and encoding.

    python benchmarks/tables.py [ROWS] [FOLDER]

Twenty mixed columns (eight numbers, two of them with gaps; four whole numbers, five categories of 3
to 2,000 names, two dates, a boolean), a label and a client, as CSV and as Parquet.
"""

import os
import resource
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
from pyarrow import csv, parquet

from idiolect.data import federate, read


def made(rows: int) -> pa.Table:
    """Draw the columns."""
    rng = np.random.default_rng(0)
    columns: dict[str, object] = {}
    for place in range(8):
        values = rng.normal(50, 10, rows).round(4)
        columns[f"number{place}"] = pa.array(values, mask=rng.random(rows) < 0.3 * (place < 2))
    for place in range(4):
        columns[f"whole{place}"] = rng.integers(0, 10 ** (place + 1), rows)
    for place, size in enumerate((3, 10, 40, 200, 2000)):
        names = np.array([f"name, {n} of {size}" for n in range(size)])
        columns[f"category{place}"] = pa.array(
            names[rng.integers(0, size, rows)], mask=rng.random(rows) < 0.1
        )
    for place in range(2):
        days = rng.integers(15_000, 19_000, rows).astype("datetime64[D]")
        columns[f"date{place}"] = days
    columns["smokes"] = rng.random(rows) < 0.2
    columns["label"] = np.where(rng.random(rows) < 0.02, "yes", "no")
    columns["client"] = np.array([f"site {n}" for n in range(12)])[rng.integers(0, 12, rows)]
    return pa.table(columns)


def main() -> None:
    """Write the table in both forms, and time what a run does before its first round."""
    rows = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    with tempfile.TemporaryDirectory(dir=sys.argv[2] if len(sys.argv) > 2 else None) as folder:
        table = made(rows)
        csv.write_csv(table, Path(folder) / "table.csv")
        parquet.write_table(table, Path(folder) / "table.parquet")
        del table
        for name in ("table.csv", "table.parquet"):
            path = Path(folder) / name
            start = time.perf_counter()
            data = read(path)
            typed = time.perf_counter()
            held = federate(data, "natural", stratify=True)
            done = time.perf_counter()
            print(
                f"{name}: {path.stat().st_size / 1e6:.0f} MB, {rows:,} rows, "
                f"{len(data.table.columns) if data.table else 0} columns -> "
                f"{held.dataset.x.shape[1]} features; read and typed in {typed - start:.1f} s, "
                f"divided, fitted and encoded in {done - typed:.1f} s, {done - start:.1f} s in all"
            )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"{os.cpu_count()} cores, at most {peak:.1f} GB")


if __name__ == "__main__":
    main()
