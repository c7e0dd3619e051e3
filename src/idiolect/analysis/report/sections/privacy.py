"""What leaves the clients and what does not, from what the run itself counted."""

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from idiolect.analysis.report.material import Material
from idiolect.analysis.report.section import Block, Section, Words
from idiolect.analysis.report.sheet import Column, Sheet

_COLUMNS = (
    Column("method"),
    Column("a client uploads, a round"),
    Column("kB up", "kilo", "Uploaded by one client in a round it takes part in"),
    Column("kB down", "kilo", "Received by one client in a round it takes part in"),
    Column("a client keeps to itself"),
)


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


def section(material: Material) -> Section | None:
    """State it in a sentence and a table."""
    if not material.methods:
        return None
    rows = [
        (
            label,
            _uploads(method),
            _per_turn(method, "bytes_up"),
            _per_turn(method, "bytes_down"),
            _keeps(method),
        )
        for label, method in material.methods.items()
    ]
    sheet = Sheet(
        "privacy-table",
        "What crosses the network",
        "Counted in this run, leaf by leaf. What is uploaded was computed from the client's data "
        "and can reveal something of it; only training with differential privacy bounds how much.",
        _COLUMNS,
        rows,
        list(material.methods),
    )
    pooled = [label for label, own in material.methods.items() if own["method"] == "centralised"]
    said = (
        "What leaves a client is what the table lists, leaf by leaf, and nothing else: examples, "
        "labels and what a client keeps stay where they are. Test data reaches only the final "
        "score."
    )
    if pooled:
        said += f" The exception is {_listed(pooled)}, which pools all data as a reference."
    blocks: list[Block] = [Words(f"<p>{escape(said)}</p>"), *_guarantees(material), sheet]
    return Section(
        "privacy", "Privacy", "What leaves the clients in this run, and what stays.", blocks
    )


def _guarantees(material: Material) -> list[Block]:
    """Show the differential privacy a method was trained with, as the run recorded it."""
    found = {label: own["privacy"] for label, own in material.methods.items() if own.get("privacy")}
    if not found:
        text = "No method of this run was trained with differential privacy."
        return [Words(f"<p>{text}</p>")]
    statements = [
        Words(f"<p><b>{escape(label)}.</b> {escape(str(own['statement']))}</p>")
        for label, own in found.items()
        if own.get("statement")
    ]
    whole = material.content.get("privacy")
    if whole and len(material.methods) > 1:
        statements.append(Words(f"<p><b>Together.</b> {escape(str(whole['statement']))}</p>"))
    keys = [key for key in _GUARANTEE if any(key in own for own in found.values())]
    sheet = Sheet(
        "guarantees",
        "Differential privacy",
        "What each method was trained under, as the run accounted for it: the odds of any "
        "conclusion about a client change by a factor of at most e to the ε, but for a chance δ.",
        [Column("method"), *(Column(_GUARANTEE[key], "number") for key in keys)],
        [(label, *(own.get(key) for key in keys)) for label, own in found.items()],
        list(found),
    )
    return [*statements, sheet]


def _uploads(method: Mapping[str, Any]) -> str:
    if method["method"] == "centralised":
        return "all its data: this is the reference that pools everything"
    turns = sum(seed["traffic"]["participations"] for seed in method["seeds"])
    sent = sum(seed["traffic"]["bytes_up"] for seed in method["seeds"])
    if turns and not sent:
        return "nothing"
    return _summed(method.get("crossing", {}).get("up")) or "what its report holds"


def _keeps(method: Mapping[str, Any]) -> str:
    kept = _summed(method.get("crossing", {}).get("stays"))
    return "its data" + (f", {kept}" if kept else "")


def _summed(leaves: Mapping[str, Sequence[int]] | None) -> str:
    """Sum leaves up by the first word of their names: `params: 39,760 numbers in 4 tensors`."""
    found: dict[str, list[int]] = {}
    for name, shape in (leaves or {}).items():
        found.setdefault(name.split(".")[0], []).append(math.prod(shape))
    return "; ".join(f"{name}: {_numbers(sizes)}" for name, sizes in found.items())


def _numbers(sizes: Sequence[int]) -> str:
    total = sum(sizes)
    many = f"{total:,} number{'s' if total != 1 else ''}"
    return many if len(sizes) == 1 else f"{many} in {len(sizes)} tensors"


def _per_turn(method: Mapping[str, Any], side: str) -> float | None:
    """Give the bytes of one client in one round."""
    turns = sum(seed["traffic"]["participations"] for seed in method["seeds"])
    total = sum(seed["traffic"][side] for seed in method["seeds"])
    return total / turns if turns else None


def _listed(labels: Sequence[str]) -> str:
    return " and ".join(labels)
