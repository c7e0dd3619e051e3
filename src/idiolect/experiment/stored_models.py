"""Personal models that lie in a folder: of a run, a comparison or newcomers; made whole again."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from idiolect.core import checkpoint, tree
from idiolect.core.tree import Tree
from idiolect.data.columns import embedded_blocks
from idiolect.data.federation import TrainData
from idiolect.data.preprocessing import Preprocessing
from idiolect.engine.architecture import Architecture, build_modules
from idiolect.engine.deployment_runtime import ClientIdentity, ClientRuntime
from idiolect.engine.outcome import THRESHOLD
from idiolect.engine.personal_model import PersonalModel
from idiolect.errors import CheckpointError, ConfigError, DataError, suggest
from idiolect.experiment.components import (
    assign_networks,
    build_method,
    client_labels,
    networks_by_label,
)
from idiolect.experiment.load import parse_toml, read_toml, resolve
from idiolect.experiment.portable import NOWHERE, export_experiment, import_experiment
from idiolect.experiment.run import EXPERIMENT
from idiolect.experiment.schema import Data, Experiment, MethodTable, ModelTable
from idiolect.experiment.untrusted import (
    CLOSED,
    Permissions,
    by_digest,
    refuse_code,
    refuse_untrusted,
    trust_named_code,
)
from idiolect.results import document, run_files, statistics
from idiolect.results.document import Document
from idiolect.results.run_files import NEWCOMERS, PARTS, PublicForm, folder_name

BEST = "best"  # instead of a method's label: the one that validation data speaks for


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
    form: Preprocessing
    clients: int
    public: PublicForm
    name: str = ""  # of the client
    found: Mapping[str, Any] = {}  # what a result says of it: data, method, scores, privacy

    @property
    def threshold(self) -> float | None:
        """The probability from which a row is called positive, where the run chose one."""
        own = self.found.get("client", {}).get("personal", {})
        value = own.get(THRESHOLD) if isinstance(own, Mapping) else None
        return float(value) if isinstance(value, int | float) else None


# A module again.


def make_model(stored: StoredModel, trust: bool = False) -> PersonalModel:
    """Make the module of a stored model, which takes examples as they were read in.

    The form of what its method deploys is found by rehearsing on blank examples. An own network is
    code, and needs `trust`.
    """
    about, form = stored.about, stored.form
    raw = parse_toml(about.experiment, "the stored model's experiment")
    if not trust:
        refuse_code(raw, "the stored model", Path.cwd())
    reach = trust_named_code(raw) if trust else CLOSED
    experiment = import_experiment(about.experiment, reach=reach)
    table = next((t for t in experiment.methods if (t.label or t.name) == about.label), None)
    if table is None:
        raise DataError(f"the experiment of run {about.run} has no method {about.label!r}")
    bound = assign_networks(
        experiment,
        form.shape,
        len(form.classes),
        stored.clients,
        form.words,
        reach=reach,
        blocks=embedded_blocks([form.encoder]),
    )
    own = next(a for a in bound.values() if a.clients is None or about.client in a.clients)
    failed: CheckpointError | None = None
    # A client that took part in no round deploys as a newcomer does.
    for newcomer in (True,) if about.newcomer else (False, True):
        template = _rehearsed(stored, table, own, newcomer)
        try:
            deployed = tree.like(template, stored.leaves)
        except CheckpointError as error:
            failed = failed or error
            continue
        modules = build_modules("main", own, about.seed, form.words)
        return PersonalModel(build_method(table), modules, deployed, form, stored.threshold)
    raise DataError(f"the stored model does not fit its method {about.label}: {failed}")


def _rehearsed(stored: StoredModel, table: MethodTable, own: Architecture, newcomer: bool) -> Tree:
    """Return the form of what a client deploys, by doing so with blank examples."""
    about, rows, public = stored.about, np.arange(4), None
    if stored.public.size:
        public = stored.form.blank(stored.public.size)
        if not stored.public.labels and stored.form.task.kind == "classes":
            public = dataclasses.replace(public, classes=("any", "other"))
    blank = TrainData(stored.form.blank(4), (rows[:2],), (rows[2:3],), ("nobody",), public)
    place = ClientIdentity(about.client, stored.clients, about.seed, newcomer)
    alone = ClientRuntime(build_method(table), place, blank, rows[3:], own, torch.device("cpu"))
    flags = ["keep", "newcomers"] if newcomer else ["keep"]
    _, _, deployed = alone.evaluate(alone.form, about.round, tested=True, flags=flags)
    return deployed


# Finding one.


def find_model(
    folder: str | Path,
    client: int | str | None = None,
    method: str | None = None,
    seed: int | None = None,
    *,
    trust: bool = False,
) -> StoredModel:
    """Read one client's model from the folder of a run, a comparison or newcomers.

    Without a method it is the run's only one; `best` is the one with the highest score on
    validation data. Without a seed it is the first.
    """
    home = Path(folder)
    if newcomers := _newcomer_files(home):
        return _newcomer_model(newcomers, client, method, seed, home)
    refuse_no_run(home)
    content = read_content(home)
    experiment = read_experiment(home, trust)
    label = choose_label(experiment, content, method, home)
    places = _places(home, label)
    if not places:
        raise DataError(_no_models(home, experiment, label))
    seeds = sorted({seed for _, seed in places})
    chosen = seeds[0] if seed is None else seed
    held = [place for place, own in places if own == chosen]
    if not held:
        raise ConfigError(
            f"--seed is {chosen}, and {home} has models of seeds {', '.join(map(str, seeds))}"
        )
    place = next((one for one in held if _as_chosen(one, content, label, chosen)), held[0])
    named, meta = checkpoint.read(run_files.models_path(place, label, chosen))
    names = [str(name) for name in meta["clients"]]
    number = client_number(client, names)
    if number is None:
        later = [path for path in _later(home, label) if path.stem.endswith(f"-seed-{chosen}")]
        return _newcomer_model(later, client, label, chosen, home, names)
    if place != home and (place / EXPERIMENT).is_file():  # settings that the seed chose
        experiment = read_experiment(place, trust)
    table = choose_method(experiment, label)
    found = findings(home, content, label, chosen, number)
    fitting = place if (place / run_files.SCALING_FILE).is_file() else home
    about = ModelInfo(
        experiment.name,
        label,
        chosen,
        table.rounds or experiment.rounds,
        number,
        alone(experiment, table, client_network(experiment, number, names), trust),
        False,
        str(found.get("reason", "")),
    )
    return StoredModel(
        about,
        run_files.one_client(named, meta["architectures"], number),
        run_files.read_scaling(fitting, chosen),
        len(names),
        run_files.read_public(fitting),
        names[number],
        found,
    )


def _newcomer_model(
    files: Sequence[Path],
    client: int | str | None,
    method: str | None,
    seed: int | None,
    home: Path,
    others: Sequence[str] = (),
) -> StoredModel:
    """Read a newcomer's model by what `adapt` wrote beside it; `others` are the run's clients."""
    held = [(path, _written(path)) for path in files]
    labels = list(dict.fromkeys(own["label"] for _, own in held))
    if method is None and len(labels) > 1:
        raise ConfigError(
            f"{home} has models of several methods; add --method {' | '.join(labels)}"
        )
    known = list(others)
    for path, own in held:
        if method not in (None, own["label"]) or seed not in (None, own["seed"]):
            continue
        names = [one["client"] for one in own["newcomers"]]
        number = None if others and isinstance(client, int) else client_number(client, names)
        if number is None:
            known += names
            continue
        label, chosen = own["label"], own["seed"]
        named, meta = checkpoint.read(run_files.models_path(path.parent, label, chosen))
        one = own["newcomers"][number]
        reason = str(one.get("reason", ""))
        text = str(own["experiment"])
        info = ModelInfo(own["run"], label, chosen, own["round"], number, text, True, reason)
        found = {
            "run": own["run"],
            "data": {"source": own["data"]["source"], "provenance": ""},
            "settings": own["settings"],
            "client": {**one, **one.get("models", {})},
            "versions": own["versions"],
        }
        return StoredModel(
            info,
            run_files.one_client(named, meta["architectures"], number),
            Preprocessing.from_json(own["preprocessing"], str(path)),
            len(names),
            PublicForm(*own["public"]),
            names[number],
            found,
        )
    known = list(dict.fromkeys(known))
    if client is None and known:
        raise ConfigError(f"add --client {' | '.join(known[:8])}{' | ...' * (len(known) > 8)}")
    if not known:
        raise ConfigError(f"{home} has models of {' | '.join(labels)}; see --method and --seed")
    raise DataError(f"{home} has no client {suggest(str(client), known)}")


def _newcomer_files(home: Path) -> list[Path]:
    """List what `adapt` wrote into a folder of newcomers; nothing where it is none."""
    if (home / EXPERIMENT).exists() or not (home / "models").is_dir():
        return []
    return sorted(home.glob("*-seed-*.json"))


def _later(home: Path, label: str) -> list[Path]:
    return sorted(home.glob(f"{NEWCOMERS}/*/{folder_name(label)}-seed-*.json"))


def _written(path: Path) -> dict[str, Any]:
    """Read what `adapt` wrote of newcomers."""
    try:
        own: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        whole = {"label", "seed", "newcomers", "run", "round", "settings", "data", "versions"}
        if not whole <= set(own):
            raise ValueError("it lacks keys")
    except (OSError, ValueError, TypeError) as error:
        raise DataError(f"{path} is damaged ({error}); adapt again") from None
    if "experiment" not in own:
        raise DataError(f"{path} was written by an older idiolect; run `idiolect adapt` again")
    return own


def model_names(folder: str | Path) -> list[str]:
    """List the clients that a folder has models of, of any method; newcomers last."""
    home = Path(folder)
    found: list[str] = []
    for path in _files(home, "*"):
        _, meta = checkpoint.read(path)
        kept = {number for own in meta["architectures"] for number in own}
        found += [str(name) for n, name in enumerate(meta["clients"]) if n in kept]
    return list(dict.fromkeys(found))


def refuse_no_run(folder: Path) -> None:
    """Refuse a folder without a run in it, saying which of its folders have one."""
    if (folder / EXPERIMENT).is_file():
        return
    below = sorted(p.parent.name for p in folder.glob(f"*/{EXPERIMENT}"))
    if below:
        raise DataError(
            f"{folder} holds several runs; give one of them: "
            f"{', '.join(str(folder / one) for one in below[:6])}"
        )
    raise DataError(
        f"{folder} holds no personal model; give the folder of a finished run or comparison, a "
        "folder that `idiolect export` wrote, or a node's kit"
    )


def read_experiment(folder: Path, trust_code: bool, device: str | None = None) -> Experiment:
    """Read what a run was, without its data: that may be gone, or somebody else's."""
    path = folder / EXPERIMENT
    if not path.is_file():
        raise DataError(f"{folder} holds no {EXPERIMENT}; give the folder of a finished run")
    raw = read_toml(path)
    raw = {key: by_digest(value) for key, value in raw.items() if key not in _UNUSED}
    if isinstance(raw.get("backend"), dict):
        # The cluster of whoever ran it; RAY_ADDRESS names one's own.
        raw["backend"].pop("ray", None)
    if not trust_code:
        refuse_code(raw, str(path), folder, Path.cwd())
        try:
            refuse_untrusted(raw, str(path))
        except ConfigError as error:
            raise ConfigError(
                f"{error}. If you trust the folder, add --trust-code (from Python: trust_code=True)"
            ) from None
    if device is not None:
        raw["backend"] = {**raw.get("backend", {}), "device": device}
    return resolve(raw, str(path), Permissions(folder) if trust_code else CLOSED)


