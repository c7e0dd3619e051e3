"""The hub's post: asks many nodes at once, waits so long and no longer, and keeps account.

A node that does not answer in time is passed over until it is heard of again; one whose answers
are refused too often is left out for good. Both are named and counted.
"""

import json
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

from idiolect.core.checkpoint import write_whole
from idiolect.deploy import protocol
from idiolect.deploy.protocol import CODES, Message, Refused


class Transport(Protocol):
    """The hub's way to its nodes. Calls to different sites may be made from several threads."""

    sites: Sequence[str]  # all of the federation, in its order, whether they are there or not

    def call(self, site: str, blob: bytes, seconds: float) -> bytes:
        """Bring a message and wait for the answer; `Refused` where there is none."""

    def returned(self, site: str) -> bool:
        """Say whether a site that was lost could take part again if the run were started anew."""

    def stopped(self) -> bool:
        """Say whether the engine wants the hub to end."""


log = logging.getLogger("idiolect.hub")

INVALID = (
    "sizes",
    "statistics",
    "format",
    "protocol",
    "size",
    "structure",
    "shape",
    "dtype",
    "nonfinite",
    "round",
    "identity",
)
"""What no honest node sends."""

SILENT = ("timeout", "unreachable")
"""What is no answer at all."""
_RESTARTED = ("closed", "crashed")  # a node that was started anew is told the experiment again
_PING = protocol.pack("knock")  # no node knows such a message; whoever says so is there


class Answer(NamedTuple):
    """What a node answered, and the bytes that crossed the network for it."""

    message: Message
    bytes_down: int
    bytes_up: int


@dataclass
class FaultLog:
    """Who failed how often, over the whole run; kept on disk so that a new start remembers."""

    path: Path | None = None
    faults: dict[str, Counter[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.path is not None and self.path.exists():
            known = json.loads(self.path.read_text())
            self.faults = {site: Counter(counts) for site, counts in known.items()}

    def blame(self, site: str, reason: str) -> None:
        """Count a failure of a site."""
        self.faults.setdefault(site, Counter())[reason] += 1
        if self.path is not None:
            write_whole(self.path, (json.dumps(self.faults, indent=1) + "\n").encode())

    def rubbish(self, site: str) -> int:
        """Return how many answers of a site were refused."""
        return sum(self.faults.get(site, Counter())[reason] for reason in INVALID)

    def told(self) -> list[str]:
        """Tell of every site that failed, in words."""
        return [
            f"{site} was passed over {sum(counts.values())} times: "
            + "; ".join(f"{CODES[reason]} ({count})" for reason, count in sorted(counts.items()))
            for site, counts in sorted(self.faults.items())
        ]


@dataclass(frozen=True)
class WaitPolicy:
    """How long the hub waits, and what it puts up with."""

    timeout: float = 600.0
    join: float = 120.0
    minimum: int | float = 0.5
    patience: int = 3
    limit: int = protocol.LIMIT

    def needed(self, cohort: int) -> int:
        """Return how many of a cohort must report."""
        if isinstance(self.minimum, int):
            return min(self.minimum, cohort)
        return max(1, -int(-self.minimum * cohort // 1))


class Messenger:
    """Letters to sites, several at a time."""

    def __init__(self, transport: Transport, policy: WaitPolicy, ledger: FaultLog) -> None:
        self.transport = transport
        self.policy = policy
        self.ledger = ledger
        self.reopen: Callable[[str], None] | None = None  # how a node is told everything again
        self._away: set[str] = set()  # silent; whoever is heard of is back
        self._out: set[str] = set()  # said no when the run was started
        self._pending: set[str] = set()  # asked, and waited for
        self.discreet = False  # who is asked in a round is nobody's business but the hub's
        self._threads: dict[str, threading.Thread] = {}

    def absent(self) -> list[str]:
        """Name the sites that are passed over at present."""
        return [site for site in self.transport.sites if not self.there(site)]

    def waiting(self) -> list[str]:
        """Name the sites that were asked and have not answered yet, where that may be known."""
        return [] if self.discreet else sorted(self._pending)

    def there(self, site: str) -> bool:
        """Say whether a site is asked at present."""
        return site not in self._away | self._out and not self.excluded(site)

    def excluded(self, site: str) -> bool:
        """Say whether a site's answers were refused too often."""
        return self.ledger.rubbish(site) >= self.policy.patience

    def lose(self, site: str) -> None:
        """Pass a site over until the run is started anew."""
        self._out.add(site)

    def waiting_outside(self) -> list[str]:
        """Name the sites that were lost and could come back if the run were started anew."""
        return [site for site in sorted(self._away | self._out) if self.transport.returned(site)]

    def ask(
        self,
        letters: Mapping[str, bytes],
        seconds: float,
        read: Callable[[str, Answer], None],
    ) -> dict[str, Refused]:
        """Ask several sites at once; `read` gets each good answer, in the order of the letters.

        What `read` refuses counts against the site, as does silence. Returns who failed, and why.
        """
        failed: dict[str, Refused] = {}
        inbox: dict[str, Answer | Refused] = {}
        asked: Sequence[str] = [site for site in letters if self.there(site)]
        for site in asked:
            self._pending.add(site)
            self._start(site, letters[site], seconds, inbox)
        for site in set(letters) & self._away:
            if not self._threads[site].is_alive():  # its last letter, or the answer, was lost
                self._start(site, _PING, seconds, {})
        until = time.monotonic() + seconds
        for site in asked:
            self._threads[site].join(max(0.0, until - time.monotonic()))
        self._pending.clear()  # who has not answered by now is not waited for
        for site in asked:
            found = inbox.get(site, Refused("timeout"))
            try:
                if isinstance(found, Refused):
                    raise found
                read(site, found)
            except Refused as error:
                self._account(site, error)
                failed[site] = error
        return failed

    def _start(
        self, site: str, blob: bytes, seconds: float, inbox: "dict[str, Answer | Refused]"
    ) -> None:
        thread = threading.Thread(target=self._one, args=(site, blob, seconds, inbox), daemon=True)
        self._threads[site] = thread
        thread.start()

    def _account(self, site: str, error: Refused) -> None:
        log.warning("%s: %s", site, error)
        self.ledger.blame(site, error.reason)
        if error.reason in SILENT:
            self._away.add(site)
        elif self.excluded(site):
            log.warning("%s is left out from now on: too many refused answers", site)

    def _one(
        self, site: str, blob: bytes, seconds: float, inbox: dict[str, Answer | Refused]
    ) -> None:
        """Ask one site; whoever answers at all, however late, is back."""
        try:
            try:
                inbox[site] = self.once(site, blob, seconds)
            except Refused as error:
                if error.reason not in _RESTARTED or self.reopen is None:
                    raise
                log.info("%s was started anew (%s); it is told everything again", site, error)
                self.reopen(site)
                inbox[site] = self.once(site, blob, seconds)
            self._away.discard(site)
        except Refused as error:
            if error.reason not in SILENT:
                self._away.discard(site)
            inbox[site] = error
        except Exception as error:  # of the engine: nothing a node does may end the hub
            log.exception("%s cannot be asked", site)
            inbox[site] = Refused("unreachable", f"{type(error).__name__}")
        finally:
            self._pending.discard(site)

    def once(self, site: str, blob: bytes, seconds: float) -> Answer:
        """Ask one site and read its answer."""
        answer = self.transport.call(site, blob, seconds)
        message = protocol.accepted(protocol.unpack(answer, self.policy.limit))
        return Answer(message, len(blob), len(answer))
