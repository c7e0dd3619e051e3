"""What follows from stored cells: statistics, ranks and verdicts; computed from them alone."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from idiolect.analysis.comparison import ALPHA, Comparison, MethodPair, compare
from idiolect.analysis.significance import holm, ranks
from idiolect.experiment.referee.cells import Record, document_of, weighted
from idiolect.results.document import plain
from idiolect.results.statistics import known_mean, participation_over_seeds

_FEWEST = 3  # problems over which methods are ranked

BETTER, WORSE, NONE = "better", "worse", "no difference found"

Cells = Mapping[str, Mapping[str, Record]]
"""By the method's label, then by problem."""


def judge(cells: Cells, problems: Sequence[str], challenger: str | None = None) -> dict[str, Any]:
    """Return all findings; with a challenger also what each baseline is to it."""
    found = {name: of_problem(name, own) for name in problems if (own := _of(cells, name))}
    judged = {
        name: _with_challenger(own, comparison, challenger)
        for name, (own, comparison) in found.items()
    }
    content: dict[str, Any] = plain(
        {
            "alpha": ALPHA,
            "problems": judged,
            "overall": _overall({name: own for name, (_, own) in found.items()}, challenger),
        }
    )
    if challenger is not None:
        failed = _failed(cells, problems, challenger)
        without = [name for name in problems if name not in cells[challenger]]
        content["verdict"] = _verdict(content, challenger, failed, without)
    return content


def _of(cells: Cells, problem: str) -> dict[str, Record]:
    return {
        label: own[problem]
        for label, own in cells.items()
        if problem in own and "failed" not in own[problem]
    }


def _failed(cells: Cells, problems: Sequence[str], label: str) -> list[str]:
    return [name for name in problems if "failed" in cells[label].get(name, {})]


def of_problem(name: str, records: Mapping[str, Record]) -> tuple[dict[str, Any], Comparison]:
    """Compare the methods of one problem, by the last round's test scores of all clients."""
    content = document_of(name, records)
    comparison = compare(content)
    described = comparison.as_dict()
    methods = {}
    for label, figures in described["methods"].items():
        own = content["methods"][label]
        taken = participation_over_seeds(own)
        best = own["best_test_round"][records[label]["model"]]
        methods[label] = {
            **figures,
            "rank": described["ranks"]["average"][label],
            "weighted_mean": known_mean(_last(records[label])),
            # Chosen on test data, so it is no result: it stands beside one.
            "best_test_round": {
                "weighted_mean": known_mean(best["weighted_mean"]),
                "rounds": best["round"],
                "chosen_on": "test data",
            },
            "bytes": described["costs"][label]["bytes"],
            "seconds": described["costs"][label]["seconds"],
            **({"participation": taken} if taken and taken["clients"]["never"] else {}),
        }
    found = {
        "metric": comparison.metric,
        "higher": comparison.higher,
        "scope": comparison.scope,
        "clients": comparison.clients,
        "seeds": list(comparison.seeds),
        "methods": methods,
        "friedman": comparison.ranks.friedman,
        "best": comparison.verdict.best,
        "not_different_from_best": comparison.verdict.level,
        "sentence": comparison.verdict.sentence,
        "guess": comparison.baseline,
        "guess_line": comparison.baseline_line,
    }
    return found, comparison


def _last(record: Record) -> list[float]:
    return [
        weighted(np.array(one["score"], np.float64), np.array(one["test"], np.float64))
        for one in record["seeds"]
    ]


# The challenger beside each baseline: a family of its own for Holm's correction.


def _with_challenger(
    found: dict[str, Any], comparison: Comparison, challenger: str | None
) -> dict[str, Any]:
    if challenger not in comparison.methods or len(comparison.methods) < 2:
        return found
    pairs = [one for one in comparison.pairs if challenger in (one.better, one.worse)]
    adjusted = holm([one.p for one in pairs])
    against = {}
    for pair, p in zip(pairs, adjusted, strict=True):
        ahead = pair.better == challenger
        low, high = pair.interval if ahead else (-pair.interval[1], -pair.interval[0])
        against[pair.worse if ahead else pair.better] = {
            "ahead": pair.difference if ahead else -pair.difference,
            "interval": [low, high],
            "p": pair.p,
            "p_holm": p,
            "outcome": _outcome(pair, ahead, p, len(comparison.seeds)),
        }
    return {**found, "against": against}


