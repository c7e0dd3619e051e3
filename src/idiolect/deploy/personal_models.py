"""A node's finished personal models: stored on its disk, used for predictions, exported."""

import csv
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from idiolect.core import checkpoint, tree
from idiolect.core.tree import Tree
from idiolect.data import Dataset, Federation, read
from idiolect.data.dataset import with_classes
from idiolect.data.own.tables import UNLABELLED
from idiolect.data.text import PAD, encoded_as
from idiolect.deploy.data_summary import ExampleForm
from idiolect.engine.deployment_runtime import ClientIdentity, ClientRuntime
from idiolect.errors import ConfigError, DataError, DeployError
from idiolect.experiment.components import assign_networks, build_method
from idiolect.experiment.load import parse_toml
from idiolect.experiment.portable import import_experiment
from idiolect.experiment.untrusted import CLOSED, refuse_code, trust_named_code
from idiolect.results.run_files import folder_name

LATEST = "latest.json"


class ModelInfo(NamedTuple):
    """Which run a model is of."""

    run: str
    label: str
    seed: int
    round: int
    client: int
    experiment: str  # as TOML
    newcomer: bool = False  # adapted to a run that was over
    reason: str = ""  # what the method chose for this client, and why, in words


class StoredModel(NamedTuple):
    """A finished model, read back."""

    about: ModelInfo
    leaves: dict[str, Tensor]  # of the deployed tree, by name
    form: ExampleForm
    shift: np.ndarray
    scale: np.ndarray
    clients: int


def save_personal_model(
    home: Path, about: ModelInfo, held: Federation, clients: int, deployed: Tree
) -> Path:
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
        "form": ExampleForm.of(held).plain(),
        "clients": clients,
    }
    checkpoint.save(path, content, meta)
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
    return StoredModel(
        ModelInfo(**meta["about"]),
        {n.removeprefix(prefix): leaf for n, leaf in named.items() if n.startswith(prefix)},
        ExampleForm(**meta["form"]),
        named["scaling.shift"].numpy(),
        named["scaling.scale"].numpy(),
        meta["clients"],
    )


def models_home(folder: Path) -> Path:
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


_ROWS = 512  # examples that are predicted at once
KINDS = (".safetensors", ".pt2", ".onnx")


