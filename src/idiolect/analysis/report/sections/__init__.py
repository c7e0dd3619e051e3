"""The parts of a report, one file each, in the order they are read."""

from idiolect.analysis.report.material import Material
from idiolect.analysis.report.section import Section
from idiolect.analysis.report.sections import (
    choices,
    clients,
    coefficients,
    curves,
    data,
    differences,
    fairness,
    headline,
    persfl,
    privacy,
    settings,
    traffic,
)

_PARTS = (
    headline,
    differences,
    clients,
    choices,
    curves,
    fairness,
    traffic,
    data,
    persfl,
    coefficients,
    privacy,
    settings,
)


def sections(material: Material) -> list[Section]:
    """Make every part that the run has something for."""
    return [made for part in _PARTS if (made := part.section(material)) is not None]
