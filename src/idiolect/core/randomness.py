"""A client's random numbers: a pure function of run seed, round, client and call.

Torch's own generators give other numbers in every run, for every width of a block and device.
These are counted: number n of a call is a hash (SplitMix64) of the client's key, the call and n, by
whole-number arithmetic that vmap maps, a CUDA graph replays and every device does alike. Normal
numbers are the inverse of the normal distribution (Wichura 1988, AS 241) in double precision, by
additions, products, quotients and roots alone, which IEEE 754 fixes to the last bit.

Whoever knows the run's seed knows these numbers, so they hide nothing.
"""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from idiolect.core import tree
from idiolect.errors import MethodError

_GOLDEN = -7046029254386353131  # 2^64 / golden ratio, as a signed number
_FIRST = -4658895280553007687
_SECOND = -7723592293110705685


class Random:
    """The random numbers of one client in one round; `local.random`."""

    def __init__(self, key: Callable[[], Tensor], like: Tensor) -> None:
        """`key` is the client's, a whole number; `like` has the type of the numbers wanted."""
        self._key, self._like = key, like
        self._at: list[int | Tensor] = []  # the scans under way: number and step of each
        self.calls = 0  # draws and scans so far at this place

    def uniform(self, shape: int | Sequence[int] = ()) -> Tensor:
        """Draw numbers from 0 to 1, 1 excluded."""
        bits = 24 if self._like.dtype != torch.float64 else 53
        whole = (self._whole(shape) >> (64 - bits)) & ((1 << bits) - 1)
        return whole.to(self._like.dtype) * 2.0**-bits

    def normal(self, shape: int | Sequence[int] = ()) -> Tensor:
        """Draw normal numbers of mean 0 and deviation 1."""
        whole = (self._whole(shape) >> 12) & ((1 << 52) - 1)
        return _quantile((tree.double(whole) + 0.5) * 2.0**-52).to(self._like.dtype)

    def permutation(self, count: int) -> Tensor:
        """Draw an order of so many things."""
        return self._whole(count).argsort()

    def _whole(self, shape: int | Sequence[int]) -> Tensor:
        size = (shape,) if isinstance(shape, int) else tuple(shape)
        key = self._key()
        for number in (*self._at, self.calls):
            key = _mixed(key * _FIRST + _GOLDEN + number)
        self.calls += 1
        count = torch.arange(math.prod(size), device=key.device)
        return _mixed(key + (count + 1) * _GOLDEN).reshape(size)

    # Where a call stands, so that padding and the width of a block move nobody's numbers.

    def enter(self) -> tuple[int, list[int | Tensor]]:
        """Begin a scan: its steps have numbers of their own."""
        outer = (self.calls + 1, self._at)
        self._at = [*self._at, self.calls, 0]
        return outer

    def step(self, number: int | Tensor) -> None:
        """Begin a step of the scan."""
        self._at = [*self._at[:-1], number]
        self.calls = 0

    def leave(self, outer: tuple[int, list[int | Tensor]]) -> None:
        """End the scan."""
        self.calls, self._at = outer


def keys(seeds: Sequence[int], clients: Sequence[int], round: int) -> np.ndarray:
    """Make a key for each client of a block: (seed, round, client), hashed."""
    made = [
        np.random.SeedSequence((seed, 23, round, client)).generate_state(1, np.uint64)[0]
        for seed, client in zip(seeds, clients, strict=True)
    ]
    return np.array(made, np.uint64).view(np.int64)


def _mixed(value: Tensor) -> Tensor:
    """SplitMix64's last steps; products wrap around as they should."""
    value = (value ^ ((value >> 30) & ((1 << 34) - 1))) * _FIRST
    value = (value ^ ((value >> 27) & ((1 << 37) - 1))) * _SECOND
    return value ^ ((value >> 31) & ((1 << 33) - 1))


# fmt: off
# AS 241: numerator and denominator of a ratio near the centre, in the tails, and far out.
_CENTRE = (
    (3.3871328727963666080, 133.14166789178437745, 1971.5909503065514427, 13731.693765509461125,
     45921.953931549871457, 67265.770927008700853, 33430.575583588128105, 2509.0809287301226727),
    (1.0, 42.313330701600911252, 687.18700749205790830, 5394.1960214247511077,
     21213.794301586595867, 39307.895800092710610, 28729.085735721942674, 5226.4952788528545610),
)
_TAIL = (
    (1.42343711074968357734, 4.63033784615654529590, 5.76949722146069140550, 3.64784832476320460504,
     1.27045825245236838258, 0.241780725177450611770, 0.0227238449892691845833,
     7.74545014278341407640e-4),
    (1.0, 2.05319162663775882187, 1.67638483018380384940, 0.689767334985100004550,
     0.148103976427480074590, 0.0151986665636164571966, 5.47593808499534494600e-4,
     1.05075007164441684324e-9),
)
_FAR = (
    (6.65790464350110377720, 5.46378491116411436990, 1.78482653991729133580,
     0.296560571828504891230, 0.0265321895265761230930, 0.00124266094738807843860,
     2.71155556874348757815e-5, 2.01033439929228813265e-7),
    (1.0, 0.599832206555887937690, 0.136929880922735805310, 0.0148753612908506148525,
     7.86869131145613259100e-4, 1.84631831751005468180e-5, 1.42151175831644588870e-7,
     2.04426310338993978564e-15),
)
# fmt: on


