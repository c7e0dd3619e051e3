"""The outcome of a comparison, or of several, in one plain sentence."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from idiolect.analysis.significance import Ranks, ranks
from idiolect.core.metrics import METRICS, Metric

if TYPE_CHECKING:
    from idiolect.analysis.comparison import Comparison, MethodPair

NONE = "no difference found"
_FEW = 4  # seeds: Student's t of two or three is wide


@dataclass(frozen=True)
class Verdict:
    """The best method, those it is better than, and those it does not differ from."""

    sentence: str
    best: str  # the highest mean, whether or not it differs from the next
    beats: list[str]
    level: list[str]  # no difference found to the best
    found: bool  # whether any pair of methods differs


def verdict(
    means: Mapping[str, float],
    pairs: "Sequence[MethodPair]",
    seeds: int,
    scope: str,
    metric: Metric = METRICS["accuracy"],
) -> Verdict:
    """Return the verdict; `means` by label, best first, and pairs are named in that order.

    `scope` says which clients it is about, and ends the sentence.
    """
    words = _Words(metric)
    best, *others = means
    own = {pair.worse: pair for pair in pairs if pair.better == best}
    beats = [label for label in others if own[label].different]
    level = [label for label in others if not own[label].different]
    found = any(pair.different for pair in pairs)
    if not others:
        sentence = (
            f"{best} has a mean {metric.title} of {metric.written(means[best])}; there is no other "
            "method to compare."
        )
    elif seeds == 1:
        sentence = _one_seed(means, own, words)
    elif not found:
        sentence = _nothing_found(means, own, seeds, words)
    else:
        sentence = _something_found(means, own, beats, level, words)
    return Verdict(
        f"{sentence} This is {scope}." if others else sentence, best, beats, level, found
    )


class _Words:
    """How a metric's values and differences are written in a sentence."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric
        self.most = "highest" if metric.higher else "lowest"

    def value(self, value: float) -> str:
        """Write a mean; accuracy, the usual metric, goes without saying."""
        title = "" if self._metric.name == "accuracy" else f"{self._metric.title} "
        return f"{title}{self._metric.written(value)}"

    def gap(self, pair: "MethodPair") -> str:
        """Write by how much one method is ahead of another."""
        low, high = pair.interval
        if self._metric.percent:
            low, high = 100 * low, 100 * high
            return f"{100 * pair.difference:.1f} points (interval {low:.1f} to {high:.1f})"
        return f"{pair.difference:.3g} (interval {low:.3g} to {high:.3g})"


def _one_seed(means: Mapping[str, float], own: "Mapping[str, MethodPair]", words: _Words) -> str:
    best, second = list(means)[:2]
    beaten = [label for label, pair in own.items() if pair.models_differ]
    models = f" Of these trained models, that of {best} does better than that of "
    return (
        f"{best} is ahead in this one run ({words.value(means[best])}; {words.gap(own[second])} "
        f"ahead of {second}), but one seed cannot tell a method from luck: {NONE} without more."
        f"{f'{models}{_listed(beaten)}.' if beaten else ''}"
    )


def _nothing_found(
    means: Mapping[str, float], own: "Mapping[str, MethodPair]", seeds: int, words: _Words
) -> str:
    best, second = list(means)[:2]
    gap = words.gap(own[second])
    few = f"; {seeds} seeds let only large ones show" if seeds < _FEW else ""
    if len(means) == 2:
        return (
            f"{NONE.capitalize()} between {best} ({words.value(means[best])}) and {second} "
            f"({words.value(means[second])}): {gap} apart, {_p(own[second].p_holm)}{few}."
        )
    return (
        f"{NONE.capitalize()} between the {len(means)} methods; {best} has the {words.most} mean "
        f"({words.value(means[best])}), {gap} ahead of {second}{few}."
    )


def _something_found(
    means: Mapping[str, float],
    own: "Mapping[str, MethodPair]",
    beats: Sequence[str],
    level: Sequence[str],
    words: _Words,
) -> str:
    best, second = list(means)[:2]
    figure = words.value(means[best])
    if not level:
        rest = "" if len(means) == 2 else f", and better than the other {len(means) - 2}"
        p = _p(max(pair.p_holm for pair in own.values()))
        return f"{best} is best ({figure}): {words.gap(own[second])} ahead of {second} ({p}){rest}."
    if not beats:
        return (
            f"{best} has the {words.most} mean ({figure}), but {NONE} between it and any other "
            "method; differences lie between the others."
        )
    return (
        f"{best} has the {words.most} mean ({figure}) and is better than {_listed(beats)}; {NONE} "
        f"between it and {_listed(level)} ({_p(min(own[one].p_holm for one in level))})."
    )


def _p(value: float) -> str:
    return "p < 0.001" if value < 0.001 else f"p = {value:.2g}"


def _listed(labels: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(labels[:-1]), labels[-1])))


@dataclass(frozen=True)
class Overall:
    """Every method's mean on every split, ranks with splits as the blocks, and a sentence."""

    means: dict[str, dict[str, float]]  # by label, then split
    ranks: Ranks
    best: dict[str, list[str]]  # by label: the splits where it differs from all others
    sentence: str


def overall(comparisons: "Mapping[str, Comparison]") -> Overall | None:
    """Compare methods over splits; None where there are not two, or no methods in common."""
    shared = [list(own.methods) for own in comparisons.values()]
    labels = tuple(one for one in (shared or [[]])[0] if all(one in own for own in shared))
    if len(comparisons) < 2 or not labels:
        return None
    means = {
        label: {split: own.methods[label].mean for split, own in comparisons.items()}
        for label in labels
    }
    best: dict[str, list[str]] = {}
    for split, own in comparisons.items():
        if own.verdict.beats and not own.verdict.level:
            best.setdefault(own.verdict.best, []).append(split)
    signs = [1 if own.higher else -1 for own in comparisons.values()]  # splits may differ in metric
    units = np.array(signs) * np.array([list(own.values()) for own in means.values()])
    return Overall(means, ranks(labels, units), best, _splits_sentence(best, len(comparisons)))


def _splits_sentence(best: Mapping[str, list[str]], splits: int) -> str:
    if not best:
        return f"On none of the {splits} splits is one method better than all others."
    parts = [
        f"{label} is best on {len(own)} of {splits} splits"
        for label, own in sorted(best.items(), key=lambda item: -len(item[1]))
    ]
    if rest := splits - sum(len(own) for own in best.values()):
        parts.append(f"on {rest} {NONE} between the best and some other")
    return "; ".join(parts) + "."
