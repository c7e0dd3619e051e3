"""Train a job round by round, evaluate it, and survive being killed at any moment."""

import contextlib
import dataclasses
import functools
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from idiolect.core import capabilities, checkpoint, tree
from idiolect.core.method import Method
from idiolect.data.federation import TestData
from idiolect.engine.evaluation import ClientScores
from idiolect.engine.outcome import (
    BASELINE,
    EFFECTIVE,
    RIGHT,
    WITHOUT,
    Outcome,
    PlannedWork,
    Scores,
    Silent,
    Stage,
    Tick,
    Watch,
    Wire,
)
from idiolect.engine.rounds import Simulation
from idiolect.engine.row_metrics import NATIVE, pooled
from idiolect.engine.server_update import Traffic
from idiolect.engine.stage_progress import StageProgress
from idiolect.errors import ConfigError, Diverged, IdiolectError
from idiolect.experiment.job import Job, Rounds, SimulatedJob
from idiolect.experiment.run_state import (
    Checkpointer,
    Clients,
    CurvePoint,
    RunState,
    outcome_of,
    personal_folder,
    sampled_clients,
    trace_records,
)
from idiolect.results import statistics
from idiolect.results.document import plain
from idiolect.results.run_files import Deployed, save_models

_GROUPED = 64  # clients: with more, comparisons are over clients themselves
_DETAILED = 300  # clients: with more, the chosen metric alone is taken of each
_TELLING = 20.0  # seconds of a first round from which on it says how long the others take
_SCORING = 0.5  # of a pass over the training data
_KEPT_BYTES = 1 << 31  # of personal models that are kept after the last round
_PATIENCE = 10.0  # seconds that an interrupt waits for the end of a round


class Trained(NamedTuple):
    """A finished job; `deployed` (per seed) is empty where it was read from disk."""

    outcome: Outcome
    deployed: list[Deployed]
    job: Job
    state: RunState


def train(
    job: Job,
    folder: Path | None = None,
    *,
    resume: bool = False,
    watch: Watch | None = None,
    earlier: Sequence[Trained] = (),
) -> Trained:
    """Train a job to its end and evaluate it on test data once; a folder keeps checkpoints.

    Interrupted (Ctrl-C), diverged or otherwise failed, it saves the last whole round and re-raises.
    If an earlier job ran exactly the same rounds, they are taken over and not repeated.
    """
    watch = watch or Silent()
    with _worded(job.label):
        checkpointer = Checkpointer(job, folder)
        state = checkpointer.load() if resume else None
        if state is None:
            state = next(
                (_taken_over(done, job) for done in earlier if job.trains_as(done.job)), None
            )
        watch.plan([planned_work(job)])
        watch.begin(job.label, state.round if state else 0, job.rounds)
        deployed: list[Deployed] = []
        if state is None or state.final is None:
            simulation, state = _start(job, state, watch, folder)
            checkpointer.start(simulation, state)
            final = functools.cache(functools.partial(_judged, job, simulation, watch))
            state = _run_rounds(job, simulation, state, checkpointer, watch, final)
            state, deployed = _finish(job, simulation, state, folder, watch, final)
            checkpointer.save(state)
        outcome = outcome_of(job, state)
        watch.scored(lambda: outcome)
        watch.end(job.label, state.speed.train_seconds + state.speed.judge_seconds)
        return Trained(outcome, deployed, job, state)


_WORDS: tuple[tuple[str, type[IdiolectError], str], ...] = (
    (
        "can't allocate memory",
        IdiolectError,
        "out of memory; lower what the method holds (batch, epochs, sizes of its own), use fewer "
        "seeds at once, a smaller backend.width or a smaller network",
    ),
    (
        "without overflow",
        ConfigError,
        "a setting, or a product of two, is beyond single precision, whose largest number is "
        "3.4e+38; lower the largest, such as lr",
    ),
    (
        "non-finite values",
        Diverged,
        "reports hold NaN or infinity, which no matrix can be made of; lower lr or set clip, and "
        "start again",
    ),
)
"""What torch says where settings are too large, and what that means."""


