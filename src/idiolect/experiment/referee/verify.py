"""Check a file of the referee that somebody else has sent: everything that it can be asked."""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from idiolect.core.metrics import metric
from idiolect.engine.outcome import RIGHT, Watch
from idiolect.errors import ConfigError, IdiolectError
from idiolect.experiment.referee.cells import BY_ROW, Record, outcome_of, train_cell, weighted
from idiolect.experiment.referee.judgement import judge
from idiolect.experiment.referee.referee_run import FORMAT, described, read_lines, stored_folder
from idiolect.experiment.referee.suite import (
    SIZES,
    Contestant,
    Suite,
    SuiteProblem,
    digest_of,
    load_suite,
)
from idiolect.results.document import Document

OK, NOTE, FAULT = "ok", "note", "fault"

_ALWAYS = ("accuracy", "rmse")  # of which every client with test rows has a figure
# The same for all methods of a problem: of a cell, and of each of its seeds.
_SHARED = ("rows", "data", "names", "task", "metric", "evaluated", "cohort")
_HELD = ("seed", "train", "test", "guess")
_KEPT = ("took_part", *BY_ROW)  # of a seed, where the others have it too
_ROUNDED = 2e-6  # stored scores have six digits
_ALIKE = 0.02  # of a mean: two trainings that differ in rounding alone, on few rows or midway
_CLOSE = 0.005  # of a mean: single answers differ between devices


class Check(NamedTuple):
    """One thing that was looked at, and what was seen."""

    kind: str  # ok, note or fault
    text: str


def verify(content: Document, challenger: Contestant | None = None) -> list[Check]:
    """Check a file; nothing of it is run. `challenger` is the method whose code is at hand."""
    found: list[Check] = []
    try:
        found.extend(_checks(content, challenger))
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, IdiolectError,
            RecursionError) as error:  # fmt: skip
        said = f"{type(error).__name__}: {error}"
        found.append(Check(FAULT, f"the file has not the form that the referee writes ({said})"))
    return found


def _checks(content: Document, challenger: Contestant | None) -> Iterator[Check]:
    if content.get("format") != FORMAT or content["suite"]["size"] not in SIZES:
        yield Check(FAULT, f"its format is {content.get('format')!r}; this version reads {FORMAT}")
        return
    if not _finite(content):
        yield Check(FAULT, "it holds a number that is not finite, which the referee never writes")
        return
    whole = "findings" in content
    if whole:
        bare = {key: value for key, value in content.items() if key != "digest"}
        same = content.get("digest") == digest_of(bare)
        yield _said(
            same, "the file's digest is its own", "the file was changed: its digest differs"
        )
    suite = load_suite(content["suite"]["size"])
    yield _suite(content["suite"], suite)
    methods: dict[str, Document] = (
        content["methods"] if whole else {content["label"]: _line(content)}
    )
    label = content["challenger"] if whole else content["label"]
    if label not in methods:
        yield Check(FAULT, f"the challenger {label!r} is not among its methods")
        return
    if _contestant(suite, label, methods[label]) is None and label in _labels(suite):
        yield Check(FAULT, f"the challenger is called {label}, which is a baseline it is not")
    yield from _problems(content, suite, methods[label], label)
    faults = [
        Check(FAULT, f"{name}/{label}: {text}")
        for label, own in methods.items()
        for name, record in own["cells"].items()
        for text in _cell(record, suite.problems.get(name), _contestant(suite, label, own))
    ]
    yield from faults
    cells = sum(len(own["cells"]) for own in methods.values())
    if not faults:
        yield Check(OK, f"{cells} cells: seeds, rounds, scores and curves agree with the suite")
        yield Check(OK, "each method tried as many settings, and chose by validation data")
    stored = read_lines(stored_folder(suite.size))
    same = [own for own in stored.values() if own["suite"] == described(suite)]
    yield from _paired(methods, same)
    yield from _code(methods, label, suite, challenger)
    for own in same:
        if (own["label"], own["name"]) == (label, methods[label]["name"]):
            yield from _itself(methods[label]["cells"], own["cells"], label)
    if whole:
        yield from _baselines(content, suite, methods, label)
    if whole and not faults:  # of faulty cells nothing follows
        names = [name for name in content["problems"] if name in suite.problems]
        again = judge({one: own["cells"] for one, own in methods.items()}, names, label)
        where = difference(content["findings"], again, "findings")
        yield _said(
            not where,
            "all statistics, ranks and verdicts follow from the stored scores",
            f"computed again from the stored scores, {where}",
        )
        yield from _beside_stored(content, methods[label]["cells"], names, label, same)


