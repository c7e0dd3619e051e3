"""What a result says: statistics and a verdict, reports, the live page and loggers."""

from idiolect.analysis.comparison import Comparison, compare

__all__ = ["Comparison", "compare"]
