"""Train one method over all seeds at once, so that it can be killed at any moment and go on."""

import functools
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from idiolect.core import checkpoint, tree
from idiolect.core.tree import Tree
from idiolect.engine.callbacks import Silent, Tick, Watch
from idiolect.engine.outcome import Outcome, Scores, Speed, Wire
from idiolect.engine.rounds import Simulation, Verdict
from idiolect.engine.traffic import Traffic
from idiolect.errors import CheckpointError
from idiolect.experiment import notices as telling
from idiolect.experiment import run_state as memories
from idiolect.experiment import sampled_scores, tracing
from idiolect.experiment.job import Job, planned
from idiolect.experiment.protocols import Course, Rounds
from idiolect.experiment.run_state import Memory, Point
from idiolect.results import statistics
from idiolect.results.models import Deployed, save_models

# A checkpoint costs milliseconds to seconds; losing this much work to a crash costs no one.
_SECONDS_BETWEEN = 5.0
_GROUPED = 64  # clients: with more, clients themselves are what a comparison is over


class Trained(NamedTuple):
    """A finished method; what was deployed, per seed, is there unless it was read from disk."""

    outcome: Outcome
    deployed: list[Deployed]
    job: Course
    memory: Memory


def train(
    job: Course,
    folder: Path | None = None,
    *,
    resume: bool = False,
    watch: Watch | None = None,
    earlier: Sequence[Trained] = (),
) -> Trained:
    """Run a job to its end and score it on test data once; with a folder, keep checkpoints there.

    Interrupted (Ctrl-C), diverged or failed otherwise, it saves the last whole round and passes the
    error on. Where an earlier job went through the very same rounds, they are taken over and not
    done again.
    """
    watch = watch or Silent()
    keeper = _Keeper(job, folder)
    memory = keeper.load() if resume else None
    if memory is None:
        memory = next((_taken_over(done, job) for done in earlier if job.trains_as(done.job)), None)
    watch.begin(job.label, memory.round if memory else 0, job.rounds)
    deployed: list[Deployed] = []
    if memory is None or memory.final is None:
        simulation, memory = _ready(job, memory, watch, folder)
        keeper.watch_over(simulation, memory)
        memory = _rounds(job, simulation, memory, keeper, watch)
        memory, deployed = _finish(job, simulation, memory, folder, watch)
        keeper.save(memory)
    outcome = _outcome(job, memory)
    watch.scored(lambda: outcome)
    watch.end(job.label, memory.speed.train_seconds + memory.speed.judge_seconds)
    return Trained(outcome, deployed, job, memory)


def finished(job: Course, folder: Path) -> Trained | None:
    """Return what a job found earlier, if it is finished; nothing is trained."""
    memory = _Keeper(job, folder).load()
    if memory is None or memory.final is None:
        return None
    return Trained(_outcome(job, memory), [], job, memory)


def _taken_over(done: Trained, job: Course) -> Memory:
    """Return another job's memory as it was after its last round, before it was scored."""
    state = done.memory.state
    named = tree.named(state) if "server" in state else state
    curve = done.memory.curve
    if job.only_global:
        curve = tuple(
            Point(p.round, {k: v for k, v in p.scores.items() if "/global/" in k}) for p in curve
        )
    return done.memory.unscored()._replace(
        state=named, curve=curve, notices=(), shared=done.job.label
    )


