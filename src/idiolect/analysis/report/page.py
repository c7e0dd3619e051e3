"""The page: sections become HTML and JSON, and with the assets one file that opens offline."""

import base64
import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from idiolect.analysis.report import (
    client_sections,
    metric_sections,
    result_sections,
    setting_sections,
)
from idiolect.analysis.report.figures import Chart, Section, Table, styles
from idiolect.analysis.report.report_data import ReportData
from idiolect.version import VERSION

if TYPE_CHECKING:
    from jinja2 import Template

PageContent = dict[str, Any]

# No request leaves the page, whatever stands in it; a live one hears its server.
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src data: blob:; connect-src {connect}; base-uri 'none'; form-action 'none'"
)


_SECTIONS = (
    result_sections.results,
    metric_sections.all_metrics,
    result_sections.differences,
    client_sections.clients,
    client_sections.choices,
    result_sections.learning_curves,
    client_sections.fairness,
    result_sections.communication,
    client_sections.held_data,
    client_sections.persfl,
    client_sections.coefficients,
    setting_sections.privacy,
    setting_sections.settings,
)


def sections(data: ReportData) -> list[Section]:
    """Return every section that the run has something for, in the order they are read."""
    found = [made for section in _SECTIONS if (made := section(data)) is not None]
    return [metric_sections.reworded(made, data.metric) for made in found]


def page_content(
    data: Sequence[ReportData], command: str, title: str = "", verdict: str = ""
) -> PageContent:
    """Return what the page shows: the same for a file and for a run that is still training."""
    runs = [
        {
            "name": one.name,
            "facts": _facts(one),
            "verdict": one.comparison.verdict.sentence if one.comparison else "",
            "status": one.status,
            "sections": _numbered(sections(one), f"r{place}-" if len(data) > 1 else ""),
        }
        for place, one in enumerate(data)
    ]
    if len(data) > 1:
        first = {"name": "", "facts": [], "verdict": verdict, "status": {}}
        runs.insert(0, {**first, "sections": [result_sections.overview(data)]})
    looks = styles([pair for one in data for pair in one.labels.items()])
    return {
        "title": title or " · ".join(dict.fromkeys(one.name for one in data)),
        "methods": [{"label": label, **style._asdict()} for label, style in looks.items()],
        "runs": runs,
        "command": command,
    }


def _facts(data: ReportData) -> list[str]:
    """Return the few facts one wants before any figure."""
    about = data.content.get("data", {})
    seeds = len(data.content.get("seeds", []))
    rounds = sorted({method["rounds"] for method in data.methods.values()})
    facts = [str(about["source"])] if about.get("source") else []
    if about.get("clients"):
        facts.append(f"{about['clients']} clients")
    kind = data.content.get("task", "classes")
    if about.get("classes") and kind in ("classes", "labels"):  # of others they are outputs
        facts.append(f"{len(about['classes'])} {kind}")
    facts.append(f"{seeds} seed{'s' if seeds != 1 else ''}")
    if rounds:
        facts.append(f"{'-'.join(map(str, dict.fromkeys((rounds[0], rounds[-1]))))} rounds")
    return facts if data.content.get("complete", True) else [*facts, "not complete yet"]


def _numbered(made: Sequence[Section], prefix: str) -> list[Section]:
    """Put a run's number before every id, so that several runs fit one page."""
    return [
        replace(
            section,
            id=prefix + section.id,
            blocks=[
                block if isinstance(block, Markup) else replace(block, id=prefix + block.id)
                for block in section.blocks
            ],
        )
        for section in made
    ]


def page_html(shown: PageContent, *, live: bool = False) -> str:
    """Return the whole page."""
    found = json.dumps(_for_script(shown, live), ensure_ascii=False, separators=(",", ":"))
    scripts = (_asset(name).decode() for name in ("draw.js", "tables.js", "page.js"))
    return template("page.html").render(
        title=shown["title"],
        command=shown["command"],
        version=VERSION,
        policy=Markup(_POLICY.format(connect="'self'" if live else "'none'")),
        style=Markup(_asset("page.css").decode()),
        # A closing tag within a string would end the script.
        content=Markup(found.replace("</", "<\\/").replace("<!--", "<\\u0021--")),
        plotly=base64.b64encode(_asset("plotly-cartesian.min.js.gz")).decode(),
        script=Markup("\n".join(scripts)),
        **_parts(shown),
    )


def page_update(shown: PageContent) -> PageContent:
    """Return what a page that is open already needs to show this instead."""
    return {"content": _for_script(shown, live=True), **_parts(shown)}


def _for_script(shown: PageContent, live: bool) -> PageContent:
    """Return charts and tables for the page's script; text stands in the page itself."""
    runs = [
        {
            "sections": [
                {
                    "charts": [one.as_json() for one in part.blocks if isinstance(one, Chart)],
                    "sheets": {
                        one.id: {"md": one.markdown(), "tex": one.latex(), "csv": one.csv()}
                        for one in part.blocks
                        if isinstance(one, Table)
                    },
                }
                for part in run["sections"]
            ]
        }
        for run in shown["runs"]
    ]
    return {"title": shown["title"], "methods": shown["methods"], "runs": runs, "live": live}


def _parts(shown: PageContent) -> dict[str, str]:
    made: Any = template("parts.html").module
    labels = [method["label"] for method in shown["methods"]]
    return {
        "main": made.main(shown["runs"]),
        "nav": made.nav(shown["runs"]),
        "switches": made.switches(labels),
    }


@cache
def template(name: str) -> "Template":
    """Return a template; whatever it is filled with is escaped."""
    import jinja2  # not for runs that show no page

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("idiolect.analysis.report", "assets"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
    )
    return environment.get_template(name)


@cache
def _asset(name: str) -> bytes:
    return resources.files("idiolect.analysis.report").joinpath("assets", name).read_bytes()
