"""Figures that were measured: run, then label, then model; a value for each seed in %."""

import json
import math
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from pathlib import Path
from statistics import mean, stdev
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
from pydantic import BaseModel

from idiolect.analysis.significance import holm
from idiolect.errors import ConfigError, suggest
from idiolect.experiment.load import load_experiment, read_toml
from idiolect.experiment.schema import STRICT, Experiment, signature_model, validate
from idiolect.results.document import FILE, Document, metric_of, read_document
from idiolect.results.statistics import over_clients, student_p, student_quantile

Made = TypeVar("Made")

BEST_TEST_ROUND = ", best test round"
"""Ends the name of a model that is scored as much of the field does, by a choice on test data."""
LAST_ROUNDS, BY_VALIDATION = ", last ten rounds", ", best validation round"
NEWCOMERS, TOOK_PART = ", newcomers", ", took part"
"""End the name of a model that is scored on the clients of no round, and on the others."""


class Figure(NamedTuple):
    """A figure of each seed, in per cent."""

    seeds: tuple[float, ...]

    @property
    def mean(self) -> float:
        """The mean over seeds."""
        return mean(self.seeds)

    @property
    def deviation(self) -> float:
        """The sample deviation over seeds; 0 of a single one."""
        return stdev(self.seeds) if len(self.seeds) > 1 else 0.0

    @property
    def bounds(self) -> tuple[float, float]:
        """Between what the mean of ever more seeds lies: each side is wrong in 5 % of cases.

        A single seed says nothing of the spread: whatever it shows may be luck, but not that it
        meets a figure.
        """
        if len(self.seeds) < 2:
            return -math.inf, self.mean
        freedom = len(self.seeds) - 1
        way = student_quantile(2 * _ERROR, freedom) * self.deviation / math.sqrt(len(self.seeds))
        return self.mean - way, self.mean + way


Measured = Mapping[str, Mapping[str, Mapping[str, Figure]]]


def figure_of(seeds: Sequence[float]) -> Figure:
    """Return a share given for each seed in per cent."""
    return Figure(tuple(100 * value for value in seeds))


def shipped_figures() -> Measured:
    """Return what came with the package: the figures of docs/reproduction."""
    return {
        run: {
            label: {model: Figure(tuple(seeds)) for model, seeds in own["models"].items()}
            for label, own in labels.items()
        }
        for run, labels in _shipped().items()
    }


def _shipped() -> dict[str, Any]:
    file = resources.files("idiolect.experiment.repro").joinpath("measured.json")
    return dict(json.loads(file.read_text(encoding="utf-8")))


def figures_of_result(result: Mapping[str, Any], name: str) -> dict[str, dict[str, Figure]]:
    """Return a finished run's figures; `name` is what the paper prints.

    `mean` or `weighted_mean` over clients, or `pooled`: of all clients' test rows together. Where
    clients are scored on a common test set, that is the figure. Beside them, under names of their
    own, the best and the last test rounds of runs that recorded them, and newcomers' scores.
    """
    if not metric_of(result).percent:
        raise ConfigError(
            f"{result['name']} is scored by {metric_of(result).title}, and figures are compared in "
            "per cent: set evaluate.metric to a share, such as accuracy"
        )
    found: dict[str, dict[str, Figure]] = {}
    for label, own in result["methods"].items():
        found[label] = {
            model: figure_of(
                [_score_of(seed["models"][model], name, result) for seed in own["seeds"]]
            )
            for model in own["headline"]
        }
        for model, best in own.get("best_test_round", {}).items():
            found[label][model + BEST_TEST_ROUND] = figure_of(best["weighted_mean"])
        others = {LAST_ROUNDS: "last_test_rounds", BY_VALIDATION: "test_at_best_validation_round"}
        for words, key in others.items():
            for model, figures in own.get(key, {}).items():
                found[label][model + words] = figure_of(figures[_over(name)])
        for model in own["headline"]:
            for words, present in ((NEWCOMERS, False), (TOOK_PART, True)):
                parts = [
                    _part(seed["clients"], model, name, result, present) for seed in own["seeds"]
                ]
                if not any(math.isnan(part) for part in parts):
                    found[label][model + words] = figure_of(parts)
    return found


