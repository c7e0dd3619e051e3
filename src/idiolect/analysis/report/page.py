"""The page: sections become HTML and JSON, and with the assets one file that opens anywhere."""

import base64
import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from html import escape
from importlib import resources
from typing import Any

from idiolect.analysis.report import palette
from idiolect.analysis.report.chart import Chart
from idiolect.analysis.report.material import Material
from idiolect.analysis.report.section import Block, Section
from idiolect.analysis.report.sections import sections
from idiolect.analysis.report.sections.overview import overview
from idiolect.analysis.report.sheet import Sheet
from idiolect.version import VERSION

Content = dict[str, Any]

# Nothing is fetched and nothing is sent, whatever stands in the page; a live one hears its server.
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src data: blob:; connect-src {connect}; base-uri 'none'; form-action 'none'"
)


def content(
    materials: Sequence[Material], command: str, title: str = "", verdict: str = ""
) -> Content:
    """Lay out what the page shows, as JSON: the same for a file and for a run going on."""
    labels = [pair for material in materials for pair in material.labels.items()]
    runs = [
        _run(material, f"r{place}-" if len(materials) > 1 else "")
        for place, material in enumerate(materials)
    ]
    if len(materials) > 1:
        first = _section(overview(materials), "")
        runs.insert(
            0, {"name": "", "facts": [], "verdict": verdict, "standing": {}, "sections": [first]}
        )
    return {
        "title": title or " · ".join(dict.fromkeys(material.name for material in materials)),
        "methods": palette.plain(palette.looks(labels)),
        "runs": runs,
        "command": command,
        "version": VERSION,
    }


def html(shown: Content, *, live: bool = False) -> str:
    """Write the page."""
    title = escape(shown["title"])
    text = json.dumps({**_figures(shown), "live": live}, ensure_ascii=False, separators=(",", ":"))
    parts = {
        "TITLE": title,
        "POLICY": _POLICY.format(connect="'self'" if live else "'none'"),
        "STYLE": _asset("page.css"),
        "NAV": _navigation(shown),
        "SWITCHES": _switches(shown),
        "MAIN": _main(shown),
        "COMMAND": escape(shown["command"]),
        "VERSION": escape(shown["version"]),
        # A closing tag within a string would end the script.
        "CONTENT": text.replace("</", "<\\/").replace("<!--", "<\\u0021--"),
        "PLOTLY": _plotly(),
        "SCRIPT": "\n".join(_asset(name) for name in ("draw.js", "tables.js", "page.js")),
    }
    page = _asset("page.html")
    pieces = page.split("{{")
    filled = [pieces[0]]
    for piece in pieces[1:]:
        name, rest = piece.split("}}", 1)
        filled += [parts[name], rest]
    return "".join(filled)


def news(shown: Content) -> Content:
    """Give what a page that is open already needs to show this instead."""
    return {
        "content": {**_figures(shown), "live": True},
        "main": _main(shown),
        "nav": _navigation(shown),
        "switches": _switches(shown),
    }


def _figures(shown: Content) -> Content:
    """Leave out the words, which stand in the page itself."""
    runs = [
        {"sections": [{"charts": s["charts"], "sheets": s["sheets"]} for s in run["sections"]]}
        for run in shown["runs"]
    ]
    return {"title": shown["title"], "methods": shown["methods"], "runs": runs}


def _main(shown: Content) -> str:
    """Write the body: every run's sections in order."""
    return "".join(
        f'<div class="run" data-run="{place}">{_run_head(run)}'
        + "".join(section["html"] for section in run["sections"])
        + "</div>"
        for place, run in enumerate(shown["runs"])
    )


def _run(material: Material, prefix: str) -> Content:
    made = sections(material)
    return {
        "name": material.name,
        "facts": _facts(material),
        "verdict": material.comparison.verdict.sentence if material.comparison else "",
        "standing": dict(material.standing),
        "sections": [_section(one, prefix) for one in made],
    }


