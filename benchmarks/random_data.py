"""Random images of the right shape for benchmarks: what is timed does not depend on pixels."""

import numpy as np

from idiolect.data import Dataset, Federation

CLASSES = 10


def federation(sizes: list[int], shape: tuple[int, ...], held_out: int = 0) -> Federation:
    """Give each client so many training examples, and as many for validation and test as asked."""
    draw = np.random.default_rng(0)
    rows = sum(sizes) + 2 * held_out * len(sizes)
    dataset = Dataset(
        "random",
        draw.integers(0, 256, (rows, *shape), dtype=np.uint8),
        draw.integers(0, CLASSES, rows),
        tuple(map(str, range(CLASSES))),
        np.full(1, 127.5, np.float32),
        np.full(1, 127.5, np.float32),
    )
    parts = np.split(np.arange(rows), np.cumsum([size + 2 * held_out for size in sizes])[:-1])
    return Federation(
        dataset,
        tuple(part[: len(part) - 2 * held_out] for part in parts),
        tuple(part[len(part) - 2 * held_out : len(part) - held_out] for part in parts),
        tuple(part[len(part) - held_out :] for part in parts),
    )
