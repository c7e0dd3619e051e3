"""Evaluation: every client's models, scored by the same task in a simulation and on a node."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch

from idiolect.core import capabilities, losses, tree
from idiolect.core.capabilities import FinalExchange, has
from idiolect.core.client import Batch, Local
from idiolect.core.method import Sent
from idiolect.core.metrics import CLASSES, NUMBER, SURVIVAL, Answers
from idiolect.core.task import Task
from idiolect.core.tree import Tree
from idiolect.data.dataset import Dataset
from idiolect.data.federation import TestData
from idiolect.data.text import UNK
from idiolect.engine.client_group import ClientKey, ClientTask
from idiolect.engine.final_exchange import (
    Exchange,
    ExchangeInput,
    Sums,
    Tell,
    exchange,
    heard,
    holds,
    welcomed,
)
from idiolect.engine.outcome import BASELINE, RIGHT
from idiolect.engine.row_metrics import (
    GROUPS,
    VALIDATION,
    ClientMetrics,
    ClientOutputs,
    MetricChoice,
    in_users_unit,
    measure,
    sequence_baseline,
)
from idiolect.engine.server_update import Traffic
from idiolect.engine.simulation_state import SimulationState
from idiolect.errors import ConfigError

_SQUARE = "mean_square"  # of which the root is taken once all batches are added up
_MOST_OUTPUTS = 1 << 25  # numbers; more rows than that have the chosen metric alone


class ClientScores(NamedTuple):
    """Scores of the clients of one run."""

    scores: dict[str, dict[str, np.ndarray]]  # model -> metric -> [client]
    facts: dict[str, np.ndarray]  # what the method tells of its choices, [client, ...]
    deployed: list[tuple[np.ndarray, Tree]]  # per architecture: clients, personal models; if kept
    exchange_sums: Sums = MappingProxyType({})  # of the final exchange, over all clients
    traffic: Traffic = Traffic(0, 0, 0)  # of that, and of hearing it
    answers: Mapping[str, Sequence[tuple[int, Answers]]] = MappingProxyType({})  # by model: client


def evaluate(
    simulation: SimulationState,
    test_data: Sequence[TestData] | None = None,
    *,
    only_global: bool = False,
    keep: bool = False,
    newcomers: bool = False,
    clients: Sequence[np.ndarray] | None = None,
    adapt: bool = True,
    grouped: bool = False,
    choice: MetricChoice | None = None,
    detail: bool = False,
) -> list[ClientScores]:
    """Score every client's models on validation data, or on test and validation data both.

    `only_global` skips `deploy`, which may train; `keep` returns the personal models; clients
    that are `newcomers` adapt instead of deploying. `clients` of each run are scored, or all;
    some at a time, so that only what is kept of them takes room. `grouped` also counts right
    answers in groups of the test rows, which comparisons of few clients are paired by. The metric
    of a `choice` is among the scores; with `detail` all metrics of its task are, those of a
    baseline too, and the answers about every test row.

    Clients that took part in no round adapt as newcomers do, since they have no trained state
    of their own; without `adapt`, which may train, their personal models have no score.
    """
    method, runs = simulation.method, simulation.runs
    extras = [] if test_data is None else [own.extras for own in test_data]
    task = ScoreTask(
        method,
        beside=test_data is not None,
        measured=tuple(sorted(set(extras[0]).intersection(*extras))) if extras else (),
        only_global=only_global,
        keep=keep,
        newcomers=newcomers,
        grouped=grouped and test_data is not None and not runs[0].train_data.dataset.sequential,
        **_outputs_wanted(simulation, test_data, choice, detail),
    )
    wanted = clients or [np.arange(len(run.train_data.names)) for run in runs]
    never = [np.intersect1d(own, simulation.strangers(run)) for run, own in enumerate(wanted)]
    alike = newcomers or only_global or not (simulation.round and capabilities.adapts(method))
    if alike or not any(map(len, never)):
        return _scored(simulation, task, test_data, clients, simulation.exchange_sums)
    took = [np.setdiff1d(own, rest) for own, rest in zip(wanted, never, strict=True)]
    first = [ClientScores({}, {}, [])] * len(runs)
    sums = simulation.exchange_sums
    if any(map(len, took)):
        first = _scored(simulation, task, test_data, took, ())
        sums = [own.exchange_sums for own in first] if has(method, FinalExchange) else ()
    strangers = replace(task, only_global=not adapt, keep=keep and adapt, newcomers=adapt)
    second = _scored(simulation, strangers, test_data, never, sums)
    return [
        mixed((own, one), (rest, other))
        for own, one, rest, other in zip(took, first, never, second, strict=True)
    ]


def _scored(
    simulation: SimulationState,
    task: "ScoreTask",
    test_data: Sequence[TestData] | None,
    clients: Sequence[np.ndarray] | None,
    sums: Sequence[Sums],
) -> list[ClientScores]:
    """Score some clients of each run, or all; newcomers receive the others' sums."""
    runs = range(len(simulation.runs))
    tests = simulation.test_members(test_data)
    tells = has(task.method, FinalExchange) and not task.only_global
    exchange = _exchanged(simulation, clients) if tells and not task.newcomers else None
    task = replace(task, hears=tells and bool(sums or not task.newcomers))
    parts: list[list[ClientScores | None]] = []
    for requests in simulation.everyone(task.newcomers, clients):
        asked = [one._replace(tests=own) for one, own in zip(requests, tests, strict=True)]
        if task.hears and exchange is None:
            asked = welcomed(sums, asked)
        started = [
            group.begin(task, exchange.handed(n, asked) if exchange else asked, simulation.round)
            for n, group in enumerate(simulation.groups)
        ]
        results = [wait() for wait in started]
        labels = [_Labels(simulation, test_data, run) for run in runs]
        parts.append([_run_scores(run, results, task, labels[run]) for run in runs])
    found = [_joined([part[run] for part in parts]) for run in runs]
    if exchange is None:
        return found
    exchanged = zip(found, exchange.sums, exchange.traffic, strict=True)
    return [own._replace(exchange_sums=sums, traffic=traffic) for own, sums, traffic in exchanged]


