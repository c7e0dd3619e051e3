"""Choose a method's settings on validation data, within its budget, and keep a record of it."""

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from idiolect.engine.outcome import Outcome
from idiolect.errors import ConfigError, Diverged
from idiolect.experiment.job import Job
from idiolect.experiment.schema import MethodTable, Tune
from idiolect.experiment.search import searching
from idiolect.experiment.search_space import Settings, Space, named, space
from idiolect.experiment.seed_parts import Bench, Seeds, trained
from idiolect.results import statistics
from idiolect.results.document import plain
from idiolect.results.models import folder_name

_LONGEST = 100  # letters of a folder's name


@dataclass(frozen=True)
class Trial:
    """Settings that were tried, and each seed's mean validation score; NaN where it failed."""

    settings: Settings
    scores: dict[int, float]
    failed: str = ""


@dataclass(frozen=True)
class Tuned:
    """What each seed chose, and how that came about."""

    chosen: dict[int, Settings]  # by seed
    record: dict[str, Any]


Make = Callable[[Settings, Seeds], Job]


def tuned(
    tune: Tune, table: MethodTable, seeds: Seeds, bench: Bench, folder: Path, make: Make
) -> Tuned:
    """Try settings on validation data alone; `make` makes a trial's job, without test rows.

    Every seed chooses by its own validation rows, so that no row that is a test row under this seed
    has a say in it; or, if asked, all choose together by the mean. The first of equals is taken.
    """
    held = space(tune, table)
    label = table.label or table.name
    if not held:
        return Tuned({seed: {} for seed in seeds}, {"trials": [], "space": {}, "chosen": []})
    # Optuna proposes by what it has found: seeds that choose for themselves search apart.
    apart = tune.search == "optuna" and tune.choose == "seed"
    batches = [(seed,) for seed in seeds] if apart else [seeds]
    trials: list[Trial] = []
    chosen: dict[int, Settings] = {}
    for batch in batches:
        own = _trials(tune, label, held, batch, bench, folder, make)
        trials += own
        for seed in batch:
            chosen[seed] = _best(tune, own, batch if tune.choose == "all" else (seed,), label)
    return Tuned(chosen, plain(_record(tune, held, trials, chosen)))


def home(folder: Path, settings: Settings) -> Path:
    """Say where settings of a method have their folder."""
    name = folder_name(named(settings))
    if len(name) > _LONGEST:
        name = f"{name[:_LONGEST]}-{zlib.crc32(name.encode()):08x}"
    return folder / name


def _trials(
    tune: Tune, label: str, held: Space, seeds: Seeds, bench: Bench, folder: Path, make: Make
) -> list[Trial]:
    search = searching(tune, label, held)
    done: list[Trial] = []
    while (settings := search.ask()) is not None:
        known = next((one for one in done if one.settings == settings), None)
        trial = known or _tried(tune, settings, seeds, bench, folder, make)
        search.tell(_mean(trial, seeds))
        if known is None:
            done.append(trial)
    return done


def _tried(
    tune: Tune, settings: Settings, seeds: Seeds, bench: Bench, folder: Path, make: Make
) -> Trial:
    def own(some: Seeds) -> Job:
        return make(settings, some)

    try:
        outcome = trained(bench, home(folder, settings), seeds, own, trial=True)
    except Diverged as error:
        return Trial(settings, dict.fromkeys(seeds, math.nan), str(error))
    return Trial(settings, dict(zip(seeds, _scores(tune, outcome), strict=True)))


def _scores(tune: Tune, outcome: Outcome) -> list[float]:
    """Give each seed's mean over clients, of what they would deploy; higher is better."""
    values = outcome.final[f"{outcome.headline}/val_{tune.metric}"]
    sign = -1.0 if tune.metric == "loss" else 1.0
    means = [sign * statistics.mean(np.asarray(row, np.float64)) for row in values]
    if any(math.isnan(one) for one in means) and tune.metric == "accuracy":
        raise ConfigError(
            "[tune] needs validation rows and some seed has none; give the second share of "
            "data.split more"
        )
    return means


def _mean(trial: Trial, seeds: Sequence[int]) -> float:
    """Average over seeds; a setting that failed under one of them has failed."""
    return sum(trial.scores[seed] for seed in seeds) / len(seeds)


def _best(tune: Tune, trials: Sequence[Trial], seeds: Sequence[int], label: str) -> Settings:
    able = [one for one in trials if not math.isnan(_mean(one, seeds))]
    if not able:
        raise Diverged(
            f"{label}: none of the {len(trials)} settings tried came to a finite end, last: "
            f"{trials[-1].failed or 'its validation loss is no number'}; try smaller lr in [tune]"
        )
    return max(able, key=lambda one: _mean(one, seeds)).settings  # the first of equals


def _record(
    tune: Tune, held: Space, trials: Sequence[Trial], chosen: dict[int, Settings]
) -> dict[str, Any]:
    sign = -1.0 if tune.metric == "loss" else 1.0
    return {
        "search": tune.search,
        "budget": tune.budget,
        "choose": tune.choose,
        "metric": f"validation {tune.metric}",
        "space": {
            key: list(values) if isinstance(values, tuple) else values.model_dump()
            for key, values in held.items()
        },
        "trials": [
            {
                "settings": trial.settings,
                "validation": [
                    {"seed": seed, "score": sign * score} for seed, score in trial.scores.items()
                ],
                "failed": trial.failed or None,
            }
            for trial in trials
        ],
        "chosen": [{"seed": seed, "settings": own} for seed, own in chosen.items()],
    }
