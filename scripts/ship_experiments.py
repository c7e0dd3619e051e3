"""A step of the build: a wheel carries the experiments, so that `idiolect repro` runs from it."""

from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class ShipExperiments(BuildHookInterface):  # type: ignore[type-arg]
    """Put experiments/ into the package; an editable install finds them in the checkout."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the folder to a wheel that is not editable."""
        if version == "standard":
            build_data["force_include"]["experiments"] = "idiolect/experiment/repro/experiments"
