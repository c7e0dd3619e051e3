"""CUDA source of this folder, compiled when a shape is met, with its sizes as constants."""

import ctypes
import functools
import sys
import warnings
from collections.abc import Callable, Mapping
from importlib import resources
from typing import Any, NamedTuple, TypeVar

import torch

from idiolect.kernels.binary_cache import loaded
from idiolect.kernels.convolution_shape import Shape

Result = TypeVar("Result")
_given_up: set[str] = set()  # what failed once
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
    text = resources.files("idiolect.kernels").joinpath(file).read_text()
    return "\n".join([*defined, text])


def kernel(file: str, name: str, constants: Constants, shared: int = 0) -> Any:
    """Return a function of a CUDA file, compiled for these constants."""
    make_current()
    compiled = _kernel(file, name, tuple(constants.items()), shared)

    def launch(*arguments: Any) -> None:
        make_current()
        compiled(*arguments)

    return launch


@functools.cache
def _kernel(file: str, name: str, constants: tuple[tuple[str, int | str], ...], shared: int) -> Any:
    compiled = loaded(source(file, dict(constants)), name)
    compiled.set_shared_memory_config(shared)
    return compiled


def make_current(driver: Any = None) -> None:
    """See to it that the calling thread has a context, without which nothing can be launched.

    torch goes back through a network on threads of its own. What it launches makes a context
    current by itself; what we launch, perhaps as the first there, does not.
    """
    driver = driver or _driver()
    context = ctypes.c_void_p()
    _checked(driver.cuCtxGetCurrent(ctypes.byref(context)))
    if context.value:
        return
    device = ctypes.c_int()
    _checked(driver.cuDeviceGet(ctypes.byref(device), torch.cuda.current_device()))
    _checked(driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
    _checked(driver.cuCtxSetCurrent(context))


@functools.cache
def _driver() -> Any:
    return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")


def _checked(code: int) -> None:
    if code:
        raise RuntimeError(f"the CUDA driver gave error {code} making a context current")


def attempt(what: str, own: Callable[[], Result], plain: Callable[[], Result]) -> Result:
    """Do something by a kernel of ours, or plainly once that has failed: slower, but it goes on."""
    if what not in _given_up:
        try:
            return own()
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, AttributeError, OSError) as error:
            _given_up.add(what)
            words = (str(error) or type(error).__name__).splitlines()[0]
            warnings.warn(f"no kernel for {what} here, so slower: {words}", stacklevel=2)
    return plain()
