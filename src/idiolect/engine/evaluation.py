"""How one client's models are scored: the same function in a simulated block and on a node."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import torch

from idiolect.core import capabilities, losses, tree
from idiolect.core.client import Batch, Local
from idiolect.core.method import Sent
from idiolect.core.tree import Tree
from idiolect.data.text import UNK
from idiolect.engine.client_group import ClientKey, ClientTask
from idiolect.engine.final_exchange import ExchangeInput, Sums, heard
from idiolect.engine.server_update import Traffic

GROUPS = 64  # of a client's test rows; results of runs with other numbers cannot be paired
RIGHT = "right_by_group"  # see `results.outcome`


class ClientScores(NamedTuple):
    """Scores of the clients of one run."""

    scores: dict[str, dict[str, np.ndarray]]  # model -> metric -> [client]
    facts: dict[str, np.ndarray]  # what the method tells of its choices, [client, ...]
    deployed: list[tuple[np.ndarray, Tree]]  # per architecture: clients, personal models; if kept
    told: Sums = MappingProxyType({})  # what all clients told, added up, where they tell something
    traffic: Traffic = Traffic(0, 0, 0)  # of that, and of hearing it


def run_scores(
    run: int, results: Sequence[tuple[Sequence[ClientKey], Tree]]
) -> ClientScores | None:
    """Bring one run's results into the order of its clients; None where nobody was called."""
    clients, parts, deployed = [], [], []
    for seats, found in results:
        mine = sorted((seat.client, n) for n, seat in enumerate(seats) if seat.run == run)
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


def joined(parts: Sequence[ClientScores | None]) -> ClientScores:
    """Lay the verdicts on groups of clients one behind the other."""
    some = [part for part in parts if part is not None]
    if not some:
        return ClientScores({}, {}, [])
    if len(some) == 1:
        return some[0]
    scores, facts = tree.map(
        lambda *leaves: np.concatenate(leaves), *[(part.scores, part.facts) for part in some]
    )
    return ClientScores(scores, facts, _kept(some))


def _kept(parts: Sequence[ClientScores]) -> list[tuple[np.ndarray, Tree]]:
    """Lay kept models of equal architecture one behind the other."""
    held: dict[tuple[str, ...], list[tuple[np.ndarray, Tree]]] = {}
    for clients, kept in (own for part in parts for own in part.deployed):
        # A group may lack an architecture altogether; one is known again by what it deploys.
        form = tuple(f"{name} {tuple(leaf.shape[1:])}" for name, leaf in tree.named(kept).items())
        held.setdefault(form, []).append((clients, kept))
    return [
        (np.concatenate([clients for clients, _ in own]), tree.concat([kept for _, kept in own]))
        for own in held.values()
    ]


def mixed(
    took_part: tuple[np.ndarray, ClientScores], never: tuple[np.ndarray, ClientScores]
) -> ClientScores:
    """Bring verdicts on clients that took part and on those that never did into one order.

    A model or a fact that only one of them has is NaN for the clients of the other.
    """
    if not len(took_part[0]) or not len(never[0]):
        return (took_part if len(took_part[0]) else never)[1]
    order = np.argsort(np.concatenate([took_part[0], never[0]]))
    (_, first), (_, second) = took_part, never
    models = list(dict.fromkeys([*first.scores, *second.scores]))
    counts = len(took_part[0]), len(never[0])

    def laid(left: dict[str, np.ndarray], right: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {
            name: np.concatenate(_both(left.get(name), right.get(name), counts))[order]
            for name in dict.fromkeys([*left, *right])
        }

    scores = {
        name: laid(first.scores.get(name, {}), second.scores.get(name, {})) for name in models
    }
    kept = _kept([first, second])
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
    """Scores a client's models on its exam; returns marks, facts and the personal model.

    `beside` adds scores on validation data; `measured` names what else the exam holds: a test set
    `common` to all, rows that a backdoor `marked`; `only_global` skips `deploy`, which may train;
    `keep` returns the personal model; clients that are `newcomers` adapt instead of deploying;
    whoever `hears` is handed what the others told.
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
        """Name what is done, so that works of one kind are planned alike."""
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

    def __call__(self, sent: Sent, personal: Tree, local: Local, exam: Local) -> Tree:
        """Settle what the client would use, and score it."""
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
            return {name: _scores(logits, batch) for name, logits in said.items()}

        marks = _completed(exam.mean(score, "exam"))
        if self.grouped:
            for name, groups in right_by_group(
                lambda batch: capabilities.predict_all(method, models, batch.x, local), exam
            ).items():
                marks[name][RIGHT] = groups
        if self.beside:  # what a choice between methods may look at
            for name, seen in _completed(local.mean(score, "val")).items():
                marks[name] |= {f"val_{metric}": value for metric, value in seen.items()}
        if "marked" in self.measured:
            for name, seen in exam.mean(score, "marked").items():
                marks[name]["attack_success"] = seen["accuracy"]
        if "common" in self.measured:
            weighed = weighed_by_class(
                lambda batch: capabilities.predict_all(method, models, batch.x, local), local, exam
            )
            for name, accuracy in weighed.items():
                marks[name]["common_accuracy"] = accuracy
        facts = {} if self.only_global else capabilities.facts(method, deployed)
        return marks, facts, models["personal"] if self.keep else ()


def right_by_group(
    predict: Callable[[Batch], dict[str, torch.Tensor]], exam: Local
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

    rows = exam.rows(right, "exam")  # [row, model]
    filled = torch.nn.functional.pad(rows, (0, 0, 0, -len(rows) % GROUPS))
    counts = filled.reshape(-1, GROUPS, rows.shape[-1]).sum(0)
    return {name: counts[:, place] for place, name in enumerate(names)}


def weighed_by_class(
    predict: Callable[[Batch], dict[str, torch.Tensor]], local: Local, exam: Local
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

    rights = exam.mean(right, "common")
    classes = next(iter(rights.values()))[0].shape[-1]
    shares = local.mean(
        lambda batch: by_class(batch, torch.ones_like(batch.weight), classes), "train"
    )
    return {
        # A class that the common test set lacks says nothing: the others share its weight.
        name: (shares * (good / of).nan_to_num()).sum() / (shares * (of > 0)).sum()
        for name, (good, of) in rights.items()
    }


def _scores(logits: torch.Tensor, batch: Batch) -> dict[str, torch.Tensor]:
    scores = {
        "accuracy": losses.accuracy(logits, batch.y, batch.weight),
        "loss": losses.cross_entropy(logits, batch.y, batch.weight),
    }
    if batch.y.dim() == 2:  # words: a network that says <unk> all the time should be found out
        known = torch.where(batch.y == UNK, -1, batch.y)
        scores["accuracy_unk_wrong"] = losses.accuracy(logits, known, batch.weight)
    return scores


def _completed(marks: dict[str, dict[str, torch.Tensor]]) -> dict[str, dict[str, torch.Tensor]]:
    """Add what is no mean itself: the perplexity of next-word models, exp of the mean loss."""
    return {
        name: {**seen, "perplexity": seen["loss"].exp()} if "accuracy_unk_wrong" in seen else seen
        for name, seen in marks.items()
    }
