"""Personal state on disk: our file of records beside LMDB.

    pip install lmdb && python benchmarks/state_on_disk.py

1,000 clients with 80,000 float32 parameters each (320 MB); cohorts of 50 drawn at random are read
and written back. Both end as a tree on the CPU. Prints the median seconds of a cohort.
"""

import statistics
import tempfile
import time
from pathlib import Path

import lmdb
import numpy as np
import torch

from idiolect.engine.state_store import DiskStore, RecordLayout

CLIENTS, PARAMETERS, COHORT, ROUNDS = 1000, 80_000, 50, 40
START = {"weight": torch.zeros(PARAMETERS)}


class Ours:
    def __init__(self, folder: Path, cache: int) -> None:
        self._store = DiskStore([(START, CLIENTS)], torch.device("cpu"), folder / "state", cache)
        self.read, self.write, self.flush = self._store.take, self._store.put, self._store.flush


class Lmdb:
    def __init__(self, folder: Path, sync: bool) -> None:
        self._layout = RecordLayout(START)
        self._file = lmdb.open(str(folder / "lmdb"), map_size=1 << 32, sync=sync)

    def read(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        with self._file.begin(buffers=True) as transaction:
            held = [np.frombuffer(transaction.get(b"%d" % row), np.uint8) for row in rows.tolist()]
            return self._layout.unpack(np.stack(held))

    def write(self, rows: torch.Tensor, values: dict[str, torch.Tensor]) -> None:
        records = self._layout.pack(values)
        with self._file.begin(write=True) as transaction:
            for row, record in zip(rows.tolist(), records, strict=True):
                transaction.put(b"%d" % row, record.tobytes())

    def flush(self) -> None:
        self._file.sync(True)


def measure(name: str, store: Ours | Lmdb) -> None:
    draw = np.random.default_rng(0)
    for start in range(0, CLIENTS, COHORT):
        rows = torch.arange(start, start + COHORT)
        store.write(rows, {"weight": rows[:, None].float().expand(COHORT, PARAMETERS)})
    reads, writes, flushes = [], [], []
    for _ in range(ROUNDS):
        rows = torch.from_numpy(draw.choice(CLIENTS, COHORT, replace=False))
        began = time.perf_counter()
        held = store.read(rows)
        reads.append(time.perf_counter() - began)
        assert torch.equal(held["weight"][:, 7].long() % CLIENTS, rows)
        changed = {"weight": held["weight"] + CLIENTS}
        began = time.perf_counter()
        store.write(rows, changed)
        writes.append(time.perf_counter() - began)
        began = time.perf_counter()
        store.flush()
        flushes.append(time.perf_counter() - began)
    read, write, flush = (1e3 * statistics.median(times) for times in (reads, writes, flushes))
    print(f"{name:28} read {read:6.1f} ms  write {write:6.1f} ms  flush {flush:6.1f} ms")


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name, make in {
        "ours, 256 MB of cache": lambda folder: Ours(folder, 1 << 28),
        "ours, no cache": lambda folder: Ours(folder, 0),
        "lmdb, sync each commit": lambda folder: Lmdb(folder, True),
        "lmdb, sync on flush": lambda folder: Lmdb(folder, False),
    }.items():
        with tempfile.TemporaryDirectory() as folder:
            measure(name, make(Path(folder)))
