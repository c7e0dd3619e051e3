"""Generators made many at once draw what NumPy's own do."""

import numpy as np
import pytest

from idiolect.engine import rng


@pytest.mark.parametrize("words", [1, 3, 4, 5, 7])
def test_many_generators_are_numpys_own(words):
    keys = [
        tuple(int(n) for n in key)
        for key in np.random.default_rng(words).integers(0, 1 << 32, (40, words))
    ]
    keys += [(0,) * words, ((1 << 32) - 1,) * words]
    for key, ours in zip(keys, rng.generators(keys), strict=True):
        theirs = np.random.default_rng(key)
        assert ours.permutation(7).tolist() == theirs.permutation(7).tolist()
        assert ours.integers(0, 1 << 60, 3).tolist() == theirs.integers(0, 1 << 60, 3).tolist()
        assert ours.random() == theirs.random()


@pytest.mark.parametrize("key", [(1 << 32, 1), (1, 2, 3)])
def test_keys_that_hash_otherwise_are_left_to_numpy(key):
    """A number of two words is hashed as two, and keys may be of several lengths."""
    keys = [(n, 1) for n in range(20)] + [key]
    for own, ours in zip(keys, rng.generators(keys), strict=True):
        assert ours.random() == np.random.default_rng(own).random()
