"""Run a table or figure of a paper: its experiments, one after the other, into a folder each."""

import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path

from idiolect.errors import ConfigError
from idiolect.experiment.schema import Experiment
from idiolect.experiment.resolve import load_experiment
from idiolect.experiment.repro.item import Item, Runnable, experiments_folder
from idiolect.experiment.repro.measured import Figure, of_result
from idiolect.results.document import Document

Execute = Callable[[Experiment, Path], Document]


def run(
    item: Item, figure: str, execute: Execute, out: Path, overrides: Sequence[str] = ()
) -> dict[str, dict[str, dict[str, Figure]]]:
    """Run all of an item with `execute`; return the figures, by run as the index names them."""
    if not item.experiments:
        raise ConfigError(f"{item.id} has nothing to run: {item.note or item.title}")
    # All files are read and checked before the first is run, which may take hours.
    loaded = [
        (name_of(one), load_experiment(_path(item, one), [*one.set, *overrides]))
        for one in item.experiments
    ]
    return {name: of_result(execute(experiment, out / name), figure) for name, experiment in loaded}


def name_of(one: Runnable) -> str:
    """Return the name a run is kept by: its own, or that of the experiment file."""
    path = experiments_folder() / one.file
    if one.name or not path.exists():
        return one.name or Path(one.file).stem
    return str(tomllib.loads(path.read_text(encoding="utf-8"))["name"])


def _path(item: Item, one: Runnable) -> Path:
    path = experiments_folder() / one.file
    if not path.exists():
        raise ConfigError(f"{item.id} needs {one.file}, which is not among the experiments here")
    return path
