"""TensorBoard: event files, one folder a method."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from idiolect.analysis.loggers.sink import library
from idiolect.results.models import folder_name


class TensorBoard:
    """Writes event files under a folder; `tensorboard --logdir` shows it."""

    def __init__(self, target: str, folder: Path, name: str) -> None:
        library("tensorboard", "tensorboard")
        self._writers = library("torch.utils.tensorboard", "tensorboard").SummaryWriter
        self._home = Path(target) if target else folder / "tensorboard"

    def begin(self, label: str) -> None:
        """Open the method's event file; one of an earlier start stays beside it."""
        self._writer = self._writers(str(self._home / folder_name(label)))

    def settings(self, values: Mapping[str, Any]) -> None:
        """Keep the settings as a table."""
        rows = "\n".join(f"| {key} | {value} |" for key, value in values.items())
        self._writer.add_text("settings", f"| setting | value |\n|---|---|\n{rows}")

    def scalars(self, values: Mapping[str, float], round: int) -> None:
        """Keep the figures of a round."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, round)
        self._writer.flush()

    def end(self) -> None:
        """Close the file."""
        self._writer.close()
