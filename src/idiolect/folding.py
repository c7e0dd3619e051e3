"""A fold over many batches on CUDA, of which a few steps are captured and replayed for the others.

The kernels of a small step take longer to launch than to run. A round that comes again is captured
whole (`simulate.graph`); what is done but once, as adapting after the last round is, gains by being
captured in pieces: some steps on end, from and to buffers that hold the carry.
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from idiolect import tree
from idiolect.tree import Tree

PIECE = 8  # steps of a graph
_EAGER = 2  # first steps: here handles, plans and choices are made, and the carry gets its form
_WORTH = 4  # pieces that there should be

Step = Callable[[Tensor, Tree], Tree]
"""step(number, carry): the number of the step as a tensor [1], which a graph can count up."""


def worth(steps: int, device: torch.device) -> bool:
    """Say whether a fold of so many steps had better be captured, and can be here and now."""
    return (
        device.type == "cuda"
        and steps >= _EAGER + _WORTH * PIECE
        and not torch.cuda.is_current_stream_capturing()
    )


def fold(step: Step, carry: Tree, steps: int, device: torch.device) -> Tree:
    """Do all steps; the first ones, and those that fill no piece, eagerly."""
    number = torch.zeros(1, dtype=torch.int64, device=device)
    for _ in range(_EAGER + (steps - _EAGER) % PIECE):
        carry, number = step(number, carry), number + 1
    held = tree.map(torch.clone, carry)

    def piece() -> None:
        now: Any = held
        for ahead in range(PIECE):
            now = step(number + ahead, now)
        # Copied twice: what is new may be what was held in another place.
        fresh = [leaf.clone() for leaf in tree.leaves(now)]
        for old, new in zip(tree.leaves(held), fresh, strict=True):
            old.copy_(new)
        number.add_(PIECE)

    repeat(piece, (steps - _EAGER) // PIECE)
    return held


def repeat(piece: Callable[[], None], times: int) -> None:
    """Do something that changes its buffers again and again: once on a side stream, then replayed.

    What cannot be captured is done eagerly, and says so.
    """
    current = torch.cuda.current_stream()
    side = type(current)()
    side.wait_stream(current)
    with torch.cuda.stream(side):  # capture wants lazily made workspaces to exist
        piece()
    current.wait_stream(side)
    again = piece
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            piece()
        again = graph.replay
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:  # an operation that waits for the host, say
        warnings.warn(f"not captured, so slower: {str(error).splitlines()[0]}", stacklevel=2)
    for _ in range(times - 1):
        again()
