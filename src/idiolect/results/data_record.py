"""What a run folder records of the data: decoding, vocabulary, and who held what.

`scaling.safetensors` and, of text, `vocabulary/seed-N.txt` (a word a line, in the order of the
tokens) make newcomers' data fit; `holdings.safetensors` counts every client's examples by class.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from idiolect.core import checkpoint
from idiolect.data.dataset import Dataset, Floats, Rows, with_classes
from idiolect.data.federation import Federation
from idiolect.data.text import encoded_as
from idiolect.errors import DataError

SCALING_FILE = "scaling.safetensors"
VOCABULARY = "vocabulary"


class Scaling(NamedTuple):
    """Classes in the order of the outputs, the form of an example, and how it is decoded."""

    classes: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    shift: Floats
    scale: Floats
    text: str = ""  # "labelled" or "next word", where examples are text
    words: tuple[str, ...] = ()  # of text

    @property
    def reading(self) -> dict[str, Any]:
        """The options that own data must be read with to fit."""
        if not self.text:
            return {}
        return {"length": self.shape[0], "next_word": self.text == "next word"}


def save_scaling(folder: Path, datasets: Mapping[int, Dataset]) -> None:
    """Write how a run decodes examples, by seed: all that is needed of its data once it is over."""
    for seed, own in datasets.items():
        if own.words:
            text = "".join(f"{word}\n" for word in own.words)
            checkpoint.write_whole(_vocabulary(folder, seed), text.encode())
    dataset = next(iter(datasets.values()))
    arrays = {
        f"seed-{seed}": {
            name: torch.from_numpy(np.array(values))
            for name, values in (("shift", own.shift), ("scale", own.scale))
        }
        for seed, own in datasets.items()
    }
    checkpoint.save(
        folder / SCALING_FILE,
        arrays,
        {
            # Where words are the classes, they are in the vocabulary of each seed.
            "classes": [] if dataset.sequential else list(dataset.classes),
            "text": _kind(dataset),
            "shape": list(dataset.x.shape[1:]),
            "dtype": str(dataset.x.dtype),
        },
    )


def read_scaling(folder: Path, seed: int) -> Scaling:
    """Read what `save_scaling` wrote for a seed."""
    if not (folder / SCALING_FILE).is_file():
        raise DataError(
            f"{folder} holds no {SCALING_FILE}, which says how its examples are decoded; write it "
            "with `idiolect run EXPERIMENT.toml --resume`"
        )
    named, meta = checkpoint.read(folder / SCALING_FILE)
    # Earlier runs had one scaling for all seeds.
    own = f"seed-{seed}." if any(name.startswith("seed-") for name in named) else ""
    if f"{own}shift" not in named:
        raise DataError(
            f"{folder / SCALING_FILE} has no scaling of seed {seed}; write it with "
            "`idiolect run EXPERIMENT.toml --resume`"
        )
    kind = meta.get("text", "")
    words = _words(_vocabulary(folder, seed)) if kind else ()
    return Scaling(
        words if kind == "next word" else tuple(meta["classes"]),
        tuple(meta["shape"]),
        meta["dtype"],
        named[f"{own}shift"].numpy(),
        named[f"{own}scale"].numpy(),
        kind,
        words,
    )


def _kind(dataset: Dataset) -> str:
    if not dataset.words:
        return ""
    return "next word" if dataset.sequential else "labelled"


def _vocabulary(folder: Path, seed: int) -> Path:
    return folder / VOCABULARY / f"seed-{seed}.txt"


def _words(path: Path) -> tuple[str, ...]:
    try:
        return tuple(path.read_text(encoding="utf-8").splitlines())
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"{path}, the words that the run knows, cannot be read ({error}); write it with "
            "`idiolect run EXPERIMENT.toml --resume`"
        ) from error


def match_scaling(dataset: Dataset, scaling: Scaling) -> Dataset:
    """Give other data a run's classes, matched by name, and its decoding; refuse misfits."""
    if _kind(dataset) != scaling.text:
        raise DataError(
            f"{dataset.name} is {_kind(dataset) or 'no'} text and the run was on "
            f"{scaling.text or 'no'} text; give data of the same kind"
        )
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
    if scaling.words:
        dataset = encoded_as(dataset, scaling.words)
    if dataset.sequential:
        return dataset
    known = with_classes(dataset, scaling.classes, "the run")
    return dataclasses.replace(known, shift=scaling.shift, scale=scaling.scale, unfitted="")


HOLDINGS_FILE = "holdings.safetensors"
DATA_PARTS = ("train", "val", "test")


class Holdings(NamedTuple):
    """Who holds what under one seed."""

    seed: int
    classes: tuple[str, ...]
    names: tuple[str, ...]
    counts: Rows  # [part, client, class]


def save_holdings(folder: Path, seeds: Sequence[int], federations: Sequence[Federation]) -> None:
    """Write how many examples of each class every client holds, under every seed."""
    held = dict(zip(map(str, seeds), federations, strict=True))
    counts = {
        seed: torch.stack([torch.from_numpy(own.counts(part)) for part in DATA_PARTS])
        for seed, own in held.items()
    }
    meta = {
        "classes": list(federations[0].columns),
        "names": {seed: list(own.names) for seed, own in held.items()},
    }
    checkpoint.save(
        folder / HOLDINGS_FILE, {seed: own.to(torch.int32) for seed, own in counts.items()}, meta
    )


def read_holdings(folder: Path) -> list[Holdings]:
    """Read what `save_holdings` wrote; nothing where an older idiolect wrote the run."""
    if not (folder / HOLDINGS_FILE).is_file():
        return []
    named, meta = checkpoint.read(folder / HOLDINGS_FILE)
    return [
        Holdings(int(seed), tuple(meta["classes"]), tuple(meta["names"][seed]), counts.numpy())
        for seed, counts in sorted(named.items(), key=lambda item: int(item[0]))
    ]
