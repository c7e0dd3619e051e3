"""An admin's side: submits a run, watches it, fetches results. The run does not depend on it.

A run is known by its own number, so that a job that follows a stopped one goes on where it stopped.
"""

import contextlib
import json
import logging
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from idiolect.core.checkpoint import write_whole
from idiolect.deploy import submission
from idiolect.deploy.flare import job_layout, require
from idiolect.deploy.flare.job_layout import FlareTask
from idiolect.deploy.flare.kits import OUTCOME, RESULT, MemberKit
from idiolect.deploy.messenger import WaitPolicy
from idiolect.deploy.newcomer_nodes import WantedModel
from idiolect.errors import ConfigError, DeployError, IdiolectError
from idiolect.experiment.portable import export_experiment
from idiolect.experiment.schema import Experiment

RUN_FILE = "federation.json"  # in a run's folder: which run of which federation it is
_JOIN = 120.0  # seconds that newcomers have to connect


def run_task(
    kit: MemberKit, experiment: Experiment, folder: Path, only: Sequence[str]
) -> FlareTask:
    """Ask for an experiment; what a folder holds is gone on with."""
    deploy = experiment.deploy
    policy = WaitPolicy(deploy.timeout, deploy.join, deploy.minimum)
    run = known_run(kit, folder) or uuid.uuid4().hex[:12]
    least = policy.needed(len(kit.sites))
    return FlareTask(run, kit.sites, least, deploy.join, export_experiment(experiment), tuple(only))


def describe_task(kit: MemberKit, experiment: Experiment) -> FlareTask:
    """Ask for statistics of the sites' data; nothing is trained."""
    deploy = experiment.deploy
    least = WaitPolicy(deploy.timeout, deploy.join, deploy.minimum).needed(len(kit.sites))
    text = export_experiment(experiment)
    return FlareTask(uuid.uuid4().hex[:12], kit.sites, least, deploy.join, text, describe=True)


def newcomers_task(
    kit: MemberKit,
    folder: Path,
    sites: Sequence[str],
    method: str | None,
    seed: int | None,
    network: str | None,
) -> FlareTask:
    """Ask for models of newcomers, from a run of which the folder holds the results."""
    run = known_run(kit, folder)
    if not run:
        raise ConfigError(
            f"{folder} holds no run of a federation (no {RUN_FILE}); give the --out folder of "
            "`idiolect run EXPERIMENT.toml --on KIT`"
        )
    if not sites or len(set(sites)) < len(sites):
        raise ConfigError("--site: name every newcomer once, such as --site lab")
    wanted = WantedModel(run, method, seed, network)
    return FlareTask(uuid.uuid4().hex[:12], tuple(sites), len(sites), _JOIN, wanted=wanted)


def _signed(kit: MemberKit, task: FlareTask) -> FlareTask:
    """Sign a task with the key of whoever submits it, for the nodes."""
    return replace(task, signed=submission.sign(kit.folder, task.run, task.kind, task.experiment))


def known_run(kit: MemberKit, folder: Path) -> str:
    """Return the run that a folder holds, of this federation; empty where it holds none."""
    path = folder / RUN_FILE
    if not path.exists():
        return ""
    known = json.loads(path.read_text())
    if known.get("federation") != kit.federation:
        raise DeployError(
            f"{folder} holds a run of federation {known.get('federation')!r}, and the kit is of "
            f"{kit.federation!r}; choose another folder, or the other kit"
        )
    return str(known["run"])


Say = Callable[[str], None]
_SILENCE = 600.0  # seconds without a server before the run is given up
_POLL = 1.0
_T = TypeVar("_T")
_ENDED = ("FINISHED", "FAILED")  # how the status of a job that is over begins
_LONG = 30.0  # seconds without a round after which it is said who has not answered


class AdminSession:
    """A connection to the server that is made again when it breaks."""

    def __init__(self, kit: MemberKit) -> None:
        require()
        # FLARE logs every lost connection; we report what matters of it.
        logging.lastResort = None
        self._kit = kit
        self._inner: Any = None

    def ask(self, call: Callable[[Any], Any]) -> Any:
        """Ask the server; an error of the engine becomes ours, in one line."""
        try:
            if self._inner is None:
                self._inner = self._connected()
            return call(self._inner)
        except IdiolectError:
            raise
        except Exception as error:
            ours = _translated(error, self._kit)
            if isinstance(ours, Unreachable):
                self.close()
            raise ours from error

    def _connected(self) -> Any:
        from nvflare.fuel.flare_api.flare_api import new_secure_session

        folder = str(self._kit.folder)
        with contextlib.redirect_stdout(None):
            return new_secure_session(self._kit.name, folder, timeout=10.0, auto_login_max_tries=3)

    def close(self) -> None:
        """End the connection."""
        inner, self._inner = self._inner, None
        if inner is not None:
            with contextlib.suppress(Exception):
                inner.close()


class Unreachable(DeployError):
    """The server does not answer now; it may later."""