_UNUSED = ("data", "splits", "tune", "attack", "logging")  # tables without a meaning afterwards


def choose_method(experiment: Experiment, label: str | None) -> MethodTable:
    """Find a method of a run by its label or name; a run's only one without."""
    tables = {table.label_or_name: table for table in experiment.methods}
    if label is None:
        if len(tables) > 1:
            raise ConfigError(f"the run has several methods; add --method {' | '.join(tables)}")
        return experiment.methods[0]
    named = [table for table in experiment.methods if table.name == label]
    if label not in tables and len(named) == 1:  # as in --set, its name will do
        return named[0]
    if label not in tables:
        raise ConfigError(f"--method: unknown label {suggest(label, tables)}")
    return tables[label]


def with_one_network(experiment: Experiment, label: str | None) -> Experiment:
    """Bind clients to one network: which one, only the user can say where there were several."""
    networks = networks_by_label(experiment.model)
    if label is None and len(networks) > 1:
        raise ConfigError(
            f"the run's clients had several networks; add --network {' | '.join(networks)}"
        )
    if label is not None and label not in networks:
        raise ConfigError(f"--network: unknown network {suggest(label, networks)}")
    one = networks[label or next(iter(networks))]
    model = ModelTable(name=one.name, auxiliary=experiment.model.auxiliary, **one.options)
    return experiment.model_copy(update={"model": model})