def _finite(value: Any) -> bool:
    """Say whether all numbers are finite: NaN compares with nothing, so no check would see it."""
    if isinstance(value, Mapping):
        return all(map(_finite, value.values()))
    if isinstance(value, list):
        return all(map(_finite, value))
    return not isinstance(value, float) or math.isfinite(value)


def _line(content: Document) -> Document:
    return {key: content[key] for key in ("name", "code", "unable", "cells")}


def _said(fine: bool, yes: str, no: str) -> Check:
    return Check(OK, yes) if fine else Check(FAULT, no)


def _suite(told: Mapping[str, Any], suite: Suite) -> Check:
    if told["version"] != suite.version:
        return Check(
            FAULT,
            f"it is of version {told['version']} of the suite and this package has version "
            f"{suite.version}; check it with a package of that version",
        )
    return _said(
        told == described(suite), "the suite is the one of this package",
        "its suite's digest is not that of this package: other problems or other baselines",
    )  # fmt: skip


def _problems(content: Document, suite: Suite, own: Document, label: str) -> Iterator[Check]:
    """Ask for every problem: none may be missing in silence, where it went badly perhaps."""
    listed = content.get("problems", list(own["cells"]))
    told = {**content.get("left_out", {}), **own["unable"]}
    reasons: dict[str, list[str]] = {}
    for problem in suite.first:
        if problem.name in own["cells"]:
            continue
        if "problems" not in content and problem.instead in own["cells"]:
            told.setdefault(problem.name, f"{problem.instead} is there instead")
        if problem.name in told:
            reasons.setdefault(told[problem.name], []).append(problem.name)
        else:
            text = f"{label} has no result on {problem.name}, and the file does not say why"
            yield Check(FAULT, text)
    for why, names in reasons.items():
        yield Check(NOTE, f"left out: {', '.join(names)} ({why})")
    for name in {name for name in listed if listed.count(name) > 1}:
        yield Check(FAULT, f"{name} is listed twice")
    for name in set(own["cells"]) - set(listed):
        yield Check(FAULT, f"{label} has a result on {name}, which the findings leave out")
    for name in set(listed) - set(suite.problems):
        yield Check(FAULT, f"the suite has no problem {name!r}")
    for name in listed:
        if name not in own["cells"] and name not in own["unable"]:
            yield Check(FAULT, f"{label} has no result on {name}, which the file lists")


def _contestant(suite: Suite, label: str, own: Document) -> Contestant | None:
    return next(
        (one for one in suite.baselines if (one.label, one.name) == (label, own["name"])), None
    )


def _labels(suite: Suite) -> set[str]:
    return {own.label for own in suite.baselines}


# One cell.


