"""Cut a line of clients into blocks: wide enough to be fast, alike enough to waste little."""

from collections.abc import Sequence
from functools import lru_cache

PADDING = 0.1  # share of padded work that is not worth another block
_MOST_BLOCKS = 8  # each block is a round of its own; past this many, padding is cheaper


def cut(lengths: Sequence[int], span: int) -> list[tuple[int, int]]:
    """Return (first, last) of each block of at most `span` clients, given lengths, longest first.

    Each span is cut into the fewest pieces that keep its padding low.
    """
    cuts = []
    for first in range(0, len(lengths), span):
        piece = tuple(max(1, length) for length in lengths[first : first + span])
        cuts += [(first + low, first + high) for low, high in _pieces(piece)]
    return cuts


@lru_cache(maxsize=256)
def _pieces(lengths: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Cut one span, longest first, by dynamic programming over its distinct lengths."""
    starts = [n for n in range(len(lengths)) if n == 0 or lengths[n] != lengths[n - 1]]
    starts.append(len(lengths))
    real, last = sum(lengths), len(starts) - 1
    # best[k] = (planned work, where the last piece starts) of the first k distinct lengths
    best: list[tuple[float, int]] = [(0, 0)] + [(float("inf"), 0)] * last
    history = [best]
    for _ in range(min(_MOST_BLOCKS, last)):
        best = [(float("inf"), 0)] * (last + 1)
        for end in range(1, last + 1):
            best[end] = min(
                (history[-1][low][0] + lengths[starts[low]] * (starts[end] - starts[low]), low)
                for low in range(end)
            )
        history.append(best)
        if best[last][0] * (1 - PADDING) <= real:
            break
    pieces, end = [], last
    for best in reversed(history[1:]):
        low = best[end][1]
        pieces.append((starts[low], starts[end]))
        end = low
        if end == 0:
            break
    return tuple(reversed(pieces))
