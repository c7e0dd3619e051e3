"""Put the examples of all runs on the device once; clients are rows of these pools."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from idiolect.data.dataset import Dataset
from idiolect.data.federation import Lessons
from idiolect.errors import DataError
from idiolect.local import Pool
from idiolect.simulate.plans import Member

_MEMBERS = 8192  # whose rows are kept at hand
_DECODED_BYTES = 1 << 30  # on a CPU decoding every batch costs more than holding floats


class Roll(Sequence[Member]):
    """Members made when they are called; the last ones stay the same, for books know them again."""

    def __init__(self, make: Callable[[int], Member], count: int) -> None:
        self._make = make
        self._count = count
        self._made: dict[int, Member] = {}

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


class Library:
    """The pools of several runs, and each run's clients as members that point into them.

    Runs on the same dataset share its examples; other datasets are laid behind them.
    """

    def __init__(self, lessons: Sequence[Lessons], device: torch.device) -> None:
        private, self._offsets = _joined([one.dataset for one in lessons], device)
        self.pools = {"train": private, "val": private}
        self.exam_pools = dict.fromkeys(("exam", "common", "marked"), private)
        self._public: list[int] | None = None
        self._examined: dict[tuple[int, int], tuple[Sequence[np.ndarray], Sequence[Member]]] = {}
        if all(one.public is not None for one in lessons):
            public, self._public = _joined([one.public for one in lessons if one.public], device)
            self.pools["public"] = public

    def examples(self, count: int = 2) -> torch.Tensor:
        """Return a few decoded examples, to try a network on."""
        pool = self.pools["train"]
        return pool.decode(pool.x[:count])

    def members(self, run: int, seed: int, lessons: Lessons) -> Sequence[Member]:
        """Return a run's clients with what they may learn from."""
        offset = self._offsets[run]
        shared: dict[str, np.ndarray] = {}
        if self._public is not None and lessons.public is not None:
            shared["public"] = np.arange(len(lessons.public.y)) + self._public[run]

        def member(client: int) -> Member:
            train, val = lessons.train[client] + offset, lessons.val[client] + offset
            return Member(seed, client, {"train": train, "val": val, **shared})

        return Roll(member, len(lessons.train))

    def examined(
        self,
        run: int,
        seed: int,
        rows: Sequence[np.ndarray],
        extras: Mapping[str, Sequence[np.ndarray]] | None = None,
    ) -> Sequence[Member]:
        """Return a run's clients with what they are scored on; the same members for the same rows.

        Books know members again by identity, and then keep their plans.
        """
        key = (run, id(rows))  # the rows are kept beside it, so that no others can take their id
        if key not in self._examined:
            offset, more = self._offsets[run], extras or {}
            # What is the same for all clients stays one array.
            moved = {id(own): own + offset for held in more.values() for own in held}

            def member(client: int) -> Member:
                beside = {stream: moved[id(held[client])] for stream, held in more.items()}
                return Member(seed, client, {"exam": rows[client] + offset, **beside})

            members = Roll(member, len(rows))
            self._examined[key] = (rows, members)
        return self._examined[key][1]


def _joined(datasets: Sequence[Dataset], device: torch.device) -> tuple[Pool, list[int]]:
    """Lay distinct datasets one behind the other; return the pool and each run's first row."""
    distinct: list[Dataset] = []
    for dataset in datasets:
        if not any(dataset is known for known in distinct):
            distinct.append(dataset)
    first = distinct[0]
    for other in distinct[1:]:
        if not (_same(first.shift, other.shift) and _same(first.scale, other.scale)):
            raise DataError(
                f"{first.name} and {other.name} are scaled differently, so their runs cannot be "
                "trained together; run the seeds one by one"
            )
    starts = np.cumsum([0] + [len(dataset.y) for dataset in distinct])
    place = {id(dataset): int(start) for dataset, start in zip(distinct, starts, strict=False)}
    x = first.x if len(distinct) == 1 else np.concatenate([dataset.x for dataset in distinct])
    y = first.y if len(distinct) == 1 else np.concatenate([dataset.y for dataset in distinct])
    pool = Pool(_tensor(x, device), _tensor(y, device))
    if x.dtype == np.uint8 or np.issubdtype(x.dtype, np.floating):  # other whole numbers are tokens
        kind = torch.get_default_dtype()
        shift = torch.from_numpy(np.array(first.shift)).to(device, kind)
        inverse_scale = 1 / torch.from_numpy(np.array(first.scale)).to(device, kind)
        pool = pool._replace(shift=shift, inverse_scale=inverse_scale)
        if device.type == "cpu" and x.size * 4 <= _DECODED_BYTES:
            pool = Pool(pool.decode(pool.x), pool.y)
    return pool, [place[id(dataset)] for dataset in datasets]


def _same(left: np.ndarray, right: np.ndarray) -> bool:
    return left.shape == right.shape and bool(np.array_equal(left, right))


def _tensor(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Copy an array (a read-only memory map too) to the device."""
    return torch.from_numpy(np.array(array)).to(device)
