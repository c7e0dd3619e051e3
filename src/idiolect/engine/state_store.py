"""Personal state of many clients: one stacked tree, gathered for a cohort and scattered back."""

from collections.abc import Sequence

import torch
from torch import Tensor

from idiolect.core import tree
from idiolect.core.tree import Tree


class Store:
    """Rows of personal state on the device, one for each client of an architecture."""

    def __init__(self, starts: Sequence[tuple[Tree, int]], device: torch.device) -> None:
        """Fill `count` rows from each starting state in turn."""
        self.starts = [start for start, _ in starts]
        self.rows = tree.concat([tree.repeat(tree.to(start, device), n) for start, n in starts])

    @property
    def example(self) -> Tree:
        """One client's state, for its form."""
        return tree.map(lambda leaf: leaf[0], self.rows)

    def take(self, rows: Tensor) -> Tree:
        """Gather the personal state of some clients."""
        return tree.take(self.rows, rows)

    def put(self, rows: Tensor, values: Tree) -> None:
        """Replace the personal state of some clients; everyone else's is untouched."""
        self.rows = tree.put(self.rows, rows, values)

    def flush(self) -> None:
        """Do nothing: a checkpoint of what is in memory holds all of it."""
