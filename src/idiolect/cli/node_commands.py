"""A site's node: started, and what its people decide: node approve, refuse, status."""

import getpass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from idiolect.cli import federation_commands
from idiolect.cli.command_base import JSON, CommandGroup, guarded, say
from idiolect.cli.federation_commands import _KIT, _POLICY
from idiolect.errors import ConfigError

if TYPE_CHECKING:
    from idiolect.deploy.approval import ApprovalRequest
    from idiolect.deploy.flare.kits import MemberKit

_START = "start"


class _NodeGroup(CommandGroup):
    """`idiolect node KIT --data OWN` starts the node: the command `start` may be left out."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put the command in where there is none."""
        if args and args[0] not in (*self.commands, "--help"):
            args = [_START, *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    help="Run a site's node (idiolect node KIT --data OWN); decide what it takes part in.",
    no_args_is_help=True,
    cls=_NodeGroup,
)
app.command(name=_START)(federation_commands.node)
_RUN = typer.Argument(help="The run; the only one that waits, by default.")


@app.command()
@guarded
def approve(
    kit: Annotated[Path, _KIT],
    run: Annotated[str | None, _RUN] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask again.")] = False,
) -> None:
    """Say yes to a run, after reading what it asks for."""
    from idiolect.deploy.approval import YES

    own, request = _waiting(kit, run)
    _show(request)
    if not yes:
        typer.confirm("take part?", abort=True)
    _decide(own, request, YES, "")
    say(f"run {request.run} is approved; the node goes on by itself")


@app.command()
@guarded
def refuse(
    kit: Annotated[Path, _KIT],
    run: Annotated[str | None, _RUN] = None,
    why: Annotated[str, typer.Option(help="Words that the lead is told.")] = "",
) -> None:
    """Say no to a run, also to one that was approved and goes on."""
    from idiolect.deploy.approval import NO

    own, request = _waiting(kit, run)
    _decide(own, request, NO, why)
    say(f"run {request.run} is refused; nothing more leaves for it")


def _waiting(kit: Path, run: str | None) -> "tuple[MemberKit, ApprovalRequest]":
    from idiolect.deploy.approval import Approvals
    from idiolect.deploy.flare.kits import read

    own = read(kit, "node")
    known = Approvals(own.home)
    if run is not None:
        found = known.find(run)
        if found is not None:
            return own, found
    waiting = [one for one in known.all() if not one.decision]
    if run is None and len(waiting) == 1:
        return own, waiting[0]
    names = ", ".join(one.run for one in waiting) or "none"
    raise ConfigError(f"{f'no run {run}' if run else 'name the run'}; waiting: {names}")


def _decide(own: "MemberKit", request: "ApprovalRequest", decision: str, why: str) -> None:
    """Write down who decided what: in the audit log first."""
    from idiolect.deploy.approval import YES, Approvals
    from idiolect.deploy.audit import AuditLog

    by = getpass.getuser()
    AuditLog(own.home, own.name, "node").append(
        "approved" if decision == YES else "refused",
        run=request.run,
        asked=request.digest,
        by=by,
        why=why,
    )
    Approvals(own.home).decide(request.run, decision, by, why, shown=request)


def _show(request: "ApprovalRequest") -> None:
    for line in request.summary:
        say(f"  {line}")


@app.command()
@guarded
def status(
    kit: Annotated[Path, _KIT],
    policy: Annotated[Path | None, _POLICY] = None,
    json: Annotated[bool, JSON] = False,
) -> None:
    """Show what a site allows, what has left it, what privacy is spent and which runs wait."""
    from idiolect.cli.screen import print_json
    from idiolect.deploy.approval import Approvals
    from idiolect.deploy.audit import AuditLog
    from idiolect.deploy.flare.kits import read
    from idiolect.deploy.flare.site_keys import expiry_words
    from idiolect.deploy.limits import SitePolicy, policy_path, read_site_policy
    from idiolect.deploy.node_records import ReleaseLog

    own = read(kit, "node")
    file = policy_path(own.folder, policy)
    allowed = SitePolicy() if file is None else read_site_policy(file)
    releases, requests = ReleaseLog(own.home, allowed), Approvals(own.home).all()
    log = AuditLog(own.home, own.name, "node")
    head, words = log.head() if log.path.exists() else None, expiry_words(own.folder)
    changed = {k: v for k, v in allowed.plain().items() if v != getattr(SitePolicy(), k)}
    found = {
        "name": own.name,
        "federation": own.federation,
        "certificate": words[0],
        "runs": releases.runs,
        "epsilon_spent": releases.spent(),
        "epsilon_budget": allowed.budget_epsilon or None,
        "requests": [{"run": o.run, "decision": o.decision, "by": o.by} for o in requests],
        "audit": None if head is None else head._asdict(),
        "policy": changed,
    }
    if json:
        print_json(found)
        return
    say(f"{own.name} of {own.federation}: {words[0]}")
    for key, value in changed.items():
        say(f"policy: {key} = {value}")
    for run, known in releases.runs.items():
        spent = sum(known.get("epsilon", {}).values())
        began = datetime.fromtimestamp(known["began"]).strftime("%Y-%m-%d %H:%M")
        counts = f"{known['reports']} reports, {known['scores']} scorings"
        say(f"run {run}, {began}: {counts}{f', epsilon {spent:.4g}' if spent else ''}")
    budget = allowed.budget_epsilon
    say(
        f"epsilon spent over all runs: {releases.spent():.4g}"
        + (f" of {budget:.4g}" if budget else " (counted where the policy asks for privacy)")
    )
    if head is not None:
        say(f"audit log: {head.number + 1} entries, newest {head.hash[:16]}")
    for one in requests:
        if not one.decision:
            say(f"run {one.run} waits for a yes or no (idiolect node approve {kit} {one.run}):")
            _show(one)
