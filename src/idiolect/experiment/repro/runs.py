"""Run a table or figure of a paper: its experiments, one after the other, into a folder each."""

import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from idiolect.errors import ConfigError
from idiolect.experiment.load import load_experiment
from idiolect.experiment.repro.items import Item, Paper, Runnable
from idiolect.experiment.repro.seed_figures import Figure, Measured, figures_of_result, shipped
from idiolect.experiment.schema import Experiment
from idiolect.results.document import FILE, Document, read_document


def experiments_folder() -> Path:
    """Return where the experiment files are: in the package if installed, else in the checkout."""
    inside = Path(__file__).parent / "experiments"
    return inside if inside.is_dir() else Path(__file__).parents[4] / "experiments"


Execute = Callable[[Experiment, Path, Sequence[str]], Document]
"""Runs an experiment into a folder, all its methods or those with these labels."""


def run_item(
    item: Item,
    figure: str,
    execute: Execute,
    out: Path,
    overrides: Sequence[str] = (),
    only: Sequence[str] = (),
) -> dict[str, dict[str, dict[str, Figure]]]:
    """Run all of an item with `execute`; return the figures, by run as the index names them.

    With `only` the methods of these labels are run, of whichever experiments have them.
    """
    if not item.experiments:
        raise ConfigError(f"{item.id} has nothing to run: {item.note or item.title}")
    # All files are read and checked before the first is run, which may take hours.
    loaded = load_item(item, overrides)
    labels = {name: labels_of(experiment) for name, experiment in loaded}
    if unknown := [one for one in only if not any(one in own for own in labels.values())]:
        known = dict.fromkeys(one for own in labels.values() for one in own)
        raise ConfigError(
            f"no method of {item.id} is called {unknown[0]!r}: it has {', '.join(known)}"
        )
    found = {}
    for name, experiment in loaded:
        wanted = [one for one in only if one in labels[name]]
        if wanted or not only:
            result = execute(experiment, out / name, wanted)
            found[name] = figures_of_result(result, item.figure or figure)
    return found


class Estimate(NamedTuple):
    """Minutes of a whole item on one H200, from kept seconds."""

    least: float  # seeds beyond those that were trained at once cost nothing
    most: float  # they cost as much as the others
    known: int  # methods of which seconds are kept
    asked: int  # methods of the item


def estimated(item: Item) -> Estimate:
    """Estimate how long an item takes: seconds of a seed and round, as often as its files ask."""
    kept_runs, least, most, known, asked = shipped(), 0.0, 0.0, 0, 0
    for one in item.experiments:
        experiment = load_experiment(_experiment_path(item, one), one.set)
        asked += len(experiment.methods)
        for own in experiment.methods:
            kept = kept_runs.get(name_of(one), {}).get(own.label_or_name, {})
            if "seconds" in kept:
                seeds, had = len(experiment.seeds), len(next(iter(kept["models"].values())))
                a_seed = kept["seconds"] * (own.rounds or experiment.rounds) / 60
                least, most = least + a_seed * min(seeds, had), most + a_seed * seeds
                known += 1
    return Estimate(least, most, known, asked)


def load_item(item: Item, overrides: Sequence[str] = ()) -> list[tuple[str, Experiment]]:
    """Return an item's experiments by the names that their runs are kept by."""
    loaded: list[tuple[str, Experiment]] = []
    for one in item.experiments:
        experiment = load_experiment(_experiment_path(item, one), [*one.set, *overrides])
        name = name_of(one)
        if name in dict(loaded):
            raise ConfigError(
                f"{item.id} has two runs called {name!r}; give each a name, such as "
                f'{{ file = "{Path(one.file).name}", name = "{name}-2", set = [...] }}'
            )
        loaded.append((name, experiment))
    return loaded


def labels_of(experiment: Experiment) -> list[str]:
    """Return what an experiment's methods are called."""
    return [one.label_or_name for one in experiment.methods]


def finished_figures(paper: Paper, item: Item, out: Path) -> Measured:
    """Return the figures of an item's runs that lie in a folder, as far as they are finished."""
    folders = {name: out / name for name in map(name_of, item.experiments)}
    found = {
        name: figures_of_result(read_document(folder), item.figure or paper.figure)
        for name, folder in folders.items()
        if (folder / FILE).exists()
    }
    for cell in item.cells:
        models = found.get(cell.run, {}).get(cell.label, {cell.model: None})
        if cell.model not in models:
            known = ", ".join(map(repr, models))
            raise ConfigError(
                f"cell {cell.what!r}: {cell.label} has no model {cell.model!r} in "
                f"{folders[cell.run]}; it has {known}"
            )
    return found


def name_of(one: Runnable) -> str:
    """Return the name a run is kept by: its own, or that of the experiment file."""
    path = experiments_folder() / one.file
    if one.name or not path.exists():
        return one.name or Path(one.file).stem
    return str(tomllib.loads(path.read_text(encoding="utf-8"))["name"])


def _experiment_path(item: Item, one: Runnable) -> Path:
    path = experiments_folder() / one.file
    if not path.exists():
        raise ConfigError(
            f"{item.id} needs {one.file}, which is neither beside its table nor among the "
            "experiments here"
        )
    return path
