"""What can be known before the first round, checked for all methods of a file before any trains."""

import math
import shutil
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path

import numpy as np
import torch
from torch import nn

from idiolect.core import capabilities, tree
from idiolect.core.capabilities import ArchitectureState, Privacy, has
from idiolect.core.method import Setup, refuse_task
from idiolect.data.dataset import Dataset
from idiolect.data.federation import Federation
from idiolect.engine import architecture
from idiolect.engine.architecture import Architecture, WordNetwork
from idiolect.engine.backend import TRAINING_ROOM, Backend, machine_memory
from idiolect.engine.data_pools import DataPools
from idiolect.engine.evaluation import refuse_metric
from idiolect.engine.ray_backend import cluster
from idiolect.engine.row_metrics import VALIDATION
from idiolect.errors import ConfigError, DataError, IdiolectError, MissingExtra, ModelError
from idiolect.experiment.job import SimulatedJob
from idiolect.experiment.schema import Experiment
from idiolect.models import MODELS


def refuse_misfits(experiment: Experiment, jobs: Sequence[SimulatedJob], folder: Path) -> list[str]:
    """Refuse what would fail later: a network, a method's needs, a library, a full disk.

    Returns what is allowed and noteworthy.
    """
    _refuse_missing_libraries(experiment)
    setups = _setups(jobs[0]) if jobs else {}
    notes = list(experiment.notes)
    for job in jobs:
        refuse_metric(job.choice, job.federations[0].dataset)
        if experiment.bystanders == "train" and has(job.method, ArchitectureState):
            raise ConfigError(
                f"bystanders = 'train' does not go with {job.label}, whose groups hear all who "
                "train; leave it at 'rest'"
            )
        if job.unseen and job.method.pooled:
            raise ConfigError(
                f"unseen does not go with {job.label}, which trains on the rows of all clients; "
                "leave one of the two out"
            )
        left, needed = job.plan(job.rounds).clients, job.cohort or 1
        if job.unseen and not job.method.alone and left < needed:
            raise ConfigError(
                f"unseen = {job.unseen} leaves too few clients that can train: {left}, and a round "
                f"needs {needed}; lower it"
            )
        if job.backend.device == "mps" and has(job.method, Privacy):
            raise ConfigError(
                f"{job.label}: noise of aggregate = 'dp' needs double precision, which device "
                "'mps' lacks; use device = 'cpu'"
            )
        _refuse_unmet_needs(job, setups)
        if job.method.chooses and not job.validated:
            notes.append(
                f"{job.label} chooses by validation rows, and under some seed no client has any; "
                "give them a share, such as data.split = [0.6, 0.15, 0.25]"
            )
        if job.evaluate.threshold == VALIDATION and not job.follows:
            raise ConfigError(
                f"{job.label}: evaluate.threshold = 'validation' needs validation rows that "
                "nothing was trained on; give a number, or leave refit out"
            )
        if (
            any(own.statistics for own in setups.values())
            and job.method.settings().get("batch") == 1
        ):
            notes.append(
                f"{job.label}: batch is 1 and the network has batch normalisation, which needs "
                "two values to normalise by; use a larger batch, or norm = 'group'"
            )
    if experiment.evaluate.save_models and jobs:
        _refuse_full_disk(jobs, setups, folder)
    return notes


def _refuse_missing_libraries(experiment: Experiment) -> None:
    if experiment.backend.kind == "ray":
        cluster.required()
    if experiment.tune is not None and experiment.tune.search == "optuna":
        try:
            import_module("optuna")
        except ImportError as error:
            raise MissingExtra('tune.search = "optuna" needs Optuna', "tune") from error


# Networks.


def _setups(job: SimulatedJob) -> dict[str, Setup]:
    """Build every network once and try it on two examples; return what methods start from."""
    held = job.federations[0]
    examples = DataPools([held.train_data], torch.device("cpu")).examples()
    plain = Backend("sequential", "cpu")
    found: dict[str, Setup] = {}
    for name, one in job.architectures.items():
        _refuse_giants(name, one, held.dataset)
        try:
            made = architecture.make(name, one, job.seeds[:1], [held.train_data], examples, plain)
        except ModelError as error:
            raise ModelError(_fitting(name, held, error)) from None
        found[name] = _weightless(made.setups[0])
    return found


def _weightless(setup: Setup) -> Setup:
    """Leave the values out, so that a method's state made of it weighs nothing."""
    nowhere = torch.device("meta")
    params, auxiliary, sizes = tree.to((setup.params, setup.auxiliary, setup.sizes), nowhere)
    return setup._replace(params=params, auxiliary=auxiliary, sizes=sizes)