def _translated(error: Exception, kit: MemberKit) -> DeployError:
    from nvflare.fuel.flare_api.api_spec import (
        AuthenticationError,
        AuthorizationError,
        InternalError,
        InvalidJobDefinition,
        InvalidTarget,
        JobNotFound,
        JobNotRunning,
    )

    where = f"{kit.host}:{kit.port}"
    if isinstance(error, AuthorizationError):
        return DeployError(f"{kit.name} may not do this in the federation (its role is too low)")
    if isinstance(error, AuthenticationError):
        return DeployError(f"the server at {where} does not accept the kit of {kit.name}")
    if isinstance(error, InvalidJobDefinition):
        said = "".join(letter for letter in str(error)[:300] if letter.isprintable())
        return DeployError(f"the server at {where} refuses the job: {said}")
    refusals = (InternalError, InvalidTarget, JobNotFound, JobNotRunning)
    if isinstance(error, refusals):
        return DeployError(f"the server at {where} refuses it: {type(error).__name__}")
    return Unreachable(f"the server at {where} does not answer ({type(error).__name__})")


@dataclass
class State:
    """What a federation looks like from outside."""

    started: Any  # when the server started
    nodes: list[str]
    jobs: list[dict[str, Any]] = field(default_factory=list)


def look(session: AdminSession) -> State:
    """Ask who is connected and what is running."""
    info = session.ask(lambda s: s.get_system_info())
    jobs = session.ask(lambda s: s.list_jobs())
    own = [job for job in jobs or [] if str(job.get("job_name", "")).startswith("idiolect-")]
    heard = {one.name: float(one.last_connect_time or 0) for one in info.client_info}
    # By the server's own clock: a node that died stays listed until it was silent for a minute.
    fresh = [name for name, when in heard.items() if max(heard.values()) - when < job_layout.FRESH]
    return State(info.server_info.start_time, fresh, own)


def progress(session: AdminSession, job: str) -> dict[str, Any]:
    """Ask a running job how far it is; empty where it cannot say yet."""
    try:
        told = session.ask(lambda s: s.show_stats(job, "server"))
        found = told["server"]["idiolect"] if "server" in told else {}
    except (DeployError, KeyError, TypeError):
        return {}
    return dict(found) if isinstance(found, dict) else {}


def active(state: State) -> list[dict[str, Any]]:
    """Pick the jobs that have not ended."""
    return [job for job in state.jobs if not str(job.get("status", "")).startswith(_ENDED)]


def name_of(job: dict[str, Any]) -> str:
    """Return the run that a job does."""
    return str(job["job_name"]).removeprefix("idiolect-")


def described(kit: MemberKit) -> dict[str, Any]:
    """Describe a federation: who is connected, what runs and how far it is."""
    session = AdminSession(kit)
    try:
        state = look(session)
        runs = []
        for job in active(state):
            told = progress(session, str(job["job_id"]))
            runs.append(
                {
                    "run": name_of(job),
                    "job": str(job["job_id"]),
                    "state": str(told.get("state") or job["status"]).lower(),
                    **{key: told.get(key) for key in ("label", "round", "rounds")},
                    **{key: list(told.get(key, ())) for key in ("waiting", "absent")},
                    "certificates": dict(told.get("certificates", {})),
                }
            )
        names = dict.fromkeys((*kit.sites, *state.nodes))  # a newcomer may be in nobody's list yet
        return {
            "federation": kit.federation,
            "server": f"{kit.host}:{kit.port}",
            "sites": [{"name": name, "connected": name in state.nodes} for name in names],
            "runs": runs,
        }
    finally:
        session.close()


def stop(kit: MemberKit, say: Say) -> int:
    """Abort what is running and may be stopped by this admin; return how many runs there were.

    An admin who may stop none of them is refused.
    """
    session = AdminSession(kit)
    try:
        running, refusals = active(look(session)), []
        for job in running:
            try:
                session.ask(partial(_abort, str(job["job_id"])))
                say(f"stopped {name_of(job)}")
            except Unreachable:
                raise
            except DeployError as error:  # another lead's
                say(f"{name_of(job)} goes on: {error}")
                refusals.append(error)
        if refusals and len(refusals) == len(running):
            raise refusals[0]
        return len(running)
    finally:
        session.close()


def _abort(job: str, session: Any) -> None:
    session.abort_job(job)


