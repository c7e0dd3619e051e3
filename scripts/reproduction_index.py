"""Write the reproduction index from its source: `make docs`.

Figures of results/ go into the package (src/idiolect/experiment/repro/measured.json), and
docs/reproduction/README.md is made of its papers/ and of them. `idiolect repro check` compares.
"""

import json
import re
import tomllib
from pathlib import Path

from idiolect.experiment.repro.index import items, papers
from idiolect.experiment.repro.items import RULES, Item, Paper
from idiolect.experiment.repro.seed_figures import Measured
from idiolect.experiment.repro.stored import rounded, stored_figures, stored_seconds, written
from idiolect.methods import METHODS

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results"
KEPT = ROOT / "src" / "idiolect" / "experiment" / "repro" / "measured.json"
PAGE = ROOT / "docs" / "reproduction" / "README.md"


def measured() -> str:
    """Return measured.json: figures of every seed of every run that the pages were made of.

    With them, where they were kept, the seconds of a seed and round.
    """
    seconds = stored_seconds(RESULTS)
    names, titles = _method_names(), {kind.title: name for name, kind in METHODS.items()}
    found = {
        run: {
            label: {
                "method": names.get(run, {}).get(label) or titles.get(label, ""),
                "models": {model: list(one.seeds) for model, one in own.items()},
                **({"seconds": seconds[run][label]} if label in seconds[run] else {}),
            }
            for label, own in labels.items()
        }
        for run, labels in rounded(stored_figures(RESULTS)).items()
    }
    text = json.dumps(found, indent=1, sort_keys=True, ensure_ascii=False)
    return re.sub(r"\[\s+([^\[\]]*?)\s+\]", _on_one_line, text) + "\n"


def _on_one_line(numbers: "re.Match[str]") -> str:
    return f"[{' '.join(numbers[1].split())}]"


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
    measures = rounded(stored_figures(RESULTS))
    lines = [
        "# Reproduction index",
        "",
        "Every table and figure of the papers. Made by `make docs` from the results that are kept",
        "in `results/`. `idiolect repro` prints the same, `idiolect repro persfl-table3` runs one",
        "of its rows (`--show` only tells figures, claims, files and, where it is known, minutes;",
        "`--set seeds=[0]` makes it shorter), and `idiolect repro check` finds every status again",
        "from the results, without a GPU. What the papers' claims come to: [what we learned about",
        "these papers](learned.md).",
        "",
        "| status | means |",
        "|---|---|",
        *(f"| **{name}** | {rule} |" for name, rule in RULES.items()),
        "",
        "Confidence is Student's over seeds; the paper's figure is taken as it is printed, for few",
        "papers give a spread. Orders are compared seed by seed, over the seeds that both have, p",
        "values corrected by Holm's rule over the row. Ours are the last round's, on test data;",
        "where test data had a part in a setting, the page says so. The figure shown is the",
        "compared one that falls *shortest* of the paper's.",
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
        figures = f"| {written(ours)} | {cell.paper:.1f} | {_escaped(cell.what)}"
    name = f"`{item.id}`" if item.experiments else item.id
    note = f"<br>{item.note}" if item.note else ""
    return f"| {name} | {title}{note} | **{item.status(measures)}** {figures} |"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    KEPT.write_text(measured())
    PAGE.write_text(page())
