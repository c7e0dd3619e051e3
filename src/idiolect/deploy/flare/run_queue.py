"""The server's long-running process: a run is its job until it is over, whoever watches or dies.

A job is a process of the server alone; nodes are asked where they are. What a dead server, or a
dead process of a job, left unfinished is put into the queue again.
"""

import logging
import threading
import time
from pathlib import Path
from typing import Any

from nvflare.apis.event_type import EventType
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_constant import SystemComponents
from nvflare.apis.fl_context import FLContext
from nvflare.apis.job_def import SERVER_SITE_NAME, Job, JobMetaKey, RunStatus
from nvflare.apis.job_scheduler_spec import DispatchInfo
from nvflare.apis.utils.job_utils import get_event_job_id
from nvflare.app_common.job_schedulers.job_scheduler import DefaultJobScheduler
from nvflare.fuel.f3.cellnet.utils import new_cell_message

from idiolect.deploy.flare.job_layout import (
    APP,
    CHANNEL,
    FRESH,
    HELLO,
    HOME,
    TIME_SAID,
    VERSION_SAID,
)
from idiolect.deploy.flare.prometheus import write_status
from idiolect.version import VERSION

log = logging.getLogger("idiolect.queue")
_STARTS = "idiolect_starts"  # in a job's record: how often its process died
_MOST_STARTS = 100
_DIED = (RunStatus.FINISHED_ABNORMAL.value, RunStatus.FINISHED_EXECUTION_EXCEPTION.value)
_OVER = ("FINISHED", "FAILED")  # how the status of a job that has ended begins
_KEPT = 20  # jobs that ended, whose results can still be fetched
_LOOK = 5.0  # seconds between two looks at who is connected
_LEFT = [RunStatus.RUNNING, RunStatus.DISPATCHED]


class RunQueue(DefaultJobScheduler):  # type: ignore[misc]
    """Starts jobs in the order of their submission, on the server alone."""

    def schedule_job(
        self, job_manager: Any, job_candidates: list[Job], fl_ctx: FLContext
    ) -> tuple[Job | None, dict[str, DispatchInfo] | None]:
        """Return the next job, unless as many run as may."""
        if self._exceed_max_jobs(fl_ctx):
            return None, None
        # The engine's own list has no job that was started before, and these are to start again.
        waiting = job_manager.get_jobs_by_status(RunStatus.SUBMITTED, fl_ctx)
        if not waiting:
            return None, None
        job = min(waiting, key=lambda one: one.meta.get(JobMetaKey.SUBMIT_TIME.value, 0.0))
        self._update_schedule_history(job, "scheduled", fl_ctx)
        return job, {SERVER_SITE_NAME: DispatchInfo(APP, {}, None)}


def _hello(request: Any) -> Any:
    """Answer a node that wants to know whether it is still known here."""
    return new_cell_message({VERSION_SAID: VERSION, TIME_SAID: time.time()}, b"")


def _leave_word(engine: Any, home: Path) -> None:
    """Write down every few seconds who is connected."""
    while True:
        now = time.time()
        clients = list(engine.client_manager.clients.values())
        there = {one.name: now - (one.last_connect_time or 0) < FRESH for one in clients}
        write_status(home, sites=there)
        time.sleep(_LOOK)


class RunKeeper(FLComponent):  # type: ignore[misc]
    """Puts a run whose process died into the queue again."""

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Look for such runs when the server starts, and whenever a job has ended."""
        if event_type == EventType.SYSTEM_BOOTSTRAP:
            jobs = fl_ctx.get_engine().get_component(SystemComponents.JOB_MANAGER)
            for job in jobs.get_jobs_by_status(_LEFT, fl_ctx):
                self._again(jobs, job, fl_ctx)
        elif event_type == EventType.SYSTEM_START:
            cell = fl_ctx.get_engine().get_cell()
            cell.register_request_cb(channel=CHANNEL, topic=HELLO, cb=_hello)
            home = Path(fl_ctx.get_engine().args.workspace) / HOME
            watch = (fl_ctx.get_engine(), home)
            threading.Thread(target=_leave_word, args=watch, daemon=True).start()
        elif event_type == EventType.JOB_COMPLETED:
            jobs = fl_ctx.get_engine().get_component(SystemComponents.JOB_MANAGER)
            job = jobs.get_job(get_event_job_id(fl_ctx), fl_ctx)
            if job is not None and job.meta.get(JobMetaKey.STATUS.value) in _DIED:
                self._again(jobs, job, fl_ctx)
            self._tidy(jobs, fl_ctx)

    def _tidy(self, jobs: Any, fl_ctx: FLContext) -> None:
        """Delete what the engine keeps of jobs that ended long ago; runs are kept elsewhere."""
        over = [
            one
            for one in jobs.get_all_jobs(fl_ctx)
            if str(one.meta.get(JobMetaKey.STATUS.value)).startswith(_OVER)
        ]
        over.sort(key=lambda one: str(one.meta.get(JobMetaKey.SUBMIT_TIME_ISO.value, "")))
        for job in over[:-_KEPT]:
            jobs.delete(job.job_id, fl_ctx)

    def _again(self, jobs: Any, job: Job, fl_ctx: FLContext) -> None:
        starts = int(job.meta.get(_STARTS, 0)) + 1
        if starts > _MOST_STARTS:
            log.error("job %s died %d times and is given up", job.job_id, starts - 1)
            return
        log.warning("job %s was cut short; it goes on from its last whole round", job.job_id)
        jobs.update_meta(job.job_id, {_STARTS: starts}, fl_ctx)
        jobs.set_status(job.job_id, RunStatus.SUBMITTED, fl_ctx)