def _quantile(p: Tensor) -> Tensor:
    """Return where the normal distribution has so much on its left."""
    q = p - 0.5
    r = 0.180625 - q * q
    centre = q * _ratio(_CENTRE, r)
    tail = torch.where(q < 0, p, 1 - p)
    root = (-_log(tail)).clamp(min=0).sqrt()
    outer = torch.where(root <= 5, _ratio(_TAIL, root - 1.6), _ratio(_FAR, root - 5))
    return torch.where(q.abs() <= 0.425, centre, torch.where(q < 0, -outer, outer))


def _ratio(factors: Sequence[Sequence[float]], x: Tensor) -> Tensor:
    upper, lower = factors
    return _polynomial(upper, x) / _polynomial(lower, x)


def _polynomial(factors: Sequence[float], x: Tensor) -> Tensor:
    total = torch.full_like(x, factors[-1])
    for factor in reversed(factors[:-1]):
        total = total * x + factor
    return total


def _log(x: Tensor) -> Tensor:
    """Return the logarithm of numbers from 2⁻⁵³ to 1, by plain arithmetic: libraries' differ."""
    power = torch.zeros_like(x)
    for step in (32, 16, 8, 4, 2, 1):
        small = x < 2.0**-step
        x = torch.where(small, x * 2.0**step, x)
        power = torch.where(small, power - step, power)
    ratio = (x - 0.75) / (x + 0.75)  # x is from a half to 1: log x = log ¾ + 2 atanh(ratio)
    square = ratio * ratio
    series = _polynomial([1 / (2 * n + 1) for n in range(12)], square)
    return power * math.log(2) + math.log(0.75) + 2 * ratio * series


# Torch's own generators are refused where clients work.

_DRAWS = frozenset(
    "rand randn randint rand_like randn_like randint_like randperm normal bernoulli bernoulli_ "
    "normal_ uniform_ random_ exponential_ geometric_ cauchy_ log_normal_ poisson multinomial "
    "binomial dropout dropout_ dropout1d dropout2d dropout3d alpha_dropout alpha_dropout_ "
    "feature_dropout feature_alpha_dropout native_dropout gumbel_softmax rrelu rrelu_".split()
)


def refusal(what: str) -> MethodError:
    """Say why a client step may not draw by itself, and what to do."""
    return MethodError(
        f"a client's code drew random numbers by {what}, which differ from run to run and from "
        "backend to backend; draw by local.random.normal(shape), .uniform(shape) or "
        ".permutation(count), which are seeded by run, round, client and call"
    )


class Refusing(TorchFunctionMode):
    """Refuses torch's random functions, but in layers of a network while it runs."""

    def __init__(self, running: Callable[[], bool]) -> None:
        super().__init__()
        self._running = running

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Look at a function's name before it is called."""
        name = getattr(func, "__name__", "")
        if name in _DRAWS and not self._running():
            raise refusal(f"torch's {name}")
        return func(*args, **(kwargs or {}))


def states() -> tuple[Any, ...]:
    """Return the states of the global generators of torch (CPU) and NumPy.

    Not of Python's: logging, retries and other threads draw from that while clients train.
    """
    return torch.get_rng_state().numpy().tobytes(), _of_numpy()


def others() -> tuple[Any, ...]:
    """Return the states of NumPy's and Python's."""
    return _of_numpy(), random.getstate()


def _of_numpy() -> bytes:
    legacy: Any = np.random.get_state(legacy=False)
    # Normal numbers are drawn in pairs, of which the second waits.
    held = [*legacy["state"].values(), legacy["has_gauss"], legacy["gauss"]]
    parts = (own.tobytes() if isinstance(own, np.ndarray) else str(own).encode() for own in held)
    return b" ".join(parts)


# Generators of NumPy, many at once. A round draws a permutation for every client from a key of its
# own. Most of the time went into hashing keys one by one (`SeedSequence`), so here that is done for
# all of them as arrays. The numbers are NumPy's, bit for bit.

_ONCE = 8  # fewer keys than this are not worth it
_WORD = (1 << 32) - 1
_LONG = (1 << 128) - 1
_PCG = 0x2360ED051FC65DA44385DF649FCCF645
_POOL = 4


def generators(keys: Sequence[tuple[int, ...]]) -> Iterator[np.random.Generator]:
    """Yield a generator for each key; each is valid until the next one is taken."""
    if len(keys) < _ONCE or not _one_word(keys):
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


def _one_word(keys: Sequence[tuple[int, ...]]) -> bool:
    """Say whether every number of every key is one word, and all keys are of one length."""
    words = all(0 <= number <= _WORD for key in keys for number in key)
    return words and len({len(key) for key in keys}) == 1


def _states(words: np.ndarray) -> Iterator[tuple[int, int]]:
    """Hash keys [word, key] as SeedSequence does, and seed a PCG64 with each."""
    made = _hashed(_mixed_pool(words), 0x8B51F9DD, 0x58F38DED, 2 * _POOL).astype(np.uint64)
    longs = made[0::2] | made[1::2] << np.uint64(32)
    for high, low, high_step, low_step in longs.T.tolist():
        step = ((high_step << 64 | low_step) << 1 | 1) & _LONG
        state = (step + (high << 64 | low)) & _LONG
        yield (state * _PCG + step) & _LONG, step


def _mixed_pool(words: np.ndarray) -> np.ndarray:
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
