"""CUDA source of this folder, compiled when a shape is met, with its sizes as constants."""

import functools
from collections.abc import Mapping
from importlib import resources
from typing import Any, NamedTuple

import torch

from idiolect.stacked.shape import Shape

Constants = Mapping[str, int] | Mapping[str, int | str]
SHARED = 200 * 1024  # bytes of shared memory a block may ask for; data-centre GPUs have more


class Side(NamedTuple):
    """What is read and what is made, seen from one direction of the convolution."""

    channels: int
    height: int
    width: int
    out_channels: int
    out_height: int
    out_width: int
    padding: int

    @property
    def constants(self) -> dict[str, int]:
        """Name the sizes as the sources do."""
        return {
            "C": self.channels, "H": self.height, "W": self.width, "PAD": self.padding,
            "OC": self.out_channels, "OH": self.out_height, "OW": self.out_width,
        }  # fmt: skip


def side(task: str, s: Shape) -> Side:
    """Return the sizes as a task sees them: the images' gradient runs the other way."""
    reads, makes = (s.channels, s.height, s.width), (s.out_channels, s.out_height, s.out_width)
    if task == "spread":
        return Side(*makes, *reads, padding=s.kernel_height - 1 - s.padding)
    return Side(*reads, *makes, padding=s.padding)


def up(number: int, multiple: int) -> int:
    """Round up to a multiple."""
    return -(-number // multiple) * multiple


def source(file: str, constants: Constants) -> str:
    """Return the text of a CUDA file with its constants before it."""
    defined = [f"#define {constant} {value}" for constant, value in constants.items()]
    text = resources.files("idiolect.stacked").joinpath(file).read_text()
    return "\n".join([*defined, text])


def kernel(file: str, name: str, constants: Constants, shared: int = 0) -> Any:
    """Return a function of a CUDA file, compiled for these constants."""
    return _kernel(file, name, tuple(constants.items()), shared)


@functools.cache
def _kernel(file: str, name: str, constants: tuple[tuple[str, int | str], ...], shared: int) -> Any:
    compiled = torch.cuda._compile_kernel(source(file, dict(constants)), name)
    compiled.set_shared_memory_config(shared)
    return compiled