@contextlib.contextmanager
def _worded(label: str) -> Iterator[None]:
    """Say in a sentence what settings that are too large come to."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        text = _WORDS[0][0] if isinstance(error, MemoryError) else str(error)
        for words, kind, said in _WORDS:
            if words in text:
                raise kind(f"{label}: {said}") from error
        raise


def finished(job: Job, folder: Path) -> Trained | None:
    """Return what a finished job found, from its checkpoint; None if it is not finished."""
    state = Checkpointer(job, folder).load()
    if state is None or state.final is None:
        return None
    return Trained(outcome_of(job, state), [], job, state)


def _taken_over(done: Trained, job: Job) -> RunState:
    """Return another job's state after its last round, before it was evaluated on test data."""
    state = done.state
    curve = state.curve
    if job.only_global:
        curve = tuple(
            CurvePoint(p.round, {k: v for k, v in p.scores.items() if "/global/" in k})
            for p in curve
        )
    named = tree.named(state.tree) if "server" in state.tree else state.tree
    return state.unscored()._replace(tree=named, curve=curve, notices=(), shared=done.job.label)


def _start(
    job: Job, state: RunState | None, watch: Watch, folder: Path | None
) -> tuple[Rounds, RunState]:
    """Make the simulation and restore the state in it."""
    simulation = job.simulation(folder and personal_folder(folder, job.label))
    notices = tuple(dict.fromkeys([*job.warnings(), *simulation.notices]))
    for text in notices:
        watch.note(text)
    if state is None:
        wire = tuple(Wire() for _ in job.seeds)
        return simulation, RunState(0, simulation.tree, wire, notices=notices)
    if isinstance(simulation, Simulation):
        simulation.stored_as(state.tree)
    template = simulation.tree
    if not any(name.startswith("attended.") for name in state.tree):  # of an earlier version
        template = {key: own for key, own in template.items() if key != "attended"}
    path = Path(f"checkpoint of {job.label}")
    simulation.tree = checkpoint.fitted(template, state.tree, path)
    simulation.round = state.round
    simulation.widths = state.widths
    if state.shared:
        notices = (*notices, f"{job.label} shares the rounds of {state.shared}, trained alike")
        watch.note(notices[-1])
    return simulation, state._replace(tree=simulation.tree, notices=notices)


def _run_rounds(
    job: Job,
    simulation: Rounds,
    state: RunState,
    checkpointer: Checkpointer,
    watch: Watch,
    final: Callable[[], list[ClientScores]],
) -> RunState:
    began, first = time.perf_counter(), state.round
    clients = sum(len(members.names) for members in job.members)
    stage = StageProgress(watch.stage, job.label, clients)
    # On a GPU rounds are short, and nothing should stand between two of them.
    long = isinstance(simulation, Simulation) and simulation.device.type == "cpu"
    interrupts = Interrupts(isinstance(simulation, Simulation))
    try:
        if state.round and _unevaluated(job, state):  # killed after a round, before its evaluation
            state = _evaluated(job, simulation, state, final)
        while state.round < job.rounds:
            # One assignment for each whole step: an interrupt leaves the last one in `state`,
            # however far the simulation itself has got.
            with _followed(simulation, stage if long else None), interrupts:
                before, state = state, _advanced(job, simulation, state)
            checkpointer.save_before_release(state)
            state = _evaluated(job, simulation, state, final)
            for text in _newly_left_out(job, before, state):
                watch.note(text)
            checkpointer.keep_globals(state)
            checkpointer.save_if_due(state)
            now = time.perf_counter()
            if state.round == first + 1 < job.rounds:
                # The first round of a session measures and compiles: later ones say how long.
                began, pace = now, math.nan if now - began < _TELLING else now - began
            else:
                pace = (now - began) / max(state.round - first - 1, 1)
            watch.tick(_tick(job, state, pace))
            if state.curve and state.curve[-1].round == state.round:
                watch.scored(functools.partial(outcome_of, job, state))
        checkpointer.save_last(state)
    except (KeyboardInterrupt, Exception):  # such as out of memory: whole rounds are kept
        checkpointer.save_last(state)
        raise
    return state


