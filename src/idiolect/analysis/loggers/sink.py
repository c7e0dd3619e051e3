"""What a logging library is asked to do, and how it is found."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any, Protocol

from idiolect.errors import MissingExtra


class Sink(Protocol):
    """Keeps scalars of several methods, one series each."""

    def begin(self, label: str) -> None:
        """Start, or go on with, a method's series."""

    def settings(self, values: Mapping[str, Any]) -> None:
        """Keep the settings of the method under way, once."""

    def scalars(self, values: Mapping[str, float], round: int) -> None:
        """Keep figures of the method under way after a round."""

    def end(self) -> None:
        """Close the series of the method under way; all of it is on disk, or sent, after this."""


def library(module: str, extra: str) -> Any:
    """Import a logging library, or say how to get it."""
    try:
        return import_module(module)
    except ImportError as error:
        raise MissingExtra(f"logging to {extra} needs {module.split('.')[0]}", extra) from error
