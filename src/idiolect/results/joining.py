"""Outcomes of one method by seed: part of one taken, and several joined into one."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from idiolect.engine.outcome import Outcome, Scores, Speed


def of_seeds(outcome: Outcome, seeds: Sequence[int]) -> Outcome:
    """Keep some seeds of an outcome, in the order asked for, and their share of the time."""
    held = [members.seed for members in outcome.members]
    places = [held.index(seed) for seed in seeds]
    if places == list(range(len(held))):
        return outcome
    return dataclasses.replace(
        outcome,
        members=tuple(outcome.members[place] for place in places),
        wire=tuple(outcome.wire[place] for place in places),
        left_out=tuple(outcome.left_out[place] for place in places) if outcome.left_out else (),
        took_part=tuple(outcome.took_part[n] for n in places) if outcome.took_part else (),
        curves={key: values[:, places] for key, values in outcome.curves.items()},
        final={key: values[places] for key, values in outcome.final.items()},
        facts={key: values[places] for key, values in outcome.facts.items()},
        reasons=tuple(outcome.reasons[place] for place in places) if outcome.reasons else (),
        speed=outcome.speed.share(len(places) / len(held)),
    )


def joined(outcomes: Sequence[Outcome], seeds: Sequence[int]) -> Outcome:
    """Join outcomes of different seeds, in the order of `seeds`; settings may differ by seed."""
    first = outcomes[0]
    if len(outcomes) == 1:
        return of_seeds(first, seeds)
    whole = dataclasses.replace(
        first,
        about={**first.about, "settings": _settings(outcomes)},
        members=tuple(members for one in outcomes for members in one.members),
        wire=tuple(wire for one in outcomes for wire in one.wire),
        left_out=tuple(own for one in outcomes for own in one.left_out),
        took_part=tuple(own for one in outcomes for own in one.took_part),
        curves=_together(outcomes, lambda one: one.curves, axis=1),
        final=_together(outcomes, lambda one: one.final, axis=0),
        facts=_together(outcomes, lambda one: one.facts, axis=0),
        reasons=tuple(own for one in outcomes for own in one.reasons),
        speed=Speed(
            sum(one.speed.examples for one in outcomes),
            sum(one.speed.train_seconds for one in outcomes),
            sum(one.speed.judge_seconds for one in outcomes),
        ),
        notices=tuple(dict.fromkeys(text for one in outcomes for text in one.notices)),
    )
    return of_seeds(whole, seeds)


def _settings(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Give settings that all share as they are, and others as a list, one for each seed."""
    held = [one.about["settings"] for one in outcomes for _ in one.members]
    return {
        key: value if all(own.get(key) == value for own in held) else [own[key] for own in held]
        for key, value in held[0].items()
    }


def _together(outcomes: Sequence[Outcome], part: Callable[[Outcome], Scores], axis: int) -> Scores:
    """Stack arrays that all have in the same form; a fact of some settings only is left out."""
    held = [part(one) for one in outcomes]
    return {
        key: np.concatenate([own[key] for own in held], axis=axis)
        for key, values in held[0].items()
        if all(key in own and _form(own[key], axis) == _form(values, axis) for own in held)
    }


def _form(values: np.ndarray, axis: int) -> tuple[int, ...]:
    return tuple(size for place, size in enumerate(values.shape) if place != axis)
