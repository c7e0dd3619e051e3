"""A node's finished personal models: stored on its disk, and read back."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from idiolect.core import checkpoint
from idiolect.core.tree import Tree
from idiolect.data import Federation
from idiolect.data.preprocessing import Preprocessing
from idiolect.errors import ConfigError, DataError
from idiolect.experiment.load import parse_toml
from idiolect.experiment.stored_models import (
    BEST,
    ModelInfo,
    StoredModel,
    best_method,
    client_number,
    findings,
    read_content,
)
from idiolect.results.run_files import PublicForm, folder_name

LATEST = "latest.json"


def save_personal_model(
    home: Path,
    about: ModelInfo,
    held: Federation,
    clients: int,
    deployed: Tree,
    found: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
) -> Path:
    """Write a personal model, which never leaves the node, and what was `found` of it.

    `options` are those that the node's own file was read with.
    """
    path = _path(home, about.run, about.label, about.seed)
    public = held.public
    meta = {
        "about": about._asdict(),
        "preprocessing": Preprocessing.of(held.dataset, options).to_json(),
        "public": PublicForm(
            0 if public is None else len(public),
            public is not None and public.classes == held.dataset.classes,
        ),
        "clients": clients,
        "name": held.names[0],
        "found": {
            "run": parse_toml(about.experiment, "the experiment").get("name", about.run),
            "data": {"source": held.dataset.name, "provenance": held.dataset.provenance},
            **(found or {}),
        },
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
        meta.get("found", {}),
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


def local_clients(folder: Path) -> dict[str, Path]:
    """List the clients of a run by `--on local`, and each one's node; nothing for other folders."""
    homes = sorted((folder / "nodes").glob("node-*"), key=lambda path: (len(path.name), path.name))
    names = [home.name for home in homes]
    for method in read_content(folder).get("methods", {}).values():
        names = [str(one["client"]) for one in method["seeds"][0]["clients"]]
    return dict(zip(names, homes, strict=False))


def local_model(
    folder: Path, client: str | None, label: str | None, seed: int | None
) -> StoredModel:
    """Read a client's model from its node in the folder of a run by `--on local`."""
    nodes = local_clients(folder)
    number = client_number(client, list(nodes))
    if number is None:
        raise ConfigError(f"the run has several clients; add --client {_or(nodes)}")
    content = read_content(folder)
    if label == BEST:
        label = best_method(content, list(content.get("methods", {})), folder)
    stored = load_personal_model(list(nodes.values())[number], label, seed)
    found = findings(folder, content, stored.about.label, stored.about.seed, number)
    return stored._replace(name=list(nodes)[number], found=found)


def _latest(path: Path) -> dict[str, Any]:
    try:
        known: dict[str, Any] = json.loads(path.read_text())
    except ValueError as error:
        raise DataError(f"{path} is damaged; delete it and run the experiment again") from error
    return known


def _or(labels: Mapping[str, Any]) -> str:
    return " | ".join(list(labels)[:8]) + (" | ..." if len(labels) > 8 else "") or "none"


def _path(home: Path, run: str, label: str, seed: int) -> Path:
    return home / "models" / run / folder_name(label) / f"seed-{seed}.safetensors"
