"""Give clients that were not in training their personal models, from the folder of a run."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from idiolect.core.checkpoint import write_whole
from idiolect.core.method import Method
from idiolect.data import SOURCES, Dataset, federate
from idiolect.data.federation import Federation
from idiolect.errors import ConfigError, DataError
from idiolect.experiment.build import loaded, machine
from idiolect.experiment.build_methods import made
from idiolect.experiment.build_networks import architectures, listed
from idiolect.experiment.load import read_toml
from idiolect.experiment.newcomers import Adapted, Kept, adapted, kept
from idiolect.experiment.resolve import completed
from idiolect.experiment.run_methods import EXPERIMENT
from idiolect.experiment.schema import Experiment, MethodTable, Network
from idiolect.experiment.seed_parts import holding
from idiolect.experiment.suggestions import meant
from idiolect.experiment.untrusted import CLOSED, Reach, admit, refuse_code
from idiolect.results import scaling
from idiolect.results.document import Document, plain, versions
from idiolect.results.models import folder_name, save_models


def adapt(
    run_dir: str | Path,
    data: str | Path | Dataset,
    method: str | None = None,
    seed: int | None = None,
    *,
    out: str | Path | None = None,
    split: Sequence[float] | str = (0.6, 0.2, 0.2),
    network: str | None = None,
    device: str | None = None,
    data_dir: str | Path | None = None,
    options: Mapping[str, Any] | None = None,
    trust_code: bool = False,
) -> Document:
    """Give every client in `data` a personal model, as `idiolect adapt` does; return the findings.

    `data` is a path, a source or a dataset, read with `options`; without a client column it is one
    newcomer's. `network` picks one where the run's clients had several. The training data is not
    needed. A folder whose networks are somebody's code (`module:factory`) needs `trust_code`: it
    is imported and run.
    """
    folder = Path(run_dir)
    experiment = _experiment(folder, device, trust_code)
    table = chosen(experiment, method)
    label = table.label or table.name
    if (part := holding(folder, label, seed)) is not None:  # of a comparison
        experiment = _experiment(part, device, trust_code)
        table, folder = chosen(experiment, label), part
    run = kept(folder, label, seed)
    fitting = scaling.read(folder, run.seed)
    if not isinstance(data, Dataset):
        own = {**_readable(str(data), fitting), **(options or {})}
        data = loaded(str(data), own, Path(data_dir) if data_dir else None)
    federation = _federation(scaling.matched(data, fitting), run.seed, split)
    reach = Reach(Path.cwd()) if trust_code else CLOSED
    networks = architectures(with_one_network(experiment, network), [federation], reach)
    settled = made(table)
    place = network_place(experiment, network)
    found = adapted(settled, run, federation, networks, machine(experiment), place)
    target = Path(out) if out else Path(run_dir) / "newcomers" / folder_name(data.name)
    about = {"source": federation.dataset.name, "federation": federation.description}
    parts = (federation.train, federation.val, federation.test)
    sizes = [[len(part[place]) for part in parts] for place in range(federation.clients)]
    content = laid_out(experiment, table, run, about, federation.names, sizes, found)
    save_models(target, label, run.seed, federation.names, found.verdict.deployed)
    write_findings(target, content)
    return {**content, "folder": str(target)}


_UNUSED = ("data", "splits", "tune", "attack", "logging")  # tables without a meaning for newcomers


def _experiment(folder: Path, device: str | None, trust_code: bool) -> Experiment:
    """Read what a run was, without its data: that may be gone, or somebody else's."""
    path = folder / EXPERIMENT
    if not path.is_file():
        raise DataError(f"{folder} holds no {EXPERIMENT}; give the folder of a finished run")
    raw = read_toml(path)
    raw = {key: value for key, value in raw.items() if key not in _UNUSED}
    if isinstance(raw.get("backend"), dict):
        raw["backend"].pop(
            "ray", None
        )  # the cluster of whoever ran it; RAY_ADDRESS names one's own
    if not trust_code:
        refuse_code(raw, str(path), folder, Path.cwd())
        try:
            admit(raw, str(path))
        except ConfigError as error:
            raise ConfigError(
                f"{error}. If you trust the folder, add --trust-code (from Python: trust_code=True)"
            ) from None
    if device is not None:
        raw["backend"] = {**raw.get("backend", {}), "device": device}
    return completed(raw, str(path), Reach(folder) if trust_code else CLOSED)


