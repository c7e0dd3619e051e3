"""What runs inside FLARE on the server: a job is one process, which does the whole run.

It asks the nodes where they are (`node_side`); a job carries settings only. It ends when the run
does, or is stopped: a node that is lost, or not there yet, is waited for here.
"""

import base64
import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nvflare.apis.fl_context import FLContext
from nvflare.apis.impl.controller import Controller
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal
from nvflare.fuel.f3.cellnet.defs import MessageHeaderKey, ReturnCode
from nvflare.fuel.f3.cellnet.utils import new_cell_message
from nvflare.widgets.info_collector import GroupInfoCollector, InfoCollector

from idiolect.core.checkpoint import write_whole
from idiolect.deploy import node_records
from idiolect.deploy.audit import AuditLog
from idiolect.deploy.describe_nodes import describe_nodes
from idiolect.deploy.flare.job_layout import (
    CHANNEL,
    DOING,
    DONE,
    MARK,
    PROCESS,
    PROGRESS,
    QUEUED,
    STATE,
    TOPIC,
    TURN,
    UNKNOWN,
    WORKING,
)
from idiolect.deploy.flare.kits import HOME, HOST_FILE, OUTCOME, RESULT
from idiolect.deploy.flare.node_side import Tidy, mark_of
from idiolect.deploy.identity import Authority, Identity
from idiolect.deploy.messenger import Messenger, Transport, WaitPolicy
from idiolect.deploy.newcomer_nodes import WantedModel, adapt_nodes, find_model
from idiolect.deploy.processes import locked
from idiolect.deploy.protocol import Refused
from idiolect.deploy.serve_experiment import ServerSettings, make_messenger, serve
from idiolect.deploy.server import RestartNeeded
from idiolect.deploy.signing import ServerChannel
from idiolect.engine.outcome import Silent, Tick
from idiolect.errors import ConfigError, DeployError, IdiolectError
from idiolect.experiment.portable import import_experiment

log = logging.getLogger("idiolect.flare")
_MOST_NOTES, _LONGEST_NOTE = 20, 400  # for an admin who asks how far the run is
_PATIENCE = 10.0  # timeouts of the server until a message is given up
_LOST = 8.0  # seconds without a sign of a site until it counts as lost
_GONE = 2.0  # the same where its connection is closed: it may be made again at once
_PAUSE = 0.5  # seconds between two attempts to reach a site
_ATTEMPTS = 5  # starts without a round done between them before the run is given up
_RESUMED = 5.0  # seconds that a run that goes on waits for all, where enough are there
_HANDOVER = 60.0  # seconds for the process before this one to end, whose server died
_NEWCOMERS_JOIN = 120.0  # seconds that newcomers have to connect


class SiteCells(Transport):
    """The engine's messages to the long-running processes of the nodes, as a `Transport`."""

    def __init__(self, cell: Any, sites: Sequence[str], abort: Signal) -> None:
        self.sites, self.looks = tuple(sites), True
        self._cell, self._abort = cell, abort
        self._over = Signal(parent=abort)  # of our own, below the job's
        self._queued: dict[str, float] = {}  # how long each site's message waited for its turn
        self._processes: dict[str, str] = {}  # the process that last answered for each site

    def call(self, site: str, blob: bytes, seconds: float) -> bytes:
        """Ask a site, and ask again for the answer while there are signs that it works on it."""
        self._queued[site] = 0.0
        mark, began = mark_of(blob), time.monotonic()
        # Longer than the server waits: a late answer proves that the node is back.
        last, body = began, blob
        while time.monotonic() - began < _PATIENCE * seconds:
            if self.stopped():
                raise Refused("unreachable", "the run was stopped")
            before = time.monotonic()
            state, answer = self._exchanged(site, mark, body)
            now = time.monotonic()
            if state == DONE:
                return answer
            # The engine knows of a closed connection at once; of a silent one nobody does.
            patience = _GONE if now - before < _GONE else _LOST
            if not state and now - last > patience:
                raise Refused("unreachable", f"{site} gives no sign")
            # What a process took with it when it died is sent to the one that follows it.
            body = blob if state in ("", UNKNOWN) else b""
            last = last if not state else now
            self._queued[site] += (now - before) * (state == QUEUED)
            if state != WORKING:
                time.sleep(_PAUSE)
        raise Refused("timeout")

    def _exchanged(self, site: str, mark: str, blob: bytes, wait: float = 5.0) -> tuple[str, bytes]:
        """Send one message; return what became of it, or nothing where no answer came."""
        reply = self._cell.send_request(
            channel=CHANNEL,
            topic=TOPIC,
            target=site,
            request=new_cell_message({MARK: mark}, blob),
            timeout=TURN + wait,
            optional=True,
            abort_signal=self._over,
        )
        if reply.get_header(MessageHeaderKey.RETURN_CODE, ReturnCode.OK) != ReturnCode.OK:
            return "", b""
        answer, self._processes[site] = reply.payload, str(reply.get_header(PROCESS, ""))
        state = str(reply.get_header(STATE, ""))
        if not isinstance(answer, bytes | bytearray | memoryview):
            raise Refused("format", f"{site} answered with {type(answer).__name__}")
        return state, bytes(answer)

    def present(self, site: str) -> bool:
        """Return whether a site gives a sign now."""
        return bool(self._exchanged(site, "", b"", 1.0)[0])

    def process(self, site: str) -> str:
        """Return the name of the process that last answered for a site."""
        return self._processes.get(site, "")

    def queued(self, site: str) -> float:
        """Return for how long a site's message has waited behind those of other runs."""
        return self._queued.get(site, 0.0)

    def hang_up(self) -> None:
        """Give up calls that nobody has answered: the run is over."""
        self._over.trigger(True)

    def stopped(self) -> bool:
        """Return whether the job is being aborted."""
        return bool(self._abort.triggered or self._over.triggered)


