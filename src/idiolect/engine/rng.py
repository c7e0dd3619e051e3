"""Many generators at once: what `numpy.random.default_rng` makes of each key, for less.

A round draws a permutation for every client from a key of its own. Most of the time went into
hashing keys one by one (`SeedSequence`), so here that is done for all of them as arrays. The
numbers are NumPy's, bit for bit; a key that would hash otherwise is left to NumPy.
"""

from collections.abc import Iterator, Sequence

import numpy as np

_ONCE = 8  # fewer keys than this are not worth it
_WORD = (1 << 32) - 1
_LONG = (1 << 128) - 1
_PCG = 0x2360ED051FC65DA44385DF649FCCF645
_POOL = 4


def generators(keys: Sequence[tuple[int, ...]]) -> Iterator[np.random.Generator]:
    """Give a generator for each key; it is used up when the next one is asked for."""
    if len(keys) < _ONCE or not _plain(keys):
        for key in keys:
            yield np.random.default_rng(key)
        return
    bits = np.random.PCG64(0)
    generator = np.random.Generator(bits)
    for state, step in _states(np.array(keys, np.uint32).T):
        bits.state = {
            "bit_generator": "PCG64",
            "state": {"state": state, "inc": step},
            "has_uint32": 0,
            "uinteger": 0,
        }
        yield generator


def _plain(keys: Sequence[tuple[int, ...]]) -> bool:
    """Say whether every number of every key is one word, and all keys are of one length."""
    words = all(0 <= number <= _WORD for key in keys for number in key)
    return words and len({len(key) for key in keys}) == 1


def _states(words: np.ndarray) -> Iterator[tuple[int, int]]:
    """Hash keys [word, key] as SeedSequence does, and seed a PCG64 with each."""
    made = _hashed(_mixed(words), 0x8B51F9DD, 0x58F38DED, 2 * _POOL).astype(np.uint64)
    longs = made[0::2] | made[1::2] << np.uint64(32)
    for high, low, high_step, low_step in longs.T.tolist():
        step = ((high_step << 64 | low_step) << 1 | 1) & _LONG
        state = (step + (high << 64 | low)) & _LONG
        yield (state * _PCG + step) & _LONG, step


def _mixed(words: np.ndarray) -> np.ndarray:
    factor = 0x43B0D7E5

    def hashed(value: np.ndarray) -> np.ndarray:
        nonlocal factor
        value = value ^ np.uint32(factor)
        factor = factor * 0x931E8875 & _WORD
        return _folded(value * np.uint32(factor))

    def mixed(left: np.ndarray, right: np.ndarray) -> np.ndarray:
        value: np.ndarray = left * np.uint32(0xCA01F9DD) - right * np.uint32(0x4973F715)
        return _folded(value)

    none = np.zeros_like(words[0])
    pool = [hashed(words[n] if n < len(words) else none) for n in range(_POOL)]
    for source in range(_POOL):
        for target in range(_POOL):
            if source != target:
                pool[target] = mixed(pool[target], hashed(pool[source]))
    for word in words[_POOL:]:
        pool = [mixed(own, hashed(word)) for own in pool]
    return np.stack(pool)


def _hashed(pool: np.ndarray, factor: int, by: int, count: int) -> np.ndarray:
    made = []
    for n in range(count):
        value = pool[n % _POOL] ^ np.uint32(factor)
        factor = factor * by & _WORD
        made.append(_folded(value * np.uint32(factor)))
    return np.stack(made)


def _folded(value: np.ndarray) -> np.ndarray:
    folded: np.ndarray = value ^ np.right_shift(value, np.uint32(16))
    return folded
