"""Whom a node works for: the submitter's signature, the site's list and hours, a person's yes.

What is let in is written into the audit log: who submitted what, what was promised, who approved.
"""

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from idiolect.deploy import audit, submission
from idiolect.deploy.approval import Approvals, RunTerms, request_digest, summary
from idiolect.deploy.audit import AuditLog
from idiolect.deploy.identity import NODE, Authority
from idiolect.deploy.protocol import Message, Refused
from idiolect.deploy.site import NodeSettings
from idiolect.errors import DeployError

if TYPE_CHECKING:
    from idiolect.deploy.node_records import ReleaseLog

log = logging.getLogger("idiolect.node")
# What is done within the site's hours only: nothing that tells of its data begins outside of them.
_WORK = ("columns", "step", "keys", "tell", "judge")


class Admitted(NamedTuple):
    """What was let in, by a digest of all that was asked, and for whose certificate."""

    digest: str
    certificate: bytes = b""  # of the lead; empty where nobody has a key


class Gate:
    """A site's own decision about each run, beside the limits on what it may do."""

    def __init__(self, site: NodeSettings, releases: "Callable[[], ReleaseLog]") -> None:
        self._site, self._releases = site, releases
        self._approvals = Approvals(site.home)
        # Without a kit (within a process, or `--on local`) nothing is signed, nor recorded.
        self._authority = None if site.kit is None else Authority.from_kit(site.kit)
        self._audit = None if site.kit is None else AuditLog(site.home, site.name, NODE)

    def admit(self, message: Message, kind: str) -> Admitted:
        """Refuse whoever may not ask, now or at all, before any data is read."""
        policy, submitter = self._site.policy, message.field("submitter", str)
        run, text = message.field("run", str), message.field("experiment", str)
        certificate = b""
        if self._authority is not None:
            given = message.head.get("submission")
            certificate = submission.verify(self._authority, given, submitter, run, kind, text)
        policy.refuse_submitter(submitter)
        policy.refuse_hours()
        clients = message.field("clients", int)
        digest = request_digest(text, submitter, run, clients, kind)
        if policy.require_approval:
            self._approvals.refuse_waiting(run, digest)
        return Admitted(digest, certificate)

    def asked(
        self,
        message: Message,
        name: str = "",
        rows: int = 0,
        promise: Mapping[str, Any] | None = None,
        spends: Mapping[str, float] | None = None,
    ) -> RunTerms:
        """Gather what a person must know to decide."""
        policy, run = self._site.policy, message.field("run", str)
        kind = "run" if promise else "describe"
        return RunTerms(
            run,
            message.field("submitter", str),
            "adapt" if message.head.get("newcomer") is True else kind,
            message.field("clients", int),
            name,
            rows,
            promise or {},
            sum((spends or {}).values()),
            self._releases().spent(run),
            policy.budget_epsilon,
        )

    def approved(self, message: Message, asked: RunTerms, admitted: Admitted) -> str:
        """Return who said yes, if the site's policy wants someone to; refuse until then."""
        if not self._site.policy.require_approval:
            return ""
        text, digest = message.field("experiment", str), admitted.digest
        known = self._approvals.find(asked.run)
        if known is None or known.digest != digest:
            # Said once, in the form that the node's console shows.
            words = "run %s waits for a yes or no: idiolect node status KIT, then node approve"
            log.error(f"refused with 'approval': {words}", asked.run)
        return self._approvals.require(asked.run, digest, summary(asked), text)

    def opened(self, message: Message, promise: Mapping[str, Any], approved: str) -> None:
        """Record that a run was let in, before anything of it leaves."""
        if self._audit is None:
            return
        run, submitter, text = (
            message.field(key, str) for key in ("run", "submitter", "experiment")
        )
        facts = audit.run_facts(run, submitter, text, message.head.get("methods", {}))
        try:
            self._audit.append(audit.RUN, **facts, promise=dict(promise), approved=approved)
        except DeployError as error:
            raise Refused("disk", str(error)) from error

    def refuse_withdrawn(self, message: Message, run: str, admitted: Admitted) -> None:
        """Refuse to go on outside of hours, for a revoked lead, or after a yes was taken back."""
        policy = self._site.policy
        if self._authority is not None:
            self._authority.refuse_revoked(admitted.certificate)
        if message.kind in _WORK:
            policy.refuse_hours()
        if policy.require_approval:
            self._approvals.refuse_unless_yes(run, admitted.digest)
