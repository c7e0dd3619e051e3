"""Loggers: a run's scores for TensorBoard, MLflow and Weights & Biases, each behind its extra."""

import logging
import re
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from idiolect.engine.outcome import RIGHT, Outcome, Silent, Tick
from idiolect.errors import ConfigError, MissingExtra
from idiolect.results import statistics
from idiolect.results.run_files import folder_name

_LONGEST = 500  # letters of a parameter that every MLflow store takes
_ODD = re.compile(r"[^\w\-./ :]")  # what MLflow refuses in a metric's name


class LogWriter(Protocol):
    """Writes scalars of several methods with a logging library, one series each."""

    def begin(self, label: str) -> None:
        """Start, or go on with, a method's series."""

    def settings(self, values: Mapping[str, Any]) -> None:
        """Write the settings of the current method, once."""

    def scalars(self, values: Mapping[str, float], round: int) -> None:
        """Write figures of the current method after a round."""

    def end(self) -> None:
        """Close the current method's series; all of it is on disk, or sent, after this."""


def library(module: str, extra: str) -> Any:
    """Import a logging library; the error says how to install it."""
    try:
        return import_module(module)
    except ImportError as error:
        raise MissingExtra(f"logging to {extra} needs {module.split('.')[0]}", extra) from error


class TensorBoard:
    """Writes event files, one folder a method; `tensorboard --logdir` shows them."""

    def __init__(self, target: str, folder: Path, name: str) -> None:
        library("tensorboard", "tensorboard")
        self._writers = library("torch.utils.tensorboard", "tensorboard").SummaryWriter
        self._home = Path(target) if target else folder / "tensorboard"

    def begin(self, label: str) -> None:
        """Open the method's event file; one of an earlier start stays beside it."""
        self._writer = self._writers(str(self._home / folder_name(label)))

    def settings(self, values: Mapping[str, Any]) -> None:
        """Write the settings as a table."""
        rows = "\n".join(f"| {key} | {value} |" for key, value in values.items())
        self._writer.add_text("settings", f"| setting | value |\n|---|---|\n{rows}")

    def scalars(self, values: Mapping[str, float], round: int) -> None:
        """Write the figures of a round."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, round)
        self._writer.flush()

    def end(self) -> None:
        """Close the file."""
        self._writer.close()


class MLflow:
    """Logs to a tracking server or store by its URI; to `mlflow.db` in the run's folder if none.

    The experiment has the run's name, and every method is an MLflow run.
    """

    def __init__(self, target: str, folder: Path, name: str) -> None:
        self._connect = library("mlflow.tracking", "mlflow").MlflowClient
        for chatty in ("mlflow.store", "alembic"):  # they report every table they make
            logging.getLogger(chatty).setLevel(logging.WARNING)
        self._uri = target or f"sqlite:///{folder.resolve()}/mlflow.db"
        self._name = name
        self._client: Any = None

    def begin(self, label: str) -> None:
        """Start an MLflow run; a method that is resumed goes on in a new one."""
        self._client = self._client or self._connect(tracking_uri=self._uri)
        known = self._client.get_experiment_by_name(self._name)
        home = known.experiment_id if known else self._client.create_experiment(self._name)
        self._run = self._client.create_run(home, run_name=label).info.run_id

    def settings(self, values: Mapping[str, Any]) -> None:
        """Write the settings as parameters."""
        for key, value in values.items():
            self._client.log_param(self._run, key, str(value)[:_LONGEST])

    def scalars(self, values: Mapping[str, float], round: int) -> None:
        """Write the figures of a round."""
        for name, value in values.items():
            self._client.log_metric(self._run, _ODD.sub("_", name), value, step=round)

    def end(self) -> None:
        """Mark the run as finished."""
        self._client.set_terminated(self._run)


class WandB:
    """Logs to a W&B project, one W&B run a method; WANDB_MODE=offline keeps it on this machine."""

    def __init__(self, target: str, folder: Path, name: str) -> None:
        self._library = library("wandb", "wandb")
        self._folder = folder
        self._where = {"project": target or "idiolect", "group": name, "dir": str(folder)}

    def begin(self, label: str) -> None:
        """Start a W&B run."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self._run = self._library.init(name=label, reinit="create_new", **self._where)

    def settings(self, values: Mapping[str, Any]) -> None:
        """Write the settings as the run's configuration."""
        self._run.config.update(dict(values))

    def scalars(self, values: Mapping[str, float], round: int) -> None:
        """Write the figures of a round."""
        self._run.log(dict(values), step=round)

    def end(self) -> None:
        """Close the run."""
        self._run.finish()