class Interrupts:
    """Lets Ctrl-C and SIGTERM wait for the end of a round, as torch may lose or garble them in it.

    A second one, or one in a round that takes long, is heard at once.
    """

    def __init__(self, able: bool = True) -> None:
        main = threading.current_thread() is threading.main_thread()  # others get no signals
        self._numbers = (signal.SIGINT, signal.SIGTERM) if able and main else ()
        self._heard: dict[int, Callable[..., Any]] = {}
        self._asked: signal.Signals | None = None
        self._timer: threading.Timer | None = None

    def __enter__(self) -> Self:
        """Listen, where Python code listened before."""
        for number in self._numbers:
            before = signal.getsignal(number)
            if callable(before):
                self._heard[number] = before
                signal.signal(number, self._ask)
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        """Pass on what was asked meanwhile, unless the round has failed."""
        for number, before in self._heard.items():
            signal.signal(number, before)
        asked, self._asked = self._asked, None
        if self._timer is not None:
            self._timer.cancel()
        if asked is not None and kind is None:
            self._heard[asked](asked, None)

    def _ask(self, number: int, frame: object) -> None:
        if self._asked is None:
            self._asked = signal.Signals(number)
            again = (threading.main_thread().ident, number)
            self._timer = threading.Timer(_PATIENCE, signal.pthread_kill, again)
            self._timer.daemon = True
            self._timer.start()
        else:
            self._heard[number](number, frame)


@contextlib.contextmanager
def _followed(simulation: Rounds, stage: StageProgress | None) -> Iterator[None]:
    """Let simulated clients say how far they are, for as long as the block lasts."""
    groups = simulation.groups if isinstance(simulation, Simulation) else []
    for group in groups:
        group.stage = stage
    try:
        yield
    finally:
        for group in groups:
            group.stage = None


def planned_work(job: Job, times: int = 1) -> PlannedWork:
    """Weigh a job's rounds, and what comes after them, by passes over the data."""
    seeds, clients = len(job.seeds), len(job.members[0].names)
    cohort = getattr(job, "cohort", None)
    part = min(cohort / clients, 1.0) if cohort and not job.method.alone else 1.0
    passes = _passes_after(job.method) if job.method.tunes else 0.0
    each = seeds * part * (1 if job.method.steps else job.method.epochs)
    return PlannedWork(job.label, job.rounds, each, seeds * (passes + _SCORING), times)


def _passes_after(method: Method) -> float:
    """Guess how often `deploy` passes over the data by its settings; measured, it is corrected."""
    found = 0.0
    for spec in dataclasses.fields(method):
        value = getattr(method, spec.name)
        if isinstance(value, Method):
            found += _passes_after(value)
        elif spec.name.endswith("epochs") and spec.name != "epochs" and isinstance(value, int):
            found += value
    return found * len(getattr(method, "cells", ())) if hasattr(method, "cells") else found


def _advanced(job: Job, simulation: Rounds, state: RunState) -> RunState:
    """Run a round."""
    start = time.perf_counter()
    done = simulation.advance()
    speed = dataclasses.replace(
        state.speed,
        examples=state.speed.examples + done.examples,
        train_seconds=state.speed.train_seconds + time.perf_counter() - start,
    )
    servers = simulation.tree["server"]
    return state._replace(
        round=simulation.round,
        tree=simulation.tree,
        wire=tuple(w + _wire(t) for w, t in zip(state.wire, done.traffic, strict=True)),
        speed=speed,
        widths=simulation.widths,
        padding=simulation.padding(),
        left_out=_count_left_out(job, state, done.left_out),
        trace=(*state.trace, *trace_records(job, simulation.round, servers)),
        crossing=done.crossing or state.crossing,
    )


def _wire(traffic: Traffic) -> Wire:
    return Wire(traffic.clients, traffic.bytes_down, traffic.bytes_up, traffic.public_bytes)


