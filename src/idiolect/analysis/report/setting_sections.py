"""Sections about privacy and about what it takes to repeat the run."""

import json
import math
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from idiolect.analysis.report.figures import (
    Block,
    Column,
    Section,
    Table,
    paragraph,
    section,
    table,
)
from idiolect.analysis.report.report_data import ReportData
from idiolect.results.attendance import spans

Method = Mapping[str, Any]

_GUARANTEE = {
    "epsilon": "ε",
    "delta": "δ",
    "releases": "seeds",
    "epsilon_per_release": "ε of one seed",
    "epsilon_draw_known": "ε, draw known",
    "noise_multiplier": "noise",
    "clip": "clip",
    "rounds": "rounds",
    "cohort": "clients a round",
    "clients": "of clients",
    "draw": "draw",
    "accountant": "accountant",
    "budget": "budget of ε",
}


def privacy(data: ReportData) -> Section | None:
    """State what leaves the clients and what does not, as the run itself counted."""
    if not data.methods:
        return None
    rows = [
        (label, _uploads(own), _per_turn(own, "up"), _per_turn(own, "down"), _keeps(own))
        for label, own in data.methods.items()
    ]
    text = (
        "What leaves a client is what the table lists, leaf by leaf, and nothing else: examples, "
        "labels and what a client keeps stay where they are. Test data reaches only the final "
        "score."
    )
    pooled = [label for label, own in data.methods.items() if own["method"] == "centralised"]
    if pooled:
        text += f" The exception is {' and '.join(pooled)}, which pools all data as a reference."
    crossing = table("privacy-table", rows, data.methods)
    return section("privacy", [paragraph(text), *_guarantees(data), crossing])


def _guarantees(data: ReportData) -> list[Block]:
    """Show the differential privacy a method was trained with, as the run recorded it."""
    found = {label: own["privacy"] for label, own in data.methods.items() if own.get("privacy")}
    if not found:
        return [paragraph("No method of this run was trained with differential privacy.")]
    statements = [
        paragraph(str(own["statement"]), f"{label}.")
        for label, own in found.items()
        if own.get("statement")
    ]
    whole = data.content.get("privacy")
    if whole and len(data.methods) > 1:
        statements.append(paragraph(str(whole["statement"]), "Together."))
    keys = [key for key in _GUARANTEE if any(key in own for own in found.values())]
    columns = [Column("method"), *(Column(_GUARANTEE[key], "number") for key in keys)]
    rows = [(label, *(own.get(key) for key in keys)) for label, own in found.items()]
    return [*statements, table("guarantees", rows, found, columns)]


def _sum_of(method: Method, key: str) -> float:
    return float(sum(seed["traffic"][key] for seed in method["seeds"]))


def _uploads(method: Method) -> str:
    if method["method"] == "centralised":
        return "all its data: this is the reference that pools everything"
    if _sum_of(method, "participations") and not _sum_of(method, "bytes_up"):
        return "nothing"
    return _sizes(method.get("crossing", {}).get("up")) or "what its report holds"


def _keeps(method: Method) -> str:
    kept = _sizes(method.get("crossing", {}).get("stays"))
    return "its data" + (f", {kept}" if kept else "")


def _per_turn(method: Method, way: str) -> float | None:
    """Return the bytes of one client in one round."""
    turns = _sum_of(method, "participations")
    return _sum_of(method, f"bytes_{way}") / turns if turns else None


def _sizes(leaves: Mapping[str, Sequence[int]] | None) -> str:
    """Sum leaves up by the first word of their names: `params: 39,760 numbers in 4 tensors`."""
    found: dict[str, list[int]] = {}
    for name, shape in (leaves or {}).items():
        found.setdefault(name.split(".")[0], []).append(math.prod(shape))
    parts = []
    for name, sizes in found.items():
        tensors = f" in {len(sizes)} tensors" if len(sizes) > 1 else ""
        parts.append(f"{name}: {sum(sizes):,} number{'s' if sum(sizes) != 1 else ''}{tensors}")
    return "; ".join(parts)


