"""A node's finished personal models: stored on its disk, and read back."""

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from idiolect.core import checkpoint
from idiolect.core.metrics import METRICS, PRIMARY
from idiolect.core.tree import Tree
from idiolect.data import Federation
from idiolect.data.preprocessing import Preprocessing
from idiolect.deploy import node_records
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
_INDEX = "index.json"  # in a run's folder of models
_PINNED = "pinned.json"  # beside the runs: what the site uses


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
    meta: dict[str, Any] = {
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
    known = kept_runs(home).get(about.run, {})
    labels: dict[str, list[int]] = known.get("labels", {})
    seeds = sorted({*labels.get(about.label, []), about.seed})
    content = {
        "run": about.run,
        "name": meta["found"]["run"],
        "written": datetime.now(UTC).isoformat(timespec="seconds"),
        "labels": {**labels, about.label: seeds},
    }
    text = (json.dumps(content, indent=1) + "\n").encode()
    checkpoint.write_whole(home / "models" / about.run / _INDEX, text)
    return path


def kept_runs(home: Path) -> dict[str, dict[str, Any]]:
    """List the runs of which a node keeps models, the newest last."""
    found = [_read_index(path) for path in (home / "models").glob(f"*/{_INDEX}")]
    earlier = home / "models" / LATEST  # of version 0.4, which knew one run
    if earlier.exists():
        known = _read_index(earlier)
        if all(one["run"] != known["run"] for one in found):
            found.append(known)
    return {one["run"]: one for one in sorted(found, key=lambda one: one.get("written", ""))}


def pin(home: Path, run: str, label: str | None = None, seed: int | None = None) -> StoredModel:
    """Choose the model that a site uses until it chooses another; return it."""
    chosen = load_personal_model(home, label, seed, run)
    content = {"run": run, "label": chosen.about.label, "seed": chosen.about.seed}
    checkpoint.write_whole(home / "models" / _PINNED, (json.dumps(content) + "\n").encode())
    return chosen


def load_personal_model(
    home: Path, label: str | None = None, seed: int | None = None, run: str | None = None
) -> StoredModel:
    """Read a node's personal model: of a run, else of what is pinned, else of the only run."""
    runs = kept_runs(home)
    if not runs:
        raise DataError(
            f"{home} holds no personal model; run an experiment with this node first: "
            "`idiolect run EXPERIMENT.toml --on KIT`"
        )
    pinned = home / "models" / _PINNED
    if run is None and pinned.exists():
        known = _read_index(pinned)
        run, label = known["run"], label or known["label"]
        seed = known["seed"] if seed is None and label == known["label"] else seed
    if run is None and len(runs) > 1:
        raise ConfigError(
            f"this node has models of several runs: {'; '.join(map(_told, runs.values()))}. Add "
            f"--run, or choose one for good: `idiolect pin {home.parent} --run RUN`"
        )
    run = run or next(iter(runs))
    if run not in runs:
        raise ConfigError(f"--run is {run!r}; this node has models of runs {_or(runs)}")
    labels = runs[run]["labels"]
    if label is None and len(labels) > 1:
        raise ConfigError(f"this node has models of several methods; add --method {_or(labels)}")
    label = label or next(iter(labels))
    if label not in labels:
        raise ConfigError(f"--method is {label!r}; this node has models of {_or(labels)}")
    seed = labels[label][0] if seed is None else seed
    path = _path(home, run, label, seed)
    if not path.is_file():
        raise DataError(f"{path} does not exist; this node has seeds {labels[label]} of {label}")
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


def _told(index: Mapping[str, Any]) -> str:
    """Say which run it is that an index is of."""
    about = [str(index[key]) for key in ("name", "written") if key in index]
    return f"{index['run']} ({', '.join(about)})" if about else str(index["run"])


def described(stored: StoredModel, home: Path | None = None) -> str:
    """Say which model it is, from which run, whose, and how good it was found to be."""
    about, found = stored.about, stored.found
    owner = "" if home is None else node_records.owner_of(home, about.run)
    words = f"model: {about.label} of run {about.run} ({found.get('run', '?')}"
    words += f", by {owner})" if owner else ")"
    words += f", seed {about.seed}, after round {about.round}"
    own = found.get("client") or {}
    scores = own.get("personal") or {}
    for name in PRIMARY.values():
        if name in scores:
            title = f"{METRICS[name].title} {METRICS[name].written(scores[name])}"
            return f"{words}; {title} on its {own['test']} test rows"
    return words


def is_node(folder: Path) -> bool:
    """Say whether a folder is a node's kit, or a node's folder of a local run."""
    return any(kept_runs(home) for home in (folder / "idiolect", folder))


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


def _read_index(path: Path) -> dict[str, Any]:
    try:
        known: dict[str, Any] = json.loads(path.read_text())
    except ValueError as error:
        raise DataError(f"{path} is damaged; delete it and run the experiment again") from error
    return known


def _or(labels: Mapping[str, Any]) -> str:
    return " | ".join(list(labels)[:8]) + (" | ..." if len(labels) > 8 else "") or "none"


def _path(home: Path, run: str, label: str, seed: int) -> Path:
    return home / "models" / run / folder_name(label) / f"seed-{seed}.safetensors"
