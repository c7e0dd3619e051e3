"""A node's finished personal models, on its own disk, with all it takes to use them."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from idiolect.core import checkpoint
from idiolect.core.tree import Tree
from idiolect.data import Federation
from idiolect.deploy.example_form import Form
from idiolect.errors import ConfigError, DataError
from idiolect.results.models import folder_name

LATEST = "latest.json"


class About(NamedTuple):
    """Which run a model is of."""

    run: str
    label: str
    seed: int
    round: int
    client: int
    experiment: str  # as TOML
    newcomer: bool = False  # adapted to a run that was over
    reason: str = ""  # what the method chose for this client, and why, in words


class Stored(NamedTuple):
    """A finished model, read back."""

    about: About
    leaves: dict[str, Tensor]  # of the deployed tree, by name
    form: Form
    shift: np.ndarray
    scale: np.ndarray
    clients: int


def keep(home: Path, about: About, held: Federation, clients: int, deployed: Tree) -> Path:
    """Write a personal model; it never leaves the node."""
    dataset = held.dataset
    path = _path(home, about.run, about.label, about.seed)
    arrays = {"shift": dataset.shift, "scale": dataset.scale}
    content = {
        "model": deployed,
        "scaling": {name: torch.from_numpy(np.array(values)) for name, values in arrays.items()},
    }
    meta = {
        "about": about._asdict(),
        "form": Form.of(held).plain(),
        "clients": clients,
    }
    checkpoint.save(path, content, meta)
    latest = home / "models" / LATEST
    known = _latest(latest) if latest.exists() else {}
    same = known.get("run") == about.run
    labels: dict[str, list[int]] = known.get("labels", {}) if same else {}
    seeds = sorted({*labels.get(about.label, []), about.seed})
    told = {"run": about.run, "labels": {**labels, about.label: seeds}}
    checkpoint.write_whole(latest, (json.dumps(told, indent=1) + "\n").encode())
    return path


def stored(
    home: Path, label: str | None = None, seed: int | None = None, run: str | None = None
) -> Stored:
    """Read a node's personal model: of the latest run, its only method, its first seed."""
    latest = home / "models" / LATEST
    if not latest.exists():
        raise DataError(
            f"{home} holds no personal model; run an experiment with this node first: "
            "`idiolect run EXPERIMENT.toml --on KIT`"
        )
    known = _latest(latest)
    labels = known["labels"]
    if run is not None and run != known["run"]:
        labels = {}
    elif label is None and len(labels) > 1:
        raise ConfigError(f"this node has models of several methods; add --method {_or(labels)}")
    label = label or next(iter(labels), None)
    if label is None or (labels and label not in labels):
        raise ConfigError(f"--method is {label!r}; this node has models of {_or(labels)}")
    seed = labels[label][0] if seed is None and labels else seed or 0
    path = _path(home, run or known["run"], label, seed)
    if not path.is_file():
        raise DataError(f"{path} does not exist; this node has models of {_or(labels)}")
    named, meta = checkpoint.read(path)
    prefix = "model."
    return Stored(
        About(**meta["about"]),
        {n.removeprefix(prefix): leaf for n, leaf in named.items() if n.startswith(prefix)},
        Form(**meta["form"]),
        named["scaling.shift"].numpy(),
        named["scaling.scale"].numpy(),
        meta["clients"],
    )


def home_of(folder: Path) -> Path:
    """Return where a node keeps its models, given its kit or its folder of a local run."""
    for home in (folder / "idiolect", folder):
        if (home / "models").is_dir():
            return home
    raise DataError(
        f"{folder} holds no personal model; give a node's kit (or RUN/nodes/NAME of a local run) "
        "after a run is finished"
    )


def _latest(path: Path) -> dict[str, Any]:
    try:
        known: dict[str, Any] = json.loads(path.read_text())
    except ValueError as error:
        raise DataError(f"{path} is damaged; delete it and run the experiment again") from error
    return known


def _or(labels: dict[str, Any]) -> str:
    return " | ".join(labels) or "none"


def _path(home: Path, run: str, label: str, seed: int) -> Path:
    return home / "models" / run / folder_name(label) / f"seed-{seed}.safetensors"
