"""What comparisons on several splits say together."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from idiolect.analysis.comparison import Comparison
from idiolect.analysis.ranks import Ranks, ranks
from idiolect.analysis.verdict import NONE


@dataclass(frozen=True)
class Overall:
    """Every method's mean on every split, ranks with splits as the blocks, and a sentence."""

    means: dict[str, dict[str, float]]  # by label, then split
    ranks: Ranks
    best: dict[str, list[str]]  # by label: the splits where it is told apart from all others
    sentence: str


def overall(comparisons: Mapping[str, Comparison]) -> Overall | None:
    """Put several splits side by side; None where there are not two, or no methods in common."""
    first = next(iter(comparisons.values()), None)
    if first is None or len(comparisons) < 2:
        return None
    labels = tuple(
        label for label in first.methods if all(label in c.methods for c in comparisons.values())
    )
    if not labels:
        return None
    means = {
        label: {split: own.methods[label].mean for split, own in comparisons.items()}
        for label in labels
    }
    best: dict[str, list[str]] = {}
    for split, own in comparisons.items():
        if own.verdict.beats and not own.verdict.level:
            best.setdefault(own.verdict.best, []).append(split)
    units = np.array([list(means[label].values()) for label in labels])
    return Overall(means, ranks(labels, units), best, _sentence(best, comparisons))


def _sentence(best: Mapping[str, list[str]], comparisons: Mapping[str, Comparison]) -> str:
    count = len(comparisons)
    told = [
        f"{label} is best on {len(splits)} of {count} splits"
        for label, splits in sorted(best.items(), key=lambda item: -len(item[1]))
    ]
    rest = [split for split in comparisons if not any(split in own for own in best.values())]
    if not told:
        return f"On none of the {count} splits is one method better than all others."
    if rest:
        told.append(f"on {len(rest)} {NONE} between the best and some other")
    return "; ".join(told) + "."