def _refuse_giants(name: str, one: Architecture, dataset: Dataset) -> None:
    """Refuse a network that this machine cannot hold, before it is made."""
    try:
        with torch.device("meta"):
            weights = sum(leaf.numel() * leaf.element_size() for leaf in one.main().parameters())
    except Exception:  # it cannot be built, which is said later, or only with values
        return
    if TRAINING_ROOM * weights > machine_memory():
        small = "; smaller images make it smaller: data.options.size = [64, 64]"
        raise ModelError(
            f"network {name!r} has {weights / 4e6:,.0f} million parameters for examples of "
            f"{_shape(dataset.x.shape[1:])}, more than this machine's memory can train; choose "
            f"another{small if dataset.x.ndim == 4 else ''}"
        )


def _fitting(name: str, held: Federation, error: ModelError) -> str:
    """Say which networks fit, where a built-in one does not."""
    if name not in MODELS:
        return str(error)
    dataset = held.dataset
    fit = [own for own in MODELS if own != name and _fits(own, dataset)]
    if not fit or ("cannot be built" not in str(error) and "fails on" not in str(error)):
        return str(error)
    what = "words" if dataset.words else "numbers" if dataset.x.ndim == 2 else "pixels"
    return (
        f"network {name!r} does not fit examples of {_shape(dataset.x.shape[1:])} {what}; these "
        f"do: {', '.join(fit)} (set model.name)"
    )


def _fits(name: str, dataset: Dataset) -> bool:
    """Return whether a built-in network takes such examples; it is built without values."""
    shape, classes = tuple(dataset.x.shape[1:]), len(dataset.classes)
    try:
        build = architecture.bound(MODELS[name], shape, classes, dataset.words, {})
        if isinstance(build, WordNetwork) != bool(dataset.words):
            return False
        kind = torch.float32 if dataset.decodes else torch.int64
        with torch.device("meta"):
            model: nn.Module = build()
            made = model.eval()(torch.zeros((2, *shape), dtype=kind))
        return tuple(made.shape) == (2, *dataset.y.shape[1:], classes)
    except Exception:
        return False


def _shape(sizes: Sequence[int]) -> str:
    return "×".join(map(str, sizes))


# Methods.


def _refuse_unmet_needs(job: SimulatedJob, setups: Mapping[str, Setup]) -> None:
    """Make a method's states without values: it refuses the data and networks that it cannot use.

    Where values are needed for that, as an own method may, the first round has to show it.
    """
    method, first = job.method, next(iter(setups.values()))
    for name, setup in setups.items():
        for make in (
            lambda own: refuse_task(method, own.task),
            lambda own: architecture.refuse_crowds(method, own),
            lambda own: method.init_server(own),
            lambda own: method.init_personal(own),
            lambda own: capabilities.init_group(method, own),
            lambda own: architecture.refuse_unequal_states(method, name, first, own),  # noqa: B023
        ):
            try:
                make(setup)
            except IdiolectError as error:
                said = str(error)
                known = said.startswith((job.label, f"{method.title}:", type(method).__name__))
                raise type(error)(said if known else f"{job.label}: {said}") from None
            except Exception:
                continue


# The machine.


def _refuse_full_disk(
    jobs: Sequence[SimulatedJob], setups: Mapping[str, Setup], folder: Path
) -> None:
    """Refuse to train for hours what cannot be written in the end."""
    weights = sum(leaf.nbytes for leaf in tree.leaves(next(iter(setups.values())).params))
    models = sum(one.clients for job in jobs for one in job.federations)
    needed = models * weights
    place = folder
    while not place.exists() and place != place.parent:
        place = place.parent
    free = shutil.disk_usage(place).free
    if needed > free:
        raise DataError(
            f"{models:,} personal models need {_giga(needed)} in {folder}, and "
            f"{_giga(free)} are free; choose another --out, or evaluate.save_models = false"
        )


def _giga(count: int) -> str:
    return f"{count / 1e9:,.1f} GB" if count >= 1e8 else f"{math.ceil(count / 1e6):,} MB"


def few_examples(held: Federation) -> list[str]:
    """List what small or one-sided data means for a run: few rows, one class, lonely classes."""
    found = []
    sizes = np.array([len(rows) for rows in held.train])
    tested = np.array([len(rows) for rows in held.test])
    if len(held.dataset.classes) > 1 and not held.dataset.sequential:
        present = held.dataset.counts()
        if (present > 0).sum() == 1:
            found.append(
                "all rows are of one class, so any model scores 100%; check the label column"
            )
    small = int((sizes < 10).sum())
    if small:
        found.append(
            f"{small} of {len(sizes)} clients train on fewer than 10 rows; merge small clients, or "
            "leave them out with data.min_size and data.drop"
        )
    few = int(((tested < 10) & (tested > 0)).sum())
    if few:
        found.append(
            f"{few} of {len(sizes)} clients are scored on fewer than 10 rows, so their figures are "
            "coarse; give the third share of data.split more"
        )
    return found
