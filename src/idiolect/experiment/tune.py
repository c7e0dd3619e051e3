"""Which settings are tried: checked against each method, listed as a grid, or drawn."""

import itertools
import math
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from idiolect.core.metrics import metric
from idiolect.engine.outcome import Outcome
from idiolect.errors import ConfigError, Diverged, IdiolectError, MissingExtra, suggest
from idiolect.experiment.components import build_method, settings_model
from idiolect.experiment.job import Job
from idiolect.experiment.schema import MethodTable, Range, Tune, as_tuples, validate
from idiolect.experiment.seed_parts import PartTrainer, Seeds, train_parts
from idiolect.results import statistics
from idiolect.results.document import plain
from idiolect.results.run_files import folder_name

Settings = dict[str, Any]
Space = dict[str, "tuple[Any, ...] | Range"]

_TRIALS = 10  # of a random search that names no budget
_DRAWS = 9  # keeps these draws apart from other uses of a seed


def checked_tune(tune: Tune, methods: Sequence[MethodTable], where: str) -> Tune:
    """Check every value against the methods it is for, and write the budget out."""
    labels = [table.label_or_name for table in methods]
    for label in tune.methods:
        if label not in labels:
            raise ConfigError(f"{where}: unknown method tune.methods.{suggest(label, labels)}")
    known = {name for table in methods for name in table.settings}
    for key in tune.space:
        if key not in known:
            raise ConfigError(f"{where}: unknown key tune.space.{key}: {suggest(key, known)}")
    tune = tune.model_copy(
        update={
            "space": _values(tune.space, where, "tune.space"),
            "methods": {
                label: _values(own, where, f"tune.methods.{label}")
                for label, own in tune.methods.items()
            },
        }
    )
    spaces = {table.label_or_name: search_space(tune, table, where) for table in methods}
    if not any(spaces.values()):
        raise ConfigError(f"{where}: tune.space is empty; name settings to try, such as lr")
    for table in methods:
        if tune.rounds is not None and tune.rounds > (table.rounds or tune.rounds):
            raise ConfigError(
                f"{where}: tune.rounds is {tune.rounds}, more than the {table.rounds} of "
                f"{table.label}; lower it"
            )
    return tune.model_copy(update={"budget": _budget(tune, spaces, where)})


def search_space(tune: Tune, table: MethodTable, where: str = "[tune]") -> Space:
    """Return what is tried for one method: shared settings that it has, and its own."""
    label = table.label_or_name
    own = tune.methods.get(label, {})
    for key in own:
        if key not in table.settings:
            raise ConfigError(
                f"{where}: unknown key tune.methods.{label}.{key}: {suggest(key, table.settings)}"
            )
    # In a setting of its own a method passes over the shared one, even to leave it untuned: [].
    found = {key: held for key, held in tune.space.items() if key in table.settings} | own
    return {
        key: _fitting(held, key, table, f"{where}: tune of {label}")
        for key, held in found.items()
        if held != ()
    }


def _fitting(held: "tuple[Any, ...] | Range", key: str, table: MethodTable, where: str) -> Any:
    """Refuse values that the method refuses; a range must fit with both its ends."""
    known = settings_model(table, where, 0)
    values = []
    for value in (held.low, held.high) if isinstance(held, Range) else held:
        fitting = getattr(validate(known, {key: value}, where), key)
        try:
            build_method(with_settings(table, {key: fitting}))
        except IdiolectError as error:
            raise ConfigError(f"{where}: {error}") from None
        values.append(fitting)
    return held if isinstance(held, Range) else tuple(values)


def with_settings(table: MethodTable, settings: Mapping[str, Any]) -> MethodTable:
    """Return a method's table with some settings changed."""
    held = {name: getattr(table, name) for name in MethodTable.model_fields}
    return MethodTable(**held, **{**table.settings, **settings})


