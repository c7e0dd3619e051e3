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
_thread = threading.local()
"""`kernels`: what this thread would launch, while it only lists; `patient`: another may come."""
_postpone: Callable[[Kernel], None] | None = None  # has a kernel compiled while others work
_pending: set[Kernel] = set()  # to be used from a later round on
_tried: set[Kernel] = set()  # compiled while others worked, or not to be compiled


class NotCompiled(Exception):
    """A kernel is compiled elsewhere, so torch does its work till then."""

    def __init__(self, which: Kernel) -> None:
        super().__init__(f"{which[1]} of {which[0]} is not compiled yet")
        self.which = which


def set_cache(folder: Path | None) -> None:
    """Keep compiled kernels in a folder from now on."""
    global _folder
    _folder = folder


def set_postponed(postpone: Callable[[Kernel], None] | None) -> None:
    """Let kernels that are not at hand be compiled by others, or where they are launched."""
    global _postpone
    _postpone = postpone


def begin_to_wait(which: Kernel) -> bool:
    """Let torch do a kernel's work until `use_from_now`; say whether it did not before."""
    new = which not in _pending
    _pending.add(which)
    return new


def use_from_now(which: Kernel) -> None:
    """Launch a kernel from now on; if it could not be compiled that is told."""
    _pending.discard(which)
    _tried.add(which)


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
    if (listed := getattr(_thread, "kernels", None)) is not None:
        listed.append(which)
        return
    make_current()
    kernel(*which)(grid, (threads, 1, 1), [computed(one) for one in arguments], shared)


def launched_by(work: Callable[..., Any], *inputs: Any) -> list[Kernel]:
    """Return what some work launches, without launching it: inputs may be on `meta`.

    Nothing where it cannot be told, such as where an operation needs numbers.
    """
    _thread.kernels = found = list[Kernel]()
    try:
        computed(work(*inputs))
    except FAILURES:
        found.clear()
    finally:
        _thread.kernels = None
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
            _binaries[text, name] = made = compiler(text, name, **_target(text))
            _keep(text, name, *made)


@functools.cache
def kernel(file: str, name: str, constants: tuple[tuple[str, int | str], ...], shared: int) -> Any:
    """Return a function of a CUDA file, compiled for these constants."""
    which = (file, name, constants, shared)
    if getattr(_thread, "patient", False) and which not in _tried:
        if which in _pending or not at_hand(which):
            raise NotCompiled(which)
    compiled = load(source(file, dict(constants)), name)
    compiled.set_shared_memory_config(shared)
    return compiled


def load(text: str, name: str) -> Any:
    """Return a function of a CUDA source, compiled now or by an earlier run."""
    ahead = _binaries.get((text, name))
    if _folder is None and ahead is None:
        return torch.cuda._compile_kernel(text, name, **_target(text))
    try:
        compiler, loader = _tools()
    except ImportError:  # they are private to torch, and may be renamed
        return torch.cuda._compile_kernel(text, name, **_target(text))
    if ahead is None:
        try:
            return loader(_kept(text, name).read_bytes(), [name])[name]
        except (OSError, RuntimeError):  # not there, or damaged
            ahead = compiler(text, name, **_target(text))
            _keep(text, name, *ahead)
    binary, mangled = ahead
    return loader(binary, [mangled])[mangled]


def is_hopper() -> bool:
    """Say whether the GPU is one of Hopper, which has instructions that no other has."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


def _target(text: str) -> dict[str, Any]:
    """Return what to compile for, where it is not the GPU's usual instructions."""
    return {"compute_capability": "90a"} if "wgmma" in text else {}


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


def aligned(given: Tensor) -> Tensor:
    """Return a tensor without gaps that can be read 16 bytes at a time."""
    tensor: Tensor = computed(given).contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


def memory_order(leaf: Tensor) -> list[int]:
    """Return the axes of rows as they lie in memory: steps leave some weights in other orders."""
    steps = leaf.stride()
    return [0, *sorted(range(1, leaf.dim()), key=lambda axis: -steps[axis])]


def attempt(
    what: str,
    own: Callable[[], Result],
    plain: Callable[[], Result],
    on: Tensor | None = None,
) -> Result:
    """Run an operation by our kernel, or by torch once that has failed: slower, but it goes on.

    Where `on` is a tensor that our kernels cannot take, torch runs it; and, where compiling is
    postponed, until there is a kernel.
    """
    if what not in _failed and (on is None or has_kernels(on)):
        before = getattr(_thread, "patient", False)
        _thread.patient = _postpone is not None
        try:
            return own()
        except NotCompiled as missing:
            if _postpone is not None:
                _postpone(missing.which)
        except torch.OutOfMemoryError:
            raise
        except FAILURES as error:
            _failed.add(what)
            warnings.warn(f"no kernel for {what} here, so slower: {summary(error)}", stacklevel=2)
        finally:
            _thread.patient = before
    return plain()


def summary(error: Exception) -> str:
    """Return the first line of an error."""
    return (str(error) or type(error).__name__).splitlines()[0]


def round_up(number: int, multiple: int) -> int:
    """Round up to a multiple."""
    return -(-number // multiple) * multiple
