"""Files of a run folder beside its results: the models clients would use, and what fits them.

`models/METHOD/seed-N.safetensors` holds what clients deploy. `scaling.safetensors` and, of text,
`vocabulary/seed-N.txt` (a word a line, in the order of the tokens) make newcomers' data fit;
`holdings.safetensors` counts every client's examples by class.
"""

from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from idiolect.core import checkpoint
from idiolect.core.survival import task_from_json
from idiolect.core.task import Classes
from idiolect.core.tree import Tree
from idiolect.data.columns import TableEncoder
from idiolect.data.dataset import Dataset, Rows
from idiolect.data.federation import Federation
from idiolect.data.preprocessing import Preprocessing
from idiolect.data.tokenisers import FILE, Tokeniser
from idiolect.errors import DataError

Deployed = Sequence[tuple[np.ndarray, Tree]]
"""Per architecture: its clients, and what they deploy, stacked on axis 0."""


NEWCOMERS = "newcomers"  # of a run's folder: newcomers/DATA has models of clients that came later
PARTS = "parts"  # of a comparison's folder: parts/METHOD/SETTINGS/SEEDS are runs of their own


_LONGEST = 150  # bytes of a file's name, below what any system refuses


def folder_name(label: str) -> str:
    """Make a label safe as the name of a file, the same on every system; long ones are cut."""
    name = "".join(c if c.isalnum() or c in "-_." else "_" for c in label)
    if len(name.encode()) > _LONGEST:
        name = f"{name[:60]}-{sha256(label.encode()).hexdigest()[:12]}"
    return name if name.strip(".") else "_" * len(name)  # no "..", which is another folder


def save_models(folder: Path, label: str, seed: int, names: Sequence[str], kept: Deployed) -> None:
    """Write what every client of one seed deploys."""
    checkpoint.save(
        models_path(folder, label, seed),
        {str(place): stacked for place, (_, stacked) in enumerate(kept)},
        {"clients": list(names), "architectures": [clients.tolist() for clients, _ in kept]},
    )


def load_model(folder: str | Path, method: str, seed: int, client: int | str) -> dict[str, Tensor]:
    """Return what one client of a finished run deploys, by the names of its leaves."""
    path = models_path(Path(folder), method, seed)
    if not path.is_file():
        raise DataError(f"{path} does not exist; finish the run with evaluate.save_models = true")
    named, meta = checkpoint.read(path)
    names = meta["clients"]
    if isinstance(client, str):
        if client not in names:
            raise DataError(f"{path} has no client {client!r}; it has {', '.join(names[:8])}, ...")
        return one_client(named, meta["architectures"], names.index(client))
    return one_client(named, meta["architectures"], client)


def one_client(
    named: dict[str, Tensor], architectures: Sequence[Sequence[int]], client: int
) -> dict[str, Tensor]:
    """Pick one client's leaves out of the stacks of its architecture."""
    for place, clients in enumerate(architectures):
        if client in clients:
            row, prefix = list(clients).index(client), f"{place}."
            return {
                name.removeprefix(prefix): leaf[row]
                for name, leaf in named.items()
                if name.startswith(prefix)
            }
    raise DataError(f"there is no client {client}; expected 0..{sum(map(len, architectures)) - 1}")


def models_path(folder: Path, label: str, seed: int) -> Path:
    """Find the file: in the run's folder, or in the part of a comparison that holds the seed."""
    own = Path("models") / folder_name(label) / f"seed-{seed}.safetensors"
    parts = folder.glob(f"{PARTS}/{folder_name(label)}/*/*/{own}")
    return folder / own if (folder / own).exists() else next(parts, folder / own)


# How examples are decoded.


SCALING_FILE = "scaling.safetensors"
VOCABULARY = "vocabulary"


def save_scaling(
    folder: Path,
    datasets: Mapping[int, Dataset],
    options: Mapping[str, Any] | None = None,
    public: Dataset | None = None,
) -> None:
    """Write how a run reads and scales examples, by seed: all that is needed once it is over.

    `options` are those that its own file was read with.
    """
    for seed, own in datasets.items():
        if own.tokeniser is not None:
            checkpoint.write_whole(folder / VOCABULARY / FILE, own.tokeniser.json.encode())
        elif own.words:
            text = "".join(f"{word}\n" for word in own.words)
            checkpoint.write_whole(_vocabulary(folder, seed), text.encode())
    forms = {seed: Preprocessing.of(own, options) for seed, own in datasets.items()}
    first = next(iter(forms.values()))
    arrays = {
        f"seed-{seed}": {
            name: torch.from_numpy(np.array(values))
            for name, values in (("shift", own.shift), ("scale", own.scale))
        }
        for seed, own in forms.items()
    }
    encoders = {
        str(seed): own.encoder.to_json() for seed, own in forms.items() if own.encoder is not None
    }
    checkpoint.save(
        folder / SCALING_FILE,
        arrays,
        {
            # Where words are the classes, they are in the vocabulary of each seed.
            "classes": [] if first.sequential else list(first.classes),
            "text": ("next word" if first.sequential else "labelled") if first.words else "",
            "shape": list(first.shape),
            "dtype": first.dtype,
            "features": list(first.features),
            "columns": first.to_json()["columns"],
            "tasks": {str(seed): own.task.to_json() for seed, own in forms.items()},
            **({"encoders": encoders} if encoders else {}),
            **({} if first.tokeniser is None else {"tokeniser": first.tokeniser.digest}),
            "public": 0 if public is None else len(public),
            "public_labels": public is not None and public.classes == first.classes,
        },
    )


def read_scaling(folder: Path, seed: int) -> Preprocessing:
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
    tokeniser = _tokeniser(folder / VOCABULARY, meta["tokeniser"]) if "tokeniser" in meta else None
    words = _words(_vocabulary(folder, seed)) if kind and tokeniser is None else ()
    words = words if tokeniser is None else tokeniser.words
    encoder = meta.get("encoders", {}).get(str(seed))
    made = None if encoder is None else TableEncoder.from_json(encoder)
    return Preprocessing(
        tuple(meta["shape"]),
        meta["dtype"],
        words if kind == "next word" else tuple(meta["classes"]),
        named[f"{own}shift"].numpy(),
        named[f"{own}scale"].numpy(),
        tuple(meta.get("features", ())) if made is None else made.features,
        words,
        kind == "next word",
        {k: v if isinstance(v, str) else tuple(v) for k, v in meta.get("columns", {}).items()},
        task_from_json(meta["tasks"][str(seed)]) if "tasks" in meta else Classes(),
        made,
        tokeniser,
    )


class PublicForm(NamedTuple):
    """How many public examples a run had, and whether they were of the same classes."""

    size: int
    labels: bool


def read_public(folder: Path) -> PublicForm:
    """Read how many public examples a run had; none where an older idiolect wrote it."""
    _, meta = checkpoint.read(folder / SCALING_FILE)
    return PublicForm(int(meta.get("public", 0)), bool(meta.get("public_labels", False)))


def _tokeniser(folder: Path, digest: str) -> Tokeniser:
    found = Tokeniser.load(folder / FILE)
    if found.digest != digest:
        raise DataError(
            f"{found.source} is not the run's (sha256 {digest[:12]}...); write it with "
            "`idiolect run EXPERIMENT.toml --resume`"
        )
    return found


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


# Who held what.


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
