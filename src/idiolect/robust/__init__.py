"""Robust aggregation, and the attacks it is tested with."""

from idiolect.aggregate import Aggregator
from idiolect.robust.rules import (
    GeometricMedian,
    Krum,
    Mean,
    Median,
    MultiKrum,
    NormBound,
    TrimmedMean,
)

RULES: dict[str, type[Aggregator]] = {
    "mean": Mean,
    "median": Median,
    "geometric-median": GeometricMedian,
    "trimmed-mean": TrimmedMean,
    "krum": Krum,
    "multi-krum": MultiKrum,
    "norm-bound": NormBound,
}

__all__ = [
    "RULES",
    "GeometricMedian",
    "Krum",
    "Mean",
    "Median",
    "MultiKrum",
    "NormBound",
    "TrimmedMean",
]
