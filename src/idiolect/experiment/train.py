"""Train one method over all seeds at once, so that it can be killed at any moment and go on."""

import functools
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from idiolect.core import capabilities, checkpoint, tree
from idiolect.core.capabilities import Privacy, has
from idiolect.core.method import Method
from idiolect.core.tree import Tree
from idiolect.data.federation import TestData
from idiolect.engine import sampling
from idiolect.engine.callbacks import Silent, Tick, Watch
from idiolect.engine.evaluation import ClientScores
from idiolect.engine.outcome import Members, Outcome, Scores, Speed, Wire
from idiolect.engine.rounds import Simulation
from idiolect.engine.server_update import Traffic
from idiolect.errors import CheckpointError, ConfigError
from idiolect.experiment import run_state
from idiolect.experiment.job import Course, Job, Rounds, plan_of
from idiolect.experiment.run_state import CurvePoint, RunState
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
    memory: RunState


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


def _taken_over(done: Trained, job: Course) -> RunState:
    """Return another job's memory as it was after its last round, before it was scored."""
    state = done.memory.state
    named = tree.named(state) if "server" in state else state
    curve = done.memory.curve
    if job.only_global:
        curve = tuple(
            CurvePoint(p.round, {k: v for k, v in p.scores.items() if "/global/" in k})
            for p in curve
        )
    return done.memory.unscored()._replace(
        state=named, curve=curve, notices=(), shared=done.job.label
    )


class _Keeper:
    """Saves checkpoints of a job when they are due; does nothing without a folder."""

    def __init__(self, job: Course, folder: Path | None) -> None:
        self._job = job
        self._folder = folder
        self._path = folder and run_state.checkpoint_path(folder, job.label)
        self._identity = job.identity
        self._place = job.backend.whereabouts
        self._saved_at = time.monotonic()
        self._saved_round = -1
        self._saved: Tree = ()  # of which a file of personal state must not lose anything
        self._simulation: Simulation | None = None

    def watch_over(self, simulation: Rounds, memory: RunState) -> None:
        """Take note of whose state is saved, and of the state on disk that it starts from."""
        self._saved = memory.state
        if isinstance(simulation, Simulation):
            self._simulation = simulation

    def load(self) -> RunState | None:
        """Read the checkpoint, if one was ever written."""
        if self._path is None or not self._path.exists():
            return None
        memory = run_state.load(self._path, self._identity, self._place)
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
            memory = memory._replace(
                trace=run_state.read_trace(self._folder, self._job, memory.round)
            )
        return memory

    def save_if_due(self, memory: RunState) -> None:
        """Save after so many rounds, or so many seconds."""
        every = self._job.checkpoint_every
        if every:
            due = memory.round % every == 0
        else:
            due = time.monotonic() - self._saved_at >= _SECONDS_BETWEEN
        if due:
            self.save(memory)

    def save_last(self, memory: RunState) -> None:
        """Save what is not saved yet: the run may end here."""
        if memory.round > max(self._saved_round, 0):
            self.save(memory)

    def save_before_release(self, memory: RunState) -> None:
        """Save a round whose outcome could not be had again, before anyone sees any of it.

        Were it lost after it was seen, the round would be done again with other noise, and the
        two outcomes together would tell more than one may.
        """
        if has(self._job.method, Privacy) and not self._job.method.repeatable:
            self.save(memory)

    def keep_globals(self, memory: RunState) -> None:
        """Keep the servers' states of a round, where the user asked for all of them."""
        if self._folder is not None and self._job.evaluate.keep_globals:
            own = run_state.globals_folder(self._folder, self._job.label)
            meta = {"seeds": list(self._job.seeds), "round": memory.round}
            path = own / f"round-{memory.round:04d}.safetensors"
            checkpoint.save(path, memory.state["server"], meta)

    def save(self, memory: RunState) -> None:
        """Save now; the trace first, so that it is never behind the checkpoint."""
        if self._folder is not None and self._path is not None:
            run_state.write_trace(self._folder, self._job, memory.trace)
            if self._simulation is not None:
                self._simulation.flush()
            run_state.save(self._path, memory, self._identity, self._place)
            self._saved = memory.state
            self._saved_at, self._saved_round = time.monotonic(), memory.round


def _ready(
    job: Course, memory: RunState | None, watch: Watch, folder: Path | None
) -> tuple[Rounds, RunState]:
    """Make the simulation and bring it to where the memory is."""
    simulation = _made(job, folder)
    notices = tuple(dict.fromkeys([*job.warnings(), *simulation.notices]))
    for text in notices:
        watch.note(text)
    if memory is None:
        start = RunState(0, simulation.tree, tuple(Wire() for _ in job.seeds), notices=notices)
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
        return job.simulation(run_state.personal_folder(folder, job.label))
    return job.simulation()


def _rounds(
    job: Course, simulation: Rounds, memory: RunState, keeper: _Keeper, watch: Watch
) -> RunState:
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
            for text in newly_left_out(job, before, memory):
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