def proposals(tune: Tune, label: str, held: Space) -> Iterator[Settings]:
    """List a grid's cells in the file's order, or draws; no cell twice, none beyond the budget."""
    if tune.search == "grid":
        choices = [values for values in held.values() if not isinstance(values, Range)]
        cells = itertools.product(*choices)
        yield from (dict(zip(held, cell, strict=True)) for cell in cells)
        return
    generator = np.random.default_rng((tune.seed, _DRAWS, zlib.crc32(label.encode())))
    seen: list[Settings] = []
    budget = tune.budget or _TRIALS
    for _ in range(100 * budget):  # a small space is soon exhausted
        if len(seen) == budget:
            return
        drawn = {key: _drawn(values, generator) for key, values in held.items()}
        if drawn not in seen:
            seen.append(drawn)
            yield drawn


def settings_text(settings: Mapping[str, Any]) -> str:
    """Write settings as one would say them."""
    return ", ".join(f"{key}={value}" for key, value in settings.items()) or "as given"


def _values(table: Mapping[str, Any], where: str, path: str) -> Space:
    found: Space = {}
    for key, given in table.items():
        if isinstance(given, Mapping):
            found[key] = validate(Range, given, where, [path, key])
        elif isinstance(given, (Range, tuple)):
            found[key] = given
        elif isinstance(given, list):
            found[key] = as_tuples(given)
        else:
            raise ConfigError(
                f"{where}: {path}.{key} is {given!r}; expected a list of values to try, or "
                "{ low = ..., high = ... }"
            )
    return found


def _budget(tune: Tune, spaces: Mapping[str, Space], where: str) -> int:
    if tune.search != "grid":
        return tune.budget or _TRIALS
    sizes = {}
    for label, held in spaces.items():
        for key, values in held.items():
            if isinstance(values, Range):
                raise ConfigError(
                    f"{where}: tune of {label}: {key} is a range, which a grid cannot list; give "
                    'values in [ ], or search = "random"'
                )
        sizes[label] = sum(1 for _ in proposals(tune, label, held))
    largest = max(sizes, key=lambda label: sizes[label])
    if tune.budget is not None and sizes[largest] > tune.budget:
        raise ConfigError(
            f"{where}: the grid of {largest} has {sizes[largest]} cells and tune.budget is "
            f'{tune.budget}; raise it, leave values out, or use search = "random"'
        )
    return tune.budget or sizes[largest]


def _drawn(values: "tuple[Any, ...] | Range", generator: np.random.Generator) -> Any:
    if not isinstance(values, Range):
        return values[int(generator.integers(len(values)))]
    low, high = values.low, values.high
    if isinstance(low, int) and isinstance(high, int) and not values.log:
        return int(generator.integers(low, high + 1))
    if values.log:
        number = math.exp(generator.uniform(math.log(low), math.log(high)))
    else:
        number = generator.uniform(low, high)
    if isinstance(low, int) and isinstance(high, int):
        return round(number)
    return min(max(rounded(number), low), high)


def rounded(number: float) -> float:
    """Keep three digits: what is reported can be typed, and no more of it matters."""
    return float(f"{number:.3g}")


# Who proposes the next settings to try: a list made beforehand, or Optuna.


class Search(Protocol):
    """Proposes settings, and hears how they did. Asked the same, it proposes the same."""

    def ask(self) -> Settings | None:
        """Propose settings; None when the budget is spent."""

    def tell(self, score: float) -> None:
        """Take the score of the last proposal; higher is better, NaN a failure."""


def make_search(tune: Tune, label: str, space: Space) -> Search:
    """Start a method's search from its beginning."""
    if tune.search == "optuna":
        return OptunaSearch(tune, label, space)
    return ListSearch(proposals(tune, label, space))


class ListSearch:
    """A grid, or draws: what is tried does not depend on what was found."""

    def __init__(self, proposals: Iterator[Settings]) -> None:
        self._proposals = proposals

    def ask(self) -> Settings | None:
        """Propose the next."""
        return next(self._proposals, None)

    def tell(self, score: float) -> None:
        """Go on all the same."""


