"""Write the reproduction index from its source: `make docs`.

Figures of docs/reproduction/figures go into the package (src/idiolect/repro/measured.json), and
docs/reproduction/README.md is made of src/idiolect/repro/papers and of them.
"""

import json
import tomllib
from pathlib import Path
from statistics import mean
from typing import Any

from idiolect.experiment.repro.index import (
    RULES,
    Figure,
    Item,
    Measured,
    Paper,
    figure_of,
    items,
    papers,
    shipped_figures,
)

ROOT = Path(__file__).resolve().parent.parent
FIGURES = ROOT / "docs" / "reproduction" / "figures"
KEPT = ROOT / "src" / "idiolect" / "experiment" / "repro" / "measured.json"
PAGE = ROOT / "docs" / "reproduction" / "README.md"


def measured() -> str:
    """Return measured.json: means over seeds of every run that the pages were made of."""
    names = _method_names()
    found: dict[str, Any] = {}
    for key, paper in papers().items():
        path = FIGURES / f"{key}.json"
        for run, content in json.loads(path.read_text()).items() if path.exists() else ():
            name = run if run.startswith(f"{key}-") else f"{key}-{run}"
            found[name] = {
                label: {
                    "method": names.get(name, {}).get(label, ""),
                    "seeds": len(content["seeds"]),
                    "models": {
                        model: [round(value, 3) for value in pair]
                        for model, pair in _models(own, paper.figure).items()
                    },
                }
                for label, own in content["methods"].items()
            }
    return json.dumps(found, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def _models(own: dict[str, Any], name: str) -> dict[str, Figure]:
    """Read a method's figures: of every client of each seed, each seed's means, or per cents."""
    if "models" in own:
        return {
            model: figure_of(means[name if name in means else "pooled"])
            for model, means in own["models"].items()
        }
    scores = own["accuracy"]
    if isinstance(scores, list):  # KT-pFL's page: the personal models alone
        return {"personal": figure_of([score / 100 for score in scores])}
    known = {m: [[c for c in seed if c is not None] for seed in scores[m]] for m in scores}
    return {m: figure_of([mean(seed) for seed in seeds]) for m, seeds in known.items()}


def _method_names() -> dict[str, dict[str, str]]:
    """Return run -> label -> the method's name, from the experiment files."""
    names: dict[str, dict[str, str]] = {}
    for path in (ROOT / "experiments").rglob("*.toml"):
        raw = tomllib.loads(path.read_text())
        named = {one.get("label", one["name"]): one["name"] for one in raw.get("methods", ())}
        names[raw["name"]] = named
        for _, item in items().values():
            for one in item.experiments:
                if one.name and path.match(one.file):
                    names[one.name] = named
    return names


def page() -> str:
    """Return the page: what a status means, then a table a paper."""
    measures = shipped_figures()
    lines = [
        "# Reproduction index",
        "",
        "Every table and figure of the papers. Made by `make docs` from `src/idiolect/repro`;",
        "`idiolect repro` prints the same, and `idiolect repro persfl-table3` runs one of its rows",
        "(`--show` only tells its figures and files; `--set seeds=[0]` makes it shorter).",
        "",
        "| status | means |",
        "|---|---|",
        *(f"| **{name}** | {rule} |" for name, rule in RULES.items()),
        "",
        "Being above the paper's figure does not count against a table. Ours are the last round's,",
        "on test data that chose nothing. The figure shown is the compared one that falls",
        "*shortest* of the paper's.",
    ]
    for paper in papers().values():
        lines += ["", *_table(paper, measures)]
    return "\n".join(lines) + "\n"


def _table(paper: Paper, measures: Measured) -> list[str]:
    where = f" [The page]({paper.page})." if (PAGE.parent / paper.page).exists() else ""
    return [
        f"## {paper.name}",
        "",
        f"{paper.authors}: *{paper.title}*.{where}",
        "",
        "| run it with `idiolect repro …` | what | status | ours | paper | of |",
        "|---|---|---|---|---|---|",
        *(_row(paper, item, measures) for item in paper.items),
    ]


def _row(paper: Paper, item: Item, measures: Measured) -> str:
    found = item.link and (PAGE.parent / paper.page).exists()
    title = f"[{item.title}]({item.link})" if found else item.title
    cell = item.headline(measures)
    figures = "| | | "
    if cell is not None and (ours := cell.ours(measures)) is not None:
        figures = (
            f"| {ours.mean:.1f} ± {ours.deviation:.1f} | {cell.paper:.1f} | {_escaped(cell.what)}"
        )
    name = f"`{item.id}`" if item.experiments else item.id
    note = f"<br>{item.note}" if item.note else ""
    return f"| {name} | {title}{note} | **{item.status(measures)}** {figures} |"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    KEPT.write_text(measured())
    PAGE.write_text(page())
