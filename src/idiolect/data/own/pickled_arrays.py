"""Arrays in a pickle, read without running anything that the pickle names.

PFLlib saves `{"x": ..., "y": ...}` by `numpy.savez`, which pickles it. A pickle is a program that
may call any function by name; here every name but NumPy's four that rebuild arrays is refused, and
those four stand for functions of this file that only take bytes, a shape and a type of numbers.
"""

import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from idiolect.data.dataset import AnyArray
from idiolect.errors import DataError

_HOMES = ("numpy.core.multiarray", "numpy._core.multiarray")  # before and since NumPy 2


class _Type:
    """A type of numbers, such as i8, with its byte order."""

    def __init__(self, code: str, *_: Any) -> None:
        self.code, self.order = code, "|"

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.order = state[1]

    def plain(self) -> np.dtype[Any]:
        if self.code[:1] not in ("b", "i", "u", "f", "U"):
            raise pickle.UnpicklingError(f"it has an array of type {self.code}")
        return np.dtype(self.order + self.code)


class _Array:
    """An array as it is stored; of objects, a list of them."""

    values: Any = None

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, kind, columns_first, held = state
        if isinstance(held, list):
            self.values = held
        else:
            flat = np.frombuffer(held, kind.plain())
            self.values = flat.reshape(shape, order="F" if columns_first else "C")


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        known: dict[tuple[str, str], Callable[..., Any]] = {
            ("numpy", "ndarray"): _Array,
            ("numpy", "dtype"): _Type,
            ("_codecs", "encode"): lambda text, _: text.encode("latin1"),  # bytes in old protocols
            **{(home, "_reconstruct"): lambda *_: _Array() for home in _HOMES},
            **{(home, "scalar"): lambda kind, held: _scalar(kind, held) for home in _HOMES},
        }
        if (module, name) not in known:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is not an array's")
        return known[module, name]


def _scalar(kind: _Type, held: bytes) -> Any:
    return np.frombuffer(held, kind.plain())[0]


def read_pickled(file: Path, entry: str, names: tuple[str, ...]) -> tuple[AnyArray, ...]:
    """Read arrays by name from the dictionary that is pickled as one entry of an npz file."""
    try:
        with zipfile.ZipFile(file) as packed, packed.open(f"{entry}.npy") as stream:
            version = np.lib.format.read_magic(stream)
            if version != (1, 0):
                raise pickle.UnpicklingError(f"its npy format is {version}")
            np.lib.format.read_array_header_1_0(stream)
            (held,) = _Reader(stream).load().values
        return tuple(_plain(held[name]) for name in names)
    except Exception as error:  # what a made-up pickle makes Python raise can be anything
        raise DataError(
            f"{file} cannot be read ({type(error).__name__}: {error}). It is a pickle, of which "
            "only number arrays are taken, since loading anything else can run any code. If you "
            "trust it, write it anew: data = numpy.load(file, allow_pickle=True)['data'].item(); "
            "numpy.savez(file, x=data['x'], y=data['y'])"
        ) from error


def _plain(held: Any) -> AnyArray:
    if isinstance(held, _Array):
        held = held.values
    return np.asarray([_plain(one) for one in held] if isinstance(held, list) else held)
