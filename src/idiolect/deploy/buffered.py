"""Buffered rounds for sites of different speed: FedBuff (Nguyen et al., AISTATS 2022).

A round is over as soon as `deploy.buffer` reports are in. Whoever is still at work goes on, and its
report counts in the round in which it comes, as a change of the model it was made from: with w(v)
the model of version v, a report r of version u that comes at version v counts as

    w(v) + s (r - w(u)),    s = 1 / sqrt(1 + v - u)

in the method's own average. Running statistics of batch normalisation come as they are, w(v) + s
(r - w(v)): changed by r - w(u) a variance that has fallen since would be negative. With a buffer of
all sites these are the rounds of FedAvg.
"""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from idiolect.core import batchnorm, tree
from idiolect.core.capabilities import Averaging, Privacy, has
from idiolect.core.method import Method, Report, Sent
from idiolect.core.tree import Tree
from idiolect.deploy.messenger import Answer, Messenger, Stopped
from idiolect.deploy.protocol import Refused
from idiolect.errors import ConfigError, MethodError
from idiolect.experiment.schema import Deployment

_LOOK = 0.02  # seconds between two looks at what has come


class _Asked(NamedTuple):
    """A message that a site is at work on."""

    version: int
    shared: Tree  # the model it was sent


@dataclass
class ReportBuffer:
    """Reports on their way: who is at work on which version, and what has come."""

    messenger: Messenger
    _asked: dict[str, _Asked] = field(default_factory=dict)
    _inbox: dict[str, Answer | Refused] = field(default_factory=dict)

    def ask(self, messages: Mapping[str, bytes], version: int, shared: Tree) -> None:
        """Send the model to all who are there and not at work."""
        for site, blob in messages.items():
            if site not in self._asked and self.messenger.there(site):
                self._asked[site] = _Asked(version, shared)
                self.messenger.start(site, blob, self.messenger.policy.timeout, self._inbox)

    def at_work(self) -> list[str]:
        """Return the sites that have not answered."""
        return [site for site in self._asked if site not in self._inbox]

    def take(
        self, need: int, version: int, read: Callable[[str, Answer, int, Tree], Report]
    ) -> tuple[dict[str, tuple[Report, int, Tree]], dict[str, Refused]]:
        """Wait until so many have answered, or nobody else will; return reports and refusals.

        A report comes with the version and the model that it was made from.
        """
        transport = self.messenger.transport
        until = time.monotonic() + self.messenger.policy.timeout
        while len(self._inbox) < need and self.at_work() and time.monotonic() < until:
            if transport.stopped():
                raise Stopped("the run was stopped")
            time.sleep(_LOOK)
        found: dict[str, tuple[Report, int, Tree]] = {}
        failed: dict[str, Refused] = {}
        for site in sorted(self._inbox):
            answer, asked = self._inbox.pop(site), self._asked.pop(site)
            try:
                if isinstance(answer, Refused):
                    raise answer
                found[site] = read(site, answer, asked.version, asked.shared), *asked
            except Refused as error:
                self.messenger.count(site, error)
                failed[site] = error
        return found, failed


def rebased(report: Report, stale: int, then: Tree, now: Tree) -> Report:
    """Return a report as a change of the present model; one that is not stale as it is."""
    if not stale:
        return report
    weight = 1 / math.sqrt(1 + stale)
    old, own = tree.named(then), tree.named(now)
    moved = {
        name: own[name] + weight * (new - (own if batchnorm.is_statistic(name) else old)[name])
        for name, new in tree.named(report.params).items()
    }
    return report._replace(params=tree.like(report.params, moved))


def needed(deploy: Deployment, clients: int) -> int:
    """Return how many reports fill the buffer; 0: rounds are not buffered."""
    if isinstance(deploy.buffer, int):
        return min(deploy.buffer, clients)
    return max(1, math.ceil(deploy.buffer * clients))


def refuse_unfit(
    label: str, method: Method, seeds: int, cohort: int | None, sent: Sent, report: Any
) -> None:
    """Refuse buffered rounds where a late report has no meaning."""
    if not has(method, Averaging) or has(method, Privacy):
        raise MethodError(
            f"{label} does not average reports, or hides who reports; deploy.buffer is for methods "
            "that average: leave it out"
        )
    forms = [
        {name: (leaf.shape, leaf.dtype) for name, leaf in tree.named(own).items()}
        for own in (sent.shared, report.params if isinstance(report, Report) else ())
    ]
    floating = all(leaf.is_floating_point() for leaf in tree.leaves(sent.shared))
    if forms[0] != forms[1] or not floating or tree.leaves(sent.own):
        raise MethodError(
            f"{label} does not report the very parameters it is sent, so that a late report is no "
            "change of a model; leave deploy.buffer out"
        )
    if seeds != 1 or cohort is not None:
        raise ConfigError(
            "deploy.buffer asks all sites, of one seed: leave cohort out, and give one seed a run"
        )
