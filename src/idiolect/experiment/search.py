"""Who proposes the next settings to try: a list made beforehand, or Optuna."""

import warnings
from collections.abc import Iterator
from importlib import import_module
from typing import Any, Protocol

from idiolect.errors import MissingExtra
from idiolect.experiment.schema import Range, Tune
from idiolect.experiment.search_space import Settings, Space, listed, rounded


class Search(Protocol):
    """Proposes settings, and hears how they did. Asked the same, it proposes the same."""

    def ask(self) -> Settings | None:
        """Propose settings; None when the budget is spent."""

    def tell(self, score: float) -> None:
        """Hear the score of the last proposal; higher is better, NaN a failure."""


def searching(tune: Tune, label: str, space: Space) -> Search:
    """Start a method's search from its beginning."""
    if tune.search == "optuna":
        return Optuna(tune, label, space)
    return Listed(listed(tune, label, space))


class Listed:
    """A grid, or draws: what is tried does not depend on what was found."""

    def __init__(self, proposals: Iterator[Settings]) -> None:
        self._proposals = proposals

    def ask(self) -> Settings | None:
        """Propose the next."""
        return next(self._proposals, None)

    def tell(self, score: float) -> None:
        """Go on all the same."""


class Optuna:
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
