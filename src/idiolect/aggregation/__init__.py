"""How the server joins reports: the mean, robust rules, differential privacy; and the attacks."""

from idiolect.aggregation.accounting import PrivacyTerms, affordable, epsilon, solved
from idiolect.aggregation.aggregator import Aggregator
from idiolect.aggregation.attacks import MODEL_ATTACKS, Attack, Attacked
from idiolect.aggregation.private_mean import Private
from idiolect.aggregation.robust import (
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
    "PrivacyTerms",
    "Private",
    "TrimmedMean",
    "affordable",
    "epsilon",
    "solved",
]
