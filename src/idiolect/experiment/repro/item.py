"""A table or figure of a paper: what it compares, what it claims, and what its status is."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from idiolect.experiment.repro.measured import Figure, Measured

REPRODUCED, CLOSE, DIFFERS = "reproduced", "close", "differs"
PENDING, IMPOSSIBLE, NOTHING = "not measured yet", "not possible here", "nothing to measure"

RULES = {
    REPRODUCED: "every compared figure of the paper's own method is at most one point below the "
    "paper's (or above it), and what the paper claims of the table holds in ours",
    CLOSE: "the same with three points; also the most that is said of a picture that prints no "
    "figures, or of figures that are no accuracies, judged by hand by what the paper says of it",
    DIFFERS: "a figure is more than three points below the paper's, or a claim does not hold",
    PENDING: "it, or a part of it, has not been run",
    IMPOSSIBLE: "it cannot be run here; the note says why",
    NOTHING: "a description or a drawing, or settings that ours take over",
}
"""What each status means. Being above the paper's figure does not count against a table."""

_ONE_POINT, _THREE_POINTS = 1.0, 3.0


@dataclass(frozen=True)
class Cell:
    """One figure of the paper's own method beside ours."""

    what: str
    run: str
    label: str
    model: str
    paper: float

    def ours(self, measured: Measured) -> Figure | None:
        """Return our figure, where it was measured."""
        return measured.get(self.run, {}).get(self.label, {}).get(self.model)


@dataclass(frozen=True)
class Claim:
    """An ordering the paper states: `above` beats each of `below` in every one of `runs`."""

    says: str
    runs: tuple[str, ...]
    above: str
    below: tuple[str, ...]

    def known(self, measured: Measured) -> bool:
        """Say whether all that it compares was measured."""
        names = (self.above, *self.below)
        return all(_find(measured, run, name) is not None for run in self.runs for name in names)

    def fails(self, measured: Measured) -> Iterator[str]:
        """Name each place where it does not hold; what was not measured is passed over."""
        for run in self.runs if self.known(measured) else ():
            for other in self.below:
                best, least = (_score(measured, run, name) for name in (self.above, other))
                if best <= least:
                    yield f"{run}: {other} {least:.1f}, {self.above} {best:.1f}"


@dataclass(frozen=True)
class Runnable:
    """An experiment file, under the name its run is kept by, with what is changed in it."""

    file: str
    name: str = ""
    set: tuple[str, ...] = ()


@dataclass(frozen=True)
class Item:
    """A table or figure; `given` is a status set by hand, which a note then explains."""

    id: str
    title: str
    experiments: tuple[Runnable, ...] = ()
    cells: tuple[Cell, ...] = ()
    claims: tuple[Claim, ...] = ()
    given: str = ""
    note: str = ""
    link: str = ""

    def status(self, measured: Measured) -> str:
        """Find the status by RULES."""
        if self.given:
            return self.given
        if any(cell.ours(measured) is None for cell in self.cells):
            return PENDING
        if not all(claim.known(measured) for claim in self.claims):
            return PENDING
        if any(True for _ in self.failed(measured)):
            return DIFFERS
        worst = max(_short(cell, measured) for cell in self.cells)
        return next(
            (s for s, most in ((REPRODUCED, _ONE_POINT), (CLOSE, _THREE_POINTS)) if worst <= most),
            DIFFERS,
        )

    def failed(self, measured: Measured) -> Iterator[str]:
        """Name each claim that does not hold, with the places."""
        for claim in self.claims:
            if places := list(claim.fails(measured)):
                yield f"not found: {claim.says} ({'; '.join(places)})"

    def headline(self, measured: Measured) -> Cell | None:
        """Return the cell that falls shortest of the paper's, so that no other is hidden by it."""
        known = [cell for cell in self.cells if cell.ours(measured) is not None]
        return max(known, key=lambda cell: _short(cell, measured), default=None)


@dataclass(frozen=True)
class Paper:
    """A paper and all its tables and figures."""

    key: str
    name: str
    title: str
    authors: str
    page: str
    figure: str  # which mean of a result the paper prints: mean or weighted_mean
    items: tuple[Item, ...]


def experiments_folder() -> Path:
    """Return where the experiment files are: in the package if installed, else in the checkout."""
    inside = Path(__file__).parent / "experiments"
    return inside if inside.is_dir() else Path(__file__).parents[3] / "experiments"


def _short(cell: Cell, measured: Measured) -> float:
    """Say by how many points ours is below the paper's, as both are printed (one decimal)."""
    ours = cell.ours(measured)
    assert ours is not None
    return round(cell.paper - ours.mean, 1)


def _find(measured: Measured, run: str, name: str) -> Figure | None:
    label, _, model = name.partition(":")
    return measured.get(run, {}).get(label, {}).get(model or "personal")


def _score(measured: Measured, run: str, name: str) -> float:
    found = _find(measured, run, name)
    assert found is not None
    return found.mean