class _Keeper:
    """Saves checkpoints of a job when they are due; does nothing without a folder."""

    def __init__(self, job: Course, folder: Path | None) -> None:
        self._job = job
        self._folder = folder
        self._path = folder and memories.checkpoint_path(folder, job.label)
        self._identity = job.identity
        self._place = job.backend.whereabouts
        self._saved_at = time.monotonic()
        self._saved_round = -1
        self._saved: Tree = ()  # of which a file of personal state must not lose anything
        self._simulation: Simulation | None = None

    def watch_over(self, simulation: Rounds, memory: Memory) -> None:
        """Take note of whose state is saved, and of the state on disk that it starts from."""
        self._saved = memory.state
        if isinstance(simulation, Simulation):
            self._simulation = simulation

    def load(self) -> Memory | None:
        """Read the checkpoint, if one was ever written."""
        if self._path is None or not self._path.exists():
            return None
        memory = memories.load(self._path, self._identity, self._place)
        rounds = self._job.rounds
        if memory.round > rounds:
            raise CheckpointError(
                f"{self._path} is at round {memory.round}, beyond the {rounds} asked for; raise "
                "rounds, or use another --out"
            )
        if memory.round < rounds:
            # The earlier run ended here; for the longer one this is a round like any other.
            curve = tuple(p for p in memory.curve if p.round % self._job.evaluate.every == 0)
            memory = memory.unscored()._replace(curve=curve)
        if self._folder is not None:
            memory = memory._replace(trace=tracing.read(self._folder, self._job, memory.round))
        return memory

    def save_if_due(self, memory: Memory) -> None:
        """Save after so many rounds, or so many seconds."""
        every = self._job.checkpoint_every
        if every:
            due = memory.round % every == 0
        else:
            due = time.monotonic() - self._saved_at >= _SECONDS_BETWEEN
        if due:
            self.save(memory)

    def save_last(self, memory: Memory) -> None:
        """Save what is not saved yet: the run may end here."""
        if memory.round > max(self._saved_round, 0):
            self.save(memory)

    def save_before_release(self, memory: Memory) -> None:
        """Save a round whose outcome could not be had again, before anyone sees any of it.

        Were it lost after it was seen, the round would be done again with other noise, and the
        two outcomes together would tell more than one may.
        """
        if not self._job.method.repeatable:
            self.save(memory)

    def keep_globals(self, memory: Memory) -> None:
        """Keep the servers' states of a round, where the user asked for all of them."""
        if self._folder is not None and self._job.evaluate.keep_globals:
            own = memories.globals_folder(self._folder, self._job.label)
            meta = {"seeds": list(self._job.seeds), "round": memory.round}
            path = own / f"round-{memory.round:04d}.safetensors"
            checkpoint.save(path, memory.state["server"], meta)

    def save(self, memory: Memory) -> None:
        """Save now; the trace first, so that it is never behind the checkpoint."""
        if self._folder is not None and self._path is not None:
            tracing.write(self._folder, self._job, memory.trace)
            if self._simulation is not None:
                self._simulation.flush()
            memories.save(self._path, memory, self._identity, self._place)
            self._saved = memory.state
            self._saved_at, self._saved_round = time.monotonic(), memory.round


def _ready(
    job: Course, memory: Memory | None, watch: Watch, folder: Path | None
) -> tuple[Rounds, Memory]:
    """Make the simulation and bring it to where the memory is."""
    simulation = _made(job, folder)
    notices = tuple(dict.fromkeys([*job.warnings(), *simulation.notices]))
    for text in notices:
        watch.note(text)
    if memory is None:
        start = Memory(0, simulation.tree, tuple(Wire() for _ in job.seeds), notices=notices)
        return simulation, start
    path = Path(f"checkpoint of {job.label}")
    if isinstance(simulation, Simulation):
        simulation.stored_as(memory.state)
    template = simulation.tree
    if not any(name.startswith("attended.") for name in memory.state):
        template = {key: own for key, own in template.items() if key != "attended"}  # an older one
    simulation.tree = checkpoint.fitted(template, memory.state, path)
    simulation.round = memory.round
    simulation.widths = memory.widths
    if memory.shared:
        notices = (*notices, f"{job.label} shares the rounds of {memory.shared}, trained alike")
        watch.note(notices[-1])
    return simulation, memory._replace(state=simulation.tree, notices=notices)


def _made(job: Course, folder: Path | None) -> Rounds:
    """Make those who do the rounds; personal state that is kept on disk has its place there."""
    if folder is not None and isinstance(job, Job):
        return job.simulation(memories.shelf_folder(folder, job.label))
    return job.simulation()