def _cell(
    record: Record, problem: SuiteProblem | None, baseline: Contestant | None
) -> Iterator[str]:
    if problem is None:
        yield "there is no such problem"
        return
    if record["problem"] != problem.digest:
        yield "it was trained on another version of the problem"
    if "failed" in record:
        return
    raw = problem.raw
    if [one["seed"] for one in record["seeds"]] != raw["seeds"]:
        yield f"its seeds are not the suite's {raw['seeds']}"
    if record["rounds"] != raw["rounds"] or record["evaluated"][-1] != raw["rounds"]:
        yield f"its result is not that of round {raw['rounds']}, the last"
    wanted = raw["evaluate"].get("metric") or metric("", record["task"]).name
    if wanted != record["metric"]:
        yield f"it is scored by {record['metric']} and not by {wanted}"
    every, last = raw["evaluate"]["every"], raw["rounds"]
    if record["evaluated"] != [*range(every, last, every), last]:
        yield f"it was not scored every {every} rounds"
    if len(record["rows"]) != len(record["seeds"]):
        yield "it does not say which rows each seed had"
    for key, value in problem.training.items():
        if (used := record["settings"].get(key)) != value:
            yield f"it was trained with {key} = {used} and not with the problem's {value}"
    faults = [text for one in record["seeds"] for text in _seed(record, one)]
    yield from faults
    if not faults:
        outcome_of("", record)  # what a statistic reads of it must be there, and be numbers
    yield from tuning_faults(record, problem, baseline)


def _seed(record: Record, one: Record) -> Iterator[str]:
    own, where = metric(record["metric"], record["task"]), f"seed {one['seed']}"
    scores, tests = np.array(one["score"], np.float64), np.array(one["test"], np.float64)
    clients = record["data"]["clients"]
    if not len(scores) == len(tests) == len(one["train"]) == clients:
        yield f"{where}: it has {len(scores)} scores of {clients} clients"
        return
    if own.name in _ALWAYS and (np.isnan(scores) & (tests > 0)).any():
        yield f"{where}: a client with test rows has no score"
    took = one.get("took_part", [1] * clients)
    if len(took) != clients or any(value not in (0, 1) for value in took):
        yield f"{where}: it does not say of each client whether it took part"
    if len(one["validation_curve"]) != len(record["evaluated"]):
        yield f"{where}: its validation curve has not a point for each evaluated round"
    seen = scores[~np.isnan(scores)]
    curves = [*one["validation_curve"], *one["test_curve"]]
    told = np.array([*seen, *(point for point in curves if point is not None)])
    low, high = own.low, own.high
    if (low is not None and (told < low).any()) or (high is not None and (told > high).any()):
        yield f"{where}: a score is beyond what {own.title} can be"
    if own.name == "accuracy":
        right = scores * tests
        apart = np.abs(right - np.round(right)) > _ROUNDED * tests + 1e-9
        if np.nan_to_num(apart, nan=0.0).any():
            yield f"{where}: an accuracy is no share of the client's test rows"
    if RIGHT in one:
        rows = np.array(one[RIGHT], np.float64)
        whole = rows.ndim == 2 and len(rows) == clients
        whole = whole and (rows >= 0).all() and (rows == np.round(rows)).all()
        # A client without test rows has no score; of other metrics only the most is known.
        exact, known = own.name == "accuracy", np.round(np.nan_to_num(scores * tests))
        whole = whole and not (rows > _rows_by_group(tests, rows.shape[1])).any()
        if not whole or (exact and (rows.sum(1) != known).any()):
            yield f"{where}: its right answers by row do not add up to its scores"
    if len(one["test_curve"]) != len(record["evaluated"]):
        yield f"{where}: its curve has not a point for each evaluated round"
    elif abs(weighted(scores, tests) - one["test_curve"][-1]) > _ROUNDED * max(1, abs(seen).max()):
        yield f"{where}: the last point of its curve is not its score"
    if one["bytes_down"] < 0 or one["bytes_up"] < 0 or record["seconds"] <= 0:
        yield f"{where}: its cost is below zero"


def _rows_by_group(tests: NDArray[Any], groups: int) -> NDArray[Any]:
    """Return how many of each client's test rows are in each group: row n is in n % groups."""
    return (tests[:, None] + groups - 1 - np.arange(groups)) // groups


