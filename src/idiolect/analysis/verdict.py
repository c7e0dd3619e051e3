"""The outcome of a comparison in one plain sentence."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from idiolect.analysis.comparison import Pair

NONE = "no difference found"
_FEW = 4  # seeds: Student's t of two or three is wide


@dataclass(frozen=True)
class Verdict:
    """Who is best, whom it beats, and who cannot be told from it."""

    sentence: str
    best: str  # the highest mean, whether or not it can be told from the next
    beats: list[str]
    level: list[str]  # not told apart from the best
    found: bool  # whether any pair of methods differs


def verdict(
    order: Sequence[str],
    means: Mapping[str, float],
    pairs: "Sequence[Pair]",
    seeds: int,
    scope: str = "",
) -> Verdict:
    """Say it; `order` is by mean, best first, and pairs are named in that order.

    `scope` says whom it is about, and is said with it.
    """
    best = order[0]
    own = {pair.worse: pair for pair in pairs if pair.better == best}
    beats = [label for label in order[1:] if own[label].different]
    level = [label for label in order[1:] if not own[label].different]
    found = any(pair.different for pair in pairs)
    said = _sentence(order, means, pairs, seeds, beats, level, found)
    if scope and len(order) > 1:
        said += f" This is {scope}."
    return Verdict(said, best, beats, level, found)


def _sentence(
    order: Sequence[str],
    means: Mapping[str, float],
    pairs: "Sequence[Pair]",
    seeds: int,
    beats: list[str],
    level: list[str],
    found: bool,
) -> str:
    best = order[0]
    figure = f"{100 * means[best]:.1f}%"
    if len(order) == 1:
        return f"{best} has a mean accuracy of {figure}; there is no other method to compare."
    own = {pair.worse: pair for pair in pairs if pair.better == best}
    if seeds == 1:
        beaten = [label for label in order[1:] if own[label].models_differ]
        models = (
            f" Of these trained models, that of {best} does better than that of {_listed(beaten)}."
            if beaten
            else ""
        )
        return (
            f"{best} is ahead in this one run ({figure}; {_gap(own[order[1]])} ahead of "
            f"{order[1]}), but one seed cannot tell a method from luck: {NONE} without more."
            f"{models}"
        )
    if not found:
        few = f"; {seeds} seeds let only large ones show" if seeds < _FEW else ""
        if len(order) == 2:
            return (
                f"{NONE.capitalize()} between {best} ({figure}) and {order[1]} "
                f"({100 * means[order[1]]:.1f}%): {_gap(own[order[1]])} apart, "
                f"{_p(own[order[1]])}{few}."
            )
        return (
            f"{NONE.capitalize()} between the {len(order)} methods; {best} has the highest mean "
            f"({figure}), {_gap(own[order[1]])} ahead of {order[1]}{few}."
        )
    if not level:
        nearest = own[order[1]]
        rest = "" if len(order) == 2 else f", and better than the other {len(order) - 2}"
        return (
            f"{best} is best ({figure}): {_gap(nearest)} ahead of {order[1]} "
            f"({_p(max(own.values(), key=lambda pair: pair.p_holm))}){rest}."
        )
    told = f"better than {_listed(beats)}" if beats else "not told apart from any"
    if not beats:
        return (
            f"{best} has the highest mean ({figure}), but {NONE} between it and any other method; "
            f"differences lie between the others."
        )
    return (
        f"{best} has the highest mean ({figure}) and is {told}; {NONE} between it and "
        f"{_listed(level)} ({_p(min((own[one] for one in level), key=lambda pair: pair.p_holm))})."
    )


def _gap(pair: "Pair") -> str:
    low, high = (100 * end for end in pair.interval)
    return f"{100 * pair.difference:.1f} points (interval {low:.1f} to {high:.1f})"


def _p(pair: "Pair") -> str:
    return "p < 0.001" if pair.p_holm < 0.001 else f"p = {pair.p_holm:.2g}"


def _listed(labels: Sequence[str]) -> str:
    if len(labels) == 1:
        return labels[0]
    return f"{', '.join(labels[:-1])} and {labels[-1]}"
