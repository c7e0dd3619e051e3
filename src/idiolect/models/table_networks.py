"""A network for tables: categories are embedded, everything else goes in as it is."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from idiolect.errors import ModelError
from idiolect.kernels.linear import linear_relu
from idiolect.models.layers import Shape

Blocks = Sequence[tuple[int, int]]  # the first feature and the width of each embedded category


def embedding_width(places: int) -> int:
    """Return how many numbers stand for a category with so many places: the root, 2 to 16."""
    return min(16, max(2, math.ceil(math.sqrt(places))))


class TableMLP(nn.Module):
    """Two hidden ReLU layers, after an embedding of every category that asks for one.

    A category that is one of `places` features goes through a matrix of its own, so that similar
    categories can come to lie together; all zeros, an unknown one, is the origin.
    """

    def __init__(
        self,
        shape: Shape,
        classes: int,
        blocks: Blocks = (),
        hidden: int = 64,
        dropout: float = 0.0,
    ) -> None:
        """`blocks` are the categories to embed, which a table's encoder knows."""
        super().__init__()
        width = math.prod(shape)
        ends = [0, *(start + places for start, places in blocks)]
        if any(start < end for (start, _), end in zip(blocks, ends, strict=False)):
            raise ModelError(f"categories {list(blocks)} overlap; expected them in order")
        if ends[-1] > width:
            raise ModelError(f"categories reach feature {ends[-1]}, and there are {width}")
        self.blocks = tuple((int(start), int(places)) for start, places in blocks)
        self.embeddings = nn.ModuleList(
            nn.Linear(places, embedding_width(places), bias=False) for _, places in self.blocks
        )
        embedded = sum(embedding_width(places) - places for _, places in self.blocks)
        self.fc1 = nn.Linear(width + embedded, hidden)
        self.fc2 = nn.Linear(hidden, hidden)
        self.dropout = nn.Dropout(dropout)
        self.fc3 = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [example, class]."""
        x = x.flatten(1)
        parts, after = [], 0
        for (start, places), embedding in zip(self.blocks, self.embeddings, strict=True):
            parts += [x[:, after:start], embedding(x[:, start : start + places])]
            after = start + places
        x = torch.cat([*parts, x[:, after:]], 1) if parts else x
        hidden = self.dropout(linear_relu(self.fc2, linear_relu(self.fc1, x)))
        logits: Tensor = self.fc3(hidden)
        return logits