class PersonalModel(nn.Module):
    """One client's model: examples as they were read in, logits out."""

    shift: Tensor
    scale: Tensor

    def __init__(self, stored: StoredModel, trust: bool = False) -> None:
        super().__init__()
        self._alone, form = _rehearsed(stored, trust)
        self._form = tree.map(lambda leaf: leaf, form)
        self._names = {name: f"leaf_{n}" for n, name in enumerate(tree.named(form))}
        for name, leaf in stored.leaves.items():
            self.register_buffer(self._names[name], leaf.clone())
        floats = np.dtype(stored.form.dtype).kind == "f" or stored.form.dtype == "uint8"
        self._decodes = floats  # other whole numbers are tokens
        self.register_buffer("shift", torch.from_numpy(stored.shift.copy()))
        self.register_buffer("scale", torch.from_numpy(stored.scale.copy()))

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [example, class]."""
        if self._decodes:
            x = (x.to(self.shift.dtype) - self.shift) * (1 / self.scale)
        own = {name: getattr(self, place) for name, place in self._names.items()}
        return self._alone.predict(tree.like(self._form, own), x)


def _rehearsed(stored: StoredModel, trust: bool) -> tuple[ClientRuntime, Any]:
    """Make the client anew, and the form of what it deploys, from blank examples."""
    about, form = stored.about, stored.form
    raw = parse_toml(about.experiment, "the stored model's experiment")
    if not trust:
        refuse_code(raw, "the stored model", Path.cwd())
    reach = trust_named_code(raw) if trust else CLOSED
    experiment = import_experiment(about.experiment, reach=reach)
    table = next((t for t in experiment.methods if (t.label or t.name) == about.label), None)
    if table is None:
        raise DeployError(f"the experiment of run {about.run} has no method {about.label!r}")
    shape, words = tuple(form.shape), tuple(form.words)
    classes = len(form.classes)
    bound = assign_networks(experiment, shape, classes, stored.clients, words, reach=reach)
    own = next(a for a in bound.values() if a.clients is None or about.client in a.clients)
    lessons, test = form.blank_client()
    place = ClientIdentity(about.client, stored.clients, about.seed, about.newcomer)
    alone = ClientRuntime(build_method(table), place, lessons, test, own, torch.device("cpu"))
    flags = ["keep", "newcomers"] if about.newcomer else ["keep"]
    _, _, deployed = alone.evaluate(alone.form, about.round, tested=True, flags=flags)
    return alone, checkpoint.fitted(deployed, stored.leaves, Path("the stored model"))


class Predictions(NamedTuple):
    """A class for every row, its probability, and the share that is right where that is known."""

    classes: list[str]
    probabilities: np.ndarray  # [row, class]
    accuracy: float | None


def predict(
    stored: StoredModel, data: str | Path, options: Mapping[str, Any], trust: bool = False
) -> Predictions:
    """Predict every row of a file; where it has labels, say how often they are met.

    A model of the next word predicts the one after the last of each row.
    """
    dataset, labelled = _dataset(stored, data, options)
    model = PersonalModel(stored, trust).eval()
    shares, right, seen = [], 0, 0
    with torch.no_grad():
        for start in range(0, len(dataset), _ROWS):
            rows = slice(start, start + _ROWS)
            x, y = (np.array(part[rows]) for part in (dataset.x, dataset.y))
            logits = model(torch.from_numpy(x)).numpy()
            right += int((logits.argmax(-1) == y).sum())
            seen += int((y >= 0).sum())
            if stored.form.sequential:
                last = np.maximum((x != PAD).sum(1) - 1, 0)
                logits = logits[np.arange(len(x)), last]
            shares.append(torch.from_numpy(logits).softmax(1).numpy())
    joined = np.concatenate(shares)
    chosen = [stored.form.classes[n] for n in joined.argmax(1)]
    return Predictions(chosen, joined, right / seen if labelled and seen else None)


def _dataset(
    stored: StoredModel, data: str | Path, options: Mapping[str, Any]
) -> tuple[Dataset, bool]:
    """Read rows, with their labels if they have any that the model knows."""
    form = stored.form
    if form.words:
        own = {"length": form.shape[0], "next_word": form.sequential}
        dataset = read(data, labelled=False, **{**options, **own})
        if not dataset.words:
            raise DataError(f"{dataset.name} holds no text, and the model reads text")
        dataset = encoded_as(dataset, tuple(form.words))
    else:
        dataset = read(data, labelled=False, **options)
    if list(dataset.x.shape[1:]) != form.shape or str(dataset.x.dtype) != form.dtype:
        raise DataError(
            f"examples of {dataset.name} are {dataset.x.dtype} {dataset.x.shape[1:]} and the "
            f"model's {form.dtype} {tuple(form.shape)}; bring them to that form"
        )
    if dataset.sequential:
        return dataset, True
    if dataset.classes == (UNLABELLED,):
        return dataset, False
    return with_classes(dataset, tuple(form.classes), "the model"), True


def as_csv(found: Predictions, classes: list[str], every: bool) -> str:
    """Write predictions as a table; with `every`, a column for each class's probability."""
    out = io.StringIO()
    table = csv.writer(out, lineterminator="\n")
    table.writerow(["row", "predicted", "probability", *(classes if every else ())])
    for row, (name, shares) in enumerate(zip(found.classes, found.probabilities, strict=True)):
        rest = [f"{share:.6f}" for share in shares] if every else []
        table.writerow([row, name, f"{shares.max():.6f}", *rest])
    return out.getvalue()


def export(stored: StoredModel, path: Path, trust: bool = False) -> None:
    """Write the model for others: its tensors, a `torch.export` program, or ONNX."""
    if path.suffix not in KINDS:
        raise ConfigError(f"{path} ends in {path.suffix!r}; expected one of {', '.join(KINDS)}")
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".safetensors":
        scaling = {"shift": torch.from_numpy(stored.shift), "scale": torch.from_numpy(stored.scale)}
        about = {key: value for key, value in stored.about._asdict().items()}
        meta = {"about": about, "form": stored.form.plain()}
        checkpoint.save(path, {"model": stored.leaves, "scaling": scaling}, meta, private=False)
        return
    model = PersonalModel(stored, trust).eval()
    rows = torch.zeros((2, *stored.form.shape), dtype=getattr(torch, stored.form.dtype))
    batch = torch.export.Dim("batch", min=1, max=1 << 20)
    program = torch.export.export(model, (rows,), dynamic_shapes=({0: batch},))
    if path.suffix == ".pt2":
        torch.export.save(program, path)
        return
    try:
        import onnxscript  # noqa: F401
    except ImportError:
        raise DeployError(
            "ONNX needs onnxscript, which is not installed; install it with `pip install "
            "'idiolect[onnx]'`, or export to .pt2"
        ) from None
    torch.onnx.export(program, (rows,), str(path), dynamo=True, verbose=False)
