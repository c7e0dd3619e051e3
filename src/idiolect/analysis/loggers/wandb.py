"""Weights & Biases: a project of the run's name, one W&B run a method."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from idiolect.analysis.loggers.sink import library


class WandB:
    """Logs to a project; WANDB_MODE=offline keeps it on this machine."""

    def __init__(self, target: str, folder: Path, name: str) -> None:
        self._library = library("wandb", "wandb")
        self._project, self._group, self._folder = target or "idiolect", name, folder

    def begin(self, label: str) -> None:
        """Start a W&B run."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self._run = self._library.init(
            project=self._project,
            group=self._group,
            name=label,
            dir=str(self._folder),
            reinit="create_new",
        )

    def settings(self, values: Mapping[str, Any]) -> None:
        """Keep the settings as the run's configuration."""
        self._run.config.update(dict(values))

    def scalars(self, values: Mapping[str, float], round: int) -> None:
        """Keep the figures of a round."""
        self._run.log(dict(values), step=round)

    def end(self) -> None:
        """Close the run."""
        self._run.finish()