def _over(name: str) -> str:
    """Return the mean over clients that a figure is; all rows together is clients by rows."""
    return "mean" if name == "mean" else "weighted_mean"


def _part(
    clients: Sequence[Mapping[str, Any]],
    model: str,
    name: str,
    result: Mapping[str, Any],
    present: bool,
) -> float:
    """Return the mean of those clients that took part in some round, or of the newcomers."""
    own = [one for one in clients if one.get("took_part", True) is present]
    scores = np.array([one[model][metric_of(result).name] for one in own], np.float64)
    return over_clients(scores, [one["test"] for one in own])[_over(name)]


def _score_of(scores: Mapping[str, Any], name: str, result: Mapping[str, Any]) -> float:
    if name == "pooled":
        return float(scores["pooled"][result["metric"]["name"]])
    return float(scores["common_accuracy" if "common_accuracy" in scores else name])


# A table or figure of a paper: what it compares, what it claims, and what its status is.


REPRODUCED, CLOSE, DIFFERS = "reproduced", "close", "differs"
UNDECIDED = "not decided"
PENDING, IMPOSSIBLE, NOTHING = "not measured yet", "not possible here", "nothing to measure"

RULES = {
    REPRODUCED: "every compared figure is equivalent to the paper's within one point: with 95 % "
    "confidence on each side our mean is not further from it; and every order that the paper "
    "claims of the table holds in ours, beyond noise",
    CLOSE: "with 95 % confidence no compared figure is more than three points below the paper's, "
    "and every order that it claims holds, beyond noise; of a picture that prints no figures, what "
    "the paper says of it holds beyond noise, or is judged by hand, which the note then says",
    DIFFERS: "with 95 % confidence some figure is more than three points below the paper's, or an "
    "order that it claims is turned round, beyond noise",
    UNDECIDED: "neither: a claimed order is within the noise, or our seeds are too few or too far "
    "apart to say; a single seed decides nothing, unless it is more than three points below",
    PENDING: "it, or a part of it (a panel, a column), has not been run; what was run does not "
    "differ",
    IMPOSSIBLE: "it cannot be run here; the note says why",
    NOTHING: "a description or a drawing, or settings that ours take over",
}
"""What each status means. A figure above the paper's may be as far above as it likes in `close`."""

_ONE_POINT, _THREE_POINTS = 1.0, 3.0
_ERROR = 0.05  # of each side of an equivalence, and of all claims of a row together


@dataclass(frozen=True)
class Cell:
    """One figure of the paper's own method beside ours."""

    what: str
    run: str
    label: str
    model: str
    paper: float

    def ours(self, measured: Measured) -> Figure | None:
        """Return our figure, where it was measured."""
        return measured.get(self.run, {}).get(self.label, {}).get(self.model)

    def apart(self, measured: Measured) -> tuple[float, float]:
        """Return between what our mean is above the paper's figure, with 95 % on each side."""
        ours = self.ours(measured)
        assert ours is not None
        low, high = ours.bounds
        return low - self.paper, high - self.paper

    def last_round(self, measured: Measured) -> Figure | None:
        """Return our figure of the last round, where the paper's is the best test round."""
        if not self.model.endswith(BEST_TEST_ROUND):
            return None
        return replace(self, model=self.model.removesuffix(BEST_TEST_ROUND)).ours(measured)


