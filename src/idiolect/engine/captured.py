"""A function on CUDA captured once and replayed with new inputs."""

from collections.abc import Callable

import torch
from torch import Tensor

from idiolect.core import tree
from idiolect.core.graph_scan import Folder
from idiolect.core.tree import Tree
from idiolect.kernels.cuda_graph import Tape


class Captured:
    """CUDA graphs of a round, with static buffers for its inputs and results."""

    def __init__(self, fn: Callable[..., Tree], inputs: tuple[Tree, ...], folder: Folder) -> None:
        self._inputs = tree.map(torch.clone, inputs)
        self._given: list[tuple[Tensor, int]] = []  # what the buffers hold, to be known again
        self._tape = Tape()
        # The eager round before has made handles and workspaces.
        self._outputs = folder.record(self._tape, lambda: fn(*self._inputs))

    def replay(self, inputs: tuple[Tree, ...], lend: bool = False) -> Tree:
        """Run on new inputs; the result is a copy, or `lend`: the next replay writes over it."""
        given = [(leaf, leaf._version) for leaf in tree.leaves(inputs)]
        for place, (static, now) in enumerate(zip(tree.leaves(self._inputs), given, strict=True)):
            if not self._given or not _same(self._given[place], now):
                static.copy_(now[0])
        self._given = given
        self._tape.replay()
        return self._outputs if lend else tree.map(torch.clone, self._outputs)


def _same(was: tuple[Tensor, int], now: tuple[Tensor, int]) -> bool:
    """Say whether a tensor is the very one of last time, and nobody wrote to it since."""
    return was[0] is now[0] and was[1] == now[1]
