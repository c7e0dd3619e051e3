"""CUDA sources of this folder: compiled with the sizes of a shape as constants, and launched.

Compiled kernels are kept between runs, since those of a deep network take longer to compile than
its first rounds. A file that is damaged, or cannot be written, costs a compilation, never a run.
"""

import contextlib
import ctypes
import functools
import hashlib
import os
import re
import sys
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from idiolect.kernels.deferred import computed

Result = TypeVar("Result")
Kernel = tuple[str, str, tuple[tuple[str, int | str], ...], int]
"""File, name, constants and shared memory, as `kernel` takes them."""
FAILURES = (RuntimeError, AttributeError, OSError)  # of compiling, loading or launching a kernel
REALS = {torch.float32: "float", torch.float64: "double"}  # dtypes with kernels: their C names
_failed: set[str] = set()  # operations whose kernel failed once
_folder: Path | None = None
_binaries: dict[tuple[str, str], tuple[bytes, str]] = {}  # compiled ahead, by text and name
_compiling: dict[tuple[str, str], threading.Lock] = {}
_listed = threading.local()  # `kernels`: what this thread would launch, while it only lists


def set_cache(folder: Path | None) -> None:
    """Keep compiled kernels in a folder from now on."""
    global _folder
    _folder = folder


def source(file: str, constants: Mapping[str, int | str]) -> str:
    """Return the text of a CUDA file with its constants before it and its headers in it."""
    defined = [f"#define {constant} {value}" for constant, value in constants.items()]
    text = re.sub(r'#include "(.+)"', lambda found: _text(found[1]), _text(file))
    return "\n".join([*defined, text])


def _text(file: str) -> str:
    return resources.files("idiolect.kernels").joinpath(file).read_text()


def launch(
    file: str,
    name: str,
    constants: Mapping[str, int | str],
    grid: tuple[int, int, int],
    threads: int,
    arguments: Sequence[Any],
    shared: int = 0,
) -> None:
    """Launch a function of a CUDA file; `shared` is the bytes of shared memory of a block."""
    which: Kernel = (file, name, tuple(constants.items()), shared)
    if (listed := getattr(_listed, "kernels", None)) is not None:
        listed.append(which)
        return
    make_current()
    kernel(*which)(grid, (threads, 1, 1), [computed(one) for one in arguments], shared)


def launched_by(work: Callable[..., Any], *inputs: Any) -> list[Kernel]:
    """Return what some work launches, without launching it: inputs may be on `meta`.

    Nothing where it cannot be told, such as where an operation needs numbers.
    """
    _listed.kernels = found = list[Kernel]()
    try:
        work(*inputs)
    except FAILURES:
        found.clear()
    finally:
        _listed.kernels = None
    return found


def at_hand(which: Kernel) -> bool:
    """Say whether a kernel need not be compiled any more."""
    file, name, constants, _ = which
    text = source(file, dict(constants))
    return (text, name) in _binaries or (_folder is not None and _kept(text, name).exists())


def compile_ahead(which: Kernel) -> None:
    """Compile a kernel for a later launch. The GPU has no part in it, so any thread may do so."""
    file, name, constants, _ = which
    text = source(file, dict(constants))
    with _compiling.setdefault((text, name), threading.Lock()):  # many layers have one kernel
        if not at_hand(which):
            compiler, _ = _tools()
            _binaries[text, name] = made = compiler(text, name)
            _keep(text, name, *made)


@functools.cache
def kernel(file: str, name: str, constants: tuple[tuple[str, int | str], ...], shared: int) -> Any:
    """Return a function of a CUDA file, compiled for these constants."""
    compiled = load(source(file, dict(constants)), name)
    compiled.set_shared_memory_config(shared)
    return compiled


def load(text: str, name: str) -> Any:
    """Return a function of a CUDA source, compiled now or by an earlier run."""
    ahead = _binaries.get((text, name))
    if _folder is None and ahead is None:
        return torch.cuda._compile_kernel(text, name)
    try:
        compiler, loader = _tools()
    except ImportError:  # they are private to torch, and may be renamed
        return torch.cuda._compile_kernel(text, name)
    if ahead is None:
        try:
            return loader(_kept(text, name).read_bytes(), [name])[name]
        except (OSError, RuntimeError):  # not there, or damaged
            ahead = compiler(text, name)
            _keep(text, name, *ahead)
    binary, mangled = ahead
    return loader(binary, [mangled])[mangled]


def _kept(text: str, name: str) -> Path:
    """Return where a compiled kernel is kept between runs."""
    about = f"{torch.__version__} {torch.version.cuda} {torch.cuda.get_device_capability()} {name}"
    digest = hashlib.sha256(f"{about}\n{text}".encode()).hexdigest()[:32]
    return (_folder or Path()) / f"{digest}.cubin"


def _keep(text: str, name: str, binary: bytes, mangled: str) -> None:
    if _folder is not None and mangled == name:
        write_cache(_kept(text, name), binary)


def _tools() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return what `torch.cuda._compile_kernel` is made of: a compiler, and a loader."""
    from torch.cuda._utils import _cuda_load_module, _nvrtc_compile

    return _nvrtc_compile, _cuda_load_module


def write_cache(file: Path, content: bytes) -> None:
    """Replace a cache file at once; do nothing where it cannot be written."""
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(f".{os.getpid()}.{threading.get_ident()}.part")
        part.write_bytes(content)
        part.replace(file)


def make_current(driver: Any = None) -> None:
    """Make sure that the calling thread has a CUDA context, without which no launch works.

    torch runs backward passes on threads of its own. Its own launches make a context current; ours,
    which may be the first on such a thread, do not.
    """
    driver = driver or _driver()
    context = ctypes.c_void_p()
    _check(driver.cuCtxGetCurrent(ctypes.byref(context)))
    if context.value:
        return
    device = ctypes.c_int()
    _check(driver.cuDeviceGet(ctypes.byref(device), torch.cuda.current_device()))
    _check(driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
    _check(driver.cuCtxSetCurrent(context))


@functools.cache
def _driver() -> Any:
    return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")


def _check(code: int) -> None:
    if code:
        raise RuntimeError(f"the CUDA driver gave error {code} making a context current")


def has_kernels(tensor: Tensor) -> bool:
    """Return whether our kernels can take a tensor: real numbers on a GPU."""
    return tensor.is_cuda and tensor.dtype in REALS


def attempt(
    what: str,
    own: Callable[[], Result],
    plain: Callable[[], Result],
    on: Tensor | None = None,
) -> Result:
    """Run an operation by our kernel, or by torch once that has failed: slower, but it goes on.

    Where `on` is a tensor that our kernels cannot take, torch runs it.
    """
    if what not in _failed and (on is None or has_kernels(on)):
        try:
            return own()
        except torch.OutOfMemoryError:
            raise
        except FAILURES as error:
            _failed.add(what)
            warnings.warn(f"no kernel for {what} here, so slower: {summary(error)}", stacklevel=2)
    return plain()


def summary(error: Exception) -> str:
    """Return the first line of an error."""
    return (str(error) or type(error).__name__).splitlines()[0]


def round_up(number: int, multiple: int) -> int:
    """Round up to a multiple."""
    return -(-number // multiple) * multiple