class OptunaSearch:
    """Optuna's tree-structured Parzen estimator.

    A study is never saved: its sampler is seeded, so that on resuming it proposes the same settings
    again, whose trials are then found finished.
    """

    def __init__(self, tune: Tune, label: str, space: Space) -> None:
        try:
            self._optuna: Any = import_module("optuna")
        except ImportError as error:
            raise MissingExtra('tune.search = "optuna" needs Optuna', "tune") from error
        self._optuna.logging.set_verbosity(self._optuna.logging.WARNING)
        self._space = space
        self._left = tune.budget or 0
        sampler = self._optuna.samplers.TPESampler(seed=tune.seed)
        self._study = self._optuna.create_study(direction="maximize", sampler=sampler)
        self._trial: Any = None

    def ask(self) -> Settings | None:
        """Propose what looks best so far."""
        if not self._left:
            return None
        self._left -= 1
        self._trial = self._study.ask()
        return {key: self._suggested(key, values) for key, values in self._space.items()}

    def tell(self, score: float) -> None:
        """Learn from a trial."""
        failed = score != score
        state = self._optuna.trial.TrialState.FAIL if failed else None
        self._study.tell(self._trial, None if failed else score, state=state)

    def _suggested(self, key: str, values: "tuple[Any, ...] | Range") -> Any:
        if not isinstance(values, Range):
            # Places, for Optuna frets over choices that are no plain values, such as lists.
            return values[self._trial.suggest_categorical(key, list(range(len(values))))]
        low, high, log = values.low, values.high, values.log
        if isinstance(low, int) and isinstance(high, int):
            return self._trial.suggest_int(key, low, high, log=log)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            drawn = self._trial.suggest_float(key, float(low), float(high), log=log)
        return min(max(rounded(drawn), low), high)


# Choose a method's settings on validation data, within its budget, and keep a record of it.


_LONGEST_NAME = 100  # letters of a folder's name


@dataclass(frozen=True)
class TuningTrial:
    """Settings that were tried, and each seed's mean validation score; NaN where it failed."""

    settings: Settings
    scores: dict[int, float]
    failed: str = ""


@dataclass(frozen=True)
class TuningResult:
    """What each seed chose, and how that came about."""

    chosen: dict[int, Settings]  # by seed
    record: dict[str, Any]


Make = Callable[[Settings, Seeds], Job]


def tune_method(
    tune: Tune, table: MethodTable, seeds: Seeds, bench: PartTrainer, folder: Path, make: Make
) -> TuningResult:
    """Try settings on validation data alone; `make` makes a trial's job, without test rows.

    Every seed chooses by its own validation rows, so that no row that is a test row under this seed
    has a say in it; or, if asked, all choose together by the mean. The first of equals is taken.
    """
    held = search_space(tune, table)
    label = table.label_or_name
    if not held:
        return TuningResult({seed: {} for seed in seeds}, {"trials": [], "space": {}, "chosen": []})
    # Optuna proposes by what it has found: seeds that choose for themselves search apart.
    apart = tune.search == "optuna" and tune.choose == "seed"
    batches = [(seed,) for seed in seeds] if apart else [seeds]
    trials: list[TuningTrial] = []
    chosen: dict[int, Settings] = {}
    for batch in batches:
        own = _trials(tune, label, held, batch, bench, folder, make)
        trials += own
        for seed in batch:
            chosen[seed] = _best(tune, own, batch if tune.choose == "all" else (seed,), label)
    name = tune.metric or make(chosen[seeds[0]], seeds[:1]).choice.name
    return TuningResult(chosen, plain(_record(tune, name, held, trials, chosen)))


def settings_folder(folder: Path, settings: Settings) -> Path:
    """Return where settings of a method have their folder."""
    name = folder_name(settings_text(settings))
    if len(name) > _LONGEST_NAME:
        name = f"{name[:_LONGEST_NAME]}-{zlib.crc32(name.encode()):08x}"
    return folder / name


