"""Batches drawn where they are used: NumPy's permutations of every client's rows, in one launch."""

from torch import Tensor

from idiolect.kernels.compiled import REALS, launch, round_up

_THREADS = 64
_BYTES = 4  # of a place in shared memory
_MOST = 1 << 13  # places that a client's one thread shuffles; beyond that the host is faster


def suits(longest: int, epochs: int, weight: Tensor) -> bool:
    """Return whether there is a kernel that is faster than the host."""
    return longest * epochs <= _MOST and weight.dtype in REALS


def shuffle(
    who: Tensor,
    held: Tensor,
    rows: Tensor,
    weight: Tensor,
    longest: int,
    key: tuple[int, int, int],
    batch: int,
    steps: int,
    epochs: int,
) -> None:
    """Write rows and weights [client, step, example] of a round.

    `who` has for every client its seed, number, count of examples and where its rows begin in
    `held`; `key` is what else the draws depend on: tag, round and call. Without `steps` they are as
    many as the epochs take.
    """
    shared = round_up(_BYTES * max(longest, 1), 4096)
    constants: dict[str, int | str] = {"REAL": REALS[weight.dtype], "THREADS": _THREADS}
    given = [who, held, rows, weight, *key, batch, steps, epochs, *rows.shape[1:]]
    launch("permutations.cu", "shuffle", constants, (len(who), 1, 1), _THREADS, given, shared)