def _readable(source: str, fitting: scaling.Scaling) -> dict[str, Any]:
    """Return the options that make a source, or own data, fit the run's text."""
    known = SOURCES[source].options() if source in SOURCES else fitting.reading
    return {name: value for name, value in fitting.reading.items() if name in known}


def chosen(experiment: Experiment, label: str | None) -> MethodTable:
    """Find the method newcomers are to have a model of."""
    tables = {table.label or table.name: table for table in experiment.methods}
    if label is None:
        if len(tables) > 1:
            raise ConfigError(f"the run has several methods; add --method {' | '.join(tables)}")
        return experiment.methods[0]
    named = [table for table in experiment.methods if table.name == label]
    if label not in tables and len(named) == 1:  # as in --set, its name will do
        return named[0]
    if label not in tables:
        raise ConfigError(f"--method: unknown label {meant(label, tables)}")
    return tables[label]


def _federation(dataset: Dataset, seed: int, split: Sequence[float] | str) -> Federation:
    """Divide by clients; data that names none is one newcomer's."""
    if dataset.clients is None:
        one = np.zeros(len(dataset), np.int64)
        dataset = dataclasses.replace(dataset, clients=one, client_names=("newcomer",))
    return federate(dataset, "natural", seed, split, drop=True)


def with_one_network(experiment: Experiment, label: str | None) -> Experiment:
    """Bind newcomers to one network: which one, only the user can say where there were several."""
    networks = listed(experiment.model)
    if label is None and len(networks) > 1:
        raise ConfigError(
            f"the run's clients had several networks; add --network {' | '.join(networks)}"
        )
    if label is not None and label not in networks:
        raise ConfigError(f"--network: unknown network {meant(label, networks)}")
    one = networks[label or next(iter(networks))]
    model = Network(name=one.name, auxiliary=experiment.model.auxiliary, **one.options)
    return experiment.model_copy(update={"model": model})


def network_place(experiment: Experiment, label: str | None) -> int:
    """Return a network's place among the run's."""
    return 0 if label is None else list(listed(experiment.model)).index(label)


def laid_out(
    experiment: Experiment,
    table: MethodTable,
    run: Kept,
    about: Mapping[str, str],
    names: Sequence[str],
    sizes: Sequence[Sequence[int]],
    found: Adapted,
) -> Document:
    """Lay out what was found; `sizes` are each newcomer's training, validation and test rows."""
    method = made(table)
    content: Document = {
        "run": experiment.name,
        "method": table.name,
        "label": run.label,
        "settings": table.settings,
        "seed": run.seed,
        "round": run.round,
        "met": found.met,
        "notices": found.notices,
        "data": dict(about),
        "newcomers": [
            _newcomer(names[place], sizes[place], found, place, method)
            for place in range(len(names))
        ],
        "versions": versions(),
    }
    laid: Document = plain(content)
    return laid


def write_findings(folder: Path, content: Document) -> None:
    """Write what was found into a folder."""
    text = json.dumps(content, indent=1, allow_nan=False, ensure_ascii=False) + "\n"
    name = f"{folder_name(content['label'])}-seed-{content['seed']}.json"
    write_whole(folder / name, text.encode())


def _newcomer(
    name: str, sizes: Sequence[int], found: Adapted, place: int, method: Method
) -> Document:
    verdict = found.verdict
    facts = {fact: values[place] for fact, values in verdict.facts.items()}
    reason = method.reason(facts)
    return {
        "client": name,
        "train": sizes[0],
        "val": sizes[1],
        "test": sizes[2],
        "models": {
            model: {metric: values[place] for metric, values in metrics.items()}
            for model, metrics in verdict.scores.items()
        },
        "facts": facts,
        **({"reason": reason} if reason else {}),
    }