@dataclass(frozen=True)
class Claim:
    """An ordering the paper states: `above` beats each of `below` in every one of `runs`."""

    says: str
    runs: tuple[str, ...]
    above: str
    below: tuple[str, ...]

    def known(self, measured: Measured) -> bool:
        """Return whether all that it compares was measured."""
        names = (self.above, *self.below)
        return all(_find(measured, run, name) is not None for run in self.runs for name in names)

    def compared(self, measured: Measured) -> "Iterator[OrderTest]":
        """Compare in every place, seed by seed; what was not measured is passed over."""
        for run in self.runs:
            for other in self.below:
                best, least = (_find(measured, run, name) for name in (self.above, other))
                if best is not None and least is not None:
                    yield OrderTest(self, run, other, best, least)


class OrderTest(NamedTuple):
    """Two figures of one run, of which a paper says that the first is above.

    They are compared over the seeds that both have, which stand first.
    """

    claim: Claim
    run: str
    other: str
    best: Figure
    least: Figure

    @property
    def gain(self) -> float:
        """By how many points the first is above."""
        return mean(self._gaps)

    @property
    def _gaps(self) -> list[float]:
        return [a - b for a, b in zip(self.best.seeds, self.least.seeds, strict=False)]

    @property
    def p(self) -> float:
        """The two-sided p of the paired differences of seeds, by Student's t, as a verdict's is.

        A single seed cannot tell a difference from luck.
        """
        gaps = self._gaps
        if len(gaps) < 2:
            return 1.0
        error = stdev(gaps) / math.sqrt(len(gaps))
        if error == 0:
            return 0.0 if mean(gaps) else 1.0
        return student_p(mean(gaps) / error, len(gaps) - 1)

    def words(self, p: float) -> str:
        """Say what was found, with a p that may be corrected for others."""
        seeds = len(self._gaps)
        best, least = (mean(one.seeds[:seeds]) for one in (self.best, self.least))
        found = f"{self.other} {least:.1f}, {self.claim.above} {best:.1f}"
        return f"{self.run}: {found}, p = {p:.2g}"


@dataclass(frozen=True)
class Runnable:
    """An experiment file, under the name its run is kept by, with what is changed in it."""

    file: str
    name: str = ""
    set: tuple[str, ...] = ()


@dataclass(frozen=True)
class Item:
    """A table or figure; `given` is a status set by hand, which a note then explains."""

    id: str
    title: str
    experiments: tuple[Runnable, ...] = ()
    cells: tuple[Cell, ...] = ()
    claims: tuple[Claim, ...] = ()
    given: str = ""
    note: str = ""
    link: str = ""
    figure: str = ""  # which figure of a result is printed, where it is not the paper's usual one
    missing: str = ""  # a panel or column that was not run: it may differ, but not be reproduced

    def status(self, measured: Measured) -> str:
        """Find the status by RULES."""
        if self.given or not (self.cells or self.claims):
            return self.given or NOTHING
        known = [cell for cell in self.cells if cell.ours(measured) is not None]
        bounds = [cell.apart(measured) for cell in known]
        turned, noise = self._failed(measured)
        if turned or any(high < -_THREE_POINTS for _, high in bounds):
            return DIFFERS  # whatever else is missing: it cannot mend that
        whole = len(known) == len(self.cells) and all(c.known(measured) for c in self.claims)
        if self.missing or not whole:
            return PENDING
        if noise or any(low < -_THREE_POINTS for low, _ in bounds):
            return UNDECIDED
        within = all(-_ONE_POINT <= low and high <= _ONE_POINT for low, high in bounds)
        return REPRODUCED if bounds and within else CLOSE

    def counts(self, measured: Measured) -> dict[str, int]:
        """Count cells: within one point of the table or above, further below, not measured."""
        ours = [(cell.ours(measured), cell.paper) for cell in self.cells]
        gaps = [own.mean - paper for own, paper in ours if own is not None]
        near = sum(gap >= -_ONE_POINT for gap in gaps)
        return {"near": near, "below": len(gaps) - near, "not_measured": len(ours) - len(gaps)}

    def _failed(self, measured: Measured) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
        """Find, claim by claim, the comparisons that are turned round, and those within noise.

        The p values of a row are corrected together, by Holm's rule.
        """
        compared = [one for claim in self.claims for one in claim.compared(measured)]
        turned: dict[str, list[str]] = {}
        noise: dict[str, list[str]] = {}
        for one, p in zip(compared, holm([one.p for one in compared]), strict=True):
            if p >= _ERROR:
                noise.setdefault(one.claim.says, []).append(one.words(p))
            elif one.gain < 0:
                turned.setdefault(one.claim.says, []).append(one.words(p))
        return turned, noise

    def failed(self, measured: Measured) -> Iterator[str]:
        """Name each claim that does not hold somewhere, and why, with the places."""
        for why, claims in zip(
            ("turned round", "within noise"), self._failed(measured), strict=True
        ):
            for says, places in claims.items():
                yield f"{why}: {says} ({'; '.join(places)})"

    def headline(self, measured: Measured) -> Cell | None:
        """Return the cell that falls shortest of the paper's, so that no other is hidden by it."""
        known = [cell for cell in self.cells if cell.ours(measured) is not None]
        return max(known, key=lambda cell: _short(cell, measured), default=None)


