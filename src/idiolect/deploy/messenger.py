"""The server's messenger: asks many nodes at once, waits for a limited time and counts failures.

A node that does not answer in time is skipped until it is heard of again; one whose answers are
refused too often is excluded for good. Both are named and counted.
"""

import json
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from idiolect.core.checkpoint import write_whole
from idiolect.deploy import protocol
from idiolect.deploy.protocol import Message, Refused
from idiolect.errors import DeployError

log = logging.getLogger("idiolect.hub")

INVALID = frozenset(
    "sizes statistics format protocol size structure shape dtype nonfinite round identity".split()
)
"""Refusals of answers that no honest node sends."""

SILENT = ("timeout", "unreachable")
"""Refusals that stand for no answer at all."""

_RESTARTED = ("closed", "crashed")  # a restarted node gets the experiment again
_PASSING = ("busy", "crashed", "closed", "disk", "memory")  # refusals that may mend by themselves
_LOOK = 1.0  # seconds between two looks at what may have changed
_PING = protocol.pack("knock")  # no node knows this kind; any answer proves that it is there


class Transport(ABC):
    """Carries messages to nodes. Calls to different sites may be made from several threads."""

    sites: Sequence[str]  # all of the federation, in its order, whether they are there or not
    submission: str = ""  # what the lead signed; empty where nobody has a key
    looks: bool = False  # whether it can say of a site that it is there, without a message

    @abstractmethod
    def call(self, site: str, blob: bytes, seconds: float) -> bytes:
        """Send a message and return the answer; `Refused` where there is none."""

    def present(self, site: str) -> bool:
        """Return whether a site is connected now, where this transport can tell (`looks`)."""
        return True

    def process(self, site: str) -> str:
        """Return an id of the process that last answered for a site; a restarted one has another.

        Empty where the transport cannot tell.
        """
        return ""

    def queued(self, site: str) -> float:
        """Return for how many seconds a site's message has waited behind those of other runs."""
        return 0.0

    def stopped(self) -> bool:
        """Return whether the server should end."""
        return False

    def expiries(self) -> Mapping[str, str]:
        """Return until when each site's certificate is valid, where sites have some."""
        return {}

    def note(self, kind: str, **facts: Any) -> None:
        """Record something in the server's audit log, where it keeps one."""
        return

    def leave_heads(self, folder: Path) -> None:
        """Write the newest signed entry of every member's audit log into a run's folder."""
        return


class Stopped(DeployError):
    """The run was stopped; missing answers are not counted as failures."""


class Answer(NamedTuple):
    """A node's answer, and the bytes of the question and of the answer."""

    message: Message
    bytes_down: int
    bytes_up: int