def _trials(
    tune: Tune, label: str, held: Space, seeds: Seeds, bench: PartTrainer, folder: Path, make: Make
) -> list[TuningTrial]:
    search = make_search(tune, label, held)
    done: list[TuningTrial] = []
    while (settings := search.ask()) is not None:
        known = next((one for one in done if one.settings == settings), None)
        trial = known or _tried(tune, settings, seeds, bench, folder, make)
        search.tell(_mean(trial, seeds))
        if known is None:
            done.append(trial)
    return done


def _tried(
    tune: Tune, settings: Settings, seeds: Seeds, bench: PartTrainer, folder: Path, make: Make
) -> TuningTrial:
    def own(some: Seeds) -> Job:
        return make(settings, some)

    try:
        outcome = train_parts(bench, settings_folder(folder, settings), seeds, own, trial=True)
    except Diverged as error:
        return TuningTrial(settings, dict.fromkeys(seeds, math.nan), str(error))
    scores = _scores(tune, outcome, own(seeds).kept_out)
    return TuningTrial(settings, dict(zip(seeds, scores, strict=True)))


def _scores(tune: Tune, outcome: Outcome, unseen: Sequence[np.ndarray]) -> list[float]:
    """Return each seed's mean over clients, of what they would deploy; higher is better.

    Those who are kept out of all rounds have no say.
    """
    own = metric(tune.metric or outcome.metric, outcome.task, outcome.precision)
    values = outcome.final[f"{outcome.headline}/val_{own.name}"]
    rows = [np.delete(row, out) for row, out in zip(values, unseen, strict=True)]
    means = [own.sign * statistics.mean(np.asarray(row, np.float64)) for row in rows]
    if any(math.isnan(one) for one in means) and own.name == "accuracy":
        raise ConfigError(
            "[tune] needs validation rows and some seed has none; give the second share of "
            "data.split more"
        )
    losses = np.asarray(outcome.final[f"{outcome.headline}/val_loss"], np.float64)
    if any(math.isnan(one) for one in means) and own.name != "loss" and np.isfinite(losses).any():
        raise ConfigError(
            f"[tune] by {own.title} is not defined on the validation rows of any client, which may "
            "be too few or of one class; give the second share of data.split more, or set "
            'tune.metric = "loss"'
        )
    return means


def _mean(trial: TuningTrial, seeds: Sequence[int]) -> float:
    """Average over seeds; a setting that failed under one of them has failed."""
    return sum(trial.scores[seed] for seed in seeds) / len(seeds)


def _best(tune: Tune, trials: Sequence[TuningTrial], seeds: Sequence[int], label: str) -> Settings:
    able = [one for one in trials if not math.isnan(_mean(one, seeds))]
    if not able:
        raise Diverged(
            f"{label}: none of the {len(trials)} settings tried came to a finite end, last: "
            f"{trials[-1].failed or 'its validation loss is no number'}; try smaller lr in [tune]"
        )
    return max(able, key=lambda one: _mean(one, seeds)).settings  # the first of equals


def _record(
    tune: Tune,
    name: str,
    held: Space,
    trials: Sequence[TuningTrial],
    chosen: dict[int, Settings],
) -> dict[str, Any]:
    own = metric(name)
    return {
        "search": tune.search,
        "budget": tune.budget,
        "choose": tune.choose,
        "metric": f"validation {own.title}",
        "space": {
            key: list(values) if isinstance(values, tuple) else values.model_dump()
            for key, values in held.items()
        },
        "trials": [
            {
                "settings": trial.settings,
                "validation": [
                    {"seed": seed, "score": own.sign * score}
                    for seed, score in trial.scores.items()
                ],
                "failed": trial.failed or None,
            }
            for trial in trials
        ],
        "chosen": [{"seed": seed, "settings": own} for seed, own in chosen.items()],
    }
