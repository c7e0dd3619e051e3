"""Who took part in which round of a federation, and why not: one record for each site and round.

The server adds a line a round. A round that is done again after a crash has a second line, which
counts; so the record is of the rounds that the result is made of.
"""

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

FILE = "attendance.jsonl"  # in a run's folder
REPORTED = "reported"
TRAINED = "trained, not heard"  # a bystander
NOT_DRAWN = "not drawn"
WORKING = "at work"  # of buffered rounds: its report counts in a later one
VOID = "the round was given up"
PRESENT = (
    REPORTED,
    TRAINED,
    NOT_DRAWN,
    WORKING,
)  # whatever else a record says is why a site missed a round

Attendance = Sequence[Mapping[str, str]]
"""For each round what each site did, under one seed."""


class AttendanceLog:
    """The record of a run, kept on disk."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE

    def add(self, label: str, round: int, seeds: Attendance) -> None:
        """Add what each site did in a round, for each seed; rounds count from 1."""
        about = {"label": label, "round": round, "at": float(f"{time.time():.3f}")}  # its end
        line = json.dumps({**about, "seeds": list(seeds)})
        with self._path.open("a", encoding="utf-8") as file:
            file.write(f"\n{line}")  # what a power cut tore off is a line of its own

    def read(self, label: str, rounds: int, seeds: int) -> list[list[Mapping[str, str]]]:
        """Return for each seed what each site did in each round; {} where that is not known."""
        known: dict[int, Any] = {}
        lines = self._path.read_text(encoding="utf-8").splitlines() if self._path.exists() else ()
        for line in lines:
            try:
                found = json.loads(line) if line else {}
            except ValueError:
                continue
            if found.get("label") == label:
                known[found["round"]] = found["seeds"]
        nothing: list[Mapping[str, str]] = [{}] * seeds
        each = [known.get(round, nothing) for round in range(1, rounds + 1)]
        return [[own[place] for own in each] for place in range(seeds)]


def by_site(record: Attendance) -> dict[str, Any]:
    """Count each site's rounds, and list those it missed as spans with a cause."""
    sites = dict.fromkeys(site for round in record for site in round)
    return {site: _of_site([round.get(site, "") for round in record]) for site in sites}


def _of_site(did: Sequence[str]) -> dict[str, Any]:
    missed: list[dict[str, Any]] = []
    for round, what in enumerate(did, 1):
        if what in PRESENT:
            continue
        last = missed[-1] if missed else None
        why = what or "not recorded"
        if last is not None and last["why"] == why and last["to"] == round - 1:
            last["to"] = round
        else:
            missed.append({"from": round, "to": round, "why": why})
    counts = {what.partition(",")[0].replace(" ", "_"): did.count(what) for what in PRESENT}
    return {**counts, "missed": sum(did.count(w) for w in {*did} - {*PRESENT}), "spans": missed}


def spans(own: Mapping[str, Any]) -> str:
    """Write the rounds that a site missed, and why."""
    return ", ".join(
        f"{one['from']}{'' if one['to'] == one['from'] else '-' + str(one['to'])} ({one['why']})"
        for one in own["spans"]
    )


def words(attendance: Mapping[str, Any]) -> list[str]:
    """Say of each site that missed a round which ones, and why."""
    return [
        f"{site} missed {own['missed']} of {own['missed'] + own['reported']} rounds: {spans(own)}"
        for site, own in attendance.items()
        if own["missed"]
    ]
