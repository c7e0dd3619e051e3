"""The array types and the seed type that the data package speaks of."""

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Rows: TypeAlias = NDArray[np.int64]
Floats: TypeAlias = NDArray[np.float32]
AnyArray: TypeAlias = NDArray[Any]

# A seed may be a tuple, so that a stage can extend it: (seed, stage, client).
Seed: TypeAlias = int | tuple[int, ...]


def extended(seed: Seed, *more: int) -> tuple[int, ...]:
    """Derive the seed of a stage below this one."""
    return (*seed, *more) if isinstance(seed, tuple) else (seed, *more)


def random_numbers(seed: Seed, *more: int) -> np.random.Generator:
    """Make a generator that depends on the seed and on nothing else."""
    return np.random.default_rng(extended(seed, *more))