def _advanced(job: Course, simulation: Rounds, memory: RunState) -> RunState:
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
        left_out=count_left_out(job, memory, done.left_out),
        trace=(
            *memory.trace,
            *run_state.trace_records(job, simulation.round, simulation.tree["server"]),
        ),
        crossing=done.crossing or memory.crossing,
    )


def _judged(job: Course, simulation: Rounds, memory: RunState) -> RunState:
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


def _unjudged(job: Course, memory: RunState) -> bool:
    """Say whether a round was done and its score, which is due, was not taken."""
    last = memory.curve[-1].round if memory.curve else 0
    return bool(job.validated or job.evaluate.test_curve) and last < memory.round


def _point(job: Course, simulation: Rounds) -> tuple[CurvePoint, ...]:
    """Score the round on validation data, and on test data only where the user asked to watch."""
    if simulation.round % job.evaluate.every and simulation.round != job.rounds:
        return ()
    scores: Scores = {}
    some = curve_clients(job)
    # To adapt is to train: along the way only where personal models are wanted at any cost.
    how = {"only_global": job.only_global, "adapt": job.evaluate.personal == "always"}
    if job.validated:
        scores.update(_scores(evaluate(simulation, None, some, **how), "val/"))
    if job.evaluate.test_curve:
        verdicts = evaluate(simulation, job.exams, some, **how)
        scores.update(_scores(verdicts, "test_curve/"))
    return (CurvePoint(simulation.round, scores),) if scores else ()


def _finish(
    job: Course, simulation: Rounds, memory: RunState, folder: Path | None, watch: Watch
) -> tuple[RunState, list[Deployed]]:
    """Score the last round on test data: the one place where test data decides a figure."""
    start = time.perf_counter()
    some, everyone = final_clients(job), len(job.members[0].names)
    verdicts = evaluate(
        simulation,
        job.exams,
        some,
        keep=keeps_models(job, simulation),
        grouped=everyone <= _GROUPED,
    )
    if folder is not None and job.evaluate.save_models:
        for members, verdict in zip(job.members, verdicts, strict=True):
            if verdict.deployed:
                save_models(folder, job.label, members.seed, members.names, verdict.deployed)
    names = verdicts[0].facts
    speed = memory.speed
    final = spread_scores(_scores(verdicts, ""), some, everyone)
    facts = {name: np.stack([v.facts[name] for v in verdicts]) for name in names}
    told = [
        *simulation.remarks(),
        *absent_notices(job, simulation),
        *left_out_notices(job, memory),
        *privacy_notices(job, memory),
        *divergence_notices(job, final, some),
        *model_notices(job, simulation),
    ]
    for text in told:
        watch.note(text)
    memory = memory._replace(
        final=final,
        notices=(*memory.notices, *told),
        facts=spread_scores(facts, some, everyone),
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


def _scores(verdicts: list[ClientScores], prefix: str) -> Scores:
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


def _took_part(job: Course, memory: RunState) -> tuple[np.ndarray, ...]:
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


def _tick(job: Course, memory: RunState, pace: float) -> Tick:
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


def _outcome(job: Course, memory: RunState) -> Outcome:
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
        **capabilities.promise(job.method, plan_of(job, memory.round)),
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
        watched=tuple(curve_clients(job) or ()),
        scored=tuple(final_clients(job) or ()),
        facts=dict(memory.facts),
        reasons=client_reasons(job.method, memory.facts, job.members),
        wire=memory.crossed,
        speed=memory.speed,
        notices=memory.notices,
        left_out=memory.left_out,
        took_part=_took_part(job, memory),
    )


# Scoring some of very many clients: which ones, and what the others' figures are.


_KEPT_BYTES = 1 << 31  # of personal models that are kept after the last round

Clients = list[NDArray[np.int64]]
"""Who is scored under each seed, in order."""


def curve_clients(job: Course) -> Clients | None:
    """Draw whom curves are about, the same at every evaluation; None: everyone."""
    return _draw_clients(job, job.evaluate.clients)


def final_clients(job: Course) -> Clients | None:
    """Draw whom the final scores are about; None: everyone."""
    return _draw_clients(job, job.evaluate.final_clients)


def _draw_clients(job: Course, count: int | None) -> Clients | None:
    clients = len(job.members[0].names)
    if count is None or count >= clients:
        return None
    return [sampling.watched(seed, clients, count) for seed in job.seeds]


def evaluate(
    simulation: Rounds,
    exams: Sequence[TestData] | None,
    clients: Clients | None,
    *,
    only_global: bool = False,
    keep: bool = False,
    adapt: bool = True,
    grouped: bool = False,
) -> list[ClientScores]:
    """Score some clients, or all; `adapt` and `grouped` as in `Simulation.judge`."""
    if isinstance(simulation, Simulation) and grouped:
        return simulation.judge(
            exams, only_global=only_global, keep=keep, clients=clients, adapt=adapt, grouped=True
        )
    if clients is None:
        return simulation.judge(exams, only_global=only_global, keep=keep, adapt=adapt)
    if not isinstance(simulation, Simulation):
        raise ConfigError(
            "evaluate.clients and evaluate.final_clients choose among simulated clients; leave "
            "them out where clients are nodes of their own"
        )
    return simulation.judge(exams, only_global=only_global, keep=keep, clients=clients, adapt=adapt)