def _exchanged(simulation: SimulationState, clients: Sequence[np.ndarray] | None) -> Exchange:
    """Collect what clients contribute to the final exchange.

    If deployed models do not fit in memory or are remote, `deploy` runs twice.
    """
    method, runs = simulation.method, simulation.runs
    count = sum(map(len, clients)) if clients else sum(len(run.train_data.names) for run in runs)
    sent = simulation.send(simulation.states[0], np.arange(1))
    keep = not simulation.remote and holds(method, sent, count, simulation.device)
    parts = simulation.everyone(False, clients)
    return exchange(Tell(method, keep), simulation.groups, parts, simulation.round)


class _Labels:
    """The labels of one run's clients, in the user's unit."""

    def __init__(
        self, simulation: SimulationState, test_data: Sequence[TestData] | None, run: int
    ) -> None:
        self._train = simulation.runs[run].train_data
        self._test = None if test_data is None else test_data[run]
        self.task = self._train.dataset.task

    def outputs(self, client: int, said: Mapping[str, Mapping[str, np.ndarray]]) -> ClientOutputs:
        """Put a client's labels beside what its models say."""
        held = self._train
        y = held.dataset.y
        val = y[held.val[client]]
        test = val if self._test is None else self._test.dataset.y[self._test.test[client]]
        train = y[held.train[client]]
        return ClientOutputs(self.task, said.get("test", {}), said.get("val", {}), test, val, train)

    @property
    def sequential(self) -> bool:
        """Whether each word has a label."""
        return self._train.dataset.sequential

    def baseline(self, client: int) -> dict[str, dict[str, float]]:
        """Return what guessing scores where each word has a label."""
        width = len(self._train.dataset.classes)
        return {BASELINE: sequence_baseline(self.outputs(client, {}), width)}


