"""Watches a run and can say at any moment how it stands; hearing costs the run next to nothing."""

import threading
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from idiolect.analysis.report.material import EXPERIMENT, Material, curves
from idiolect.engine.callbacks import Tick
from idiolect.engine.outcome import Outcome
from idiolect.results import data_record, document


class Onlooker:
    """A watch that keeps the latest of every method; whoever asks does the work, not the run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._label = ""
        self._outcomes: dict[str, Callable[[], Outcome]] = {}
        self._standing: dict[str, str] = {}
        self._notes: list[str] = []
        self.news = threading.Condition()
        self.number = 0  # of the last thing that happened

    def begin(self, label: str, round: int, rounds: int) -> None:
        """Note that a method starts."""
        self._label = label
        self._heard(label, "starts" if not round else f"goes on after round {round} of {rounds}")

    def tick(self, tick: Tick) -> None:
        """Note how far it is."""
        self._heard(tick.label, f"round {tick.round} of {tick.rounds}")

    def scored(self, outcome: Callable[[], Outcome]) -> None:
        """Keep the latest scores, unmade."""
        with self.news:
            self._outcomes[self._label] = outcome

    def note(self, text: str) -> None:
        """Keep a notice."""
        with self.news:
            self._notes.append(text)

    def end(self, label: str, seconds: float) -> None:
        """Note that a method is done."""
        self._heard(label, f"done in {seconds:.0f} s")

    def _heard(self, label: str, words: str) -> None:
        with self.news:
            self._standing[label] = words
            self.number += 1
            self.news.notify_all()

    def material(self) -> tuple[int, Material]:
        """Say how the run stands, and the number of the last thing that is in it."""
        with self.news:
            number, standing = self.number, dict(self._standing)
            made = dict(self._outcomes)
        outcomes = [make() for make in made.values()]
        scored = [outcome for outcome in outcomes if outcome.final]
        about = _about(self._folder)
        content = document.build_document(about, scored, complete=False)
        if not scored and outcomes:
            content["seeds"] = [members.seed for members in outcomes[0].members]
        return number, Material(
            content,
            tuple(curve for outcome in outcomes for curve in curves(outcome)),
            tuple(data_record.read_holdings(self._folder)),
            _text(self._folder),
            str(self._folder),
            standing=standing,
        )


def _text(folder: Path) -> str:
    path = folder / EXPERIMENT
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def _about(folder: Path) -> dict[str, Any]:
    """Tell what the folder says of the experiment before any result stands in it."""
    told = tomllib.loads(_text(folder))
    held = data_record.read_holdings(folder)
    data: dict[str, Any] = {"source": Path(str(told.get("data", {}).get("source", ""))).name}
    if held:
        data |= {"clients": len(held[0].names), "classes": list(held[0].classes)}
    return {"name": told.get("name", folder.name), "data": data}