class FederationRun:
    """A run on a federation, as the one who submitted it sees it: the server does it alone."""

    def __init__(self, kit: MemberKit, task: FlareTask, folder: Path, say: Say) -> None:
        self._kit = kit
        self._task = task
        self._folder = folder
        self._say = say
        self._session = AdminSession(kit)
        self._seen = ("", -1)  # label and round of the last progress
        self._since = time.monotonic()
        self._noted: set[str] = set()  # what the server noted and was said
        self._waited: list[str] = []  # of whom it was said that they are waited for
        self._queued = False  # whether it was said that other runs come first

    def finish(self) -> Path:
        """Submit the run, or find it, and watch it to its end; return the folder of its results.

        Whoever watches may leave at any time: the run goes on.
        """
        about = {"run": self._task.run, "federation": self._kit.federation}
        self._folder.mkdir(parents=True, exist_ok=True)
        write_whole(self._folder / RUN_FILE, json.dumps(about).encode())
        try:
            outcome = self._watched(self._job())
            if outcome["state"] != "done":
                raise _as_error(outcome)
            return self._folder
        finally:
            self._session.close()

    def _patient(self, call: Callable[[], _T]) -> _T:
        """Ask the server; one that is away may come back."""
        since, told = time.monotonic(), False
        while True:
            try:
                return call()
            except Unreachable as error:
                if time.monotonic() - since > _SILENCE:
                    raise
                if not told:
                    self._say(f"{error}; waiting for it")
                    told = True
                time.sleep(_POLL)

    def _job(self) -> str:
        """Return the job of this run that has not ended, or submit one."""
        state = self._patient(lambda: look(self._session))
        name = f"idiolect-{self._task.run}"
        named = [str(job["job_id"]) for job in active(state) if job["job_name"] == name]
        for job in named:
            if self._submitter(job) == self._kit.name:
                self._say(f"run {self._task.run} is under way as job {job}")
                return job
        with tempfile.TemporaryDirectory() as scratch:
            folder = job_layout.write(Path(scratch) / "job", _signed(self._kit, self._task))
            number = self._patient(lambda: self._session.ask(lambda s: s.submit_job(str(folder))))
        self._say(
            f"submitted run {self._task.run} as job {number}; it goes on at the server if you leave"
        )
        return str(number)

    def _submitter(self, job: str) -> str:
        """Say whose job it is: anyone can give theirs any name."""
        try:
            meta = self._session.ask(lambda s: s.get_job_meta(job))
        except Unreachable:
            raise
        except DeployError:
            return ""
        return str(meta.get("submitter_name", "")) if isinstance(meta, dict) else ""

    def _watched(self, job: str) -> dict[str, str]:
        """Tell how far a job is until it has ended; return how it did."""
        while True:
            time.sleep(_POLL)
            status = str(self._patient(lambda: self._session.ask(lambda s: s.get_job_status(job))))
            if status.startswith(_ENDED):
                return self._outcome(job, status)
            if status == "SUBMITTED":
                self._tell_queue(job)
            else:
                self._tell(job)

    def _tell_queue(self, job: str) -> None:
        """Say once what a job that has not been started waits for."""
        if self._queued:
            return
        with contextlib.suppress(DeployError):
            state = look(self._session)
            others = [one for one in active(state) if str(one["job_id"]) != job]
            ahead = [name_of(one) for one in others if one["status"] != "SUBMITTED"]
            if ahead:
                self._queued = True
                self._say(f"waiting in the queue: the server is busy with {', '.join(ahead)}")
            elif not state.nodes:
                self._queued = True
                self._say("waiting for a first node to connect to the server")

    def _tell(self, job: str) -> None:
        found = progress(self._session, job)
        notes = found.get("notes", ())
        for text in notes if isinstance(notes, list) else ():
            if isinstance(text, str) and text not in self._noted:
                self._noted.add(text)
                self._say(f"note: {text}")
        waiting = [site for site in found.get("waiting", ()) if site in self._task.sites]
        if found.get("state") == "waiting for nodes":
            if waiting != self._waited:
                self._waited = waiting
                self._say(f"waiting for {', '.join(waiting)}")
            return
        seen = (str(found.get("label", "")), int(found.get("round", -1)))
        if seen != self._seen and seen[1] >= 0:
            self._seen, self._since, self._waited = seen, time.monotonic(), []
            without = [site for site in found.get("absent", ()) if site in self._task.sites]
            self._say(
                f"{seen[0]}: round {seen[1]} of {found.get('rounds')}"
                + (f", without {', '.join(without)}" if without else "")
            )
        elif waiting and waiting != self._waited and time.monotonic() - self._since > _LONG:
            self._waited = waiting
            self._say(f"waiting for {', '.join(waiting)} to answer")

    def _outcome(self, job: str, status: str) -> dict[str, str]:
        """Fetch what a job left; without an outcome its status must do."""
        with tempfile.TemporaryDirectory() as scratch:
            try:
                location = self._session.ask(lambda s: s.download_job_result(job, scratch))
            except DeployError:
                location = None
            found = sorted(Path(location or scratch).rglob(OUTCOME))
            if not found and "ABORTED" in status:
                raise DeployError(
                    "the run was stopped; what was trained is kept: go on with --resume"
                )
            if not found:
                return {"state": "short", "text": f"the job ended with {status}"}
            outcome: dict[str, str] = json.loads(found[0].read_text())
            if outcome["state"] == "done":
                shutil.copytree(found[0].parent / RESULT, self._folder, dirs_exist_ok=True)
                for path in self._folder.rglob("*.safetensors"):
                    path.chmod(0o600)
            return outcome


def _as_error(outcome: dict[str, str]) -> IdiolectError:
    error = DeployError(outcome["text"])
    error.code = int(outcome.get("code", error.code))
    return error