def refuse_metric(choice: MetricChoice, dataset: Dataset) -> None:
    """Refuse a metric of rows where each word has a label, and one of words where none has."""
    if dataset.sequential and not choice.native:
        raise ConfigError(
            f"evaluate.metric is {choice.name}, and every word has a label; expected perplexity, "
            "accuracy or loss"
        )
    if choice.name == "perplexity" and not dataset.sequential:
        raise ConfigError(
            f"evaluate.metric is perplexity, which is of next words, and {dataset.name} has a "
            "label for each row; expected log_loss, accuracy or another of docs/metrics.md"
        )


def _outputs_wanted(
    simulation: SimulationState,
    test_data: Sequence[TestData] | None,
    choice: MetricChoice | None,
    detail: bool,
) -> dict[str, Any]:
    """Return how the outputs of rows are asked for: padded to the longest of all clients."""
    if choice is None:
        return {}
    runs = simulation.runs
    dataset = runs[0].train_data.dataset
    refuse_metric(choice, dataset)
    if dataset.sequential:
        return {"choice": choice, "detail": detail}
    val = max(len(rows) for run in runs for rows in run.train_data.val)
    test = val
    if test_data is not None:
        test = max(len(rows) for own in test_data for rows in own.test)
    clients = sum(len(run.train_data.names) for run in runs)
    detail = detail and clients * test * max(1, len(dataset.classes)) <= _MOST_OUTPUTS
    moved = choice.threshold is not None and test_data is not None
    if choice.native and not (detail or moved):
        return {"choice": choice}
    beside = test_data is not None and (not choice.native or choice.threshold == VALIDATION)
    return {"choice": choice, "detail": detail, "outputs": (test, val if beside else -1)}


def _run_scores(
    run: int,
    results: Sequence[tuple[Sequence[ClientKey], Tree]],
    task: "ScoreTask",
    labels: _Labels,
) -> ClientScores | None:
    """Bring one run's results into the order of its clients; None where nobody was asked."""
    clients, parts, deployed = [], [], []
    answers: dict[str, list[tuple[int, Answers]]] = {}
    for keys, found in results:
        mine = sorted((key.client, n) for n, key in enumerate(keys) if key.run == run)
        if not mine:
            continue
        scores, facts, kept, said = found
        clients += [client for client, _ in mine]
        rows = np.array([n for _, n in mine])
        scores, facts, said = tree.map(
            lambda leaf, rows=rows: leaf.cpu().numpy()[rows], (scores, facts, said)
        )
        scores = in_users_unit(scores, labels.task)
        if said:
            measured = [
                task.measure(labels.outputs(client, tree.map(lambda leaf, n=n: leaf[n], said)))
                for n, (client, _) in enumerate(mine)
            ]
            for (client, _), own in zip(mine, measured, strict=True):
                for name, answer in own.answers.items() if task.detail else ():
                    answers.setdefault(name, []).append((client, answer))
            scores = with_marks(scores, [own.marks for own in measured])
        elif task.detail and labels.sequential:
            scores = with_marks(scores, [labels.baseline(client) for client, _ in mine])
        parts.append((scores, facts))
        for first in tree.leaves(kept)[:1]:
            places = torch.from_numpy(rows).to(first.device)
            deployed.append((np.array([client for client, _ in mine]), tree.take(kept, places)))
    if not parts:
        return None
    order = np.argsort(clients)
    scores, facts = tree.map(lambda *leaves: np.concatenate(leaves)[order], *parts)
    return ClientScores(scores, facts, deployed, answers=answers)


def with_marks(
    scores: Mapping[str, Mapping[str, np.ndarray]],
    marks: Sequence[Mapping[str, Mapping[str, Any]]],
) -> dict[str, dict[str, np.ndarray]]:
    """Put the metrics of clients beside their scores; by model and metric, [client]."""
    found = {model: dict(own) for model, own in scores.items()}
    for model, own in marks[0].items():
        stacked = {name: np.stack([one[model][name] for one in marks]) for name in own}
        found[model] = {**found.get(model, {}), **stacked}
    return found