def keeps_models(job: Course, simulation: Rounds) -> bool:
    """Say whether the personal models of all who are scored can be kept."""
    scored = len(job.members[0].names)
    if job.evaluate.final_clients is not None:
        scored = min(scored, job.evaluate.final_clients)
    return tree.nbytes(simulation.tree["server"]) * scored <= _KEPT_BYTES


def spread_scores(scores: Scores, clients: Clients | None, everyone: int) -> Scores:
    """Give figures of some clients [seed, scored] a place for each; NaN for those not scored."""
    if clients is None:
        return scores
    return {name: _spread(values, clients, everyone) for name, values in scores.items()}


def _spread(values: NDArray[Any], clients: Clients, everyone: int) -> NDArray[Any]:
    whole = np.full((len(values), everyone, *values.shape[2:]), np.nan)
    for own, places, found in zip(whole, clients, values, strict=True):
        own[places] = found
    return whole


# What a user should hear of a run besides its figures: who was left out, who never took part.


def count_left_out(
    job: Course, memory: RunState, clients_of: Sequence[np.ndarray]
) -> tuple[Mapping[str, int], ...]:
    """Add a round to the count of who was left out, by name."""
    counts = [dict(own) for own in memory.left_out] or [{} for _ in job.seeds]
    for own, members, clients in zip(counts, job.members, clients_of, strict=bool(clients_of)):
        for name in (members.names[client] for client in clients):
            own[name] = own.get(name, 0) + 1
    return tuple(counts)


def newly_left_out(job: Course, before: RunState, after: RunState) -> list[str]:
    """Tell of each client when it is left out for the first time."""
    return [
        f"round {after.round}, seed {seed}: {name} reported NaN or infinity and was left out"
        for place, seed in enumerate(job.seeds)
        for name in after.left_out[place]
        if not before.left_out or name not in before.left_out[place]
    ]


def absent_notices(job: Course, simulation: Rounds) -> list[str]:
    """Tell of clients that took part in no round, and how they come to their models."""
    told = []
    for run, members in enumerate(job.members):
        never = simulation.strangers(run)
        if len(never):
            told.append(
                f"seed {members.seed}: {len(never)} of {len(members.names)} clients took part in "
                f"no round, first {members.names[never[0]]}; they got their models as newcomers do "
                "(adapt), and means are given with and without them"
            )
    return told


def client_reasons(
    method: Method, facts: Mapping[str, np.ndarray], members: Sequence[Members]
) -> tuple[tuple[str, ...], ...]:
    """Put every client's facts into words; () where the method has none to say."""
    told = tuple(
        tuple(
            capabilities.reason(
                method, {name: values[place, client] for name, values in facts.items()}
            )
            for client in range(len(own.names))
        )
        for place, own in enumerate(members)
    )
    return told if facts and any(map(any, told)) else ()


def model_notices(job: Course, simulation: Rounds) -> list[str]:
    """Tell where personal models were too many to keep."""
    if keeps_models(job, simulation):
        return []
    return [
        f"the personal models of {len(job.members[0].names)} clients take too much room and were "
        "not kept; evaluate.final_clients keeps those of a sample"
    ]


def left_out_notices(job: Course, memory: RunState) -> list[str]:
    """Name the clients whose reports were not used, and how often."""
    told = []
    for seed, counts in zip(job.seeds, memory.left_out, strict=False):
        if counts:
            named = [f"{name} ({count})" for name, count in counts.items()][:8]
            more = f" and {len(counts) - 8} more" if len(counts) > 8 else ""
            told.append(
                f"seed {seed}: {len(counts)} clients reported NaN or infinity and were left out of "
                f"rounds, so often: {', '.join(named)}{more}; lower lr, or set clip"
            )
    return told


def privacy_notices(job: Course, memory: RunState) -> list[str]:
    """Repeat a promise of privacy in words."""
    promised = capabilities.promise(job.method, plan_of(job, memory.round)).get("privacy")
    return [str(promised["statement"])] if promised else []


def divergence_notices(
    job: Course, final: Scores, scored: Sequence[np.ndarray] | None = None
) -> list[str]:
    """Tell of models that were scored though their loss is no number: `deploy` may diverge too."""
    told = []
    tested = np.array([members.test for members in job.members]) > 0
    if scored is not None:
        chosen = np.zeros_like(tested)
        for own, clients in zip(chosen, scored, strict=True):
            own[clients] = True
        tested &= chosen
    for model in sorted({key.split("/")[0] for key in final}):
        rows = np.argwhere(tested & ~np.isfinite(final[f"{model}/loss"]))
        if len(rows):
            seed, client = rows[0]
            told.append(
                f"the {model} model of {len(rows)} of {int(tested.sum())} clients has no finite "
                f"test loss, first {job.members[seed].names[client]} under seed "
                f"{job.seeds[seed]}; its training after the rounds diverged: lower its rate"
            )
    return told
