"""A network that brings its process down, in the process and at the moment that a test chooses."""

import ctypes
import math
import os
from pathlib import Path

from torch import Tensor, nn

VARIABLE = "IDIOLECT_TEST_VICTIM"  # names a file with the number of the process that shall crash


class Fragile(nn.Module):
    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(math.prod(shape), classes)

    def forward(self, x: Tensor) -> Tensor:
        marked = Path(os.environ.get(VARIABLE, "/nowhere"))
        if marked.exists() and marked.read_text() == str(os.getpid()):
            ctypes.string_at(0)  # reads where nothing is: what a broken kernel or driver does
        return self.linear(x.flatten(1))


def fragile(shape: tuple[int, ...], classes: int) -> nn.Module:
    return Fragile(shape, classes)
