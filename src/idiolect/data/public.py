"""Public examples: images brought to the private ones' form, or rows held out of these."""

from dataclasses import replace

import numpy as np

from idiolect.data.arrays import AnyArray, Rows
from idiolect.data.dataset import Dataset
from idiolect.errors import DataError

_LUMINANCE = np.array([0.299, 0.587, 0.114])  # of red, green and blue (ITU-R BT.601)


def alike(dataset: Dataset, shape: tuple[int, ...], private: str) -> Dataset:
    """Bring images to a shape: grey is repeated, colour weighed, the middle cut out or padded.

    So 28x28 digits serve a network for 32x32 photographs, and the other way round. Anything but
    stored images has to be of the right shape already.
    """
    own = tuple(dataset.x.shape[1:])
    if own == shape:
        return dataset
    images = dataset.x.dtype == np.uint8 and len(own) == len(shape) == 3
    if not images or not {own[0], shape[0]} <= {1, 3}:
        raise DataError(
            f"public examples of {dataset.name} are {own} and the private ones of {private} "
            f"{shape}; choose a public source of the same shape"
        )
    x = _coloured(np.asarray(dataset.x), shape[0])
    x = _sized(_sized(x, 2, shape[1]), 3, shape[2])
    told = f"{dataset.provenance} Images of {own} brought to {shape}.".strip()
    return replace(dataset, x=np.ascontiguousarray(x), provenance=told)


def _coloured(x: AnyArray, channels: int) -> AnyArray:
    if x.shape[1] == channels:
        return x
    if channels == 3:
        return np.repeat(x, 3, axis=1)
    grey = np.tensordot(x, _LUMINANCE, axes=(1, 0))
    coloured: AnyArray = np.rint(grey).astype(np.uint8)[:, None]
    return coloured


def _sized(x: AnyArray, axis: int, size: int) -> AnyArray:
    """Cut the middle out of an axis, or pad it with zeros on both sides."""
    spare = x.shape[axis] - size
    if spare >= 0:
        return x.take(np.arange(spare // 2, spare // 2 + size), axis)
    before = -spare // 2
    widths = [(0, 0)] * x.ndim
    widths[axis] = (before, -spare - before)
    return np.pad(x, widths)


def rows_of(dataset: Dataset, rows: Rows) -> Dataset:
    """Keep these rows only, as a set of examples that belongs to nobody."""
    return replace(
        dataset, x=dataset.x[rows], y=dataset.y[rows], clients=None, client_names=(), origin=None
    )


def without(dataset: Dataset, rows: Rows) -> Dataset:
    """Leave these rows out: what is public is nobody's private example."""
    kept = np.setdiff1d(np.arange(len(dataset)), rows)
    if not len(kept):
        raise DataError(f"nothing is left of {dataset.name} beside its public examples")
    return replace(
        dataset,
        x=dataset.x[kept],
        y=dataset.y[kept],
        clients=None if dataset.clients is None else dataset.clients[kept],
        origin=None if dataset.origin is None else dataset.origin[kept],
    )
