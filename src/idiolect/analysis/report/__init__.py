"""Reports: a run's findings as one page that opens offline, and as files for a paper."""

from idiolect.analysis.report.material import Material, read
from idiolect.analysis.report.write import report

__all__ = ["Material", "read", "report"]