class _Progress(Silent):
    """How far the run is, for an admin who asks."""

    def __init__(self, run: str) -> None:
        self.state: dict[str, Any] = {"run": run, "state": "starting"}
        self.notes: list[str] = []
        self.post: Messenger | None = None
        self.begun = False  # rounds, at this start
        self.path: Path | None = None  # where it is written for whoever measures
        self._tidy = Tidy()

    @property
    def place(self) -> tuple[str, int]:
        """The method and the round that were done last."""
        return str(self.state.get("label", "")), int(self.state.get("round", -1))

    def update(self, **changes: Any) -> None:
        """Replace what is reported."""
        absent = [] if self.post is None else self.post.absent()
        known = {key: value for key, value in self.state.items() if key != "waiting"}
        until = {} if self.post is None else dict(self.post.transport.expiries())
        self.state = {**known, **changes, "absent": absent, "certificates": until}

    def told(self) -> dict[str, Any]:
        """Say how far the run is, and who is waited for now."""
        waiting = [] if self.post is None else self.post.waiting()
        return {"waiting": waiting, **self.state}

    def missing(self, sites: Sequence[str]) -> None:
        """Note who must be there before the run can go on."""
        self.state = {**self.state, "state": "waiting for nodes", "waiting": list(sites)}

    def begin(self, label: str, round: int, rounds: int) -> None:
        """Note that a method starts, or resumes."""
        self.begun = True
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


