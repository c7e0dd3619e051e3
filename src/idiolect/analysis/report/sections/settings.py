"""Everything it takes to do this again: settings, versions, notices, commands."""

import json
import shlex
from collections.abc import Mapping
from html import escape
from typing import Any

from idiolect.analysis.report.material import Material
from idiolect.analysis.report.section import Block, Section, Words
from idiolect.analysis.report.sheet import Column, Sheet


def section(material: Material) -> Section:
    """List them."""
    blocks: list[Block] = []
    if notices := _notices(material):
        items = "".join(f"<li>{escape(text)}</li>" for text in notices)
        blocks.append(Words(f"<h3>What the run remarked</h3><ul>{items}</ul>"))
    if material.methods:
        blocks += _settings(material.methods)
    if tuned := {label: own["tuned"] for label, own in material.methods.items() if "tuned" in own}:
        blocks.append(_tuned(tuned))
    blocks.append(Words(_versions(material)))
    if material.experiment:
        blocks.append(Words(_experiment(material)))
    return Section(
        "settings", "Settings", "Everything it takes to do this again to the same figures.", blocks
    )


def _notices(material: Material) -> list[str]:
    """Give each notice once, with the methods it concerns."""
    found: dict[str, list[str]] = {}
    for label, method in material.methods.items():
        for text in method["notices"]:
            found.setdefault(text, []).append(label)
    every = len(material.methods)
    return [
        text if len(labels) == every or labels[0] in text else f"{', '.join(labels)}: {text}"
        for text, labels in found.items()
    ]


def _settings(methods: Mapping[str, Mapping[str, Any]]) -> list[Block]:
    """Set what all methods share apart from what they differ in."""
    every = {label: {"rounds": own["rounds"], **own["settings"]} for label, own in methods.items()}
    names = list(dict.fromkeys(name for own in every.values() for name in own))
    rows = [(name, *(_written(own.get(name)) for own in every.values())) for name in names]
    shared = [f"{row[0]} = {row[1]}" for row in rows if len(set(row[1:])) == 1]
    blocks: list[Block] = []
    if shared:
        listed = escape(", ".join(shared))
        blocks.append(Words(f"<h3>Settings that all methods share</h3><p>{listed}</p>"))
    if differ := [row for row in rows if len(set(row[1:])) > 1]:
        sheet = Sheet(
            "methods-settings",
            "Settings that differ",
            "As run, defaults written out; – where a method has no such setting.",
            [Column("setting"), *(Column(label) for label in methods)],
            differ,
        )
        blocks.append(sheet)
    return blocks


def _tuned(records: Mapping[str, Mapping[str, Any]]) -> Sheet:
    """Tell what each method tried on validation data, and what its seeds chose."""
    rows = []
    for label, record in records.items():
        chosen: dict[str, list[str]] = {}
        for one in record.get("chosen", []):
            words = ", ".join(f"{key} = {value}" for key, value in one["settings"].items())
            chosen.setdefault(words or "nothing", []).append(str(one["seed"]))
        told = "; ".join(f"{words} (seed {', '.join(own)})" for words, own in chosen.items())
        rows.append((label, len(record.get("trials", [])), told or "nothing to tune"))
    first = next(iter(records.values()))
    return Sheet(
        "tuned",
        "What was tuned",
        f"By {first.get('metric', 'validation')}, {first.get('search', 'grid')} search, at most "
        f"{first.get('budget', '?')} settings a method. No test row had a say.",
        [Column("method"), Column("settings tried", "whole"), Column("chosen")],
        rows,
        list(records),
    )


def _versions(material: Material) -> str:
    content = material.content
    first: Mapping[str, Any] = next(iter(material.methods.values()), {})
    facts = {
        "data": content.get("data", {}).get("federations", [""])[0],
        "model": _written(first.get("model")),
        "clients a round": "all" if first.get("cohort") is None else str(first["cohort"]),
        "seeds": ", ".join(map(str, content.get("seeds", []))),
        "device": f"{first.get('device', '')}, {first.get('backend', '')}",
        **content.get("versions", {}),
    }
    items = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(str(value))}</dd></div>"
        for name, value in facts.items()
        if value not in ("", "–", ", ")
    )
    return f"<h3>Data, machine and versions</h3><dl class='facts'>{items}</dl>"


def _experiment(material: Material) -> str:
    again = shlex.join(["idiolect", "run", f"{material.folder}/experiment.toml", "--out", "again"])
    return (
        "<h3>The experiment</h3>"
        f"<p>This file and <code>{escape(again)}</code> give the run again; it stands in the run's "
        "folder.</p>"
        f"<details><summary>experiment.toml</summary><pre>{escape(material.experiment)}</pre>"
        "</details>"
    )


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