def _rounds(
    job: Course, simulation: Rounds, memory: Memory, keeper: _Keeper, watch: Watch
) -> Memory:
    began, first = time.perf_counter(), memory.round
    try:
        if memory.round and _unjudged(job, memory):  # it ended after a round, before its score
            memory = _judged(job, simulation, memory)
        while memory.round < job.rounds:
            # One assignment for each whole step: an interrupt leaves the last one in `memory`,
            # however far the simulation itself has got.
            before, memory = memory, _advanced(job, simulation, memory)
            keeper.save_before_release(memory)
            memory = _judged(job, simulation, memory)
            for text in telling.newly_left_out(job, before, memory):
                watch.note(text)
            keeper.keep_globals(memory)
            keeper.save_if_due(memory)
            pace = (time.perf_counter() - began) / (memory.round - first)
            watch.tick(_tick(job, memory, pace))
            if memory.curve and memory.curve[-1].round == memory.round:
                watch.scored(functools.partial(_outcome, job, memory))
        keeper.save_last(memory)
    except (KeyboardInterrupt, Exception):  # out of memory, say: what was done is not undone
        keeper.save_last(memory)
        raise
    return memory


def _advanced(job: Course, simulation: Rounds, memory: Memory) -> Memory:
    """Do a round."""
    start = time.perf_counter()
    done = simulation.advance()
    speed = memory.speed
    return memory._replace(
        round=simulation.round,
        state=simulation.tree,
        wire=tuple(w + _wire(t) for w, t in zip(memory.wire, done.traffic, strict=True)),
        speed=Speed(
            speed.examples + done.examples,
            speed.train_seconds + time.perf_counter() - start,
            speed.judge_seconds,
        ),
        widths=simulation.widths,
        padding=simulation.padding(),
        left_out=telling.counted(job, memory, done.left_out),
        trace=(*memory.trace, *tracing.recorded(job, simulation.round, simulation.tree["server"])),
        crossing=done.crossing or memory.crossing,
    )


def _judged(job: Course, simulation: Rounds, memory: Memory) -> Memory:
    """Score a round where that is due."""
    start = time.perf_counter()
    point = _point(job, simulation)
    speed = memory.speed
    return memory._replace(
        curve=(*memory.curve, *point),
        speed=Speed(
            speed.examples,
            speed.train_seconds,
            speed.judge_seconds + time.perf_counter() - start,
        ),
        widths=simulation.widths,
    )


def _unjudged(job: Course, memory: Memory) -> bool:
    """Say whether a round was done and its score, which is due, was not taken."""
    last = memory.curve[-1].round if memory.curve else 0
    return bool(job.validated or job.evaluate.test_curve) and last < memory.round


def _point(job: Course, simulation: Rounds) -> tuple[Point, ...]:
    """Score the round on validation data, and on test data only where the user asked to watch."""
    if simulation.round % job.evaluate.every and simulation.round != job.rounds:
        return ()
    scores: Scores = {}
    some = sampled_scores.watched(job)
    # To adapt is to train: along the way only where personal models are wanted at any cost.
    how = {"only_global": job.only_global, "adapt": job.evaluate.personal == "always"}
    if job.validated:
        scores.update(_scores(sampled_scores.judged(simulation, None, some, **how), "val/"))
    if job.evaluate.test_curve:
        verdicts = sampled_scores.judged(simulation, job.exams, some, **how)
        scores.update(_scores(verdicts, "test_curve/"))
    return (Point(simulation.round, scores),) if scores else ()


