"""The index: every paper's tables and figures, read from a file each, and a user's own."""

import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel

from idiolect.errors import ConfigError, suggest
from idiolect.experiment.load import read_toml
from idiolect.experiment.repro.items import RULES, Cell, Claim, Item, Paper, Runnable
from idiolect.experiment.repro.runs import labels_of, load_item
from idiolect.experiment.repro.seed_figures import BEST_TEST_ROUND, BY_VALIDATION, LAST_ROUNDS
from idiolect.experiment.schema import STRICT, Experiment, signature_model, validate

Made = TypeVar("Made")

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
