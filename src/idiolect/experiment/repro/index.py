"""Figures that were measured: run, then label, then model; mean and deviation over seeds in %."""

import json
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

from idiolect.errors import ConfigError
from idiolect.experiment.load import load_experiment
from idiolect.experiment.schema import Experiment
from idiolect.results.document import Document

BEST_TEST_ROUND = ", best test round"
"""Ends the name of a model that is scored as much of the field does, by a choice on test data."""


class Figure(NamedTuple):
    """A mean over seeds and its sample deviation, per cent."""

    mean: float
    deviation: float


Measured = Mapping[str, Mapping[str, Mapping[str, Figure]]]


def figure_of(seeds: list[float]) -> Figure:
    """Return the mean and deviation, in per cent, of a share given for each seed."""
    values = [100 * value for value in seeds]
    return Figure(mean(values), stdev(values) if len(values) > 1 else 0.0)


def shipped_figures() -> Measured:
    """Return what came with the package: the figures of docs/reproduction."""
    text = (
        resources.files("idiolect.experiment.repro")
        .joinpath("measured.json")
        .read_text(encoding="utf-8")
    )
    return {
        run: {
            label: {model: Figure(*pair) for model, pair in own["models"].items()}
            for label, own in labels.items()
        }
        for run, labels in json.loads(text).items()
    }


def figures_of_result(result: Mapping[str, Any], name: str) -> dict[str, dict[str, Figure]]:
    """Return a finished run's figures; `name` is what the paper prints.

    `mean` or `weighted_mean` over clients, or `pooled`: of all clients' test rows together. Beside
    them, under names of their own, the best test rounds of runs that recorded them.
    """
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
    return found


def _score_of(scores: Mapping[str, Any], name: str, result: Mapping[str, Any]) -> float:
    if name == "pooled":
        return float(scores["pooled"][result["metric"]["name"]])
    return float(scores[name])


# A table or figure of a paper: what it compares, what it claims, and what its status is.


REPRODUCED, CLOSE, DIFFERS = "reproduced", "close", "differs"
PENDING, IMPOSSIBLE, NOTHING = "not measured yet", "not possible here", "nothing to measure"

RULES = {
    REPRODUCED: "every compared figure of the paper's own method is at most one point below the "
    "paper's (or above it), and what the paper claims of the table holds in ours",
    CLOSE: "the same with three points; also the most that is said of a picture that prints no "
    "figures, or of figures that are no accuracies, judged by hand by what the paper says of it",
    DIFFERS: "a figure is more than three points below the paper's, or a claim does not hold",
    PENDING: "it, or a part of it, has not been run",
    IMPOSSIBLE: "it cannot be run here; the note says why",
    NOTHING: "a description or a drawing, or settings that ours take over",
}
"""What each status means. Being above the paper's figure does not count against a table."""

_ONE_POINT, _THREE_POINTS = 1.0, 3.0


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

    def fails(self, measured: Measured) -> Iterator[str]:
        """Name each place where it does not hold; what was not measured is passed over."""
        for run in self.runs if self.known(measured) else ():
            for other in self.below:
                best, least = (_score(measured, run, name) for name in (self.above, other))
                if best <= least:
                    yield f"{run}: {other} {least:.1f}, {self.above} {best:.1f}"


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

    def status(self, measured: Measured) -> str:
        """Find the status by RULES."""
        if self.given:
            return self.given
        if any(cell.ours(measured) is None for cell in self.cells):
            return PENDING
        if not all(claim.known(measured) for claim in self.claims):
            return PENDING
        if any(True for _ in self.failed(measured)):
            return DIFFERS
        worst = max(_short(cell, measured) for cell in self.cells)
        return next(
            (s for s, most in ((REPRODUCED, _ONE_POINT), (CLOSE, _THREE_POINTS)) if worst <= most),
            DIFFERS,
        )

    def failed(self, measured: Measured) -> Iterator[str]:
        """Name each claim that does not hold, with the places."""
        for claim in self.claims:
            if places := list(claim.fails(measured)):
                yield f"not found: {claim.says} ({'; '.join(places)})"

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


def _score(measured: Measured, run: str, name: str) -> float:
    found = _find(measured, run, name)
    assert found is not None
    return found.mean


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
        meant = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(
            f"no table or figure is called {name!r}{meant} `idiolect repro` lists all"
        )
    return known[name]


def _paper(key: str) -> Paper:
    file = resources.files("idiolect.experiment.repro").joinpath("papers", f"{key}.toml")
    raw = tomllib.loads(file.read_text(encoding="utf-8"))
    made = tuple(_item(key, raw["page"], one) for one in raw.pop("items"))
    return Paper(key=key, items=made, **raw)


def _item(key: str, page: str, raw: dict[str, Any]) -> Item:
    at = raw.get("at", "")
    return Item(
        id=f"{key}-{raw['id']}" if raw["id"] else key,
        title=raw["title"],
        experiments=tuple(_runnable(one) for one in raw.get("experiments", ())),
        cells=tuple(Cell(**one) for one in raw.get("cells", ())),
        claims=tuple(
            Claim(one["says"], tuple(one["runs"]), one["above"], tuple(one["below"]))
            for one in raw.get("claims", ())
        ),
        given=raw.get("status", ""),
        note=raw.get("note", ""),
        link=f"{page}#{at}" if at else "",
        figure=raw.get("figure", ""),
    )


def _runnable(raw: str | dict[str, Any]) -> Runnable:
    if isinstance(raw, str):
        return Runnable(raw)
    return Runnable(raw["file"], raw["name"], tuple(raw["set"]))


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
    loaded = [
        (name_of(one), load_experiment(_experiment_path(item, one), [*one.set, *overrides]))
        for one in item.experiments
    ]
    labels = {name: [one.label_or_name for one in own.methods] for name, own in loaded}
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


def name_of(one: Runnable) -> str:
    """Return the name a run is kept by: its own, or that of the experiment file."""
    path = experiments_folder() / one.file
    if one.name or not path.exists():
        return one.name or Path(one.file).stem
    return str(tomllib.loads(path.read_text(encoding="utf-8"))["name"])


def _experiment_path(item: Item, one: Runnable) -> Path:
    path = experiments_folder() / one.file
    if not path.exists():
        raise ConfigError(f"{item.id} needs {one.file}, which is not among the experiments here")
    return path
