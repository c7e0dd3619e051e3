"""Compiled kernels, kept between runs: those of a deep network take longer than its first rounds.

A file that is damaged, or cannot be written, costs a compilation and never a run.
"""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

_folder: Path | None = None


def keep(folder: Path | None) -> None:
    """Keep kernels in a folder from now on."""
    global _folder
    _folder = folder


def loaded(text: str, name: str) -> Any:
    """Return a kernel of a CUDA source, compiled now or by an earlier run."""
    if _folder is None:
        return torch.cuda._compile_kernel(text, name)
    try:
        compiler, loader = _tools()
    except ImportError:  # they are torch's own, and may be renamed
        return torch.cuda._compile_kernel(text, name)
    file = _folder / f"{_digest(text, name)}.cubin"
    try:
        return loader(file.read_bytes(), [name])[name]
    except (OSError, RuntimeError):  # not there, or damaged
        binary, spelt = compiler(text, name)
        if spelt == name:
            _write(file, binary)
        return loader(binary, [spelt])[spelt]


def _tools() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return what `torch.cuda._compile_kernel` is made of: a compiler, and a loader."""
    from torch.cuda._utils import _cuda_load_module, _nvrtc_compile

    return _nvrtc_compile, _cuda_load_module


def _digest(text: str, name: str) -> str:
    """Tell kernels apart by all that they are compiled from, by and for."""
    chip = torch.cuda.get_device_capability()
    about = f"{torch.__version__} {torch.version.cuda} {chip} {name}\n{text}"
    return hashlib.sha256(about.encode()).hexdigest()[:32]


def _write(file: Path, binary: bytes) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(f".{os.getpid()}.part")
        part.write_bytes(binary)
        part.replace(file)
    except OSError:
        pass