def _facts(material: Material) -> list[str]:
    """Give the few facts one wants before any figure."""
    about = material.content.get("data", {})
    facts = [str(about["source"])] if about.get("source") else []
    if about.get("clients"):
        facts.append(f"{about['clients']} clients")
    if about.get("classes"):
        facts.append(f"{len(about['classes'])} classes")
    seeds = len(material.content.get("seeds", []))
    facts.append(f"{seeds} seed{'s' if seeds != 1 else ''}")
    rounds = sorted({method["rounds"] for method in material.methods.values()})
    if rounds:
        facts.append(
            f"{rounds[0]} rounds" if len(rounds) == 1 else f"{rounds[0]}-{rounds[-1]} rounds"
        )
    if not material.content.get("complete", True):
        facts.append("not complete yet")
    return facts


def _section(section: Section, prefix: str) -> Content:
    blocks = [_prefixed(block, prefix) for block in section.blocks]
    inner = "".join(_block(block) for block in blocks)
    ident = prefix + section.id
    return {
        "id": ident,
        "title": section.short or section.title,
        "html": f'<section id="{ident}"><h2>{escape(section.title)}</h2>'
        f'<p class="lead">{escape(section.lead)}</p>{inner}</section>',
        "charts": [block.plain() for block in blocks if isinstance(block, Chart)],
        "sheets": {
            block.id: {"md": block.markdown(), "tex": block.latex(), "csv": block.csv()}
            for block in blocks
            if isinstance(block, Sheet)
        },
    }


def _prefixed(block: Block, prefix: str) -> Block:
    if isinstance(block, Chart | Sheet):
        return replace(block, id=prefix + block.id)
    return block


def _block(block: Block) -> str:
    if isinstance(block, Sheet):
        return (
            f'<figure class="sheet" data-sheet="{block.id}"><h3>{escape(block.title)}</h3>'
            f"{block.html()}{_foot(block.caption, ('md', 'tex', 'csv'))}</figure>"
        )
    if isinstance(block, Chart):
        return (
            f'<figure class="chart" data-chart="{block.id}"><h3>{escape(block.title)}</h3>'
            f'<div class="legend"></div><div class="plot" id="plot-{block.id}" role="img" '
            f'aria-label="{escape(block.title)}" style="min-height:{block.height}px"></div>'
            f"{_foot(block.caption, ('svg', 'csv'))}</figure>"
        )
    return block.html


_TOOLS = {"md": "Markdown", "tex": "LaTeX", "csv": "CSV", "svg": "SVG"}


def _foot(caption: str, tools: Sequence[str]) -> str:
    buttons = "".join(
        f'<button type="button" data-get="{tool}">{_TOOLS[tool]}</button>' for tool in tools
    )
    return f'<figcaption>{escape(caption)}</figcaption><div class="tools">{buttons}</div>'


def _run_head(run: Content) -> str:
    name = f'<h1 class="name">{escape(run["name"])}</h1>' if run["name"] else ""
    facts = "".join(f"<li>{escape(fact)}</li>" for fact in run["facts"])
    standing = "".join(
        f"<li><b>{escape(label)}</b> {escape(words)}</li>"
        for label, words in run["standing"].items()
    )
    verdict = f'<p class="verdict">{escape(run["verdict"])}</p>' if run["verdict"] else ""
    return (
        f'<header class="head">{name}{verdict}<ul class="chips">{facts}</ul>'
        f'<ul class="standing">{standing}</ul></header>'
    )


def _navigation(shown: Content) -> str:
    several = len(shown["runs"]) > 1
    items = []
    for run in shown["runs"]:
        if several and run["name"]:
            first = run["sections"][0]["id"] if run["sections"] else ""
            items.append(f'<a href="#{first}">{escape(run["name"])}</a>')
        elif not several:
            items += [
                f'<a href="#{one["id"]}">{escape(one["title"])}</a>' for one in run["sections"]
            ]
    return "".join(items)


def _switches(shown: Content) -> str:
    return "".join(
        f'<button type="button" aria-pressed="true" data-switch="{escape(method["label"])}">'
        f'<span class="key" data-key="{escape(method["label"])}"></span>'
        f"{escape(method['label'])}</button>"
        for method in shown["methods"]
    )


@cache
def _asset(name: str) -> str:
    return (
        resources.files("idiolect.analysis.report")
        .joinpath("assets", name)
        .read_text(encoding="utf-8")
    )


@cache
def _plotly() -> str:
    """Give Plotly's script, packed; the page unpacks it."""
    packed = resources.files("idiolect.analysis.report").joinpath(
        "assets", "plotly-cartesian.min.js.gz"
    )
    return base64.b64encode(packed.read_bytes()).decode()
