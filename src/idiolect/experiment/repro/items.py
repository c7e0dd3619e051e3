"""A table or figure of a paper: what it compares, what it claims, and what its status is."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import mean, stdev
from typing import NamedTuple

from idiolect.analysis.significance import holm
from idiolect.experiment.repro.seed_figures import BEST_TEST_ROUND, ERROR, Figure, Measured
from idiolect.results.statistics import student_p

REPRODUCED, CLOSE, DIFFERS = "reproduced", "close", "differs"
UNDECIDED = "not decided"
PENDING, IMPOSSIBLE, NOTHING = "not measured yet", "not possible here", "nothing to measure"

RULES = {
    REPRODUCED: "every compared figure is equivalent to the paper's within one point: with 95 % "
    "confidence on each side our mean is not further from it; and every order that the paper "
    "claims of the table holds in ours, beyond noise",
    CLOSE: "with 95 % confidence no compared figure is more than three points below the paper's, "
    "and every order that it claims holds, beyond noise; of a picture that prints no figures, what "
    "the paper says of it holds beyond noise, or is judged by hand, which the note then says",
    DIFFERS: "with 95 % confidence some figure is more than three points below the paper's, or an "
    "order that it claims is turned round, beyond noise",
    UNDECIDED: "neither: a claimed order is within the noise, or our seeds are too few or too far "
    "apart to say; a single seed decides nothing, unless it is more than three points below",
    PENDING: "it, or a part of it (a panel, a column), has not been run; what was run does not "
    "differ",
    IMPOSSIBLE: "it cannot be run here; the note says why",
    NOTHING: "a description or a drawing, or settings that ours take over",
}
"""What each status means. A figure above the paper's may be as far above as it likes in `close`."""

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

    def apart(self, measured: Measured) -> tuple[float, float]:
        """Return between what our mean is above the paper's figure, with 95 % on each side."""
        ours = self.ours(measured)
        assert ours is not None
        low, high = ours.bounds
        return low - self.paper, high - self.paper

    def last_round(self, measured: Measured) -> Figure | None:
        """Return our figure of the last round, where the paper's is the best test round."""
        if not self.model.endswith(BEST_TEST_ROUND):
            return None
        return replace(self, model=self.model.removesuffix(BEST_TEST_ROUND)).ours(measured)


@dataclass(frozen=True)
class Claim:
    """An ordering the paper states: `above` beats each of `below` in every one of `runs`."""

    says: str
    runs: tuple[str, ...]
    above: str
    below: tuple[str, ...]

    def known(self, measured: Measured) -> bool:
        """Return whether all that it compares was measured."""
        names = (self.above, *self.below)
        return all(_find(measured, run, name) is not None for run in self.runs for name in names)

    def compared(self, measured: Measured) -> "Iterator[OrderTest]":
        """Compare in every place, seed by seed; what was not measured is passed over."""
        for run in self.runs:
            for other in self.below:
                best, least = (_find(measured, run, name) for name in (self.above, other))
                if best is not None and least is not None:
                    yield OrderTest(self, run, other, best, least)


class OrderTest(NamedTuple):
    """Two figures of one run, of which a paper says that the first is above.

    They are compared over the seeds that both have, which stand first.
    """

    claim: Claim
    run: str
    other: str
    best: Figure
    least: Figure

    @property
    def gain(self) -> float:
        """By how many points the first is above."""
        return mean(self._gaps)

    @property
    def _gaps(self) -> list[float]:
        return [a - b for a, b in zip(self.best.seeds, self.least.seeds, strict=False)]

    @property
    def p(self) -> float:
        """The two-sided p of the paired differences of seeds, by Student's t, as a verdict's is.

        A single seed cannot tell a difference from luck.
        """
        gaps = self._gaps
        if len(gaps) < 2:
            return 1.0
        error = stdev(gaps) / math.sqrt(len(gaps))
        if error == 0:
            return 0.0 if mean(gaps) else 1.0
        return student_p(mean(gaps) / error, len(gaps) - 1)

    def words(self, p: float) -> str:
        """Say what was found, with a p that may be corrected for others."""
        seeds = len(self._gaps)
        best, least = (mean(one.seeds[:seeds]) for one in (self.best, self.least))
        found = f"{self.other} {least:.1f}, {self.claim.above} {best:.1f}"
        return f"{self.run}: {found}, p = {p:.2g}"


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
    figure: str = ""  # which figure of a result is printed, where it is not the paper's usual one
    missing: str = ""  # a panel or column that was not run: it may differ, but not be reproduced

    def status(self, measured: Measured) -> str:
        """Find the status by RULES."""
        if self.given or not (self.cells or self.claims):
            return self.given or NOTHING
        known = [cell for cell in self.cells if cell.ours(measured) is not None]
        bounds = [cell.apart(measured) for cell in known]
        turned, noise = self._failed(measured)
        if turned or any(high < -_THREE_POINTS for _, high in bounds):
            return DIFFERS  # whatever else is missing: it cannot mend that
        whole = len(known) == len(self.cells) and all(c.known(measured) for c in self.claims)
        if self.missing or not whole:
            return PENDING
        if noise or any(low < -_THREE_POINTS for low, _ in bounds):
            return UNDECIDED
        within = all(-_ONE_POINT <= low and high <= _ONE_POINT for low, high in bounds)
        return REPRODUCED if bounds and within else CLOSE

    def counts(self, measured: Measured) -> dict[str, int]:
        """Count cells: within one point of the table or above, further below, not measured."""
        ours = [(cell.ours(measured), cell.paper) for cell in self.cells]
        gaps = [own.mean - paper for own, paper in ours if own is not None]
        near = sum(gap >= -_ONE_POINT for gap in gaps)
        return {"near": near, "below": len(gaps) - near, "not_measured": len(ours) - len(gaps)}

    def _failed(self, measured: Measured) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
        """Find, claim by claim, the comparisons that are turned round, and those within noise.

        The p values of a row are corrected together, by Holm's rule.
        """
        compared = [one for claim in self.claims for one in claim.compared(measured)]
        turned: dict[str, list[str]] = {}
        noise: dict[str, list[str]] = {}
        for one, p in zip(compared, holm([one.p for one in compared]), strict=True):
            if p >= ERROR:
                noise.setdefault(one.claim.says, []).append(one.words(p))
            elif one.gain < 0:
                turned.setdefault(one.claim.says, []).append(one.words(p))
        return turned, noise

    def failed(self, measured: Measured) -> Iterator[str]:
        """Name each claim that does not hold somewhere, and why, with the places."""
        for why, claims in zip(
            ("turned round", "within noise"), self._failed(measured), strict=True
        ):
            for says, places in claims.items():
                yield f"{why}: {says} ({'; '.join(places)})"

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
    time: str = ""  # what the page knows of it, for rows of which no seconds are kept


def _short(cell: Cell, measured: Measured) -> float:
    """Return by how many points ours is below the paper's, as both are printed (one decimal)."""
    ours = cell.ours(measured)
    assert ours is not None
    return round(cell.paper - ours.mean, 1)


def _find(measured: Measured, run: str, name: str) -> Figure | None:
    label, _, model = name.partition(":")
    return measured.get(run, {}).get(label, {}).get(model or "personal")
