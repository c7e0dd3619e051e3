"""A function on CUDA captured once as a graph and replayed with new inputs."""

from collections.abc import Callable

import torch

from idiolect import tree
from idiolect.tree import Tree


class Captured:
    """A CUDA graph with static buffers for its inputs and results."""

    def __init__(self, fn: Callable[..., Tree], inputs: tuple[Tree, ...]) -> None:
        self._inputs = tree.map(torch.clone, inputs)
        # Capture wants lazily made handles and workspaces to exist: run once aside first.
        current = torch.cuda.current_stream()
        side = type(current)()
        side.wait_stream(current)
        with torch.cuda.stream(side):
            fn(*self._inputs)
        current.wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._outputs = fn(*self._inputs)

    def replay(self, inputs: tuple[Tree, ...]) -> Tree:
        """Run on new inputs; the result is a copy that later replays leave alone."""
        for static, new in zip(tree.leaves(self._inputs), tree.leaves(inputs), strict=True):
            static.copy_(new)
        self._graph.replay()
        return tree.map(torch.clone, self._outputs)
