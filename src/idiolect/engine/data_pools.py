"""Put the examples of all runs on the device once; clients are rows of these pools."""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch

from idiolect.core.client import Pool
from idiolect.core.task import Classes, Task
from idiolect.data.dataset import Dataset
from idiolect.data.federation import TrainData
from idiolect.engine.batch_plan import ClientRows
from idiolect.errors import DataError

_MEMBERS = 8192  # whose rows are kept at hand
_DECODED_BYTES = 1 << 30  # on a CPU decoding every batch costs more than holding floats


class LazyClients(Sequence[ClientRows]):
    """Clients' rows, made on access; recent ones are cached, as plans compare them by identity."""

    def __init__(
        self,
        make: Callable[[int], ClientRows],
        count: int,
        held: Callable[[], Mapping[str, np.ndarray]] | None = None,
    ) -> None:
        """`held` tells how many rows of each stream every client holds, without making any."""
        self._make = make
        self._count = count
        self.held = held
        self._made: dict[int, ClientRows] = {}

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, client: Any) -> Any:
        """Return a member by its number."""
        if not 0 <= client < self._count:
            raise IndexError(client)
        if client not in self._made:
            if len(self._made) >= _MEMBERS:
                self._made.clear()
            self._made[client] = self._make(client)
        return self._made[client]


class DataPools:
    """The pools of several runs, and each run's clients as members that point into them.

    Runs on the same examples share them, also where each run scales them in its own way (statistics
    of its own training rows); other examples are appended. A row of a member says both: the
    example, and whose scaling it is decoded with (see `Pool`).
    """

    def __init__(self, train_data: Sequence[TrainData], device: torch.device) -> None:
        self._device = device
        self._private = JoinedDatasets([one.dataset for one in train_data])
        self._public: JoinedDatasets | None = None
        self._tested: dict[tuple[int, int], tuple[Sequence[np.ndarray], Sequence[ClientRows]]] = {}
        if all(one.public is not None for one in train_data):
            self._public = JoinedDatasets([one.public for one in train_data if one.public])

    @cached_property
    def pools(self) -> dict[str, Pool]:
        """What clients train on, by stream; on the device from its first use."""
        private = self._private.whole().pool(self._device)
        public = {} if self._public is None else {"public": self.public().pool(self._device)}
        return {"train": private, "val": private, "labelled": private, **public}

    @property
    def test_pools(self) -> dict[str, Pool]:
        """What clients are scored on, by stream."""
        return dict.fromkeys(("test", "common", "marked"), self.pools["train"])

    def public(self) -> "StoredExamples":
        """Return the public examples of all runs, as they are stored."""
        if self._public is None:
            raise DataError("there are no public examples; set data.public")
        return self._public.whole()

    @property
    def has_public(self) -> bool:
        """Whether there are public examples."""
        return self._public is not None

    @property
    def stored(self) -> int:
        """How many private examples are stored; rows count up from there for each scaling."""
        return self._private.stored

    def excerpt(self, rows: np.ndarray) -> "StoredExamples":
        """Return some examples of the private pool, in ascending order, as they are stored."""
        return self._private.excerpt(rows)

    def examples(self, count: int = 2) -> torch.Tensor:
        """Return a few decoded examples, to try a network on."""
        pool = self.excerpt(np.arange(count)).pool(self._device)
        return pool.decode(pool.x)

    def members(self, run: int, seed: int, train_data: TrainData) -> Sequence[ClientRows]:
        """Return a run's clients with what they may train on."""
        offset = self._private.offsets[run]
        shared: dict[str, np.ndarray] = {}
        if self._public is not None and train_data.public is not None:
            shared["public"] = np.arange(len(train_data.public.y)) + self._public.offsets[run]

        def member(client: int) -> ClientRows:
            train, val = train_data.train[client] + offset, train_data.val[client] + offset
            both = np.concatenate([train, val])
            rows = {"train": train, "val": val, "labelled": both}
            return ClientRows(seed, client, {**rows, **shared})

        def held() -> dict[str, np.ndarray]:
            train, val = (
                np.fromiter(map(len, own), np.int64, len(own))
                for own in (train_data.train, train_data.val)
            )
            return {"train": train, "val": val, "labelled": train + val}

        return LazyClients(member, len(train_data.train), held)

    def test_members(
        self,
        run: int,
        seed: int,
        rows: Sequence[np.ndarray],
        extras: Mapping[str, Sequence[np.ndarray]] | None = None,
    ) -> Sequence[ClientRows]:
        """Return a run's clients with what they are scored on; the same members for the same rows.

        Plans recognise members by identity, and are then kept.
        """
        key = (run, id(rows))  # the rows are kept beside it, so that no others can take their id
        if key not in self._tested:
            offset, more = self._private.offsets[run], extras or {}
            # What is the same for all clients stays one array.
            moved = {id(own): own + offset for held in more.values() for own in held}

            def member(client: int) -> ClientRows:
                beside = {stream: moved[id(held[client])] for stream, held in more.items()}
                return ClientRows(seed, client, {"test": rows[client] + offset, **beside})

            members = LazyClients(member, len(rows))
            self._tested[key] = (rows, members)
        return self._tested[key][1]


