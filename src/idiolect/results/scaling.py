"""`scaling.safetensors`: how a run decodes examples, so that newcomers' data can be made to fit."""

import dataclasses
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from idiolect import checkpoint
from idiolect.data.arrays import Floats
from idiolect.data.dataset import Dataset, with_classes
from idiolect.errors import DataError

FILE = "scaling.safetensors"


class Scaling(NamedTuple):
    """Classes in the order of the outputs, the form of an example, and how it is decoded."""

    classes: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    shift: Floats
    scale: Floats


def save(folder: Path, dataset: Dataset) -> None:
    """Write how a run decodes examples: all that is needed of its data once it is over."""
    arrays = {"shift": dataset.shift, "scale": dataset.scale}
    checkpoint.save(
        folder / FILE,
        {name: torch.from_numpy(np.array(values)) for name, values in arrays.items()},
        {
            "classes": list(dataset.classes),
            "shape": list(dataset.x.shape[1:]),
            "dtype": str(dataset.x.dtype),
        },
    )


def read(folder: Path) -> Scaling:
    """Read what `save` wrote."""
    if not (folder / FILE).is_file():
        raise DataError(
            f"{folder} holds no {FILE}, which says how its examples are decoded; write it with "
            "`idiolect run EXPERIMENT.toml --resume`"
        )
    named, meta = checkpoint.read(folder / FILE)
    return Scaling(
        tuple(meta["classes"]),
        tuple(meta["shape"]),
        meta["dtype"],
        named["shift"].numpy(),
        named["scale"].numpy(),
    )


def matched(dataset: Dataset, scaling: Scaling) -> Dataset:
    """Give other data a run's classes, matched by name, and its decoding; misfits are told."""
    if dataset.x.shape[1:] != scaling.shape:
        raise DataError(
            f"examples of {dataset.name} have shape {dataset.x.shape[1:]} and the run's "
            f"{scaling.shape}; bring them to that shape"
        )
    if str(dataset.x.dtype) != scaling.dtype:
        # The run's shift and scale are in the units of its own numbers, bytes say.
        raise DataError(
            f"examples of {dataset.name} are {dataset.x.dtype} and the run's {scaling.dtype}; give "
            "them in the same units and type"
        )
    known = with_classes(dataset, scaling.classes, "the run")
    return dataclasses.replace(known, shift=scaling.shift, scale=scaling.scale)