@dataclass(frozen=True)
class Paper:
    """A paper and all its tables and figures."""

    key: str
    name: str
    title: str
    authors: str
    page: str
    figure: str  # which mean of a result the paper prints: mean or weighted_mean
    items: tuple[Item, ...]
    time: str = ""  # what the page knows of it, for rows of which no seconds are kept


def experiments_folder() -> Path:
    """Return where the experiment files are: in the package if installed, else in the checkout."""
    inside = Path(__file__).parent / "experiments"
    return inside if inside.is_dir() else Path(__file__).parents[4] / "experiments"


def _short(cell: Cell, measured: Measured) -> float:
    """Return by how many points ours is below the paper's, as both are printed (one decimal)."""
    ours = cell.ours(measured)
    assert ours is not None
    return round(cell.paper - ours.mean, 1)


def _find(measured: Measured, run: str, name: str) -> Figure | None:
    label, _, model = name.partition(":")
    return measured.get(run, {}).get(label, {}).get(model or "personal")


# The index, read from a file a paper.


PAPERS = ("persfl", "ktpfl", "combinations", "pfml", "flamby", "pfllib", "fedala", "pfedkdh")


@cache
def papers() -> dict[str, Paper]:
    """Return every paper by its key."""
    return {key: _paper(key) for key in PAPERS}


def items() -> dict[str, tuple[Paper, Item]]:
    """Return every table and figure by its id, such as persfl-table3."""
    return {item.id: (paper, item) for paper in papers().values() for item in paper.items}


def find_item(name: str) -> tuple[Paper, Item]:
    """Return a table or figure and its paper."""
    from difflib import get_close_matches

    known = items()
    if name not in known:
        near = get_close_matches(name, known, 1, cutoff=0.5)
        meant = f"; did you mean {near[0]}?" if near else ";"
        raise ConfigError(
            f"no table or figure is called {name!r}{meant} `idiolect repro` lists all"
        )
    return known[name]


def _paper(key: str) -> Paper:
    file = resources.files("idiolect.experiment.repro").joinpath("papers", f"{key}.toml")
    return _read(key, tomllib.loads(file.read_text(encoding="utf-8")), file.name)


