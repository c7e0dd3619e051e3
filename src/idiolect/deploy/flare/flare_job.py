"""What runs inside FLARE: the server's rounds, and an answering object on every node.

A job carries settings only; these classes are installed with idiolect on both sides, and a site
that keeps its defaults runs nothing else.
"""

import base64
import dataclasses
import gc
import json
import logging
import shutil
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_context import FLContext
from nvflare.apis.signal import Signal
from nvflare.collab import collab
from nvflare.collab.api.context import set_call_context
from nvflare.collab.api.exceptions import CollabCallError, RunAborted
from nvflare.widgets.info_collector import GroupInfoCollector, InfoCollector

from idiolect.core.checkpoint import write_whole
from idiolect.deploy import node_records, protocol
from idiolect.deploy.audit import AuditLog
from idiolect.deploy.describe_nodes import describe_nodes
from idiolect.deploy.flare.kits import HOME, HOST_FILE, NODE_FILE, OUTCOME, RESULT, RETURNED
from idiolect.deploy.messenger import Messenger, Transport
from idiolect.deploy.newcomer_nodes import WantedModel, adapt_nodes, find_model
from idiolect.deploy.node_process import NodeProcess
from idiolect.deploy.protocol import Refused
from idiolect.deploy.serve_experiment import ServerSettings, make_messenger, serve
from idiolect.deploy.server import RestartNeeded
from idiolect.deploy.signing import Authority, Identity, NodeChannel, ServerChannel
from idiolect.deploy.site import NodeSettings
from idiolect.engine.outcome import Silent, Tick
from idiolect.errors import ConfigError, DeployError, IdiolectError


class Tidy:
    """Collects what the engine dropped; cheap, as all that was there at the start is left out."""

    def __init__(self) -> None:
        self._begun = False

    def __call__(self) -> None:
        """Tidy up, once a message or a round."""
        gc.collect()
        if not self._begun:
            self._begun = True
            gc.freeze()


log = logging.getLogger("idiolect.flare")
_SERVER = "server"  # what the engine calls the server's end of a job
_MOST_NOTES, _LONGEST_NOTE = 20, 400  # for an admin who asks how far the run is
_PATIENCE = 10.0  # timeouts of the server until a call is given up


class NodeSide:
    """A node's end: hands messages to the training process, and answers back."""

    def __init__(self) -> None:
        self._child: NodeProcess | None = None
        self._channel: NodeChannel | None = None
        self._lock = threading.Lock()
        self._tidy = Tidy()

    @collab.publish  # type: ignore[untyped-decorator]
    def answer(self, blob: bytes) -> bytes:
        """Answer one message of the server; of a failure only a code leaves.

        The engine lets every member of a job call every other. Who it says is calling is looked at
        first, but a member can forge that: what counts is the server's signature.
        """
        try:
            caller, workspace = collab.caller, collab.context.workspace
            if caller != _SERVER:
                raise Refused("identity", f"called by {caller!r}; only the server is answered")
            return self._signed(workspace).answer(
                blob, lambda body: self._asked(workspace).answer(body)
            )
        except Refused as error:
            log.error("refused with %r: %s", error.reason, error)
            return protocol.refusal(error.reason)
        except Exception:
            log.exception("a message could not be answered")
            return protocol.refusal("failed")

    def _signed(self, workspace: Any) -> NodeChannel:
        """Return the channel of this process; there is no way to be without a kit's identity."""
        with self._lock:
            if self._channel is None:
                root = Path(workspace.get_root_dir())
                own = Identity.from_kit(root)
                kept = AuditLog(root / HOME, own.name, own.role)
                self._channel = NodeChannel(own, Authority.from_kit(root), kept)
            return self._channel

    def _asked(self, workspace: Any) -> NodeProcess:
        with self._lock:
            self._tidy()
            if self._child is None:
                root = Path(workspace.get_root_dir())
                path = root / HOME / NODE_FILE
                if not path.is_file():
                    raise Refused("data", f"{path} is missing; start with `idiolect node`")
                # Whatever the file says: over this engine a node has the identity of its kit.
                site = dataclasses.replace(
                    NodeSettings.from_json(path.read_text()), kit=root.resolve()
                )
                self._child = NodeProcess(site)
            return self._child

    @collab.final  # type: ignore[untyped-decorator]
    def end(self) -> None:
        """End the training process with the job."""
        if self._child is not None:
            self._child.close()