@dataclass
class FaultLog:
    """How often each site failed over the whole run; kept on disk across restarts."""

    path: Path | None = None
    faults: dict[str, Counter[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.path is not None and self.path.exists():
            known = json.loads(self.path.read_text())
            self.faults = {site: Counter(counts) for site, counts in known.items()}

    def count(self, site: str, reason: str) -> None:
        """Count a failure of a site."""
        self.faults.setdefault(site, Counter())[reason] += 1
        if self.path is not None:
            write_whole(self.path, (json.dumps(self.faults, indent=1) + "\n").encode())

    def invalid(self, site: str) -> int:
        """Return how many answers of a site were refused."""
        return sum(self.faults.get(site, Counter())[reason] for reason in INVALID)


@dataclass(frozen=True)
class WaitPolicy:
    """How long the server waits, and how many failures it tolerates."""

    timeout: float = 600.0
    join: float = 120.0
    minimum: int | float = 0.5
    patience: int = 3
    limit: int = protocol.LIMIT
    approval: float = 86400.0

    def needed(self, cohort: int) -> int:
        """Return how many of a cohort must report."""
        if isinstance(self.minimum, int):
            return min(self.minimum, cohort)
        return max(1, -int(-self.minimum * cohort // 1))


class Messenger:
    """Sends messages to several sites at a time."""

    def __init__(self, transport: Transport, policy: WaitPolicy, faults: FaultLog) -> None:
        self.transport = transport
        self.policy = policy
        self.faults = faults
        self.reopen: Callable[[str], None] | None = None  # repeats the handshake with a site
        self.discreet = False  # cohorts are secret, so nobody learns who is waited for
        self._away: dict[str, str] = {}  # silent, and how; any answer brings them back
        self._out: dict[str, tuple[str, str]] = {}  # refused at the start: why, by which process
        self._outside: set[str] = set()  # silent when the run was started, so they have no part
        self._pending: set[str] = set()  # asked and not answered yet
        self._threads: dict[str, threading.Thread] = {}
        self._lookout: threading.Thread | None = None

    def absent(self) -> list[str]:
        """Return the sites that are skipped at present."""
        return [site for site in self.transport.sites if not self.there(site)]

    def waiting(self) -> list[str]:
        """Return the sites that have not answered yet, unless that is secret."""
        return [] if self.discreet else sorted(self._pending)

    def there(self, site: str) -> bool:
        """Return whether a site is asked at present."""
        if site in self._away or site in self._out or site in self._outside:
            return False
        return not self.excluded(site)

    def excluded(self, site: str) -> bool:
        """Return whether a site's answers were refused too often."""
        return self.faults.invalid(site) >= self.policy.patience

    def absence(self, site: str) -> str:
        """Return the code for why a site is not asked; empty where it is."""
        if self.excluded(site):
            return "excluded"
        return self._away.get(site) or self._out.get(site, ("", ""))[0]

    def lose(self, site: str, why: str) -> None:
        """Skip a site until it was restarted: its present process refuses for good."""
        self._out[site] = why, self.transport.process(site)
        self._look_out()

    def refusing(self) -> dict[str, str]:
        """Return who refused at the start of the run, and why, except for temporary reasons."""
        return {site: why for site, (why, _) in self._out.items() if why not in _PASSING}

    def close_doors(self, joined: Collection[str]) -> None:
        """Record who has joined; other sites can take part only after a restart of the run."""
        self._outside = {site for site in self._away if site not in joined}

    def waiting_outside(self) -> list[str]:
        """Return the sites that could take part after a restart of the run."""
        other = {s for s, (_, known) in self._out.items() if self.transport.process(s) != known}
        return sorted((self._outside - set(self._away)) | other)

    def wait_for(self, seconds: float) -> None:
        """Wait for silent sites to come back, for a limited time."""
        until = time.monotonic() + (seconds if self.transport.looks else 0.0)
        while self._away and time.monotonic() < until and not self.transport.stopped():
            time.sleep(0.2)

    def _look_out(self) -> None:
        """Look for lost sites every second, while there are any."""
        if self.transport.looks and (self._lookout is None or not self._lookout.is_alive()):
            self._lookout = threading.Thread(target=self._keep_looking, daemon=True)
            self._lookout.start()

    def _keep_looking(self) -> None:
        while (self._away or self._out) and not self.transport.stopped():
            for site in [*self._away, *self._out]:
                present = self.transport.present(site)
                asked = self._threads.get(site)
                if present and (asked is None or not asked.is_alive()):
                    self._away.pop(site, None)
            time.sleep(_LOOK)

    def ask(
        self,
        messages: Mapping[str, bytes],
        seconds: float,
        read: Callable[[str, Answer], None],
    ) -> dict[str, Refused]:
        """Ask several sites at once; `read` gets each good answer, in the order of the messages.

        What `read` refuses counts against the site, as does silence. Returns who failed, and why.
        """
        failed: dict[str, Refused] = {}
        inbox: dict[str, Answer | Refused] = {}
        asked: Sequence[str] = [site for site in messages if self.there(site)]
        for site in asked:
            self._pending.add(site)
            self.start(site, messages[site], seconds, inbox)
        for site in set(messages) & set(self._away):
            lost = not self._threads[site].is_alive()  # its last message, or the answer
            if lost and not self.transport.looks:
                self.start(site, _PING, seconds, {})
        until = time.monotonic() + seconds
        for site in asked:
            while self._threads[site].is_alive():
                left = until + self.transport.queued(site) - time.monotonic()
                if left <= 0 or self.transport.stopped():
                    break
                self._threads[site].join(min(left, _LOOK))
        self._pending.clear()  # nobody is waited for any longer
        if self.transport.stopped():
            raise Stopped("the run was stopped")
        for site in asked:
            found = inbox.get(site, Refused("timeout"))
            try:
                if isinstance(found, Refused):
                    raise found
                read(site, found)
            except Refused as error:
                self.count(site, error)
                failed[site] = error
        return failed

    def tell(self, messages: Mapping[str, bytes], seconds: float) -> None:
        """Send several sites a message; a missing answer is not counted as a failure."""
        for site, blob in messages.items():
            self.start(site, blob, seconds, {})
        until = time.monotonic() + seconds
        for site in messages:
            self._threads[site].join(max(0.0, until - time.monotonic()))

    def start(
        self, site: str, blob: bytes, seconds: float, inbox: "dict[str, Answer | Refused]"
    ) -> None:
        """Ask a site in a thread of its own; its answer, or why there is none, goes to `inbox`."""
        thread = threading.Thread(target=self._one, args=(site, blob, seconds, inbox), daemon=True)
        self._threads[site] = thread
        thread.start()

    def count(self, site: str, error: Refused) -> None:
        """Count a failure of a site, and skip the site if it did not answer."""
        log.warning("%s: %s", site, error)
        if error.reason == "approval":
            return  # people take their time
        self.faults.count(site, error.reason)
        if error.reason in SILENT:
            self._away[site] = error.reason
            self._look_out()
        elif self.excluded(site):
            log.warning("%s is left out from now on: too many refused answers", site)

    def _one(
        self, site: str, blob: bytes, seconds: float, inbox: dict[str, Answer | Refused]
    ) -> None:
        """Ask one site; any answer, however late, proves that it is connected."""
        try:
            try:
                inbox[site] = self.once(site, blob, seconds)
            except Refused as error:
                if error.reason not in _RESTARTED or self.reopen is None:
                    raise
                log.info("%s was restarted (%s); the handshake is repeated", site, error)
                self.reopen(site)
                inbox[site] = self.once(site, blob, seconds)
            self._away.pop(site, None)
        except Refused as error:
            if error.reason not in SILENT:
                self._away.pop(site, None)
            inbox[site] = error
        except Exception as error:  # of the engine: nothing a node does may end the server
            log.exception("%s cannot be asked", site)
            inbox[site] = Refused("unreachable", f"{type(error).__name__}")
        finally:
            self._pending.discard(site)

    def once(self, site: str, blob: bytes, seconds: float) -> Answer:
        """Ask one site and read its answer."""
        answer = self.transport.call(site, blob, seconds)
        message = protocol.accepted(protocol.unpack(answer, self.policy.limit))
        return Answer(message, len(blob), len(answer))