def tuning_faults(
    record: Record, problem: SuiteProblem, baseline: Contestant | None
) -> Iterator[str]:
    """Check budget, space and choice: by validation, the first of equals, for each seed."""
    tuned = record["tuned"]
    if tuned.get("budget") != problem.budget:
        yield f"its tuning budget is {tuned.get('budget')} and not the suite's {problem.budget}"
    if len(tuned["trials"]) > problem.budget:
        yield f"it tried {len(tuned['trials'])} settings, more than the {problem.budget} of others"
    if not str(tuned.get("metric", "")).startswith("validation "):
        yield f"it was tuned by {tuned.get('metric')!r}, not on validation data"
    if baseline is not None and tuned["space"] != problem.space(baseline):
        yield "it tried other settings than the suite lists for it"
    seeds = [one["seed"] for one in record["seeds"]]
    settings = [trial["settings"] for trial in tuned["trials"]]
    if len({digest_of(own) for own in settings}) != len(settings):
        yield "it counts a setting twice"
    if math.prod(len(values) for values in tuned["space"].values()) != len(settings):
        yield "it did not try the whole of its space"
    for own in settings:
        if any(value not in tuned["space"].get(key, ()) for key, value in own.items()):
            yield f"it tried {own}, which is not in its space"
    sign = metric(record["metric"], record["task"]).sign
    tried = problem.raw["tune"].get("rounds", problem.raw["rounds"])
    chosen = {one["seed"]: one["settings"] for one in tuned["chosen"]}
    if list(chosen) != seeds:
        yield "it does not say what each seed chose"
        return
    for place, seed in enumerate(seeds):
        scores = []
        for trial in tuned["trials"]:
            told = {one["seed"]: one["score"] for one in trial["validation"]}
            scores.append(-math.inf if told[seed] is None else sign * told[seed])
        if settings and settings[int(np.argmax(scores))] != chosen[seed]:
            yield f"seed {seed}: it did not take the settings that are best on validation data"
        curve = record["seeds"][place]["validation_curve"]
        if settings and curve and tried in record["evaluated"]:
            # The final training of the same settings has the same rounds.
            then, best = curve[record["evaluated"].index(tried)], sign * max(scores)
            if then is None or not abs(then - best) <= _ALIKE * max(1.0, abs(best)):
                yield (
                    f"seed {seed}: a trial of what it chose scored {best:.6g} on validation data "
                    f"after {tried} rounds, and the final training {then}"
                )
        for key, value in chosen[seed].items():
            used = record["settings"].get(key)
            if value != (used[place] if isinstance(used, list) else used):
                yield f"seed {seed}: it was trained with {key} = {used} and had chosen {value}"


# Cells beside each other.


def _paired(methods: Mapping[str, Document], stored: Sequence[Document]) -> Iterator[Check]:
    """All methods of a problem had the same rows and rounds; guessing scores the same for all.

    So had the stored results of this package, beside which a line of the board will stand.
    """
    seen: dict[str, tuple[str, Any]] = {}
    drawn: dict[str, Any] = {}
    known = [(f"the stored {own['label']}", own["cells"]) for own in stored]
    for label, cells in [*known, *((one, own["cells"]) for one, own in methods.items())]:
        for name, record in cells.items():
            if "failed" in record:
                continue
            facts = {key: record[key] for key in _SHARED}
            facts["seeds"] = [
                {**{key: one[key] for key in _HELD}, **{key: key in one for key in _KEPT}}
                for one in record["seeds"]
            ]
            first, told = seen.setdefault(name, (label, facts))
            if where := difference(told, facts, ""):
                which = f"{name}: {label} had other clients or rows than {first}"
                yield Check(FAULT, f"{which} ({where.partition(' ')[0].removeprefix('.')})")
                return
            # Who is drawn depends on the seed alone; a method that needs no server trains everyone.
            if all(
                "took_part" in one and one["bytes_down"] + one["bytes_up"]
                for one in record["seeds"]
            ):
                took = np.array([one["took_part"] for one in record["seeds"]])
                if (took > drawn.setdefault(name, took)).any():
                    yield Check(
                        FAULT,
                        f"{name}: {label} says of clients that they took part which "
                        "were drawn in no round",
                    )
    yield Check(OK, "all methods of a problem had the same clients and rows")