LOGGERS: dict[str, Callable[[str, Path, str], LogWriter]] = {
    "tensorboard": TensorBoard,
    "mlflow": MLflow,
    "wandb": WandB,
}


def logger(name: str, target: str, folder: Path, experiment: str) -> "Logger":
    """Return a logger by name; a missing library is an error before anything is trained."""
    if name not in LOGGERS:
        raise ConfigError(f"unknown logger {name!r}; expected one of {', '.join(LOGGERS)}")
    return Logger(name, LOGGERS[name](target, folder, experiment))


class Logger(Silent):
    """A callback that writes scores as named figures.

    In the rounds `val/MODEL/METRIC`, the mean over clients and seeds, with `/std_seeds`; at the end
    `test/MODEL/METRIC` with `/std_seeds` and `/worst_client`, and what was sent, in bytes. A logger
    that fails is disabled and reported at the end: a lost connection must not cost a training.
    """

    def __init__(self, name: str, writer: LogWriter) -> None:
        self._name = name
        self._writer = writer
        self._settings_written = False
        self.trouble = ""  # why it stopped, if it did

    def begin(self, label: str, round: int, rounds: int) -> None:
        """Start a method's series."""
        self._settings_written = False
        self._try(self._writer.begin, label)

    def tick(self, tick: Tick) -> None:
        """Write the speed."""
        speed = {"speed/examples_per_second": tick.examples_per_second}
        self._try(self._writer.scalars, speed, tick.round)

    def scored(self, outcome: Callable[[], Outcome]) -> None:
        """Write the newest scores."""
        self._try(self._write, outcome)

    def end(self, label: str, seconds: float) -> None:
        """Close the series."""
        self._try(self._writer.end)

    def _write(self, made: Callable[[], Outcome]) -> None:
        outcome = made()
        if not self._settings_written:
            self._settings_written = True
            about = outcome.about
            seeds = [members.seed for members in outcome.members]
            first = {"method": about.get("method"), "clients": about.get("clients"), "seeds": seeds}
            self._writer.settings(first | dict(about.get("settings", {})))
        figures = final_figures(outcome) if outcome.final else last_figures(outcome)
        self._writer.scalars(figures, outcome.rounds)

    def _try(self, act: Callable[..., None], *arguments: Any) -> None:
        if self.trouble:
            return
        try:
            act(*arguments)
        except Exception as error:
            self.trouble = f"logging to {self._name} stopped: {error}"


def last_figures(outcome: Outcome) -> dict[str, float]:
    """Return the scores of the last evaluated round, by name."""
    figures: dict[str, float] = {}
    for key, curve in sorted(outcome.curves.items()):
        figures |= _averaged(key, curve[-1])
    return figures


def final_figures(outcome: Outcome) -> dict[str, float]:
    """Return the scores on test data after the last round, and the bytes sent."""
    figures: dict[str, float] = {}
    for key, values in sorted(outcome.final.items()):
        model, metric = key.split("/")
        if metric.startswith("val_") or metric == RIGHT:
            continue
        figures |= _averaged(f"test/{key}", values)
        if metric == "accuracy":
            means = [statistics.mean(column) for column in np.asarray(values, np.float64).T]
            figures[f"test/{model}/worst_client"] = min(m for m in means if not np.isnan(m))
    sent = [wire.bytes_down + wire.bytes_up for wire in outcome.wire]
    figures["traffic/bytes"] = sum(sent) / len(sent)
    return figures


def _averaged(name: str, values: Any) -> dict[str, float]:
    """Return the mean over [seed, client], and the deviation over seeds where there are several."""
    means = np.array([statistics.mean(np.asarray(row, np.float64)) for row in values])
    figures = {name: statistics.mean(means), f"{name}/std_seeds": statistics.deviation(means)}
    return {key: value for key, value in figures.items() if not np.isnan(value)}
