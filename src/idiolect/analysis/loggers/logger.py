"""A watch that hands scores to a logging library; one that fails is left alone, the run goes on."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from idiolect.analysis.loggers.mlflow import MLflow
from idiolect.analysis.loggers.sink import Sink
from idiolect.analysis.loggers.tensorboard import TensorBoard
from idiolect.analysis.loggers.wandb import WandB
from idiolect.engine.callbacks import Tick
from idiolect.engine.outcome import RIGHT, Outcome
from idiolect.errors import ConfigError
from idiolect.results import statistics

LOGGERS: dict[str, Callable[[str, Path, str], Sink]] = {
    "tensorboard": TensorBoard,
    "mlflow": MLflow,
    "wandb": WandB,
}


def logger(name: str, target: str, folder: Path, experiment: str) -> "Logger":
    """Make a logger by name; a library that is missing is told before anything is trained."""
    if name not in LOGGERS:
        raise ConfigError(f"unknown logger {name!r}; expected one of {', '.join(LOGGERS)}")
    return Logger(name, LOGGERS[name](target, folder, experiment))


class Logger:
    """Turns what a run tells into named figures.

    Along the way `val/MODEL/METRIC`, the mean over clients and seeds, with `/std_seeds`; at the end
    `test/MODEL/METRIC` with `/std_seeds` and `/worst_client`, and what was sent, in bytes.
    """

    def __init__(self, name: str, sink: Sink) -> None:
        self._name = name
        self._sink = sink
        self._known = False  # whether the settings were told
        self.trouble = ""  # why it stopped, if it did

    def begin(self, label: str, round: int, rounds: int) -> None:
        """Start a method's series."""
        self._known = False
        self._try(lambda: self._sink.begin(label))

    def tick(self, tick: Tick) -> None:
        """Keep the speed."""
        speed = {"speed/examples_per_second": tick.examples_per_second}
        self._try(lambda: self._sink.scalars(speed, tick.round))

    def scored(self, outcome: Callable[[], Outcome]) -> None:
        """Keep the newest scores."""
        self._try(lambda: self._keep(outcome()))

    def note(self, text: str) -> None:
        """Leave notices to the screen."""

    def end(self, label: str, seconds: float) -> None:
        """Close the series."""
        self._try(self._sink.end)

    def _keep(self, outcome: Outcome) -> None:
        if not self._known:
            self._known = True
            self._sink.settings(_settings(outcome))
        figures = final_figures(outcome) if outcome.final else last_figures(outcome)
        self._sink.scalars(figures, outcome.rounds)

    def _try(self, act: Callable[[], Any]) -> None:
        """Do it unless it failed before: a lost connection must not cost a training."""
        if self.trouble:
            return
        try:
            act()
        except Exception as error:
            self.trouble = f"logging to {self._name} stopped: {error}"


def last_figures(outcome: Outcome) -> dict[str, float]:
    """Give the scores of the last evaluated round, by name."""
    figures: dict[str, float] = {}
    for key, curve in sorted(outcome.curves.items()):
        figures |= _summed(key, curve[-1])
    return figures


def final_figures(outcome: Outcome) -> dict[str, float]:
    """Give the scores on test data after the last round, and what it took."""
    figures: dict[str, float] = {}
    for key, values in sorted(outcome.final.items()):
        model, metric = key.split("/")
        if metric.startswith("val_") or metric == RIGHT:
            continue
        figures |= _summed(f"test/{key}", values)
        if metric == "accuracy":
            means = [statistics.mean(column) for column in np.asarray(values, np.float64).T]
            figures[f"test/{model}/worst_client"] = min(m for m in means if not np.isnan(m))
    sent = [wire.bytes_down + wire.bytes_up for wire in outcome.wire]
    figures["traffic/bytes"] = sum(sent) / len(sent)
    return figures


def _summed(name: str, values: Any) -> dict[str, float]:
    """Give the mean over [seed, client], and the deviation over seeds where there are several."""
    means = np.array([statistics.mean(np.asarray(row, np.float64)) for row in values])
    figures = {name: statistics.mean(means)}
    if len(means) > 1:
        figures[f"{name}/std_seeds"] = statistics.deviation(means)
    return {key: value for key, value in figures.items() if not np.isnan(value)}


def _settings(outcome: Outcome) -> dict[str, Any]:
    about = outcome.about
    seeds = [members.seed for members in outcome.members]
    told = {"method": about.get("method"), "clients": about.get("clients"), "seeds": seeds}
    return told | dict(about.get("settings", {}))