def own_paper(path: Path) -> Paper:
    """Read a paper's tables that are the user's own; the files that they name lie beside them.

    What cells and claims name is looked up in the experiments now, for a run may take hours.
    """
    paper = _read(path.stem, read_toml(path, "a table"), str(path), path.parent)
    for item in paper.items:
        loaded = dict(load_item(item))
        for cell in item.cells:
            where = f"{path}: cell {cell.what!r}"
            _look_up(cell.run, cell.label, loaded, where)
            along = cell.model.endswith((BEST_TEST_ROUND, LAST_ROUNDS, BY_VALIDATION))
            if along and not loaded[cell.run].evaluate.test_curve:
                raise ConfigError(
                    f"{where}: {cell.model!r} needs test scores along the way, and {cell.run} has "
                    "none; set evaluate.test_curve = true there"
                )
        for claim in item.claims:
            for run in claim.runs:
                for name in (claim.above, *claim.below):
                    label = name.partition(":")[0]
                    _look_up(run, label, loaded, f"{path}: claim {claim.says!r}")
    return paper


def _look_up(run: str, label: str, loaded: Mapping[str, Experiment], where: str) -> None:
    if run not in loaded:
        raise ConfigError(f"{where}: no experiment is called {suggest(run, loaded)}")
    if label not in (labels := labels_of(loaded[run])):
        raise ConfigError(f"{where}: no method of {run} is called {suggest(label, labels)}")


class _ItemTable(BaseModel):
    """A table or figure as its file has it."""

    model_config = STRICT

    id: str = ""
    title: str
    at: str = ""
    experiments: tuple[str | dict[str, Any], ...] = ()
    cells: tuple[dict[str, Any], ...] = ()
    claims: tuple[dict[str, Any], ...] = ()
    status: str = ""
    note: str = ""
    figure: Literal["", "mean", "weighted_mean", "pooled"] = ""
    missing: str = ""


class _PaperTable(BaseModel):
    """A paper as its file has it."""

    model_config = STRICT

    name: str
    title: str = ""
    authors: str = ""
    page: str = ""
    figure: Literal["mean", "weighted_mean", "pooled"] = "mean"
    time: str = ""
    items: tuple[_ItemTable, ...]


def _read(key: str, raw: Any, where: str, beside: Path | None = None) -> Paper:
    paper = validate(_PaperTable, raw, where)
    items = []
    for place, one in enumerate(paper.items):
        if one.status not in ("", *RULES):
            known = suggest(one.status, RULES)
            raise ConfigError(f"{where}: items[{place}].status: unknown status {known}")
        named = [{"file": own} if isinstance(own, str) else own for own in one.experiments]
        runnables = _made(Runnable, named, where, ("items", place, "experiments"))
        if beside:  # an absolute path stays what it is in any folder
            found = [(own, (beside / own.file).resolve()) for own in runnables]
            runnables = [
                replace(own, file=str(path)) if path.exists() else own for own, path in found
            ]
        items.append(
            Item(
                id=f"{key}-{one.id}" if one.id else key,
                title=one.title,
                experiments=tuple(runnables),
                cells=tuple(_made(Cell, one.cells, where, ("items", place, "cells"))),
                claims=tuple(_made(Claim, one.claims, where, ("items", place, "claims"))),
                given=one.status,
                note=one.note,
                link=f"{paper.page}#{one.at}" if one.at else "",
                figure=one.figure,
                missing=one.missing,
            )
        )
    about = (paper.name, paper.title, paper.authors, paper.page, paper.figure)
    return Paper(key, *about, items=tuple(items), time=paper.time)


def _made(
    kind: Callable[..., Made], given: Sequence[Any], where: str, path: tuple[str | int, ...]
) -> list[Made]:
    """Make each of a list of tables; a wrong key is one line that names it."""
    model = signature_model(kind, ())
    tables = [validate(model, own, where, (*path, place)) for place, own in enumerate(given)]
    return [kind(**{name: getattr(one, name) for name in model.model_fields}) for one in tables]


# Run a table or figure of a paper: its experiments, one after the other, into a folder each.


Execute = Callable[[Experiment, Path, Sequence[str]], Document]
"""Runs an experiment into a folder, all its methods or those with these labels."""


