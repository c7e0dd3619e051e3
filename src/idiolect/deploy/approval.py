"""A person's yes or no to a run: asked for in words, kept on the node's disk.

A run that waits is refused with `approval`, and the server asks again; once someone at the site has
decided (`idiolect node approve`, `refuse`), it is let in or refused for good. A decision is about
exactly what was asked: another experiment, submitter or promise is asked about anew.
"""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from idiolect.core.checkpoint import write_whole
from idiolect.deploy import protocol
from idiolect.deploy.protocol import Refused
from idiolect.errors import ConfigError

_FOLDER = "approvals"  # in a node's home
YES, NO = "yes", "no"
_NAME = 40  # letters of a name that are shown
_MOST = 100  # requests that wait for a decision


@dataclass(frozen=True)
class ApprovalRequest:
    """What is asked of a site, and what its people said to it."""

    run: str
    digest: str  # of all that is asked
    asked: float
    summary: tuple[str, ...]
    experiment: str  # as TOML
    decision: str = ""
    by: str = ""
    why: str = ""


class Approvals:
    """The requests that a site was asked to decide."""

    def __init__(self, home: Path) -> None:
        self._folder = home / _FOLDER

    def find(self, run: str) -> ApprovalRequest | None:
        """Return what is known of a run."""
        path = self._path(run)
        if not path.exists():
            return None
        try:
            found = json.loads(path.read_text())
            return ApprovalRequest(**{**found, "summary": tuple(found["summary"])})
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise Refused("state", f"{path} cannot be read; remove it to be asked anew") from error

    def refuse_waiting(self, run: str, digest: str) -> None:
        """Refuse a run that a person has said no to, or not said anything yet."""
        known = self.find(run)
        if known is None or known.digest != digest or known.decision == YES:
            return
        if known.decision == NO:
            raise Refused("declined", known.why or "a person said no")
        raise Refused("approval", f"run {run} waits for `idiolect node approve`")

    def refuse_unless_yes(self, run: str, digest: str) -> None:
        """Refuse a run to which a person's last word is not yes, to exactly this."""
        self.refuse_waiting(run, digest)
        known = self.find(run)
        if known is None or known.digest != digest:
            raise Refused("approval", f"run {run}: what was said yes to is not what was joined")

    def require(self, run: str, digest: str, summary: Sequence[str], experiment: str) -> str:
        """Return who said yes to exactly this; else ask, and refuse for now."""
        self.refuse_waiting(run, digest)
        known = self.find(run)
        if known is not None and known.digest == digest:
            return known.by
        if sum(not one.decision for one in self.all()) >= _MOST:
            raise Refused("max_runs", f"{_MOST} runs wait for a yes or no here")
        self._write(ApprovalRequest(run, digest, time.time(), tuple(summary), experiment))
        raise Refused("approval", f"run {run} waits for `idiolect node approve`")

    def decide(
        self,
        run: str,
        decision: str,
        by: str,
        why: str = "",
        shown: ApprovalRequest | None = None,
    ) -> ApprovalRequest:
        """Keep what a person said, to what was `shown`: something else may be asked meanwhile."""
        known = shown or self.find(run)
        if known is None:
            waiting = ", ".join(one.run for one in self.all()) or "none"
            raise ConfigError(f"no run {run} was asked for here; known: {waiting}")
        made = ApprovalRequest(
            **{**asdict(known), "decision": decision, "by": by, "why": why[:200]}
        )
        self._write(made)
        return made

    def all(self) -> list[ApprovalRequest]:
        """Return all requests, the newest first."""
        runs = [path.stem for path in self._folder.glob("*.json")]
        found = [one for run in runs if (one := self.find(run)) is not None]
        return sorted(found, key=lambda one: -one.asked)

    def _write(self, request: ApprovalRequest) -> None:
        text = json.dumps(asdict(request), indent=1) + "\n"
        write_whole(self._path(request.run), text.encode(), private=True)

    def _path(self, run: str) -> Path:
        if not (run.isascii() and run.isalnum()):
            raise Refused("format", "a run is named by letters and digits")
        return self._folder / f"{run}.json"


class RunTerms(NamedTuple):
    """What a run asks of this site."""

    run: str
    submitter: str
    kind: str  # run, adapt or describe
    clients: int
    name: str = ""  # of the experiment
    rows: int = 0  # of training data here, under the first seed
    promise: Mapping[str, Any] = MappingProxyType({})
    spends: float = 0.0  # epsilon, where the site counts it
    spent: float = 0.0  # before
    budget: float = 0.0


def summary(asked: RunTerms) -> list[str]:
    """Say what a run asks for, what leaves, how often, and what is promised."""
    who = asked.submitter or "someone without a name"
    lines = [f"{who} asks this site to take part in run {asked.run} ({asked.name[:_NAME]!r})"]
    if asked.kind == "describe":
        lines.append(
            f"asked: statistics of this site's columns, beside {asked.clients - 1} other sites'"
        )
        lines.append("leaves: counts, means and histograms, once, as the policy limits them")
        return _printable(lines)
    if asked.kind == "adapt":
        lines.append("asked: to fit a model of a run that is over to this site's data")
        lines.append("leaves: scores, once; the model stays here")
        return _printable(lines)
    methods, seeds = asked.promise["methods"], asked.promise["seeds"]
    reports = sum(one["rounds"] for one in methods.values()) * seeds
    each = ", ".join(f"{_name(label)}: {one['rounds']} rounds" for label, one in methods.items())
    lines.append(
        f"asked: training on {asked.rows} rows, with {asked.clients - 1} other sites; {each}; "
        f"{seeds} seeds"
    )
    seen = (
        "the server sees their sum only (secure aggregation)"
        if asked.promise["secure"]
        else "the server sees each of them"
    )
    lines.append(
        f"leaves: at most {reports} reports (model parameters), one for each round, seed and "
        f"method; {seen}"
    )
    lines.append(
        f"leaves: some {reports} sets of scores (the limit is max_reports of policy.toml); numbers "
        "of rows, form and statistics of the columns at the start"
    )
    for label, one in methods.items():
        private = one["privacy"]
        told = "no differential privacy; reports may show single rows"
        if private and private["epsilon"] is not None:
            told = (
                f"epsilon = {private['epsilon']:.4g}, delta = {private['delta']:.2g}, by noise "
                "that the server adds"
            )
        lines.append(f"promise for {_name(label)}: {told}")
    if asked.budget:
        lines.append(
            f"epsilon: this run {asked.spends:.4g}, spent before {asked.spent:.4g}, of "
            f"{asked.budget:.4g} over all runs"
        )
    lines.append("stays: rows, personal models and personal state")
    return _printable(lines)


def _name(label: str) -> str:
    """Return a lead's name for a method: short, and in quotes, lest it pass for our own words."""
    short = label[:_NAME]
    return short if short.isalnum() else repr(short)


def _printable(lines: Sequence[str]) -> list[str]:
    return ["".join(c if c.isprintable() else "?" for c in line[:400]) for line in lines]


def request_digest(text: str, submitter: str, run: str, clients: int, kind: str) -> str:
    """Name what is asked, all of it."""
    parts = (text, submitter, run, str(clients), kind)
    return protocol.digest(*(part.encode() for part in parts))