class _Cells(Transport):
    """FLARE's calls as a `Transport`."""

    def __init__(self, sites: list[str]) -> None:
        self.sites: Sequence[str] = tuple(sites)
        self._context = collab.context
        self._proxies = {proxy.name: proxy for proxy in collab.clients}
        self._returned: frozenset[str] = frozenset()
        # Of our own, below the job's: the engine lets no job end before all its calls have.
        self._over = [Signal(parent=p.backend.abort_signal) for p in self._proxies.values()]
        for proxy, signal in zip(self._proxies.values(), self._over, strict=True):
            proxy.backend.abort_signal = signal
        # Only the server's lasting process knows who is connected, so an admin must report it.
        collab.fl_ctx.get_engine().register_app_command(RETURNED, self._told)

    def _told(self, topic: str, data: Any, fl_ctx: FLContext) -> dict[str, Any]:
        sites = data.get("sites", ()) if isinstance(data, dict) else ()
        self._returned = frozenset(site for site in sites if site in self.sites)
        return {}

    def call(self, site: str, blob: bytes, seconds: float) -> bytes:
        """Call a site's object; its errors never carry the site's own words further."""
        if site not in self._proxies:
            raise Refused("unreachable", f"{site} did not start with the job")
        set_call_context(self._context)
        try:
            # Longer than the server waits: a late answer proves that the node is back.
            answer = self._proxies[site](timeout=_PATIENCE * seconds).answer(blob)
        except RunAborted:
            raise Refused("unreachable", "the job is ending") from None
        except CollabCallError as error:
            late = "timed out" in str(error)
            raise Refused("timeout" if late else "unreachable") from None
        if not isinstance(answer, bytes):
            raise Refused("format", f"{site} answered with {type(answer).__name__}")
        return answer

    def hang_up(self) -> None:
        """Give up calls that nobody has answered: the run is over, or starts anew."""
        for signal in self._over:
            signal.trigger(True)

    def returned(self, site: str) -> bool:
        """Return whether a site is connected that has no part in this job, or has one no more."""
        return site in self._returned

    def stopped(self) -> bool:
        """Return whether the job is being aborted."""
        return bool(self._context.is_aborted())


class _Progress(Silent):
    """How far the run is, for an admin who asks."""

    def __init__(self, run: str) -> None:
        self.state: dict[str, Any] = {"run": run, "state": "starting"}
        self.notes: list[str] = []
        self.post: Messenger | None = None
        self._tidy = Tidy()

    def update(self, **changes: Any) -> None:
        """Replace what is reported."""
        absent = [] if self.post is None else self.post.absent()
        self.state = {**self.state, **changes, "absent": absent}

    def begin(self, label: str, round: int, rounds: int) -> None:
        """Note that a method starts, or resumes."""
        self.update(state="training", label=label, round=round, rounds=rounds)

    def tick(self, tick: Tick) -> None:
        """Note that a round is over."""
        self._tidy()
        self.update(label=tick.label, round=tick.round, rounds=tick.rounds, time=time.time())

    def note(self, text: str) -> None:
        """Log something the user should know, and keep it for an admin who asks."""
        log.info(text)
        if len(self.notes) < _MOST_NOTES:
            self.notes.append(text[:_LONGEST_NOTE])
            self.update(notes=list(self.notes))

    def end(self, label: str, seconds: float) -> None:
        """Note that a method is trained and scored."""
        self.update(state="scored", label=label)


