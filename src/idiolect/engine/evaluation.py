"""Evaluation: every client's models, scored by the same task in a simulation and on a node."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import torch

from idiolect.core import capabilities, losses, tree
from idiolect.core.capabilities import FinalExchange, has
from idiolect.core.client import Batch, Local
from idiolect.core.method import Sent
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
from idiolect.engine.outcome import RIGHT
from idiolect.engine.server_update import Traffic
from idiolect.engine.simulation_state import SimulationState

GROUPS = 64  # of a client's test rows; results of runs with other numbers cannot be paired


class ClientScores(NamedTuple):
    """Scores of the clients of one run."""

    scores: dict[str, dict[str, np.ndarray]]  # model -> metric -> [client]
    facts: dict[str, np.ndarray]  # what the method tells of its choices, [client, ...]
    deployed: list[tuple[np.ndarray, Tree]]  # per architecture: clients, personal models; if kept
    exchange_sums: Sums = MappingProxyType({})  # of the final exchange, over all clients
    traffic: Traffic = Traffic(0, 0, 0)  # of that, and of hearing it


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
) -> list[ClientScores]:
    """Score every client's models on validation data, or on test and validation data both.

    `only_global` skips `deploy`, which may train; `keep` returns the personal models; clients
    that are `newcomers` adapt instead of deploying. `clients` of each run are scored, or all;
    some at a time, so that only what is kept of them takes room. `grouped` also counts right
    answers in groups of the test rows, which comparisons of few clients are paired by.

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
        grouped=grouped and test_data is not None and _one_class(runs[0].train_data.dataset),
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
        parts.append([_run_scores(run, results) for run in runs])
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


def _run_scores(
    run: int, results: Sequence[tuple[Sequence[ClientKey], Tree]]
) -> ClientScores | None:
    """Bring one run's results into the order of its clients; None where nobody was asked."""
    clients, parts, deployed = [], [], []
    for keys, found in results:
        mine = sorted((key.client, n) for n, key in enumerate(keys) if key.run == run)
        if not mine:
            continue
        scores, facts, kept = found
        clients += [client for client, _ in mine]
        rows = np.array([n for _, n in mine])
        parts.append(tree.map(lambda leaf, rows=rows: leaf.cpu().numpy()[rows], (scores, facts)))
        for first in tree.leaves(kept)[:1]:
            places = torch.from_numpy(rows).to(first.device)
            deployed.append((np.array([client for client, _ in mine]), tree.take(kept, places)))
    if not parts:
        return None
    order = np.argsort(clients)
    scores, facts = tree.map(lambda *leaves: np.concatenate(leaves)[order], *parts)
    return ClientScores(scores, facts, deployed)


def _joined(parts: Sequence[ClientScores | None]) -> ClientScores:
    """Concatenate the scores of parts of the clients."""
    some = [part for part in parts if part is not None]
    if len(some) < 2:
        return some[0] if some else ClientScores({}, {}, [])
    scores, facts = tree.map(
        lambda *leaves: np.concatenate(leaves), *[(part.scores, part.facts) for part in some]
    )
    return ClientScores(scores, facts, _deployed(some))


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
    return first._replace(scores=scores, facts=laid(first.facts, second.facts), deployed=kept)


def _both(
    left: np.ndarray | None, right: np.ndarray | None, counts: tuple[int, int]
) -> list[np.ndarray]:
    """Fill in NaN for whichever of the two is missing."""
    form = (left if left is not None else np.empty(0) if right is None else right).shape[1:]
    pairs = zip((left, right), counts, strict=True)
    return [np.full((count, *form), np.nan) if one is None else one for one, count in pairs]


@dataclass(frozen=True)
class ScoreTask(ClientTask):
    """Scores a client's models on test rows; returns scores, facts and the personal model.

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
            **dict.fromkeys(self.measured, True),
        }
        return " ".join(word for word, chosen in words.items() if chosen)

    def __call__(self, sent: Sent, personal: Tree, local: Local, test: Local) -> Tree:
        """Deploy and score."""
        method = self.method
        handed: ExchangeInput = sent.own if self.hears else ExchangeInput(sent.own, {}, ())
        sent = sent._replace(own=handed.own)
        deployed = handed.deployed
        if not (self.only_global or tree.leaves(deployed)):
            settle = partial(capabilities.adapt, method) if self.newcomers else method.deploy
            deployed = settle(sent, personal, local)
        if self.hears:
            deployed = heard(method, deployed, handed.others, local)
        models = method.models(sent, deployed)
        if self.only_global:
            models = {name: model for name, model in models.items() if name == "global"}

        def score(batch: Batch) -> Tree:
            said = capabilities.predict_all(method, models, batch.x, local)
            return {name: _scores(logits, batch, local.task) for name, logits in said.items()}

        marks = _completed(test.mean(score, "test"))
        if self.grouped:
            for name, groups in right_by_group(
                lambda batch: capabilities.predict_all(method, models, batch.x, local), test
            ).items():
                marks[name][RIGHT] = groups
        if self.beside:  # what a choice between methods may look at
            for name, seen in _completed(local.mean(score, "val")).items():
                marks[name] |= {f"val_{metric}": value for metric, value in seen.items()}
        if "marked" in self.measured:
            for name, seen in test.mean(score, "marked").items():
                marks[name]["attack_success"] = seen["accuracy"]
        if "common" in self.measured:
            weighed = weighed_by_class(
                lambda batch: capabilities.predict_all(method, models, batch.x, local), local, test
            )
            for name, accuracy in weighed.items():
                marks[name]["common_accuracy"] = accuracy
        facts = {} if self.only_global else capabilities.facts(method, deployed)
        return marks, facts, models["personal"] if self.keep else ()


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


def _scores(logits: torch.Tensor, batch: Batch, task: Task) -> dict[str, torch.Tensor]:
    scores = {
        "accuracy": task.score(logits, batch.y, batch.weight),
        "loss": task.loss(logits, batch.y, batch.weight),
    }
    if (
        task.kind == "classes" and batch.y.dim() == 2
    ):  # words: a network that says <unk> all the time should be found out
        known = torch.where(batch.y == UNK, -1, batch.y)
        scores["accuracy_unk_wrong"] = losses.accuracy(logits, known, batch.weight)
    return scores


def _one_class(dataset: Dataset) -> bool:
    """Say whether an example has one label, a class, so that answers are right or wrong."""
    return dataset.task.kind == "classes" and not dataset.sequential


def _completed(marks: dict[str, dict[str, torch.Tensor]]) -> dict[str, dict[str, torch.Tensor]]:
    """Add what is no mean itself: the perplexity of next-word models, exp of the mean loss."""
    return {
        name: {**seen, "perplexity": seen["loss"].exp()} if "accuracy_unk_wrong" in seen else seen
        for name, seen in marks.items()
    }
