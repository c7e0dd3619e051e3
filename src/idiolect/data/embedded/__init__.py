"""The data that comes with the package: 6,000 MNIST training digits, 600 of each."""

from __future__ import annotations

import lzma
from importlib import resources

import numpy as np

from idiolect.data.dataset import Dataset, default_decoding
from idiolect.errors import DataError

_DIGITS, _SIDE = 6000, 28


def load_embedded() -> Dataset:
    """Load the embedded digits; no network, no cache, well under a second."""
    packed = resources.files(__name__).joinpath("digits.xz").read_bytes()
    raw = np.frombuffer(lzma.decompress(packed), np.uint8)
    pixels = _DIGITS * _SIDE * _SIDE
    if len(raw) != pixels + _DIGITS:
        raise DataError(f"the embedded digits are damaged ({len(raw)} bytes); reinstall idiolect")
    x = raw[:pixels].reshape(_DIGITS, 1, _SIDE, _SIDE)
    shift, scale = default_decoding(x)
    return Dataset(
        name="embedded",
        x=x,
        y=raw[pixels:].astype(np.int64),
        classes=tuple("0123456789"),
        shift=shift,
        scale=scale,
        provenance=(
            "First 600 images of each digit in MNIST's training file (LeCun, Cortes, Burges; "
            "CC BY-SA 3.0), shipped with idiolect."
        ),
    )
