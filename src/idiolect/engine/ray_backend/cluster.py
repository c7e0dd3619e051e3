"""The workers of a Ray cluster: started once for a process, and replaced when they are lost.

Every shard has a slot, and a slot a worker. When a worker is lost, another is started; until it is
there, the remaining workers serve its slots too. Ray's own `max_restarts` would wait for room for
the lost worker, which there is not if its machine is gone, and would not send its state again.
"""

import contextlib
import os
import re
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple

import torch

from idiolect.engine.backend import Ray
from idiolect.engine.ray_backend.worker import Worker
from idiolect.errors import ClusterError, ConfigError, IdiolectError, MissingExtra
from idiolect.version import VERSION

_SECONDS = 300.0  # a worker has to start: its process, its imports, a device to come free
_CONNECT = 10.0  # seconds for the head of a cluster to answer at all
_ATTEMPTS = 3  # at one task, each of which a worker did not survive

_OPEN: dict[Ray, "Cluster"] = {}  # Ray itself is one to a process

_numbers = count()


@dataclass(eq=False)
class WorkerHandle:
    """A worker, and its first answer, which comes once it has started."""

    actor: Any
    ready: Any
    slots: set[int] = field(default_factory=set)
    number: int = field(default_factory=lambda: next(_numbers))


def required() -> Any:
    """Return the module ray, or raise what to install."""
    # Ray would print it among results; `RayJob.remarks` reports it.
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", "A worker died or was killed")
    try:
        import ray
    except ImportError:
        raise MissingExtra("backend 'ray' needs the library ray, which is missing", "ray") from None
    return ray


def open_cluster(wanted: Ray) -> "Cluster":
    """Return the cluster that is wanted; later jobs use the same workers."""
    ray = required()
    for key, known in list(_OPEN.items()):
        if not known.open:
            del _OPEN[key]
        elif key != wanted and not known.jobs:  # others may need its place
            known.close()
            del _OPEN[key]
    if wanted not in _OPEN:
        _OPEN[wanted] = Cluster(ray, wanted)
    return _OPEN[wanted]


def _session(ray: Any) -> str:
    return str(ray.get_runtime_context().get_job_id())


class Cluster:
    """The workers that were asked for, or those that are left of them."""

    def __init__(self, ray: Any, wanted: Ray) -> None:
        self._ray, self._wanted = ray, wanted
        self.jobs: set[str] = set()  # that are going on
        if not ray.is_initialized():
            _connect(ray, wanted)
        self._session = _session(ray)
        self.size = wanted.workers or _fitting(ray, wanted)
        _refuse_too_many(ray, wanted, self.size)
        self._coming = [self._start() for _ in range(self.size)]
        self._slots: list[WorkerHandle] = []
        self._gone: set[int] = set()
        first = self._admitted(self.size)
        if len(first) < self.size:
            raise ClusterError(
                f"{len(first)} of {self.size} workers started within {_SECONDS:.0f} s; see "
                "`ray status` for what keeps the others waiting, or ask for fewer (backend.ray)"
            )
        self._slots = first
        for slot, worker in enumerate(first):
            worker.slots.add(slot)

    @property
    def open(self) -> bool:
        """Whether the session with Ray that the workers belong to is still on."""
        return bool(self._ray.is_initialized()) and self._session == _session(self._ray)

    def at(self, slot: int) -> WorkerHandle:
        """Return the worker of a slot; a replacement that has started takes a slot over."""
        for worker in self._admitted(0) if self._coming else ():
            busiest = max(self.workers(), key=lambda other: len(other.slots), default=None)
            if busiest is not None and len(busiest.slots) > 1:
                self._move(max(busiest.slots), worker)
        return self._slots[slot]

    def workers(self) -> list[WorkerHandle]:
        """Return all workers that are there."""
        return list(dict.fromkeys(self._slots))

    def _move(self, slot: int, worker: WorkerHandle) -> None:
        self._slots[slot].slots.discard(slot)
        self._slots[slot] = worker
        worker.slots.add(slot)

    def lost(self, worker: WorkerHandle) -> None:
        """Replace a lost worker: start another, and let the others serve its slots meanwhile."""
        if worker.number in self._gone:
            return
        self._gone.add(worker.number)
        self._coming.append(self._start())
        left = [other for other in self.workers() if other.number not in self._gone]
        if not left:
            left = self._admitted(1)
            if not left:
                raise ClusterError(
                    f"all workers were lost, and none started again within {_SECONDS:.0f} s; see "
                    "`ray status`, and go on with --resume when the cluster is well"
                )
        for slot in sorted(worker.slots):
            self._move(slot, min(left, key=lambda other: (len(other.slots), other.number)))

    def _start(self) -> WorkerHandle:
        options = {"num_cpus": self._wanted.cpus, "num_gpus": self._wanted.gpus}
        actor = self._ray.remote(**options, max_restarts=0)(Worker)
        path = [os.path.abspath(place) for place in sys.path]
        made = actor.remote(max(1, int(self._wanted.cpus)), path)
        return WorkerHandle(made, made.about.remote())

    def _admitted(self, wanted: int) -> list[WorkerHandle]:
        """Return the workers that have started since; wait for `wanted` of them for a time."""
        refs = {worker.ready: worker for worker in self._coming}
        patience = _SECONDS if wanted else 0.0
        found, _ = self._ray.wait(
            list(refs), num_returns=max(1, min(wanted, len(refs))), timeout=patience
        )
        ready = []
        for ref in found:
            self._coming.remove(refs[ref])
            with contextlib.suppress(self._ray.exceptions.RayActorError):  # lost in its turn
                _refuse_other_versions(self._ray.get(ref))
                ready.append(refs[ref])
        return sorted(ready, key=lambda worker: worker.number)

    def put(self, value: Any) -> Any:
        """Put something into the object store, for all workers."""
        return self._ray.put(value)

    def ask(self, task: Callable[[WorkerHandle], list[Any]], slot: int) -> "PendingCall":
        """Call the worker of a slot; `task` makes the calls, and the last one is the answer."""
        worker = self.at(slot)
        return PendingCall(task, slot, worker, task(worker))

    def answer(self, asked: "PendingCall") -> "CallResult":
        """Wait for an answer. A worker that is lost is replaced, and the work done again."""
        errors = self._ray.exceptions
        for attempt in range(_ATTEMPTS):
            try:
                # In order: where a preparation failed, its error says more than what followed.
                last = [self._ray.get(ref) for ref in asked.refs][-1]
                return CallResult(asked.worker, last, attempt)
            except errors.RayTaskError as error:
                raise _own(error) from error
            except _lost(errors):
                self.lost(asked.worker)
                asked = self.ask(asked.task, asked.slot)
        raise ClusterError(
            f"the same work cost {_ATTEMPTS} workers their lives; perhaps the memory does not "
            "suffice: ask for fewer workers, or set backend.width"
        )

    def send(self, worker: WorkerHandle, call: str, *arguments: Any) -> None:
        """Call a worker without waiting for an answer, if it is still there."""
        if worker.number not in self._gone and self.open:
            getattr(worker.actor, call).remote(*arguments)

    def about(self) -> list[dict[str, Any]]:
        """Return what all workers say of themselves: versions, process, seconds of work."""
        refs = [worker.actor.about.remote() for worker in self.workers()]
        return [self._ray.get(ref) for ref in refs]

    def close(self) -> None:
        """End all workers."""
        for worker in [*self.workers(), *self._coming]:
            self._ray.kill(worker.actor)


