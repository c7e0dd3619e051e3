"""Robust aggregation, and the attacks it is tested with."""

from idiolect.aggregate import Aggregator
from idiolect.robust.attacks import MODEL_ATTACKS, Attack, Attacked
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
    "MODEL_ATTACKS",
    "RULES",
    "Attack",
    "Attacked",
    "GeometricMedian",
    "Krum",
    "Mean",
    "Median",
    "MultiKrum",
    "NormBound",
    "TrimmedMean",
]