class ServerSide(Controller):  # type: ignore[misc]
    """The server's end: does the run from its last checkpoint, and reports progress."""

    def __init__(
        self,
        run: str,
        experiment: str,
        sites: list[str],
        only: list[str],
        wanted: list[Any] | None = None,
        describe: bool = False,
        signed: str = "",
    ) -> None:
        """`experiment` is TOML in base64: FLARE would read braces as its own variables.

        With `wanted` the sites are newcomers, who adapt to a run that is over; to `describe` is to
        ask for statistics and to train nothing. `signed` is for the nodes: who submitted it.
        """
        super().__init__()
        self._run = run
        self._text = base64.b64decode(experiment).decode()
        self._sites = sites
        self._only = only
        self._wanted = None if wanted is None else WantedModel(*wanted)
        self._describe, self._signed = describe, signed
        self._progress = _Progress(run)

    def start_controller(self, fl_ctx: FLContext) -> None:
        """Do nothing: all is done in `control_flow`."""

    def stop_controller(self, fl_ctx: FLContext) -> None:
        """Do nothing."""

    def process_result_of_unknown_task(
        self, client: Any, task_name: str, client_task_id: str, result: Shareable, fl_ctx: FLContext
    ) -> None:
        """Do nothing: nodes are given no tasks of the engine."""

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Report progress when an admin asks."""
        if event_type == InfoCollector.EVENT_TYPE_GET_STATS:
            collector = fl_ctx.get_prop(InfoCollector.CTX_KEY_STATS_COLLECTOR)
            if isinstance(collector, GroupInfoCollector):
                collector.set_info("idiolect", self._progress.told())

    def control_flow(self, abort_signal: Signal, fl_ctx: FLContext) -> None:
        """Do the run, from wherever it stands to its end."""
        threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
        engine, workspace = fl_ctx.get_engine(), fl_ctx.get_workspace()
        number = fl_ctx.get_job_id()
        job, root = Path(workspace.get_run_dir(number)), Path(workspace.get_root_dir())
        cells = SiteCells(engine.get_cell(), self._sites, abort_signal)
        try:
            # What the server's long-running process wrote when it deployed the job: its record of
            # who submitted it, with the name in the certificate of whoever was logged in.
            submitter = submitter_of(Path(workspace.get_job_meta_path(number)))
            own = Identity.from_kit(root)
            kept = AuditLog(root / HOME, own.name, own.role)
            transport = ServerChannel(cells, own, Authority.from_kit(root), kept)
            transport.submission = self._signed
            outcome = self.finished(transport, root / HOME, job, submitter)
        except IdiolectError as error:
            outcome = {"state": "error", "text": str(error), "code": str(error.code)}
        finally:
            cells.hang_up()
        if outcome["state"] != "done" and abort_signal.triggered:
            return  # the run was stopped
        self._progress.update(**outcome)
        write_whole(job / OUTCOME, json.dumps(outcome).encode())

    def finished(
        self, transport: Transport, home: Path, job: Path, submitter: str
    ) -> dict[str, str]:
        """Bring the run to its end, in as many starts as it takes; return how it ended."""
        self._claim(home, submitter)  # else another lead's job would keep the run from going on
        doing = home / DOING / node_records.run_name(self._run)
        with locked(doing, _HANDOVER) as free:
            if not free:
                raise ConfigError(f"run {self._run} is being done already, by another job")
            self._progress.path = doing / PROGRESS
            failures = 0
            while True:
                before, self._progress.begun = self._progress.place, False
                self._wait_for_sites(transport, home)
                outcome = self.done(transport, home, job, submitter)
                if outcome["state"] in ("done", "error") or transport.stopped():
                    self._progress.path.unlink(missing_ok=True)
                    return outcome
                self._progress.note(f"{outcome['text']}; goes on from the last whole round")
                moved = outcome["state"] == "again" or self._progress.place != before
                failures = 0 if moved else failures + 1
                if failures >= _ATTEMPTS:
                    text = f"{failures} starts got no further: {outcome['text']}; mend it, then go "
                    return {**outcome, "state": "error", "text": f"{text}on with --resume"}

    def _wait_for_sites(self, transport: Transport, home: Path) -> None:
        """Wait until everyone is there, or enough are and the others had their time."""
        if self._wanted is None:
            host = ServerSettings.read(home / HOST_FILE)
            deploy = import_experiment(self._text, reach=host.reach).deploy
            policy = WaitPolicy(deploy.timeout, deploy.join, deploy.minimum)
        else:
            policy = WaitPolicy(join=_NEWCOMERS_JOIN, minimum=len(self._sites))
        # Who comes later takes part then; only at the very beginning is it worth waiting for all.
        begun = (_run_folder(home, self._run) / "roster.json").exists()
        patience = min(policy.join, _RESUMED) if begun else policy.join
        since = time.monotonic()
        while not transport.stopped():
            missing = [site for site in self._sites if not transport.present(site)]
            late = time.monotonic() - since >= patience
            enough = len(self._sites) - len(missing) >= policy.needed(len(self._sites))
            if not missing or (enough and late):
                return
            self._progress.missing(missing)
            time.sleep(_PAUSE)

    def done(self, transport: Transport, home: Path, job: Path, submitter: str) -> dict[str, str]:
        """Do as much as can be done now, for a submitter; return how it ended, in words.

        The run, and the one that newcomers adapt to, must be the submitter's: before that is known
        nothing of them is read or written.
        """
        try:
            folder = self._claim(home, submitter)
            folder.mkdir(parents=True, exist_ok=True)
            if self._describe:
                host = ServerSettings.read(home / HOST_FILE)
                calls = self._progress.post = make_messenger(transport, self._text, folder, host)
                describe_nodes(calls, self._text, self._run, folder, submitter, host)
            elif self._wanted is None:
                self._serve(transport, home, folder, submitter)
            else:
                self._welcome(transport, home, folder, submitter, self._wanted)
            shutil.copytree(folder, job / RESULT)
        except RestartNeeded as error:
            return {"state": "again", "text": str(error)}
        except DeployError as error:
            # Who refuses to join for good does so at each start: whoever can mend it must know now.
            post = self._progress.post
            for_good = not self._progress.begun and post is not None and bool(post.refusing())
            return {
                "state": "error" if for_good else "short",
                "text": str(error),
                "code": str(error.code),
            }
        except IdiolectError as error:
            return {"state": "error", "text": str(error), "code": str(error.code)}
        except Exception as error:
            log.exception("the server failed")
            return {"state": "error", "text": f"the server failed ({type(error).__name__})"}
        return {"state": "done"}

    def _claim(self, home: Path, submitter: str) -> Path:
        """Refuse a run that is someone else's, or to adapt to one; return where the run is kept."""
        folder = _run_folder(home, self._run)
        if self._wanted is not None:
            node_records.check_owner(home, self._wanted.run, submitter)
        node_records.claim_run(home, self._run, submitter, folder)
        return folder

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


def _end_with(parent: int) -> None:
    """End this process when its parent has ended: the next one starts the run again."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


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