def choose_label(experiment: Experiment, content: Document, method: str | None, home: Path) -> str:
    """Find a method's label by what a user gave; `best` is the best on validation data."""
    labels = [table.label_or_name for table in experiment.methods]
    if method == BEST and BEST not in labels:
        return best_method(content, labels, home)
    try:
        return choose_method(experiment, method).label_or_name
    except ConfigError as error:
        if method is None:
            raise ConfigError(f"{error}, or --method best (by validation data)") from None
        raise


def best_method(content: Document, labels: Sequence[str], home: Path) -> str:
    """Return the method whose clients' own models score best on validation data."""
    metric = document.metric_of(content)
    scores: dict[str, float] = {}
    for label, own in content.get("methods", {}).items():
        model = next(iter(own.get("headline", {})), "personal")
        seen = [seed["models"].get(model, {}).get(f"val_{metric.name}") for seed in own["seeds"]]
        score = statistics.known_mean(seen)
        if label in labels and score is not None:
            scores[label] = metric.sign * score
    if not scores:
        raise DataError(
            f"{home} has no scores on validation data to choose by; name one with --method "
            f"{' | '.join(labels)}"
        )
    return max(scores, key=lambda label: scores[label])


def client_network(experiment: Experiment, number: int, names: Sequence[str]) -> str | None:
    """Return the label of a client's network; None where all have the same."""
    if len(networks_by_label(experiment.model)) == 1:
        return None
    return client_labels(experiment.model, len(names), names)[number]


