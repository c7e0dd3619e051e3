"""Random images of the right shape: what is timed does not depend on pixels."""

from collections.abc import Sequence

import numpy as np

from idiolect.data import Dataset, Federation

CLASSES = 10
CIFAR, MNIST = (3, 32, 32), (1, 28, 28)


def dataset(rows: int, shape: tuple[int, ...], labels: np.ndarray | None = None) -> Dataset:
    """Draw so many images, with labels at random or as given."""
    draw = np.random.default_rng(0)
    return Dataset(
        "random",
        draw.integers(0, 256, (rows, *shape), dtype=np.uint8),
        draw.integers(0, CLASSES, rows) if labels is None else labels,
        tuple(map(str, range(CLASSES))),
        np.full(1, 127.5, np.float32),
        np.full(1, 127.5, np.float32),
    )


def federation(sizes: Sequence[int], shape: tuple[int, ...], held_out: int = 0) -> Federation:
    """Give each client so many training examples, and as many for validation and test as asked."""
    rows = sum(sizes) + 2 * held_out * len(sizes)
    parts = np.split(np.arange(rows), np.cumsum([size + 2 * held_out for size in sizes])[:-1])
    return Federation(
        dataset(rows, shape),
        tuple(part[: len(part) - 2 * held_out] for part in parts),
        tuple(part[len(part) - 2 * held_out : len(part) - held_out] for part in parts),
        tuple(part[len(part) - held_out :] for part in parts),
    )


def like_cifar10(shape: tuple[int, ...] = CIFAR) -> Dataset:
    """Draw as many images of each class as CIFAR-10 has in its two files.

    The partitions of the papers look at labels alone, so clients are as large as the real ones.
    """
    labels = np.concatenate(
        [np.repeat(np.arange(CLASSES), 5000), np.repeat(np.arange(CLASSES), 1000)]
    )
    drawn = dataset(len(labels), shape, labels)
    origin = (np.arange(len(labels)) >= 50_000).astype(np.int64)
    return Dataset(
        "random, as large as cifar10", drawn.x, drawn.y, drawn.classes, drawn.shift, drawn.scale,
        origin=origin,
    )  # fmt: skip
