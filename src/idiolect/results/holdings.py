"""`holdings.safetensors`: how many examples of each class every client holds, for pictures."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from idiolect.core import checkpoint
from idiolect.data.arrays import Rows
from idiolect.data.federation import Federation

FILE = "holdings.safetensors"
PARTS = ("train", "val", "test")


class Holdings(NamedTuple):
    """Who holds what under one seed."""

    seed: int
    classes: tuple[str, ...]
    names: tuple[str, ...]
    counts: Rows  # [part, client, class]


def of(seeds: Sequence[int], federations: Sequence[Federation]) -> list[Holdings]:
    """Count what clients hold under each seed."""
    return [
        Holdings(
            seed,
            federation.columns,
            tuple(federation.names),
            torch.stack([torch.from_numpy(federation.counts(part)) for part in PARTS]).numpy(),
        )
        for seed, federation in zip(seeds, federations, strict=True)
    ]


def save(folder: Path, held: Sequence[Holdings]) -> None:
    """Write the counts of every seed."""
    counts = {str(one.seed): torch.from_numpy(one.counts).to(torch.int32) for one in held}
    names = {str(one.seed): list(one.names) for one in held}
    meta = {"classes": list(held[0].classes), "names": names}
    checkpoint.save(folder / FILE, counts, meta)


def read(folder: Path) -> list[Holdings]:
    """Read what `save` wrote; nothing where an older idiolect wrote the run."""
    if not (folder / FILE).is_file():
        return []
    named, meta = checkpoint.read(folder / FILE)
    return [
        Holdings(int(seed), tuple(meta["classes"]), tuple(meta["names"][seed]), counts.numpy())
        for seed, counts in sorted(named.items(), key=lambda item: int(item[0]))
    ]