def _tick(job: Job, state: RunState, pace: float) -> Tick:
    loss = accuracy = score = math.nan
    chosen = job.choice.name
    if state.curve:
        scores = state.curve[-1].scores
        model = "personal" if "val/personal/loss" in scores else "global"
        if f"val/{model}/loss" in scores:
            loss = statistics.mean(scores[f"val/{model}/loss"].reshape(-1))
            nothing = np.full(1, math.nan)
            accuracy, score = (
                statistics.mean(scores.get(f"val/{model}/{name}", nothing).reshape(-1))
                for name in ("accuracy", chosen)
            )
    left = pace * (job.rounds - state.round)
    rate = state.speed.examples_per_second
    return Tick(job.label, state.round, job.rounds, loss, accuracy, rate, left, score, chosen)


# Evaluation.


def _unevaluated(job: Job, state: RunState) -> bool:
    """Return whether a round was run and its evaluation, which is due, was not."""
    last = state.curve[-1].round if state.curve else 0
    return bool(job.follows or job.evaluate.watches) and last < state.round


def _evaluated(
    job: Job, simulation: Rounds, state: RunState, final: Callable[[], list[ClientScores]]
) -> RunState:
    """Evaluate a round where that is due: on validation data, on other data only if asked to."""
    start = time.perf_counter()
    due = simulation.round % job.evaluate.every == 0 or simulation.round == job.rounds
    scores = _curves(job, simulation, final) if due and job.evaluate.curves else {}
    point = (CurvePoint(simulation.round, scores),) if scores else ()
    return _timed(state, start)._replace(curve=(*state.curve, *point), widths=simulation.widths)


def _curves(job: Job, simulation: Rounds, final: Callable[[], list[ClientScores]]) -> Scores:
    """Score models on what curves are of.

    To deploy may mean training, so where it would give the same models again it is done once: test
    and validation rows are scored together, and the last point is what is found at the end.
    """
    asked = job.evaluate
    some = sampled_clients(job, asked.clients)
    # Adapting means training: during the run only where personal models are always wanted.
    always = asked.personal == "always"
    how: dict[str, Any] = {"only_global": job.only_global, "choice": job.choice, "adapt": always}
    # A threshold is one of test rows; what nodes are asked for is theirs to know.
    together = isinstance(simulation, Simulation) and asked.threshold is None
    last = always and asked.clients == asked.final_clients and simulation.round == job.rounds
    scores: Scores = {}
    if together and (last or (asked.test_curve and job.follows)):
        found = final() if last else _evaluate(simulation, job.test_data, some, **how)
        both = _undetailed(job, _scores(found, ""))
        if job.follows:
            scores |= {
                f"val/{key.replace('/val_', '/')}": own
                for key, own in both.items()
                if "/val_" in key
            }
        if asked.test_curve:
            scores |= {f"test_curve/{key}": own for key, own in both.items()}
    else:
        if job.follows:
            scores |= _scores(_evaluate(simulation, None, some, **how), "val/")
        if asked.test_curve:
            scores |= _scores(_evaluate(simulation, job.test_data, some, **how), "test_curve/")
    if asked.train_curve:
        scores |= _scores(_evaluate(simulation, _trained(job), some, **how), "train_curve/")
    return scores


def _undetailed(job: Job, scores: Scores) -> Scores:
    """Leave out what is measured only at the end."""
    usual = {*NATIVE[job.choice.kind], job.choice.name}
    only = {own.name for own in job.choice.all()} - usual | {RIGHT, WITHOUT, EFFECTIVE}
    split = {key: key.split("/") for key in scores}
    return {
        key: own
        for key, own in scores.items()
        if split[key][0] != BASELINE and split[key][1] not in only
    }


def _trained(job: Job) -> Sequence[TestData]:
    """Return the training rows as rows to be scored."""
    if not isinstance(job, SimulatedJob):
        raise ConfigError(
            "evaluate.train_curve scores training rows of simulated clients; leave it out where "
            "clients are nodes of their own"
        )
    return job.trained_data