class ServerSide(FLComponent):  # type: ignore[misc]
    """The server's end: runs the experiment from its last checkpoint, and reports progress."""

    def __init__(
        self,
        run: str,
        experiment: str,
        sites: list[str],
        only: list[str],
        wanted: list[Any] | None = None,
        describe: bool = False,
    ) -> None:
        """`experiment` is TOML in base64: FLARE would read braces as its own variables.

        With `wanted` the sites are newcomers, who adapt to a run that is over; to `describe` is to
        ask for statistics and to train nothing.
        """
        super().__init__()
        self._run = run
        self._text = base64.b64decode(experiment).decode()
        self._sites = sites
        self._only = only
        self._wanted = None if wanted is None else WantedModel(*wanted)
        self._describe = describe
        self._progress = _Progress(run)

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Report progress when an admin asks."""
        if event_type == InfoCollector.EVENT_TYPE_GET_STATS:
            collector = fl_ctx.get_prop(InfoCollector.CTX_KEY_STATS_COLLECTOR)
            if isinstance(collector, GroupInfoCollector):
                calls = self._progress.post
                waiting = [] if calls is None else calls.waiting()
                collector.set_info("idiolect", {**self._progress.state, "waiting": waiting})

    @collab.main  # type: ignore[untyped-decorator]
    def work(self) -> None:
        """Run the experiment, or as much of it as can be done now."""
        workspace = collab.context.workspace
        number = collab.fl_ctx.get_job_id()
        job, root = Path(workspace.get_run_dir(number)), Path(workspace.get_root_dir())
        cells = _Cells(self._sites)
        try:
            # What the server's lasting process wrote when it deployed the job: its own record of
            # who submitted it, with the name in the certificate of whoever was logged in.
            submitter = submitter_of(Path(workspace.get_job_meta_path(number)))
            own = Identity.from_kit(root)
            kept = AuditLog(root / HOME, own.name, own.role)
            transport = ServerChannel(cells, own, Authority.from_kit(root), kept)
            outcome = self.done(transport, root / HOME, job, submitter)
        except IdiolectError as error:
            outcome = {"state": "error", "text": str(error), "code": str(error.code)}
        finally:
            cells.hang_up()
        if outcome["state"] != "done" and cells.stopped():
            raise RunAborted("the run was stopped")
        self._progress.update(**outcome)
        write_whole(job / OUTCOME, json.dumps(outcome).encode())

    def done(self, transport: Transport, home: Path, job: Path, submitter: str) -> dict[str, str]:
        """Do as much as can be done now, for a submitter; return how it ended, in words.

        The run, and the one that newcomers adapt to, must be the submitter's: before that is known
        nothing of them is read or written.
        """
        try:
            folder = _run_folder(home, self._run)
            if self._wanted is not None:
                node_records.check_owner(home, self._wanted.run, submitter)
            node_records.claim_run(home, self._run, submitter, folder)
            folder.mkdir(parents=True, exist_ok=True)
            if self._describe:
                host = ServerSettings.read(home / HOST_FILE)
                calls = self._progress.post = make_messenger(transport, self._text, folder, host)
                describe_nodes(calls, self._text, self._run, folder, submitter, host)
            elif self._wanted is None:
                self._serve(transport, home, folder, submitter)
            else:
                self._welcome(transport, home, folder, submitter, self._wanted)
            if isinstance(transport, ServerChannel):
                transport.leave_heads(folder)
            shutil.copytree(folder, job / RESULT)
        except RestartNeeded as error:
            return {"state": "again", "text": str(error)}
        except DeployError as error:
            return {"state": "short", "text": str(error)}
        except IdiolectError as error:
            return {"state": "error", "text": str(error), "code": str(error.code)}
        except Exception as error:
            log.exception("the server failed")
            return {"state": "error", "text": f"the server failed ({type(error).__name__})"}
        return {"state": "done"}

    def _serve(self, transport: Transport, home: Path, folder: Path, submitter: str) -> None:
        """Run the experiment."""
        host = ServerSettings.read(home / HOST_FILE)
        calls = self._progress.post = make_messenger(transport, self._text, folder, host)
        serve(
            calls,
            self._text,
            self._run,
            folder,
            only=self._only,
            watch=self._progress,
            host=host,
            submitter=submitter,
        )

    def _welcome(
        self, transport: Transport, home: Path, folder: Path, submitter: str, wanted: WantedModel
    ) -> None:
        """Give newcomers their models of a run that is over."""
        host = ServerSettings.read(home / HOST_FILE)
        found = find_model(_run_folder(home, wanted.run), wanted, host)
        calls = self._progress.post = make_messenger(transport, found.text, folder, host)
        self._progress.update(state="adapting", label=found.kept.label)
        adapt_nodes(calls, found, self._run, folder, submitter, host)


def submitter_of(meta: Path) -> str:
    """Return who submitted a job, by the engine's own record of it."""
    try:
        name = json.loads(meta.read_text())["submitter_name"]
    except (OSError, ValueError, TypeError, KeyError):
        name = None
    if not isinstance(name, str) or not name:
        raise ConfigError("the engine does not say who submitted the job; nothing is done for it")
    return name


def _run_folder(home: Path, run: str) -> Path:
    """Say where the server keeps a run; a name that leads elsewhere is refused."""
    return home / "runs" / node_records.run_name(run)