def _code(
    methods: Mapping[str, Document], label: str, suite: Suite, challenger: Contestant | None
) -> Iterator[Check]:
    for one, own in methods.items():
        cells = own["cells"].values()
        if any(record["code"] != own["code"] for record in cells):
            yield Check(FAULT, f"{one}: its cells are of different versions of its code")
        if any(not record["versions"].get("idiolect") for record in cells):
            yield Check(FAULT, f"{one}: it does not say with which versions it was trained")
    others = [
        one
        for one, own in methods.items()
        if (known := _contestant(suite, one, own)) is not None and known.code != own["code"]
    ]
    if others:
        yield Check(NOTE, f"trained with other code than this package's: {', '.join(others)}")
    if _contestant(suite, label, methods[label]) is not None:
        return
    if challenger is None:
        yield Check(NOTE, f"the code of {label} was not compared; give its file with --method")
    else:
        same = challenger.code == methods[label]["code"]
        yield _said(
            same, f"the code of {label} is that of the file given",
            f"the code of {label} is not that of the file given",
        )  # fmt: skip


def _baselines(
    content: Document, suite: Suite, methods: Mapping[str, Document], label: str
) -> Iterator[Check]:
    """Compare the baselines with the stored ones of this package.

    One that the sender has trained may differ as far as other hardware makes a difference.
    """
    stored = read_lines(stored_folder(suite.size))
    kept = {one: own["cells"] for one, own in stored.items() if own["suite"] == described(suite)}
    for one in methods.keys() - {label, *_labels(suite)}:
        yield Check(FAULT, f"{one} is neither the challenger nor a baseline")
    same, unknown = 0, []
    for one in (own.label for own in suite.baselines if own.label != label):
        own = methods.get(one, {"cells": {}})["cells"]
        known = {name: kept[one][name] for name in content["problems"] if name in kept.get(one, {})}
        here = one in content["trained_here"]
        if not own:
            kind = FAULT if known else NOTE
            yield Check(kind, f"the baseline {one} is not in the file")
        elif {name: own.get(name) for name in known} == known:
            same += 1
        elif not here or any(name not in own for name in known):
            yield Check(FAULT, f"{one} is not as this package has it stored")
        else:
            checks = [compare_cells(f"{name}/{one}", known[name], own[name]) for name in known]
            yield from (check for check in checks if check.kind == FAULT)
            yield Check(NOTE, f"{one} was trained by the sender; it is not the stored result")
        unknown += [one] if set(own) - set(known) else []
    yield Check(OK, f"{same} of {len(suite.baselines)} baselines are as this package has them")
    if unknown:
        yield Check(NOTE, f"not stored in this package, so not compared: {', '.join(unknown)}")


def _beside_stored(
    content: Document,
    cells: Mapping[str, Record],
    names: Sequence[str],
    label: str,
    stored: Sequence[Document],
) -> Iterator[Check]:
    """Judge the challenger by this package's baselines too, where the sender has trained others.

    Those may be close to the stored ones, each of them, and yet all be a little worse.
    """
    lines = {own["label"]: own["cells"] for own in stored if own["label"] != label}
    if set(content["trained_here"]) <= {label} or not lines:
        return
    ours = judge({label: cells, **lines}, names, label)["verdict"]
    if ours["beside_best_baseline"] != content["findings"]["verdict"]["beside_best_baseline"]:
        yield Check(NOTE, f"beside this package's own baselines: {ours['sentence']}")


def _itself(cells: Mapping[str, Record], kept: Mapping[str, Record], label: str) -> Iterator[Check]:
    """Compare a challenger that is a baseline with its stored results."""
    checks = [compare_cells(f"{n}/{label}", kept[n], own) for n, own in cells.items() if n in kept]
    yield from (check for check in checks if check.kind != OK)
    same = sum(check.kind == OK for check in checks)
    yield Check(OK, f"{same} of {len(cells)} cells of {label} are as this package has them")


