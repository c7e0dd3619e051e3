"""Gaussian noise that cannot be guessed, on a grid that floating point cannot betray.

Random bits are the keystream of ChaCha20 under a key of 256 bits. From them come integers with a
discrete Gaussian distribution (Canonne, Kamath, Steinke, "The Discrete Gaussian for Differential
Privacy", NeurIPS 2020, Algorithms 2 and 3) of standard deviation 2^28. What is hidden is a whole
number of steps of the same grid, so every sum lies on the grid whatever the data were: the low bits
of a noisy number tell nothing, as they do where noise is drawn as floating-point numbers (Mironov,
"On Significance of the Least Significant Bits for Differential Privacy", CCS 2012).

The published sampler decides by exact rational arithmetic; this one compares 64 random bits with
`exp` in double precision. Probabilities are right to a relative 2^-45, but for tails that hold
2^-60 of the whole: for each round of a million numbers this adds less than 1e-7 to ε and 1e-11 to
δ.
"""

import hashlib
import secrets

import numpy as np

from idiolect.errors import ConfigError

BITS = 28
SPREAD = 1 << BITS  # standard deviation, in steps of the grid
_PIECE = 1 << 18  # numbers drawn at a time, so that memory stays small
_FULL = 2.0**64


class NoCipher(ConfigError):
    """The library of ciphers is not installed."""


class NoiseStream:
    """Random bits from a key, and integers with a Gaussian distribution."""

    def __init__(self, key: bytes) -> None:
        """`key` has 32 bytes and is used for one stream."""
        require()
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

        self._cipher = Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor()

    def words(self, count: int) -> np.ndarray:
        """Return so many uniform 64-bit words."""
        return np.frombuffer(self._cipher.update(bytes(8 * count)), dtype="<u8")

    def gaussians(self, count: int) -> np.ndarray:
        """Return so many integers, as float64, of mean 0 and standard deviation 2^28."""
        found = np.empty(count)
        done = 0
        while done < count:
            wanted = min(count - done, _PIECE)
            # About 48 of 100 candidates are taken.
            some = self._candidates(int(2.2 * wanted) + 16)[:wanted]
            found[done : done + len(some)] = some
            done += len(some)
        return found

    def laplaces(self, count: int, scale: float) -> np.ndarray:
        """Return so many whole numbers n, each with a chance in proportion to exp(-|n| / scale).

        The difference of two geometric numbers is one such; counts that it is added to stay whole.
        """
        steps = np.floor(-scale * np.log(self._uniform(2 * count)))
        drawn: np.ndarray = steps[:count] - steps[count:]
        return drawn

    def _candidates(self, count: int) -> np.ndarray:
        """Draw integers of a discrete Laplace distribution, and keep those the Gaussian accepts."""
        words = self.words(count)
        low = (words & np.uint64(SPREAD - 1)).astype(np.float64)
        kept = self._accepted(low / SPREAD)
        low, signs = low[kept], (words[kept] >> np.uint64(63)).astype(bool)
        # How many whole spreads lie below: P(at least k) = e^-k.
        high = np.floor(-np.log(self._uniform(len(low))))
        size = low + SPREAD * high
        kept = ~(signs & (size == 0))  # zero has one sign
        size, signs = size[kept], signs[kept]
        kept = self._accepted((size / SPREAD - 1) ** 2 / 2)
        size, signs = size[kept], signs[kept]
        signed: np.ndarray = np.where(signs, -size, size)
        return signed

    def _accepted(self, exponent: np.ndarray) -> np.ndarray:
        """Flip a coin for each that says yes with probability exp(-exponent)."""
        yes: np.ndarray = self._uniform(len(exponent)) <= np.exp(-exponent)
        return yes

    def _uniform(self, count: int) -> np.ndarray:
        """Return numbers above 0, up to 1."""
        return (self.words(count).astype(np.float64) + 1.0) / _FULL


def from_system() -> NoiseStream:
    """Return a stream whose key the operating system draws; nobody keeps it."""
    return NoiseStream(secrets.token_bytes(32))


def from_seed(seed: int, round: int) -> NoiseStream:
    """Return the stream of a round, which whoever knows the seed can draw again."""
    return NoiseStream(hashlib.sha256(f"idiolect private noise {seed} {round}".encode()).digest())


def require() -> None:
    """Say what to install where the library of ciphers is missing."""
    try:
        import cryptography  # noqa: F401
    except ImportError:
        raise NoCipher(
            "aggregate = 'dp' draws its noise by the library `cryptography`, which is not "
            "installed; install it with: pip install 'idiolect[privacy]'"
        ) from None
