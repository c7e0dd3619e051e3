"""What the pages of docs/reproduction have in common: runs kept as JSON, tables put into a page."""

import argparse
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from idiolect.analysis.significance import holm
from idiolect.results.statistics import student_p

RESULTS = Path(__file__).resolve().parent.parent / "results"
"""What is kept of the runs: scores of every seed, settings, versions; a file for each paper."""


def keep(
    figures: Path,
    folders: list[str],
    method: Callable[[dict[str, Any]], dict[str, Any]],
    curve: tuple[str, str] | None = None,
) -> None:
    """Keep what `method` takes from each method of the given runs, in one JSON file.

    A run (RUN_DIR or RUN_DIR=NAME) is kept under its folder's name or the one given; methods of
    runs of the same name join. With other seeds it takes the place of the kept one, if it has all
    its methods. RUN_DIR=NAME+ has more seeds of what is kept. A method may have more of them than
    others, if it has theirs first: it then tells its own, and the run's are those that all have.
    `curve` is of which split and model a method's curve is kept, that of its first seeds.
    """
    kept = json.loads(figures.read_text()) if figures.exists() else {}
    for place in folders:
        folder, _, name = place.partition("=")
        result = json.loads((Path(folder) / "result.json").read_text())
        found = {label: method(m) for label, m in result["methods"].items()}
        if name.endswith("+"):
            _more_seeds(kept[name.removesuffix("+")], found, result["seeds"])
            continue
        known = kept.setdefault(name or Path(folder).name, {"methods": {}})
        if known.get("seeds", result["seeds"]) != result["seeds"]:
            if left := known["methods"].keys() - found.keys():
                raise SystemExit(f"{place} has other seeds than kept, and not {', '.join(left)}")
            known["methods"] = {}
        known |= {
            "seeds": result["seeds"],
            "versions": result["versions"],
            "federation": result["data"]["federations"][0],
        }
        known["methods"] |= found
        if curve:
            for label, models in curves(Path(folder) / "metrics.parquet", curve[0]).items():
                known["methods"][label]["curve"] = models.get(curve[1], {})
    for name, known in kept.items():
        own_seeds = [own.pop("seeds", known["seeds"]) for own in known["methods"].values()]
        longest = max(own_seeds, key=len)
        if any(own != longest[: len(own)] for own in own_seeds):
            raise SystemExit(
                f"the methods of {name} would have seeds of which none has all: {own_seeds}"
            )
        known["seeds"] = min(own_seeds, key=len)
        for own, seeds in zip(known["methods"].values(), own_seeds, strict=True):
            if seeds != known["seeds"]:
                own["seeds"] = seeds
    figures.write_text(json.dumps(kept, sort_keys=True) + "\n")


def _more_seeds(known: dict[str, Any], found: dict[str, Any], seeds: list[int]) -> None:
    """Put more seeds' figures behind those of each method, which tells its seeds meanwhile."""
    for label, own in found.items():
        kept = known["methods"][label]
        had = kept.setdefault("seeds", list(known["seeds"]))
        if not set(seeds) & set(had):
            _behind(kept, own, len(had), len(seeds))
            had += seeds


def _behind(kept: dict[str, Any], more: dict[str, Any], had: int, number: int) -> None:
    """Lengthen every list that has a value a seed."""
    for key, own in kept.items():
        if isinstance(own, dict):
            _behind(own, more.get(key, {}), had, number)
        elif isinstance(own, list) and len(own) == had and len(more.get(key, [])) == number:
            kept[key] = own + more[key]


def curves(
    metrics: Path, split: str, metric: str = "accuracy"
) -> dict[str, dict[str, dict[str, float]]]:
    """Return method -> model -> round -> accuracy (or loss), mean over clients and seeds."""
    import pandas

    rows = pandas.read_parquet(metrics)
    rows = rows[(rows["split"] == split) & (rows["metric"] == metric)]
    found: dict[str, dict[str, dict[str, float]]] = {}
    for (label, model, number), value in rows.groupby(["method", "model", "round"])["value"]:
        found.setdefault(label, {}).setdefault(model, {})[str(number)] = round(value.mean(), 4)
    return found


def fill(page: Path, tables: Mapping[str, list[str]]) -> None:
    """Put each table between its markers in the page; the words around them are kept."""
    text = page.read_text()
    for name, rows in tables.items():
        pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        if not pattern.search(text):
            raise SystemExit(f"{page} has no place marked <!-- {name} -->")
        lines = "\n".join(rows)
        text = pattern.sub(lambda found, lines=lines: f"{found[1]}{lines}\n{found[2]}", text)
    page.write_text(text)


def table(header: list[str], rows: list[list[str]]) -> list[str]:
    """Lay out a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]


def deviation(values: list[float]) -> float:
    """Return the sample standard deviation; 0 of a single value."""
    middle = sum(values) / len(values)
    if len(values) < 2:
        return 0.0
    squares = sum((value - middle) ** 2 for value in values)
    return float((squares / (len(values) - 1)) ** 0.5)


def seeds_p(gaps: list[float]) -> float:
    """Return the p of paired differences of seeds, as `idiolect compare` finds it."""
    error = deviation(gaps) / len(gaps) ** 0.5
    return student_p(sum(gaps) / len(gaps) / error, len(gaps) - 1) if error else 1.0


def gains(differences: list[list[float]]) -> list[str]:
    """Write each row's mean difference, with p values corrected over the rows by Holm's rule."""
    corrected = holm([seeds_p(gaps) for gaps in differences])
    return [
        f"{sum(gaps) / len(gaps):+.2f} (p = {p:.2g})"
        for gaps, p in zip(differences, corrected, strict=True)
    ]


def run(about: str | None, collect: Callable[[list[str]], None], write: Callable[[], None]) -> None:
    """Collect figures or write the page, as the command line says."""
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("collect").add_argument("folders", nargs="+")
    commands.add_parser("write")
    options = parser.parse_args()
    if options.command == "collect":
        collect(options.folders)
    else:
        write()
