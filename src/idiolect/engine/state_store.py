"""Personal state of many clients: in memory, or on disk where it would weigh on every round.

On disk only clients that took part take up room. The file is an array of records, one for the state
of one client. No record is overwritten that may still be needed: a client's new state goes to a
free record, and who has which record is a table of numbers (`slots`), which is all that a
checkpoint holds of it. So the last whole round can be saved after an interrupt, a checkpoint
survives whatever is written after it, and a killed run resumes with the exact states of that round.
"""

import mmap
import os
import shutil
import tempfile
import threading
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from idiolect.core import tree
from idiolect.core.tree import Tree
from idiolect.engine.backend import Backend
from idiolect.errors import CheckpointError, IdiolectError


class MemoryStore:
    """Rows of personal state on the device, one for each client of an architecture."""

    def __init__(self, starts: Sequence[tuple[Tree, int]], device: torch.device) -> None:
        """Fill `count` rows from each starting state in turn."""
        self.starts = [start for start, _ in starts]
        self.rows = tree.concat([tree.repeat(tree.to(start, device), n) for start, n in starts])

    @property
    def example(self) -> Tree:
        """One client's state, for its form."""
        return tree.map(lambda leaf: leaf[0], self.rows)

    def take(self, rows: Tensor) -> Tree:
        """Gather the personal state of some clients."""
        return tree.take(self.rows, rows)

    def put(self, rows: Tensor, values: Tree) -> None:
        """Replace the personal state of some clients; everyone else's is untouched."""
        self.rows = tree.put(self.rows, rows, values)

    def flush(self) -> None:
        """Do nothing: a checkpoint holds all of it."""


CACHE = 1 << 28  # bytes of records kept in memory
_ALIGN = 64
_LEAST = 64  # records a file begins with