def settings(data: ReportData) -> Section:
    """List notices, settings, versions and the experiment file."""
    blocks: list[Block] = []
    if notices := _notices(data):
        items = Markup().join(Markup("<li>{}</li>").format(text) for text in notices)
        blocks.append(Markup("<h3>What the run remarked</h3><ul>{}</ul>").format(items))
    if there := _attendance(data):
        blocks.append(there)
    if data.methods:
        blocks += _settings(data.methods)
    if tuned := {label: own["tuned"] for label, own in data.methods.items() if "tuned" in own}:
        blocks.append(_tuned(tuned))
    blocks.append(_versions(data))
    if data.experiment:
        again = shlex.join(["idiolect", "run", f"{data.folder}/experiment.toml", "--out", "again"])
        blocks.append(
            Markup(
                "<h3>The experiment</h3><p>This file and <code>{}</code> give the run again; it "
                "stands in the run's folder.</p><details><summary>experiment.toml</summary>"
                "<pre>{}</pre></details>"
            ).format(again, data.experiment)
        )
    return section("settings", blocks)


def _attendance(data: ReportData) -> Markup:
    """List who was there in how many rounds of a federation, and who was not, and why."""
    items = Markup().join(
        Markup("<li>{}, seed {}, {}: {} rounds{}</li>").format(
            label,
            seed["seed"],
            site,
            own["reported"],
            f"; missed {spans(own)}" if own["missed"] else "",
        )
        for label, method in data.methods.items()
        for seed in method["seeds"]
        for site, own in seed.get("attendance", {}).items()
    )
    return Markup("<h3>Who was there</h3><ul>{}</ul>").format(items) if items else Markup()


def _notices(data: ReportData) -> list[str]:
    """Return each notice once, with the methods it concerns."""
    found: dict[str, list[str]] = {}
    for label, method in data.methods.items():
        for text in method["notices"]:
            found.setdefault(text, []).append(label)
    every = len(data.methods)
    return [
        text if len(labels) == every or labels[0] in text else f"{', '.join(labels)}: {text}"
        for text, labels in found.items()
    ]


def _settings(methods: Mapping[str, Method]) -> list[Block]:
    """Show the settings that all methods share apart from those that differ."""
    every = [{"rounds": own["rounds"], **own["settings"]} for own in methods.values()]
    names = dict.fromkeys(name for own in every for name in own)
    rows = [(name, *(_written(own.get(name)) for own in every)) for name in names]
    blocks: list[Block] = []
    if shared := [f"{row[0]} = {row[1]}" for row in rows if len(set(row[1:])) == 1]:
        words = Markup("<h3>Settings that all methods share</h3><p>{}</p>")
        blocks.append(words.format(", ".join(shared)))
    differ = {row[0] for row in rows if len(set(row[1:])) > 1}
    own = [
        (label, ", ".join(f"{name} = {_written(one[name])}" for name in one if name in differ))
        for label, one in zip(methods, every, strict=True)
    ]
    if differ:
        found = [row if row[1] else (row[0], "none of its own") for row in own]
        columns = [Column("method"), Column("settings")]
        blocks.append(table("methods-settings", found, methods, columns=columns))
    return blocks


def _tuned(records: Mapping[str, Method]) -> Table:
    """Show what each method tried on validation data, and what its seeds chose."""
    rows = []
    for label, record in records.items():
        chosen: dict[str, list[str]] = {}
        for one in record.get("chosen", []):
            words = ", ".join(f"{key} = {value}" for key, value in one["settings"].items())
            chosen.setdefault(words or "nothing", []).append(str(one["seed"]))
        text = "; ".join(f"{words} (seed {', '.join(own)})" for words, own in chosen.items())
        rows.append((label, len(record.get("trials", [])), text or "nothing to tune"))
    first = next(iter(records.values()))
    defaults = {"metric": "validation", "search": "grid", "budget": "?"}
    about: dict[str, Any] = {key: first.get(key, other) for key, other in defaults.items()}
    return table("tuned", rows, records, **about)


def _versions(data: ReportData) -> Markup:
    content = data.content
    first: Method = next(iter(data.methods.values()), {})
    facts = {
        "data": content.get("data", {}).get("federations", [""])[0],
        "model": _written(first.get("model")),
        "clients a round": "all" if first.get("cohort") is None else str(first["cohort"]),
        "seeds": ", ".join(map(str, content.get("seeds", []))),
        "device": f"{first.get('device', '')}, {first.get('backend', '')}",
        **content.get("versions", {}),
    }
    items = Markup().join(
        Markup("<div><dt>{}</dt><dd>{}</dd></div>").format(name, value)
        for name, value in facts.items()
        if value not in ("", "–", ", ")
    )
    return Markup("<h3>Data, machine and versions</h3><dl class='facts'>{}</dl>").format(items)


def _written(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list | tuple):
        return ", ".join(map(_written, value))
    return json.dumps(value, ensure_ascii=False) if isinstance(value, Mapping) else str(value)