@dataclass(frozen=True)
class PendingCall:
    """A call of a worker, which can be repeated on another."""

    task: Callable[[WorkerHandle], list[Any]]
    slot: int
    worker: WorkerHandle
    refs: list[Any]


class CallResult(NamedTuple):
    """A worker's answer, and how often the call was repeated on another."""

    worker: WorkerHandle
    value: Any
    again: int


def _lost(errors: Any) -> tuple[type[Exception], ...]:
    """List the errors that mean: the worker, or what it had made, is gone."""
    return (
        errors.RayActorError,
        errors.WorkerCrashedError,
        errors.ObjectLostError,
        errors.OutOfMemoryError,
    )


def _own(error: Any) -> Exception:
    """Return a worker's error as it was raised there, without Ray's wrapping."""
    cause = error.cause
    missing = re.search(r"No module named '[^']+'", str(cause))
    if missing and not isinstance(cause, IdiolectError):
        return ClusterError(
            f"a worker says: {missing.group()}; install it, or put it on PYTHONPATH, on every "
            "machine of the cluster"
        )
    return cause if isinstance(cause, Exception) else ClusterError(f"a worker failed: {error}")


def _connect(ray: Any, wanted: Ray) -> None:
    """Join the cluster that is named, or the one in RAY_ADDRESS, or start one here."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    address = wanted.address or os.environ.get("RAY_ADDRESS", "")
    try:
        if address and address != "local":
            _refuse_silence(address)
            ray.init(address=address, log_to_driver=False, logging_level="ERROR")
            return
        quiet = {"log_to_driver": False, "logging_level": "ERROR", "include_dashboard": False}
        ray.init(address="local", **quiet)  # it counts cores and GPUs itself
    except (OSError, RuntimeError, ValueError) as error:
        where = f"at {address!r}" if address else "on this machine"
        reason = str(error).splitlines()[0].split(". ")[0]
        raise ClusterError(
            f"no Ray cluster could be reached {where}: {reason}; start one with `ray start "
            "--head`, correct backend.ray.address, or leave it out to start one here"
        ) from None


def _refuse_silence(address: str) -> None:
    """Try to connect first: Ray itself would wait for minutes."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host, int(port)), _CONNECT).close()


def _fitting(ray: Any, wanted: Ray) -> int:
    """Return how many workers the cluster has room for: by GPUs where they need some."""
    there = ray.cluster_resources()
    if wanted.gpus:
        return max(1, int(there.get("GPU", 0) / wanted.gpus))
    return max(1, int(there.get("CPU", 0) / wanted.cpus)) if wanted.cpus else 1


def _refuse_too_many(ray: Any, wanted: Ray, workers: int) -> None:
    there = ray.cluster_resources()
    for what, each in (("CPU", wanted.cpus), ("GPU", wanted.gpus)):
        if workers * each > there.get(what, 0) + 1e-6:
            raise ConfigError(
                f"backend.ray asks for {workers} workers with {each:g} {what}s each, and the "
                f"cluster has {there.get(what, 0):g}; ask for fewer, or add machines to it"
            )


def _refuse_other_versions(about: dict[str, Any]) -> None:
    own = {"idiolect": VERSION, "torch": torch.__version__}
    for name, version in own.items():
        if about[name] != version:
            raise ClusterError(
                f"a worker has {name} {about[name]} and this process {version}; install the same "
                "on every machine of the cluster"
            )
