"""MLflow: an experiment of the run's name, one MLflow run a method."""

import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from idiolect.analysis.loggers.sink import library

_LONGEST = 500  # letters of a parameter that every store takes
_ODD = re.compile(r"[^\w\-./ :]")  # what MLflow refuses in a metric's name


class MLflow:
    """Logs to a tracking server or store by its URI; to `mlflow.db` in the run's folder if none."""

    def __init__(self, target: str, folder: Path, name: str) -> None:
        self._connect = library("mlflow.tracking", "mlflow").MlflowClient
        for chatty in ("mlflow.store", "alembic"):  # they tell of every table they make
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
        """Keep the settings as parameters."""
        for key, value in values.items():
            self._client.log_param(self._run, key, str(value)[:_LONGEST])

    def scalars(self, values: Mapping[str, float], round: int) -> None:
        """Keep the figures of a round."""
        for name, value in values.items():
            self._client.log_metric(self._run, _ODD.sub("_", name), value, step=round)

    def end(self) -> None:
        """Say that the run is finished."""
        self._client.set_terminated(self._run)
