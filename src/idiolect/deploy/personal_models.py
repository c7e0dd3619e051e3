"""A node's finished personal models: stored on its disk, and read back."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from idiolect.core import checkpoint
from idiolect.core.tree import Tree
from idiolect.data import Federation
from idiolect.data.preprocessing import Preprocessing
from idiolect.errors import ConfigError, DataError
from idiolect.experiment.stored_models import ModelInfo, StoredModel, client_number
from idiolect.results.document import FILE
from idiolect.results.run_files import PublicForm, folder_name

LATEST = "latest.json"


def save_personal_model(
    home: Path, about: ModelInfo, held: Federation, clients: int, deployed: Tree
) -> Path:
    """Write a personal model; it never leaves the node."""
    path = _path(home, about.run, about.label, about.seed)
    public = held.public
    meta = {
        "about": about._asdict(),
        "preprocessing": Preprocessing.of(held.dataset).to_json(),
        "public": PublicForm(
            0 if public is None else len(public),
            public is not None and public.classes == held.dataset.classes,
        ),
        "clients": clients,
        "name": held.names[0],
    }
    checkpoint.save(path, {"model": deployed}, meta)
    latest = home / "models" / LATEST
    known = _latest(latest) if latest.exists() else {}
    same = known.get("run") == about.run
    labels: dict[str, list[int]] = known.get("labels", {}) if same else {}
    seeds = sorted({*labels.get(about.label, []), about.seed})
    content = {"run": about.run, "labels": {**labels, about.label: seeds}}
    checkpoint.write_whole(latest, (json.dumps(content, indent=1) + "\n").encode())
    return path


def load_personal_model(
    home: Path, label: str | None = None, seed: int | None = None, run: str | None = None
) -> StoredModel:
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
    if "form" in meta:  # of version 0.3
        form, public = _earlier_form(meta["form"], named)
    else:
        form = Preprocessing.from_json(meta["preprocessing"], str(path))
        public = PublicForm(*meta["public"])
    return StoredModel(
        ModelInfo(**meta["about"]),
        # A tree that is a single tensor has no name of its own.
        {n.removeprefix(prefix): leaf for n, leaf in named.items() if n.startswith(prefix)}
        or {"value": named["model"]},
        form,
        meta["clients"],
        public,
        meta.get("name", ""),
        {"run": meta["about"]["run"], "reason": meta["about"].get("reason", "")},
    )


def _earlier_form(form: dict[str, Any], named: dict[str, Any]) -> tuple[Preprocessing, PublicForm]:
    found = Preprocessing(
        tuple(form["shape"]),
        form["dtype"],
        tuple(form["classes"]),
        named["scaling.shift"].numpy().astype(np.float32),
        named["scaling.scale"].numpy().astype(np.float32),
        words=tuple(form["words"]),
        sequential=form["sequential"],
    )
    return found, PublicForm(form["public"] or 0, form["public_labels"])


def is_node(folder: Path) -> bool:
    """Say whether a folder is a node's kit, or a node's folder of a local run."""
    return any((home / "models" / LATEST).is_file() for home in (folder / "idiolect", folder))


def models_home(folder: Path) -> Path:
    """Return where a node keeps its models, given its kit or its folder of a local run."""
    for home in (folder / "idiolect", folder):
        if (home / "models").is_dir():
            return home
    raise DataError(
        f"{folder} holds no personal model; give the folder of a finished run, one that `idiolect "
        "export` wrote, or a node's kit (or RUN/nodes/NAME of a local run)"
    )


def node_of_client(folder: Path, client: str | None) -> Path | None:
    """Find a client's node in the folder of a run by `--on local`; None where it is no such run."""
    nodes = folder / "nodes"
    if not nodes.is_dir():
        return None
    homes = sorted(nodes.glob("node-*"), key=lambda path: (len(path.name), path.name))
    known = [home.name for home in homes]
    try:
        content = json.loads((folder / FILE).read_text(encoding="utf-8"))
        first = next(iter(content["methods"].values()))["seeds"][0]["clients"]
        names = [str(one["client"]) for one in first]
    except (OSError, ValueError, KeyError, IndexError, StopIteration, TypeError):
        names = known
    place = client_number(client, names)
    if place is None and client in known:
        place = known.index(client)
    if place is None or place >= len(homes):
        some = " | ".join(names[:8])
        raise ConfigError(f"--client is {client!r}; this run has {some}, a node each")
    return nodes / f"node-{place}"


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
