"""The kept results of the papers' runs, and whether the page of statuses follows from them.

`results/` of the repository has a file for each paper: every run with its seeds, versions and the
scores of every seed, of every client where they are few. Nothing here needs a GPU, or the runs.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import mean
from typing import Any

from idiolect.errors import ConfigError
from idiolect.experiment.repro.index import items, papers
from idiolect.experiment.repro.items import Paper
from idiolect.experiment.repro.seed_figures import Figure, Measured, figure_of, shipped_figures

ROOT = Path(__file__).resolve().parents[4]  # of a checkout
_ROW = re.compile(r"^\| `?([a-z0-9-]+)`? \| .*\| \*\*([a-z ]+)\*\* \|([^|]*)\|[^|]*\|.*\|$")


def stored_figures(folder: Path) -> Measured:
    """Return the figures of all kept runs, each seed's, by run as the index names them."""
    return {
        name: {label: _models(own, paper.figure) for label, own in content["methods"].items()}
        for name, paper, content in _runs(folder)
    }


def stored_seconds(folder: Path) -> dict[str, dict[str, float]]:
    """Return the seconds a seed and round of what was trained on an H200, by run and label.

    Runs that one simulation trained together all hold its seconds, and share them.
    """
    runs = list(_runs(folder))
    timed = {
        (name, label): own
        for name, _, content in runs
        for label, own in content["methods"].items()
        if "seconds" in own and "H200" in own.get("device", "")
    }
    shared = Counter(_simulation(label, own) for (_, label), own in timed.items())
    return {
        name: {
            label: round(own["seconds"] / trained / own["rounds"], 5)
            for label in content["methods"]
            if (own := timed.get((name, label)))
            and (trained := len(content["seeds"]) * shared[_simulation(label, own)])
        }
        for name, _, content in runs
    }


def _simulation(label: str, own: Mapping[str, Any]) -> tuple[Any, ...]:
    """Tell simulations apart by their times, of which those of outside tables hold several."""
    return label, own["seconds"], own.get("first", id(own)), own.get("pace")


def _runs(folder: Path) -> Iterator[tuple[str, Paper, dict[str, Any]]]:
    for key, paper in papers().items():
        path = folder / f"{key}.json"
        for run, content in json.loads(path.read_text()).items() if path.exists() else ():
            yield run if run.startswith(f"{key}-") else f"{key}-{run}", paper, content


def _models(own: dict[str, Any], name: str) -> dict[str, Figure]:
    """Read a method's figures: of every client of each seed, each seed's means, or per cents."""
    if "models" in own:
        return {
            model: figure_of(means[name if name in means else "pooled"])
            for model, means in own["models"].items()
        }
    scores = own.get("common_accuracy") or own["accuracy"]
    if isinstance(scores, list):  # KT-pFL's page: the personal models alone
        return {"personal": figure_of([score / 100 for score in scores])}
    known = {m: [[c for c in seed if c is not None] for seed in scores[m]] for m in scores}
    return {m: figure_of([mean(seed) for seed in seeds]) for m, seeds in known.items()}


def rounded(figures: Measured) -> Measured:
    """Return figures as they are kept in the package, to three digits after the point."""
    return {
        run: {
            label: {m: Figure(tuple(round(v, 3) for v in one.seeds)) for m, one in own.items()}
            for label, own in labels.items()
        }
        for run, labels in figures.items()
    }


def written(figure: Figure) -> str:
    """Write a figure as the page has it: a single seed has no deviation to tell."""
    spread = f"± {figure.deviation:.1f}" if len(figure.seeds) > 1 else "(one seed)"
    return f"{figure.mean:.1f} {spread}"


def disagreements(results: Path, page: Path) -> list[str]:
    """Find every status again from the kept results; say where page or package differs."""
    for path in (results, page):
        if not path.exists():
            raise ConfigError(
                f"{path} is not there; `idiolect repro check` compares the results and the page of "
                "a checkout: clone idiolect and run it there"
            )
    kept = rounded(stored_figures(results))
    told = []
    if kept != shipped_figures():
        runs = [run for run in kept if kept[run] != shipped_figures().get(run)]
        runs += [run for run in shipped_figures() if run not in kept]
        told.append(f"the package's figures are not those of {results}: {', '.join(runs)}")
    said = {
        match[1]: (match[2], match[3].strip())
        for line in page.read_text().splitlines()
        if (match := _ROW.match(line))
    }
    for name, (_, item) in items().items():
        status, cell = item.status(kept), item.headline(kept)
        ours = cell.ours(kept) if cell else None
        expected = (status, written(ours) if ours else "")
        if name not in said:
            told.append(f"{name}: not on the page, and is {status}")
        elif said[name] != expected:
            told.append(
                f"{name}: the page says {_words(said[name])}, the results {_words(expected)}"
            )
    told += [f"{name}: on the page, and not in the index" for name in said if name not in items()]
    return told


def _words(row: tuple[str, str]) -> str:
    return f"{row[0]} ({row[1]})" if row[1] else row[0]