def _joined(parts: Sequence[ClientScores | None]) -> ClientScores:
    """Concatenate the scores of parts of the clients."""
    some = [part for part in parts if part is not None]
    if len(some) < 2:
        return some[0] if some else ClientScores({}, {}, [])
    scores, facts = tree.map(
        lambda *leaves: np.concatenate(leaves), *[(part.scores, part.facts) for part in some]
    )
    return ClientScores(scores, facts, _deployed(some), answers=_all_answers(some))


def _all_answers(parts: Sequence[ClientScores]) -> dict[str, list[tuple[int, Answers]]]:
    """Put the answers of parts of the clients together, in the clients' order."""
    names = dict.fromkeys(name for part in parts for name in part.answers)
    found = {name: [one for part in parts for one in part.answers.get(name, ())] for name in names}
    return {name: sorted(own, key=lambda pair: pair[0]) for name, own in found.items()}


def _deployed(parts: Sequence[ClientScores]) -> list[tuple[np.ndarray, Tree]]:
    """Concatenate kept models of equal architecture."""
    held: dict[tuple[str, ...], list[tuple[np.ndarray, Tree]]] = {}
    for clients, kept in (own for part in parts for own in part.deployed):
        # A part may lack an architecture; one is recognised by the form of what it deploys.
        form = tuple(f"{name} {tuple(leaf.shape[1:])}" for name, leaf in tree.named(kept).items())
        held.setdefault(form, []).append((clients, kept))
    return [
        (np.concatenate([clients for clients, _ in own]), tree.concat([kept for _, kept in own]))
        for own in held.values()
    ]