def _judged(job: Job, simulation: Rounds, watch: Watch) -> list[ClientScores]:
    """Evaluate the last round on test data: the only place where test data decides a figure."""
    some, scored = _final_clients(job)
    clients = len(job.members[0].names)
    grouped = isinstance(simulation, Simulation) and clients <= _GROUPED
    more: dict[str, Any] = {"grouped": True} if grouped else {}
    more |= {"choice": job.choice, "detail": job.evaluate.detail and clients <= _DETAILED}
    stage = StageProgress(watch.stage, job.label, scored * len(job.seeds))
    first = "adapting" if job.method.tunes else "scoring"
    watch.stage(Stage(first, job.label, clients=scored * len(job.seeds)))  # of nodes elsewhere too
    with _followed(simulation, stage):
        return _evaluate(simulation, job.test_data, some, keep=_keeps(job, simulation), **more)


def _final_clients(job: Job) -> tuple[Clients | None, int]:
    """Return who is scored at the end, and how many under each seed."""
    some = sampled_clients(job, job.evaluate.final_clients)
    return some, len(job.members[0].names) if some is None else len(some[0])


def _keeps(job: Job, simulation: Rounds) -> bool:
    """Say whether there is room for what everybody deploys."""
    return tree.nbytes(simulation.tree["server"]) * _final_clients(job)[1] <= _KEPT_BYTES


def _finish(
    job: Job,
    simulation: Rounds,
    state: RunState,
    folder: Path | None,
    watch: Watch,
    final_scores: Callable[[], list[ClientScores]],
) -> tuple[RunState, list[Deployed]]:
    """Take the last round's test scores, and all that is told of the run after them."""
    start = time.perf_counter()
    verdicts = final_scores()
    some, clients = _final_clients(job)[0], len(job.members[0].names)
    watch.stage(Stage("writing", job.label, 1.0))
    if folder is not None and job.evaluate.save_models:
        for members, verdict in zip(job.members, verdicts, strict=True):
            if verdict.deployed:
                save_models(folder, job.label, members.seed, members.names, verdict.deployed)
    final = _spread(_scores(verdicts, ""), some, clients)
    facts = {name: np.stack([v.facts[name] for v in verdicts]) for name in verdicts[0].facts}
    privacy = capabilities.promise(job.method, job.plan(state.round)).get("privacy")
    notices = [
        *simulation.remarks(),
        *_absent_notices(job, simulation),
        *_left_out_notices(job, state),
        *([str(privacy["statement"])] if privacy else []),
        *_unscored_notices(job, simulation),
        *_divergence_notices(job, final, some, simulation),
    ]
    if not _keeps(job, simulation):
        notices.append(
            f"the personal models of {clients} clients take too much room and were not kept; "
            "evaluate.final_clients keeps those of a sample"
        )
    for text in notices:
        watch.note(text)
    state = _timed(state, start)._replace(
        final=final,
        notices=(*state.notices, *notices),
        facts=_spread(facts, some, clients),
        exchange_sums=tuple(verdict.exchange_sums for verdict in verdicts),
        exchanged=tuple(_wire(verdict.traffic) for verdict in verdicts),
        widths=simulation.widths,
        pooled=tuple(plain(pooled(verdict.answers, job.choice)) for verdict in verdicts),
    )
    return state, [verdict.deployed for verdict in verdicts]


def _timed(state: RunState, start: float) -> RunState:
    """Add the time since `start` to that of evaluation."""
    seconds = state.speed.judge_seconds + time.perf_counter() - start
    return state._replace(speed=dataclasses.replace(state.speed, judge_seconds=seconds))


def _evaluate(
    simulation: Rounds,
    test_data: Sequence[TestData] | None,
    clients: Clients | None,
    **options: Any,
) -> list[ClientScores]:
    """Evaluate some clients, or all."""
    if clients is not None:
        if not isinstance(simulation, Simulation):
            raise ConfigError(
                "evaluate.clients and evaluate.final_clients choose among simulated clients; leave "
                "them out where clients are nodes of their own"
            )
        options["clients"] = clients
    return simulation.evaluate(test_data, **options)


def _scores(verdicts: list[ClientScores], prefix: str) -> Scores:
    """Stack the seeds' scores; NaN where no client of a seed has a score of a model."""
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