def _finish(
    job: Course, simulation: Rounds, memory: Memory, folder: Path | None, watch: Watch
) -> tuple[Memory, list[Deployed]]:
    """Score the last round on test data: the one place where test data decides a figure."""
    start = time.perf_counter()
    some, everyone = sampled_scores.tested(job), len(job.members[0].names)
    verdicts = sampled_scores.judged(
        simulation,
        job.exams,
        some,
        keep=sampled_scores.light(job, simulation),
        grouped=everyone <= _GROUPED,
    )
    if folder is not None and job.evaluate.save_models:
        for members, verdict in zip(job.members, verdicts, strict=True):
            if verdict.deployed:
                save_models(folder, job.label, members.seed, members.names, verdict.deployed)
    names = verdicts[0].facts
    speed = memory.speed
    final = sampled_scores.spread(_scores(verdicts, ""), some, everyone)
    facts = {name: np.stack([v.facts[name] for v in verdicts]) for name in names}
    told = [
        *simulation.remarks(),
        *telling.strangers(job, simulation),
        *telling.left_out(job, memory),
        *telling.privacy(job, memory),
        *telling.broken(job, final, some),
        *telling.models(job, simulation),
    ]
    for text in told:
        watch.note(text)
    memory = memory._replace(
        final=final,
        notices=(*memory.notices, *told),
        facts=sampled_scores.spread(facts, some, everyone),
        told=tuple(verdict.told for verdict in verdicts),
        exchanged=tuple(_wire(verdict.traffic) for verdict in verdicts),
        widths=simulation.widths,
        speed=Speed(
            speed.examples,
            speed.train_seconds,
            speed.judge_seconds + time.perf_counter() - start,
        ),
    )
    return memory, [verdict.deployed for verdict in verdicts]


def _scores(verdicts: list[Verdict], prefix: str) -> Scores:
    """Stack the seeds' scores; a model that nobody of a seed has a score of is NaN there."""
    count = max((len(leaf) for own in verdicts for leaf in tree.leaves(own.scores)), default=0)
    keys = {
        (model, metric) for own in verdicts for model in own.scores for metric in own.scores[model]
    }
    nothing = np.full(count, np.nan)
    return {
        f"{prefix}{model}/{metric}": np.stack(
            [own.scores.get(model, {}).get(metric, nothing) for own in verdicts]
        )
        for model, metric in sorted(keys)
    }


def _took_part(job: Course, memory: Memory) -> tuple[np.ndarray, ...]:
    """Say of every seed's clients whether they took part in some round; (): all of them."""
    state = memory.state
    present = state.get("attended.clients")
    if present is None and "attended" in state:
        present = state["attended"]["clients"]
    if present is None or job.method.pooled:
        return ()
    return tuple(np.asarray(own) for own in present.numpy())


def _wire(traffic: Traffic) -> Wire:
    return Wire(traffic.clients, traffic.bytes_down, traffic.bytes_up, traffic.public_bytes)


def _tick(job: Course, memory: Memory, pace: float) -> Tick:
    loss = accuracy = math.nan
    if memory.curve:
        scores = memory.curve[-1].scores
        model = "personal" if "val/personal/loss" in scores else "global"
        if f"val/{model}/loss" in scores:
            loss = statistics.mean(scores[f"val/{model}/loss"].reshape(-1))
            accuracy = statistics.mean(scores[f"val/{model}/accuracy"].reshape(-1))
    left = pace * (job.rounds - memory.round)
    rate = memory.speed.examples_per_second
    return Tick(job.label, memory.round, job.rounds, loss, accuracy, rate, left)


def _outcome(job: Course, memory: Memory) -> Outcome:
    keys = sorted(memory.curve[0].scores) if memory.curve else []
    about = {
        "method": job.name,
        "title": job.method.title,
        "paper": job.method.paper,
        "settings": job.settings,
        "preset": job.preset,
        **{key: value for key, value in job.described.items() if key == "model"},
        "clients": len(job.members[0].names),
        "cohort": job.cohort,
        **job.method.promise(planned(job, memory.round)),
        "backend": job.backend.kind,
        "device": job.place,
        "widths": dict(memory.widths),
        "padding": memory.padding,
        "crossing": memory.crossing,
    }
    return Outcome(
        label=job.label,
        about=about,
        members=job.members,
        rounds=memory.round,
        evaluated=tuple(point.round for point in memory.curve),
        curves={key: np.stack([point.scores[key] for point in memory.curve]) for key in keys},
        final=memory.final or {},
        watched=tuple(sampled_scores.watched(job) or ()),
        scored=tuple(sampled_scores.tested(job) or ()),
        facts=dict(memory.facts),
        reasons=telling.reasons(job.method, memory.facts, job.members),
        wire=memory.crossed,
        speed=memory.speed,
        notices=memory.notices,
        left_out=memory.left_out,
        took_part=_took_part(job, memory),
    )