def mixed(
    took_part: tuple[np.ndarray, ClientScores], never: tuple[np.ndarray, ClientScores]
) -> ClientScores:
    """Bring scores of clients that took part and of those that never did into one order.

    A model or a fact that only one of them has is NaN for the clients of the other.
    """
    if not len(took_part[0]) or not len(never[0]):
        return (took_part if len(took_part[0]) else never)[1]
    order = np.argsort(np.concatenate([took_part[0], never[0]]))
    (_, first), (_, second) = took_part, never
    counts = len(took_part[0]), len(never[0])

    def laid(left: dict[str, np.ndarray], right: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {
            name: np.concatenate(_both(left.get(name), right.get(name), counts))[order]
            for name in dict.fromkeys([*left, *right])
        }

    scores = {
        name: laid(first.scores.get(name, {}), second.scores.get(name, {}))
        for name in dict.fromkeys([*first.scores, *second.scores])
    }
    kept = _deployed([first, second])
    return first._replace(
        scores=scores,
        facts=laid(first.facts, second.facts),
        deployed=kept,
        answers=_all_answers([first, second]),
    )


def _both(
    left: np.ndarray | None, right: np.ndarray | None, counts: tuple[int, int]
) -> list[np.ndarray]:
    """Fill in NaN for whichever of the two is missing."""
    form = (left if left is not None else np.empty(0) if right is None else right).shape[1:]
    pairs = zip((left, right), counts, strict=True)
    return [np.full((count, *form), np.nan) if one is None else one for one, count in pairs]


@dataclass(frozen=True)
class ScoreTask(ClientTask):
    """Scores a client's models on test rows; returns scores, facts, personal model and outputs.

    `beside` adds scores on validation data; `measured` names further test rows: a test set `common`
    to all, rows that a backdoor `marked`; `only_global` skips `deploy`, which may train; `keep`
    returns the personal model; clients that are `newcomers` adapt instead of deploying; one that
    `hears` receives the others' sums.
    """

    beside: bool = True
    measured: tuple[str, ...] = ()
    only_global: bool = False
    keep: bool = False
    newcomers: bool = False
    hears: bool = False
    grouped: bool = False  # also count right answers in groups of the test rows
    choice: MetricChoice | None = None  # what is measured; None: what needs no outputs of rows
    detail: bool = False  # all metrics of the task
    outputs: tuple[int, int] = (-1, -1)  # rows that outputs on test and val are padded to; -1: none

    def measure(self, own: ClientOutputs) -> ClientMetrics:
        """Take the metrics of one client from its outputs."""
        assert self.choice is not None
        return measure(own, self.choice, detail=self.detail, grouped=self.grouped)

    @property
    def kind(self) -> str:
        """Name what is done."""
        words = {
            "judge": True,
            "val": not self.beside,
            "global": self.only_global,
            "keep": self.keep,
            "newcomers": self.newcomers,
            "hears": self.hears,
            "grouped": self.grouped,
            f"outputs {self.outputs}": self.outputs[0] >= 0,
            **dict.fromkeys(self.measured, True),
        }
        return " ".join(word for word, chosen in words.items() if chosen)

    def __call__(self, sent: Sent, personal: Tree, local: Local, test: Local) -> Tree:
        """Deploy and score."""
        method, own = self.method, capabilities.given(self.method, local)
        handed: ExchangeInput = sent.own if self.hears else ExchangeInput(sent.own, {}, ())
        sent = sent._replace(own=handed.own)
        deployed = handed.deployed
        if not (self.only_global or tree.leaves(deployed)):
            settle = partial(capabilities.adapt, method) if self.newcomers else method.deploy
            deployed = settle(sent, personal, own)
        if self.hears:
            deployed = heard(method, deployed, handed.others, own)
        models = method.models(sent, deployed)
        if self.only_global:
            models = {name: model for name, model in models.items() if name == "global"}

        def score(batch: Batch) -> Tree:
            said = capabilities.predict_all(method, models, batch.x, own)
            return {name: _scores(logits, batch, local.task) for name, logits in said.items()}

        marks = _completed(test.mean(score, "test"))
        if self.grouped and self.outputs[0] < 0 and local.task.kind == CLASSES:
            for name, groups in right_by_group(
                lambda batch: capabilities.predict_all(method, models, batch.x, own), test
            ).items():
                marks[name][RIGHT] = groups
        if self.beside:  # what a choice between methods may look at
            unseen = float("nan") if capabilities.trains_on_validation(method) else 0.0
            for name, seen in _completed(local.mean(score, "val")).items():
                marks[name] |= {f"val_{metric}": value + unseen for metric, value in seen.items()}
        if "marked" in self.measured:
            for name, seen in test.mean(score, "marked").items():
                marks[name]["attack_success"] = seen["accuracy"]
        if "common" in self.measured:
            weighed = weighed_by_class(
                lambda batch: capabilities.predict_all(method, models, batch.x, own), local, test
            )
            for name, accuracy in weighed.items():
                marks[name]["common_accuracy"] = accuracy
        facts = {} if self.only_global else capabilities.facts(method, deployed)
        said = {}
        for stream, (held, rows) in {
            "test": (test, self.outputs[0]),
            "val": (local, self.outputs[1]),
        }.items():
            if rows >= 0:
                said[stream] = outputs_of_rows(
                    lambda batch: capabilities.predict_all(method, models, batch.x, own),
                    held,
                    stream,
                    rows,
                )
        return marks, facts, models["personal"] if self.keep else (), said


def outputs_of_rows(
    predict: Callable[[Batch], dict[str, torch.Tensor]], local: Local, stream: str, rows: int
) -> dict[str, torch.Tensor]:
    """Return each model's outputs on a stream's rows, [row, output], padded to so many rows."""
    names: list[str] = []

    def ask(batch: Batch) -> torch.Tensor:
        said = predict(batch)
        names[:] = said
        return torch.stack(list(said.values()), -1)

    found = local.rows(ask, stream)  # [row, output, model]
    found = torch.nn.functional.pad(found, (0, 0, 0, 0, 0, rows - len(found)))
    return {name: found[..., place] for place, name in enumerate(names)}


def right_by_group(
    predict: Callable[[Batch], dict[str, torch.Tensor]], test: Local
) -> dict[str, torch.Tensor]:
    """Count each model's right answers in GROUPS groups of the test rows: row n is in n % GROUPS.

    With as many rows or fewer it says of each row whether it was right. With more, groups of rows
    are what two methods can be paired by: all methods meet the same rows in the same order.
    """
    names: list[str] = []

    def right(batch: Batch) -> torch.Tensor:
        said = predict(batch)
        names[:] = said
        good = [(out.argmax(-1) == batch.y) & ~out.isnan().any(-1) for out in said.values()]
        return torch.stack([one.to(batch.weight.dtype) * batch.weight for one in good], -1)

    rows = test.rows(right, "test")  # [row, model]
    filled = torch.nn.functional.pad(rows, (0, 0, 0, -len(rows) % GROUPS))
    counts = filled.reshape(-1, GROUPS, rows.shape[-1]).sum(0)
    return {name: counts[:, place] for place, name in enumerate(names)}


def weighed_by_class(
    predict: Callable[[Batch], dict[str, torch.Tensor]], local: Local, test: Local
) -> dict[str, torch.Tensor]:
    """Return each model's accuracy by class on the common test set, weighed by the client's shares.

    How Pye and Yu (2021) score a client: Σ_c (its training examples of class c / all of them) ·
    (the share of the common test examples of class c that are right).
    """

    def by_class(batch: Batch, values: torch.Tensor, classes: int) -> torch.Tensor:
        member = batch.y.unsqueeze(-1) == torch.arange(classes, device=batch.y.device)
        total = batch.weight.sum().clamp(min=1e-12)
        return ((values * batch.weight).unsqueeze(-1) * member).sum(0) / total

    def right(batch: Batch) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        found = {}
        for name, logits in predict(batch).items():
            good = (logits.argmax(-1) == batch.y) & ~logits.isnan().any(-1)
            classes = logits.shape[-1]
            found[name] = (
                by_class(batch, good.to(batch.weight.dtype), classes),
                by_class(batch, torch.ones_like(batch.weight), classes),
            )
        return found

    rights = test.mean(right, "common")
    classes = next(iter(rights.values()))[0].shape[-1]
    shares = local.mean(
        lambda batch: by_class(batch, torch.ones_like(batch.weight), classes), "train"
    )
    return {
        # A class that the common test set lacks says nothing: the others share its weight.
        name: (shares * (good / of).nan_to_num()).sum() / (shares * (of > 0)).sum()
        for name, (good, of) in rights.items()
    }


def _scores(outputs: torch.Tensor, batch: Batch, task: Task) -> dict[str, torch.Tensor]:
    """Return what can be added up over batches; see `row_metrics.NATIVE`."""
    y, weight = batch.y, batch.weight
    loss = task.loss(outputs, y, weight)
    if task.kind == NUMBER:  # in units of the loss
        off = outputs.squeeze(-1) - y
        squares = losses.weighted_mean(off.square(), weight)
        return {_SQUARE: squares, "mae": losses.weighted_mean(off.abs(), weight), "loss": loss}
    if task.kind == SURVIVAL:
        return {"loss": loss}
    scores = {"accuracy": task.score(outputs, y, weight), "loss": loss}
    if task.kind == CLASSES and y.dim() == 2:
        # Words: a network that says <unk> all the time should be found out.
        known = torch.where(batch.y == UNK, -1, batch.y)
        scores["accuracy_unk_wrong"] = losses.accuracy(outputs, known, weight)
    return scores


def _completed(marks: dict[str, dict[str, torch.Tensor]]) -> dict[str, dict[str, torch.Tensor]]:
    """Add what is no mean itself: perplexity, exp of the mean loss of words; roots of squares."""
    found = {}
    for name, seen in marks.items():
        if "accuracy_unk_wrong" in seen:
            seen = {**seen, "perplexity": seen["loss"].exp()}
        if _SQUARE in seen:
            rest = {metric: value for metric, value in seen.items() if metric != _SQUARE}
            seen = {"rmse": seen[_SQUARE].sqrt(), **rest}
        found[name] = seen
    return found