def _spread(scores: Scores, clients: Clients | None, everyone: int) -> Scores:
    """Turn scores of some clients [seed, scored] into [seed, client]; NaN for the others."""
    if clients is None:
        return scores
    return {name: _spread_one(values, clients, everyone) for name, values in scores.items()}


def _spread_one(values: NDArray[Any], clients: Clients, everyone: int) -> NDArray[Any]:
    whole = np.full((len(values), everyone, *values.shape[2:]), np.nan)
    for own, places, found in zip(whole, clients, values, strict=True):
        own[places] = found
    return whole


# Notices: what a user should know of a run besides its figures.


def _count_left_out(
    job: Job, state: RunState, clients_of: Sequence[np.ndarray]
) -> tuple[Mapping[str, int], ...]:
    """Add a round to the counts of clients that were left out, by name."""
    counts = [dict(own) for own in state.left_out] or [{} for _ in job.seeds]
    if not any(len(clients) for clients in clients_of):
        return tuple(counts)
    for own, members, clients in zip(counts, job.members, clients_of, strict=True):
        for name in (members.names[client] for client in clients):
            own[name] = own.get(name, 0) + 1
    return tuple(counts)


def _newly_left_out(job: Job, before: RunState, after: RunState) -> list[str]:
    return [
        f"round {after.round}, seed {seed}: {name} reported NaN or infinity and was left out"
        for place, seed in enumerate(job.seeds)
        for name in after.left_out[place]
        if not before.left_out or name not in before.left_out[place]
    ]


def _left_out_notices(job: Job, state: RunState) -> list[str]:
    """Name the clients whose reports were not used, and how often."""
    notices = []
    for seed, counts in zip(job.seeds, state.left_out, strict=False):
        if counts:
            named = [f"{name} ({count})" for name, count in counts.items()][:8]
            more = f" and {len(counts) - 8} more" if len(counts) > 8 else ""
            notices.append(
                f"seed {seed}: {len(counts)} clients reported NaN or infinity and were left out of "
                f"rounds, so often: {', '.join(named)}{more}; lower lr, or set clip"
            )
    return notices


def _absent_notices(job: Job, simulation: Rounds) -> list[str]:
    """Name clients that took part in no round, and how they got their models."""
    notices = []
    for run, members in enumerate(job.members):
        never = simulation.strangers(run)
        if len(never):
            notices.append(
                f"seed {members.seed}: {len(never)} of {len(members.names)} clients took part in "
                f"no round, first {members.names[never[0]]}; they got their models as newcomers do "
                "(adapt), and means are given with and without them"
            )
    return notices


def _unscored_notices(job: Job, simulation: Rounds) -> list[str]:
    """Name clients that were not there to be scored: they have no score, and no model."""
    return [
        f"seed {members.seed}: {members.names[client]} was not there when models were scored; it "
        "has no score and no model of this run (`idiolect adapt` gives it one)"
        for run, members in enumerate(job.members)
        for client in simulation.unscored(run)
    ]


def _divergence_notices(
    job: Job, final: Scores, scored: Clients | None, simulation: Rounds
) -> list[str]:
    """Name models whose test loss is not finite: training in `deploy` may diverge too."""
    notices = []
    tested = np.array([members.test for members in job.members]) > 0
    for run, own in enumerate(tested):
        own[simulation.unscored(run)] = False
    if scored is not None:
        chosen = np.zeros_like(tested)
        for own, clients in zip(chosen, scored, strict=True):
            own[clients] = True
        tested &= chosen
    for model in sorted({key.split("/")[0] for key in final} - {BASELINE}):
        rows = np.argwhere(tested & ~np.isfinite(final[f"{model}/loss"]))
        if len(rows):
            seed, client = rows[0]
            notices.append(
                f"the {model} model of {len(rows)} of {int(tested.sum())} clients has no finite "
                f"test loss, first {job.members[seed].names[client]} under seed "
                f"{job.seeds[seed]}; its training after the rounds diverged: lower its rate"
            )
    return notices
