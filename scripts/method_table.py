"""Write docs/methods.md and a page for each method from the methods themselves: `make docs`."""

import dataclasses
import inspect
import json
import tomllib
from pathlib import Path
from typing import Any

from idiolect.core.method import Method
from idiolect.experiment.repro.index import papers
from idiolect.experiment.repro.seed_figures import Figure
from idiolect.experiment.repro.stored import written
from idiolect.methods import METHODS

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "methods.md"
PAGES = ROOT / "docs" / "methods"
FIGURES = ROOT / "scripts" / "field_figures.md"  # of experiments/field/digits.toml
MATHS: dict[str, str] = tomllib.loads((ROOT / "scripts" / "maths.toml").read_text())
MEASURED = json.loads(
    (ROOT / "src" / "idiolect" / "experiment" / "repro" / "measured.json").read_text()
)
ON_GPU = json.loads((ROOT / "benchmarks" / "results" / "h200_methods.json").read_text())
COMMON = {spec.name: spec for spec in dataclasses.fields(Method)}


def page() -> str:
    """Return the overview: a table of methods, and the settings they all have."""
    absent = ", ".join(f"`{name}`" for name in METHODS if name not in ON_GPU["rows"])
    lines = [
        "# Methods",
        "",
        "Made by `make docs` from the code. Each passes the laws of `tests/test_laws.py` and has a",
        "step derived by hand in `tests/methods/`. A name leads to maths, settings and results.",
        "",
        "On a GPU captured rounds of each equal the sequential backend's within 1e-12 in double",
        "precision (`benchmarks/gpu_check.py`; H200: `benchmarks/results/h200_methods.json`).",
        *([f"Not run there yet: {absent}."] if absent else []),
        "",
        "| name | method | paper | what it is |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| [`{name}`](methods/{name}.md) | {kind.title} | {kind.paper or '–'} | {_summary(kind)} |"
        for name, kind in METHODS.items()
    ]
    lines += ["", FIGURES.read_text().rstrip("\n")]
    lines += ["", "## Settings of every method", "", *_settings(list(COMMON.values()))]
    return "\n".join(lines) + "\n"


def pages() -> dict[str, str]:
    """Return the page of each method: paper, maths, settings, measured results."""
    return {name: _one(name, kind) for name, kind in METHODS.items()}


def _one(name: str, kind: type[Method]) -> str:
    lines = [f"# {kind.title}", "", f"`{name}`: {_summary(kind)}"]
    if kind.paper:
        lines += ["", f"**Paper:** {kind.paper}."]
    if name in MATHS:
        lines += ["", "## Maths", "", "```text", MATHS[name].strip("\n"), "```"]
    lines += ["", "## What is done here", "", _escaped(_about(kind))]
    if kind.unused:
        lines += ["", f"Has no use for: {', '.join(f'`{one}`' for one in kind.unused)}."]
    if kind.presets:
        lines += ["", "## Presets", "", *_presets(kind)]
    own = [spec for spec in dataclasses.fields(kind) if _own(spec)]
    lines += ["", "## Settings", ""]
    if own:
        lines += [*_settings(own), ""]
    lines += ["And those [of every method](../methods.md#settings-of-every-method)."]
    lines += ["", "## Measured", "", *_measured(name)]
    source = inspect.getsourcefile(kind)
    assert source is not None
    lines += ["", f"Source: `src/idiolect/methods/{Path(source).name}`."]
    return "\n".join(lines) + "\n"


def _presets(kind: type[Method]) -> list[str]:
    return [
        f"- `{name}`: "
        + (", ".join(f"`{k} = {_toml(v)}`" for k, v in values.items()) or "the defaults")
        for name, values in kind.presets.items()
    ]


def _toml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else json.dumps(value)


def _measured(name: str) -> list[str]:
    """Return a row for each kept run of the method."""
    rows = []
    for run, labels in MEASURED.items():
        for label, own in labels.items():
            if own["method"] == name and "choose" not in run:  # those only chose settings
                cells = [_cell(own["models"].get(model)) for model in ("personal", "global")]
                page = papers()[run.partition("-")[0]].page
                rows.append(f"| [{run}](../reproduction/{page}) | {label} | {' | '.join(cells)} |")
    if not rows:
        return [
            "Not in a reproduction yet; laws and a step derived by hand hold it to its definition."
        ]
    head = ["| run | as | personal models, % | global model, % |", "|---|---|---|---|"]
    told = "Test accuracy of the last round, mean ± deviation over seeds; the page says of what."
    return [told, "", *head, *rows]


def _cell(seeds: list[float] | None) -> str:
    return "–" if seeds is None else written(Figure(tuple(seeds)))


def _own(spec: "dataclasses.Field[object]") -> bool:
    """Say whether a setting is the method's own or differs from what every method has."""
    return spec.name not in COMMON or spec.metadata != COMMON[spec.name].metadata


def _settings(specs: "list[dataclasses.Field[object]]") -> list[str]:
    rows = [f"| `{s.name}` | `{s.default}` | {_escaped(s.metadata['doc'])} |" for s in specs]
    return ["| setting | default | meaning |", "|---|---|---|", *rows]


def _escaped(text: str) -> str:
    """Keep bars of |D_r| and the stars of θ* from being read as layout."""
    return text.replace("|", "\\|").replace("*", "\\*")


def _summary(kind: type[Method]) -> str:
    return _escaped((kind.__doc__ or "").strip().splitlines()[0])


def _about(kind: type[Method]) -> str:
    return inspect.cleandoc(inspect.getmodule(kind).__doc__ or "")


if __name__ == "__main__":
    PAGE.write_text(page())
    PAGES.mkdir(exist_ok=True)
    wanted = pages()
    for path in PAGES.glob("*.md"):
        if path.stem not in wanted:
            path.unlink()
    for name, text in wanted.items():
        (PAGES / f"{name}.md").write_text(text)