def alone(experiment: Experiment, table: MethodTable, network: str | None, trust: bool) -> str:
    """Write what one client's model needs of an experiment: its method and its network."""
    packages = trust_named_code(experiment.model_dump()).packages if trust else ()
    one = with_one_network(experiment, network).model_copy(
        update={
            "methods": (table,),
            "data": Data(source=NOWHERE),
            "tune": None,
            "splits": (),
            "attack": None,
            "deploy": experiment.deploy.model_copy(update={"packages": packages}),
        }
    )
    return export_experiment(one)


def _files(home: Path, label: str) -> list[Path]:
    """List the files of models below a run's folder, newcomers' last."""
    own = f"models/{label}/seed-*.safetensors"
    found = [*home.glob(own), *home.glob(f"{PARTS}/*/*/*/{own}")]
    return sorted(found) + sorted(home.glob(f"{NEWCOMERS}/*/{own}"))


def _places(home: Path, label: str) -> list[tuple[Path, int]]:
    """List the folders that hold models of a method, and of which seed."""
    found = []
    for path in _files(home, folder_name(label)):
        if path.parents[3].name == NEWCOMERS:
            continue
        seed = path.stem.removeprefix("seed-")
        if seed.isdecimal():
            found.append((path.parents[2], int(seed)))
    return found


def _as_chosen(place: Path, content: Document, label: str, seed: int) -> bool:
    """Say whether a part was trained with the settings that the result tells of for a seed."""
    method = content.get("methods", {}).get(label, {})
    path = place / EXPERIMENT
    if not path.is_file() or not method:
        return False
    seeds = [one["seed"] for one in method["seeds"]]
    tables = read_toml(path).get("methods", [{}])
    own: dict[str, Any] = next(
        (one for one in tables if label in (one.get("label"), one.get("name"))), {}
    )
    for key, value in method.get("settings", {}).items():
        given = own.get(key, value)
        if isinstance(value, list) and not isinstance(given, list) and len(value) == len(seeds):
            value = value[seeds.index(seed)]  # seeds chose otherwise, each its own
        if document.plain(given) != value:
            return False
    return True


def _no_models(home: Path, experiment: Experiment, label: str) -> str:
    if not experiment.evaluate.save_models:
        return (
            f"{home} holds no models, for its experiment has evaluate.save_models = false; run it "
            "again with --set evaluate.save_models=true"
        )
    return (
        f"{home} holds no models of {label}; finish it with `idiolect run EXPERIMENT.toml "
        "--resume`, or see its notes: very many clients' models are not kept"
    )


def client_number(client: int | str | None, names: Sequence[str]) -> int | None:
    """Find a client by its name, else by its number; the only one without either."""
    if client is None:
        return 0 if len(names) == 1 else None
    if isinstance(client, str) and client in names:
        return list(names).index(client)
    if isinstance(client, int) or client.isdecimal():
        return int(client) if int(client) < len(names) else None
    return None


def read_content(home: Path) -> Document:
    """Read a run's result; nothing where it left none."""
    try:
        return document.read_document(home)
    except DataError:
        return {}


def findings(home: Path, content: Document, label: str, seed: int, number: int) -> dict[str, Any]:
    """Collect what a result says of one client's model, for its card."""
    method = content.get("methods", {}).get(label, {})
    found: dict[str, Any] = {
        "run": content.get("name", home.name),
        "data": {k: content.get("data", {}).get(k, "") for k in ("source", "provenance")},
        "settings": method.get("settings", {}),
        "privacy": method.get("privacy"),
        "headline": method.get("headline", {}),
        "metric": document.metric_of(content).title,
        "versions": content.get("versions", {}),
    }
    for one in method.get("seeds", ()):
        if one["seed"] == seed and number < len(one["clients"]):
            client = one["clients"][number]
            found |= {"client": client, "reason": client.get("reason", "")}
    return found
