"""The index, read from a file a paper."""

import tomllib
from functools import cache
from importlib import resources
from typing import Any

from idiolect.errors import ConfigError
from idiolect.experiment.repro.item import Cell, Claim, Item, Paper, Runnable

PAPERS = ("persfl", "ktpfl", "combinations", "pfml")


@cache
def papers() -> dict[str, Paper]:
    """Return every paper by its key."""
    return {key: _paper(key) for key in PAPERS}


def items() -> dict[str, tuple[Paper, Item]]:
    """Return every table and figure by its id, such as persfl-table3."""
    return {item.id: (paper, item) for paper in papers().values() for item in paper.items}


def find(name: str) -> tuple[Paper, Item]:
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
        id=f"{key}-{raw['id']}",
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
    )


def _runnable(raw: str | dict[str, Any]) -> Runnable:
    if isinstance(raw, str):
        return Runnable(raw)
    return Runnable(raw["file"], raw["name"], tuple(raw["set"]))