def difference(told: Any, found: Any, at: str) -> str:
    """Name the first place where two plain values differ; numbers may in their last digits."""
    if isinstance(told, Mapping) and isinstance(found, Mapping):
        for key in [*found, *(key for key in told if key not in found)]:
            if key not in told or key not in found:
                return f"{at}.{key} is {'missing' if key not in told else 'too much'}"
            if inner := difference(told[key], found[key], f"{at}.{key}"):
                return inner
        return ""
    if isinstance(told, list) and isinstance(found, list) and len(told) == len(found):
        places = (
            difference(a, b, f"{at}[{n}]") for n, (a, b) in enumerate(zip(told, found, strict=True))
        )
        return next(filter(None, places), "")
    if _number(told) and _number(found):
        same = math.isclose(told, found, rel_tol=1e-6, abs_tol=1e-9)
    else:
        same = type(told) is type(found) and told == found
    return "" if same else f"{at} is {found!r} and not {told!r}"


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


# One cell trained again.


def rerun(
    content: Document,
    cell: str,
    folder: Path,
    watch: Watch,
    challenger: Contestant | None = None,
    *,
    device: str | None = None,
    data_dir: Path | None = None,
) -> Check:
    """Train one cell of a file again, and compare every client's score."""
    name, _, label = cell.partition("/")
    suite = load_suite(content["suite"]["size"])
    methods = content.get("methods") or {content["label"]: _line(content)}
    if label not in methods or name not in methods[label]["cells"]:
        known = [f"{n}/{one}" for one, own in methods.items() for n in own["cells"]]
        raise ConfigError(
            f"the file has no cell {cell!r}; expected PROBLEM/METHOD, such as {known[0]!r}"
        )
    contestant = _contestant(suite, label, methods[label]) or challenger
    if contestant is None or contestant.label != label:
        raise ConfigError(
            f"{label} is no baseline; give the file it was trained from with --method FILE"
        )
    told = methods[label]["cells"][name]
    found = train_cell(
        suite.problem(name), contestant, folder, watch, device=device, data_dir=data_dir
    )
    check = compare_cells(cell, told, found)
    if check.kind != FAULT and "failed" not in told and (what := _beside(told, found)):
        return Check(FAULT, f"{cell}: trained again, its {what} is another")
    return check


def _beside(told: Record, found: Record) -> str:
    """Name what differs beside the scores; empty where nothing does."""
    seeds = list(zip(told["seeds"], found["seeds"], strict=True))
    for key in ("took_part", "bytes_down", "bytes_up"):
        if any(one.get(key) != other.get(key) for one, other in seeds):
            return key
    for key in ("validation_curve", "test_curve"):
        before, after = (
            np.array([one[key] for one in own["seeds"]], np.float64).mean(0)
            for own in (told, found)
        )
        if (np.abs(before - after) > _ALIKE * np.maximum(1, np.abs(before))).any():
            return key
    return ""


def compare_cells(cell: str, told: Record, found: Record) -> Check:
    """Say how a cell that was trained again differs from the one in the file."""
    if "failed" in told or "failed" in found:
        same = ("failed" in told) == ("failed" in found)
        return _said(same, f"{cell}: it fails again", f"{cell}: only one of the two failed")
    if told["rows"] != found["rows"]:
        return Check(FAULT, f"{cell}: the data here is not the data it was trained on")
    before, after = (
        np.array([one["score"] for one in own["seeds"]], np.float64) for own in (told, found)
    )
    if before.shape != after.shape:
        return Check(FAULT, f"{cell}: the file has other clients or seeds")
    largest = float(np.nanmax(np.abs(before - after)))
    mean = abs(float(np.nanmean(before) - np.nanmean(after)))
    if largest <= _ROUNDED * max(1.0, float(np.nanmax(np.abs(before)))):
        return Check(OK, f"{cell}: trained again, every client has the same score")
    own = metric(told["metric"], told["task"])
    close = _CLOSE if own.percent else _CLOSE * abs(float(np.nanmean(before)))
    words = (
        f"{cell}: trained on {found['device']} and on {told['device']}, the mean "
        f"differs by {mean:.2g}, a client's score by at most {largest:.2g}"
    )
    return Check(NOTE if mean <= close else FAULT, words)
