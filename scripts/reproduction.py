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
    figures: Path, folders: list[str], method: Callable[[dict[str, Any]], dict[str, Any]]
) -> None:
    """Keep what `method` takes from each method of the given runs, in one JSON file.

    A run (RUN_DIR or RUN_DIR=NAME) is kept under its folder's name or the one given; methods of
    runs of the same name join.
    """
    kept = json.loads(figures.read_text()) if figures.exists() else {}
    for place in folders:
        folder, _, name = place.partition("=")
        result = json.loads((Path(folder) / "result.json").read_text())
        known = kept.setdefault(name or Path(folder).name, {"methods": {}})
        if known.get("seeds", result["seeds"]) != result["seeds"]:
            raise SystemExit(f"{place} has seeds {result['seeds']}, kept are {known['seeds']}")
        known |= {
            "seeds": result["seeds"],
            "versions": result["versions"],
            "federation": result["data"]["federations"][0],
        }
        known["methods"] |= {label: method(m) for label, m in result["methods"].items()}
    figures.write_text(json.dumps(kept, sort_keys=True) + "\n")


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