class LeafRange(NamedTuple):
    """The bytes of one leaf in a client's record."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int
    size: int  # bytes


class RecordLayout:
    """How a client's state is stored as bytes."""

    def __init__(self, example: Tree) -> None:
        self.template = example
        self.leaves: list[LeafRange] = []
        end = 0
        for leaf in tree.leaves(example):
            size = leaf.numel() * leaf.element_size()
            self.leaves.append(LeafRange(tuple(leaf.shape), leaf.dtype, end, size))
            end = -(-(end + size) // _ALIGN) * _ALIGN
        self.record = max(end, _ALIGN)

    def pack(self, values: Tree) -> np.ndarray:
        """Turn states stacked on axis 0 into records."""
        leaves = tree.leaves(values)
        records = np.zeros((len(leaves[0]), self.record), np.uint8)
        for place, leaf in zip(self.leaves, leaves, strict=True):
            flat = leaf.detach().to("cpu").contiguous().reshape(len(leaf), -1)
            records[:, place.start : place.start + place.size] = flat.view(torch.uint8).numpy()
        return records

    def unpack(self, records: np.ndarray) -> Tree:
        """Turn records into states stacked on axis 0."""
        made = []
        for place in self.leaves:
            part = np.ascontiguousarray(records[:, place.start : place.start + place.size])
            flat = torch.from_numpy(part).view(place.dtype)
            made.append(flat.reshape(len(records), *place.shape))
        return tree.like(self.template, dict(zip(tree.named(self.template), made, strict=True)))


class DiskStore:
    """Rows of personal state in a file, one for each client; see `MemoryStore`."""

    def __init__(
        self,
        starts: Sequence[tuple[Tree, int]],
        device: torch.device,
        path: Path | None = None,
        cache: int = CACHE,
    ) -> None:
        """Make `count` rows from each starting state in turn; without a path in a temporary file.

        The file is made, or opened where a checkpoint refers to it, when it is first needed.
        """
        self.starts = [start for start, _ in starts]
        self.layout = RecordLayout(starts[0][0])
        self._starts = self.layout.pack(tree.stack(self.starts))
        self._first = np.repeat(np.arange(len(starts)), [count for _, count in starts])
        self._device = device
        self._path = path
        self._file: _Records | None = None
        self._slots = torch.from_numpy(self._first.astype(np.int64))
        self._issued: list[weakref.ref[Tensor]] = []  # tables that may still be in use
        self._cache: OrderedDict[int, np.ndarray] = OrderedDict()
        self._room = max(1, cache // self.layout.record)
        self._lock, self._opening = threading.Lock(), threading.Lock()
        self._reader = ThreadPoolExecutor(1)
        self._coming: Future[None] | None = None

    @property
    def rows(self) -> Tree:
        """The table of records and the key of their file, for a checkpoint."""
        if not any(known() is self._slots for known in self._issued):
            self._issued.append(weakref.ref(self._slots))
        # Before the first round there is no file, or one that a checkpoint is about to name.
        key = torch.zeros((), dtype=torch.int64) if self._file is None else self._file.key
        return {"slots": self._slots, "key": key}

    @rows.setter
    def rows(self, kept: Tree) -> None:
        key = int(kept["key"])
        if key and (self._file is None or int(self._file.key) != key):
            self._adopt(key)
        self._slots = kept["slots"].to("cpu")

    @property
    def example(self) -> Tree:
        """One client's state, for its form."""
        return self.layout.template

    def take(self, rows: Tensor) -> Tree:
        """Gather the personal state of some clients."""
        return tree.to(self.layout.unpack(self._records(self._of(rows))), self._device)

    def put(self, rows: Tensor, values: Tree) -> None:
        """Replace the personal state of some clients; records of tables in use stay."""
        records = self.layout.pack(values)
        file = self._opened()
        fresh = self._free(len(records))
        file.write(fresh, records)
        with self._lock:
            for slot, record in zip(fresh.tolist(), records, strict=True):
                self._cache_record(slot, record)
        slots = self._slots.clone()
        slots[rows.to("cpu")] = torch.from_numpy(fresh)
        self._slots = slots

    def fetch(self, rows: Tensor) -> None:
        """Read the state of clients that are needed next, on another thread."""
        slots = self._of(rows)
        with self._lock:
            missing = [slot for slot in np.unique(slots).tolist() if slot not in self._cache]
        if missing and (self._coming is None or self._coming.done()):
            wanted = np.array(missing[: self._room])
            self._coming = self._reader.submit(self._load, self._opened(), wanted)

    def flush(self) -> None:
        """Write everything to disk, before a checkpoint that refers to it."""
        if self._file is not None:
            self._file.flush()

    def _of(self, rows: Tensor) -> np.ndarray:
        slots: np.ndarray = self._slots[rows.to("cpu")].numpy()
        return slots

    def _records(self, slots: np.ndarray) -> np.ndarray:
        """Read records, from memory where they are cached."""
        found = np.empty((len(slots), self.layout.record), np.uint8)
        missing = []
        with self._lock:
            for place, slot in enumerate(slots.tolist()):
                record = self._cache.get(slot)
                if record is None:
                    missing.append(place)
                else:
                    self._cache.move_to_end(slot)
                    found[place] = record
        if missing:
            found[missing] = self._opened().read(slots[missing])
            with self._lock:
                for place in missing:
                    self._cache_record(int(slots[place]), found[place].copy())
        return found

    def _load(self, file: "_Records", slots: np.ndarray) -> None:
        records = file.read(slots)
        with self._lock:
            for slot, record in zip(slots.tolist(), records, strict=True):
                if slot not in self._cache:  # it may have been written anew meanwhile
                    self._cache_record(slot, record)

    def _cache_record(self, slot: int, record: np.ndarray) -> None:
        """Cache a record, dropping the least recently used ones."""
        self._cache[slot] = record
        self._cache.move_to_end(slot)
        while len(self._cache) > self._room:
            self._cache.popitem(last=False)

    def _free(self, count: int) -> np.ndarray:
        """Find records that no table in use refers to; the file grows where there are none."""
        if self._coming is not None:
            self._coming.result()  # or it might cache a record that is about to change
        self._issued = [known for known in self._issued if known() is not None]
        file = self._opened()
        used = np.zeros(file.capacity, bool)
        used[: len(self._starts)] = True
        for table in [self._slots, *(known() for known in self._issued)]:
            if table is not None:
                used[table.numpy()] = True
        free = np.flatnonzero(~used)
        if len(free) < count:
            free = np.concatenate([free, np.arange(file.capacity, file.grow(count - len(free)))])
        return free[:count]

    def _opened(self) -> "_Records":
        with self._opening:
            if self._file is None:
                self._file = _Records(self._path, self.layout.record, _LEAST + len(self._starts))
                self._file.write(np.arange(len(self._starts)), self._starts)
            return self._file

    def _adopt(self, key: int) -> None:
        """Open the file that a checkpoint refers to: its own, or a copy of another method's."""
        own = self._path
        if own is not None and own.is_file() and _key_of(own) == key:
            self._file = _Records.reopened(own, self.layout.record)
            return
        if own is not None:
            for other in own.parent.parent.glob(f"*/{own.name}"):
                if _key_of(other) == key:
                    own.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(other, own)
                    self._file = _Records.reopened(own, self.layout.record)
                    return
        raise CheckpointError(
            f"the personal state that the checkpoint speaks of is not in {own or 'memory'} any "
            "more; put the file back, or start the method again without --resume"
        )


class _Records:
    """A file of records of one size, mapped into memory; the first one holds its key."""

    def __init__(self, path: Path | None, record: int, capacity: int, *, new: bool = True) -> None:
        self._record = record
        try:
            self._handle = _opened(path, new)
            weakref.finalize(self, os.close, self._handle)
            if new:
                os.ftruncate(self._handle, (capacity + 1) * record)
            self.capacity = os.fstat(self._handle).st_size // record - 1
            self._map()
            if new:
                head = np.frombuffer(os.urandom(8), np.uint8).copy()
                head[-1] &= 0x7F  # a positive number
                self._array[0, :8] = head
        except OSError as error:
            raise IdiolectError(
                f"cannot keep personal state in {path or tempfile.gettempdir()}: "
                f"{error.strerror or error}; free some space, or choose another --out"
            ) from error
        self.key = torch.from_numpy(self._array[0, :8].copy().view(np.int64))[0]

    @classmethod
    def reopened(cls, path: Path, record: int) -> "_Records":
        """Open a file as it was left."""
        return cls(path, record, 0, new=False)

    def _map(self) -> None:
        self._pages = mmap.mmap(self._handle, (self.capacity + 1) * self._record)
        self._array = np.frombuffer(self._pages, np.uint8).reshape(-1, self._record)

    def read(self, slots: np.ndarray) -> np.ndarray:
        """Copy records out."""
        records: np.ndarray = self._array[slots + 1]
        self._release()
        return records

    def write(self, slots: np.ndarray, records: np.ndarray) -> None:
        """Copy records in."""
        self._array[slots + 1] = records
        self._release()

    def grow(self, least: int) -> int:
        """Make room for at least so many more records; return the new capacity."""
        capacity = self.capacity + max(least, self.capacity // 2)
        try:
            os.ftruncate(self._handle, (capacity + 1) * self._record)
        except OSError as error:
            raise IdiolectError(
                f"no room for the personal state of more clients: {error.strerror}; free some "
                "space, then go on with --resume"
            ) from error
        self.capacity = capacity
        self._map()
        return capacity

    def flush(self) -> None:
        """Wait until everything is on disk."""
        self._pages.flush()
        os.fsync(self._handle)

    def _release(self) -> None:
        """Release these pages from the process's memory: they are copied.

        The system may keep them in its file cache, which it drops when memory is short.
        """
        if hasattr(mmap, "MADV_DONTNEED"):
            self._pages.madvise(mmap.MADV_DONTNEED)


def _opened(path: Path | None, new: bool) -> int:
    if path is None:
        handle, name = tempfile.mkstemp(prefix="idiolect-")
        os.unlink(name)  # so that it is gone with the process, whatever ends that
        return handle
    path.parent.mkdir(parents=True, exist_ok=True)
    return os.open(path, os.O_RDWR | (os.O_CREAT | os.O_TRUNC if new else 0), 0o600)


def _key_of(path: Path) -> int:
    with path.open("rb") as file:
        return int(np.frombuffer(file.read(8).ljust(8, b"\0"), np.int64)[0])


_LIGHT, _HEAVY = 1 << 26, 1 << 32  # bytes of personal state that memory takes

Starts = Sequence[tuple[Tree, int]]
"""For each run: the initial personal state, and of how many clients."""


def belongs_on_disk(starts: Starts, backend: Backend, cohort: int | None, clients: int) -> bool:
    """Say whether personal state goes to disk: as set, or by its size.

    In memory a round copies everyone's: little where most take part or clients are few, and too
    much where a small cohort is drawn from very many.
    """
    weight = sum(tree.nbytes(start) * count for start, count in starts)
    if backend.personal != "auto" or not weight:
        return backend.personal == "disk" and weight > 0
    if backend.place.type == "cuda":
        return weight > torch.cuda.get_device_properties(backend.place).total_memory // 4
    few = cohort is not None and 4 * cohort <= clients
    return weight > (_LIGHT if few else _HEAVY)


def make_store(
    starts: Starts,
    backend: Backend,
    cohort: int | None,
    clients: int,
    path: Path | None = None,
    disk: bool | None = None,
) -> MemoryStore | DiskStore:
    """Make a store of personal state: on `disk` or not as set, or by its size."""
    if belongs_on_disk(starts, backend, cohort, clients) if disk is None else disk:
        return DiskStore(starts, backend.place, path, backend.personal_mb << 20)
    return MemoryStore(starts, backend.place)