def _outcome(pair: MethodPair, ahead: bool, p: float, seeds: int) -> str:
    tested = seeds > 1 and (pair.seeds is not None or pair.examples is not None)
    if not tested or p >= ALPHA:
        return NONE
    return BETTER if ahead else WORSE


# All problems together.


def _overall(comparisons: Mapping[str, Comparison], challenger: str | None) -> dict[str, Any]:
    """Rank methods over the problems that all of them have; problems are the blocks.

    A method that lacks many problems would take them from everyone: it is not ranked.
    """
    counted: dict[str, int] = {}
    for own in comparisons.values():
        for label in own.methods:
            counted[label] = counted.get(label, 0) + 1
    most = max(counted.values(), default=0)
    labels = tuple(one for one, count in counted.items() if 2 * count > most or one == challenger)
    shared = {
        name: own
        for name, own in comparisons.items()
        if all(label in own.methods for label in labels)
    }
    if len(shared) < _FEWEST or len(labels) < 2:
        return {"problems": list(shared), "ranks": None, "not_different_from_best": []}
    units = np.array(
        [
            [(1 if own.higher else -1) * own.methods[label].mean for own in shared.values()]
            for label in labels
        ]
    )
    ranked = ranks(labels, units)
    best, *others = ranked.average
    width = ranked.critical_difference or 0.0
    near = [one for one in others if ranked.average[one] - ranked.average[best] < width]
    return {
        "problems": list(shared),
        "ranks": dataclasses.asdict(ranked),
        "not_different_from_best": near,
    }


def _verdict(
    found: Mapping[str, Any], challenger: str, failed: list[str], without: list[str]
) -> dict[str, Any]:
    """Say in plain sentences how the challenger stands to the baselines."""
    outcomes = {BETTER: 0, NONE: 0, WORSE: 0}
    beside_best: dict[str, list[str]] = {BETTER: [], NONE: [], WORSE: []}
    always: dict[str, set[str]] = {}
    for name, own in found["problems"].items():
        if "against" not in own:
            continue
        means = {
            label: one["mean"] for label, one in own["methods"].items() if label in own["against"]
        }
        best = (max if own["higher"] else min)(means, key=lambda label: means[label])
        beside_best[own["against"][best]["outcome"]].append(name)
        for label, one in own["against"].items():
            outcomes[one["outcome"]] += 1
            always.setdefault(label, set()).add(one["outcome"])
    problems = sum(map(len, beside_best.values()))
    if not problems:
        sentence = f"{challenger} was compared with no baseline."
    else:
        sentence = (
            f"{challenger} beside the best baseline of each of {problems} problems: better on "
            f"{len(beside_best[BETTER])}, {NONE} on {len(beside_best[NONE])}, worse on "
            f"{len(beside_best[WORSE])}. Of {sum(outcomes.values())} pairs of a problem and a "
            f"baseline it is better in {outcomes[BETTER]}, worse in {outcomes[WORSE]}; "
            f"{NONE} in {outcomes[NONE]}."
        )
        average = (found["overall"]["ranks"] or {}).get("average", {})
        if challenger in average:
            first = next(iter(average))
            shared = len(found["overall"]["problems"])
            same = challenger in found["overall"]["not_different_from_best"]
            beside = (
                ", the first"
                if first == challenger
                else f"; first is {first} with {average[first]:.1f}"
                f"{', from which its rank does not differ' if same else ''}"
            )
            sentence += (
                f" Average rank {average[challenger]:.1f} of {len(average)} over {shared} "
                f"problems{beside}."
            )
    guessed = [
        name
        for name, own in found["problems"].items()
        if challenger in own["methods"]
        and own["guess"] is not None
        # Which way is better is the sign of both.
        and (own["methods"][challenger]["mean"] <= own["guess"]) == own["higher"]
    ]
    if guessed:
        sentence += f" It is no better than guessing on {', '.join(guessed)}."
    if failed:
        sentence += f" It came to no end on {', '.join(failed)}."
    if without:
        sentence += f" It refused {', '.join(without)}, so nothing is known of it there."
    return {
        "sentence": sentence,
        "pairs": outcomes,
        "beside_best_baseline": beside_best,
        "never_worse_than": sorted(one for one, seen in always.items() if WORSE not in seen),
        "better_everywhere_than": sorted(one for one, seen in always.items() if seen == {BETTER}),
        "no_better_than_guessing": guessed,
        "failed": failed,
    }