class StoredExamples(NamedTuple):
    """Examples as they are stored, and how to decode them."""

    x: np.ndarray
    y: np.ndarray
    shift: np.ndarray  # [scaling, ...]
    scale: np.ndarray
    tasks: tuple[Task, ...] = (Classes(),)  # one for each scaling: they hold that of labels

    def labels(self) -> np.ndarray:
        """Return labels as losses take them; where tasks differ, those of each after the other."""
        return _of_each([task.encode(self.y) for task in self.tasks])

    def importance(self) -> np.ndarray | None:
        """Return how much each row counts in training; None where all count alike."""
        each = [task.importance(self.y) for task in self.tasks]
        if all(own is None for own in each):
            return None
        ones = np.ones(len(self.y), np.float32)
        return _of_each([ones if own is None else own for own in each])

    def pool(self, device: torch.device) -> Pool:
        """Put them on a device."""
        real = torch.get_default_dtype()
        pool = Pool(_tensor(self.x, device), _tensor(self.labels(), device))
        if (importance := self.importance()) is not None:
            pool = pool._replace(importance=_tensor(importance, device).to(real))
        if len(self.tasks) > 1:
            pool = pool._replace(several=True)
        kind = self.x.dtype
        if kind == np.uint8 or np.issubdtype(kind, np.floating):  # other whole numbers are tokens
            several = len(self.shift) > 1
            shift, scale = (
                torch.from_numpy(np.array(values if several else values[0])).to(device, real)
                for values in (self.shift, self.scale)
            )
            pool = pool._replace(shift=shift, inverse_scale=1 / scale, several=several)
            if device.type == "cpu" and self.x.size * 4 <= _DECODED_BYTES:
                if several:  # scaled when taken, but no longer turned from bytes into floats then
                    pool = pool._replace(x=pool.x.to(real))
                else:
                    pool = Pool(pool.decode(pool.x), pool.y, importance=pool.importance)
        return pool


class JoinedDatasets:
    """Distinct examples, concatenated; `offsets` are each run's first row.

    Where runs scale examples differently, the rows of the second scaling follow those of the first,
    and so on: row n is example n % stored, decoded by scaling n // stored.
    """

    def __init__(self, datasets: Sequence[Dataset]) -> None:
        self._distinct: list[Dataset] = []
        self._scalings: list[tuple[np.ndarray, np.ndarray]] = []
        self._tasks: list[Task] = []
        places = []
        for dataset in datasets:
            held = [_same_examples(dataset, known) for known in self._distinct]
            if not any(held):
                self._distinct.append(dataset)
            scaling = (dataset.shift, dataset.scale)
            if not dataset.decodes:  # tokens are not scaled, whatever is noted beside them
                scaling = (np.zeros(1, np.float32), np.ones(1, np.float32))
            alike = [
                _same(scaling, known) and dataset.task.same_units(task)
                for known, task in zip(self._scalings, self._tasks, strict=True)
            ]
            if not any(alike):
                self._scalings.append(scaling)
                self._tasks.append(dataset.task)
            places.append(([*held, True].index(True), [*alike, True].index(True)))
        self._starts = np.cumsum([0] + [len(dataset.y) for dataset in self._distinct])
        self.stored = int(self._starts[-1])
        self.offsets = [int(self._starts[x]) + scaling * self.stored for x, scaling in places]

    def whole(self) -> StoredExamples:
        """Return all examples."""
        first = self._distinct[0]
        if len(self._distinct) == 1:
            return StoredExamples(first.x, first.y, *self._stacked(), tuple(self._tasks))
        return self.excerpt(np.arange(self.stored))

    def excerpt(self, rows: np.ndarray) -> StoredExamples:
        """Return some examples, by numbers that ascend."""
        cuts = np.searchsorted(rows, self._starts)
        parts = [
            (dataset, rows[low:high] - start)
            for dataset, start, low, high in zip(
                self._distinct, self._starts, cuts, cuts[1:], strict=False
            )
        ]
        x = np.concatenate([np.asarray(dataset.x[own]) for dataset, own in parts])
        y = np.concatenate([dataset.y[own] for dataset, own in parts])
        return StoredExamples(x, y, *self._stacked(), tuple(self._tasks))

    def _stacked(self) -> tuple[np.ndarray, np.ndarray]:
        """Stack shifts and scales, in the shape that fits all of them."""
        if len(self._scalings) == 1:
            return self._scalings[0][0][None], self._scalings[0][1][None]
        rank = (1,) * (self._distinct[0].x.ndim - 1)  # an example's, for rows to stand before it
        shape = np.broadcast_shapes(rank, *(own.shape for one in self._scalings for own in one))
        shift, scale = (
            np.stack([np.broadcast_to(one[part], shape) for one in self._scalings])
            for part in range(2)
        )
        return shift, scale


def _of_each(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Lay the rows of each scaling after each other, unless they are all the same."""
    if all(own is arrays[0] or np.array_equal(own, arrays[0]) for own in arrays[1:]):
        return arrays[0]
    return np.concatenate(arrays)


def _same_examples(one: Dataset, other: Dataset) -> bool:
    """Say whether two datasets are the very same arrays, however they are scaled."""
    return one is other or (one.x is other.x and one.y is other.y)


def _same(left: Sequence[np.ndarray], right: Sequence[np.ndarray]) -> bool:
    return all(
        one.shape == other.shape and bool(np.array_equal(one, other))
        for one, other in zip(left, right, strict=True)
    )


def _tensor(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Copy an array (a read-only memory map too) to the device."""
    return torch.from_numpy(np.array(array)).to(device)