def run_item(
    item: Item,
    figure: str,
    execute: Execute,
    out: Path,
    overrides: Sequence[str] = (),
    only: Sequence[str] = (),
) -> dict[str, dict[str, dict[str, Figure]]]:
    """Run all of an item with `execute`; return the figures, by run as the index names them.

    With `only` the methods of these labels are run, of whichever experiments have them.
    """
    if not item.experiments:
        raise ConfigError(f"{item.id} has nothing to run: {item.note or item.title}")
    # All files are read and checked before the first is run, which may take hours.
    loaded = load_item(item, overrides)
    labels = {name: labels_of(experiment) for name, experiment in loaded}
    if unknown := [one for one in only if not any(one in own for own in labels.values())]:
        known = dict.fromkeys(one for own in labels.values() for one in own)
        raise ConfigError(
            f"no method of {item.id} is called {unknown[0]!r}: it has {', '.join(known)}"
        )
    found = {}
    for name, experiment in loaded:
        wanted = [one for one in only if one in labels[name]]
        if wanted or not only:
            result = execute(experiment, out / name, wanted)
            found[name] = figures_of_result(result, item.figure or figure)
    return found


def minutes(item: Item) -> tuple[float, int, int]:
    """Estimate the minutes of a whole item on one H200 from kept seconds.

    Beside them stand how many of its methods they are of, and how many it has. A method's seconds
    are taken for each seed and round that its file asks for.
    """
    shipped, found, asked = _shipped(), [], 0
    for one in item.experiments:
        experiment = load_experiment(_experiment_path(item, one), one.set)
        asked += len(experiment.methods)
        for own in experiment.methods:
            kept = shipped.get(name_of(one), {}).get(own.label_or_name, {})
            if "seconds" in kept:
                rounds = own.rounds or experiment.rounds
                found.append(kept["seconds"] * len(experiment.seeds) * rounds)
    return sum(found) / 60, len(found), asked


def load_item(item: Item, overrides: Sequence[str] = ()) -> list[tuple[str, Experiment]]:
    """Return an item's experiments by the names that their runs are kept by."""
    loaded: list[tuple[str, Experiment]] = []
    for one in item.experiments:
        experiment = load_experiment(_experiment_path(item, one), [*one.set, *overrides])
        name = name_of(one)
        if name in dict(loaded):
            raise ConfigError(
                f"{item.id} has two runs called {name!r}; give each a name, such as "
                f'{{ file = "{Path(one.file).name}", name = "{name}-2", set = [...] }}'
            )
        loaded.append((name, experiment))
    return loaded


def labels_of(experiment: Experiment) -> list[str]:
    """Return what an experiment's methods are called."""
    return [one.label_or_name for one in experiment.methods]


def finished_figures(paper: Paper, item: Item, out: Path) -> Measured:
    """Return the figures of an item's runs that lie in a folder, as far as they are finished."""
    folders = {name: out / name for name in map(name_of, item.experiments)}
    found = {
        name: figures_of_result(read_document(folder), item.figure or paper.figure)
        for name, folder in folders.items()
        if (folder / FILE).exists()
    }
    for cell in item.cells:
        models = found.get(cell.run, {}).get(cell.label, {cell.model: None})
        if cell.model not in models:
            known = ", ".join(map(repr, models))
            raise ConfigError(
                f"cell {cell.what!r}: {cell.label} has no model {cell.model!r} in "
                f"{folders[cell.run]}; it has {known}"
            )
    return found


def name_of(one: Runnable) -> str:
    """Return the name a run is kept by: its own, or that of the experiment file."""
    path = experiments_folder() / one.file
    if one.name or not path.exists():
        return one.name or Path(one.file).stem
    return str(tomllib.loads(path.read_text(encoding="utf-8"))["name"])


def _experiment_path(item: Item, one: Runnable) -> Path:
    path = experiments_folder() / one.file
    if not path.exists():
        raise ConfigError(
            f"{item.id} needs {one.file}, which is neither beside its table nor among the "
            "experiments here"
        )
    return path
