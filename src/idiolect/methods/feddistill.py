"""FedDistill (FD): clients share the mean output of each class, and no parameters.

Jeong et al., "Communication-Efficient On-Device Machine Learning: Federated Distillation and
Augmentation under Non-IID Private Data", 2018, Algorithm 1 (FD; the augmentation by a generator is
not here). While a client trains, it averages its outputs by class, softmax first; that is all it
uploads. The server sends each client the mean of the others' averages, clients alike, itself left
out; the client adds γ times the cross-entropy to the average of each example's class. Nothing is
added for a class that nobody else has. The outputs are of the model before each step, in evaluation
mode, which for a network without dropout or batch normalisation is the same as in training.

The server keeps each client's last averages, so that those of absent clients go on teaching; in
the paper all take part. It sees every client's averages by themselves, and so which classes it has.
Networks may differ. A newcomer trains a network of its own towards the mean of all clients.

`average = "logits"` averages before the softmax, as in the released code of FedGen, which has FD as
a baseline. PFLlib averages logits too, of the last cohort, leaves nobody out, and has had three
losses: the squared error of logits (`distance = "squared"`) until April 2024, thus when its table
was printed; then the cross-entropy to the softmax of the mean; since d832e76 of November 2025 the
mean logits themselves are the target of the cross-entropy, which are no shares: an error that is
not in a setting here. FedGen's code divides each sum by one more than its examples, and adds up
over all rounds since the first.

Written from notes and others' code: the paper's text was not at hand to check equation numbers, or
for its rates and γ.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from idiolect.core import losses, tree
from idiolect.core.capabilities import NewcomerMessage, NewcomerModel
from idiolect.core.client import Batch, Local
from idiolect.core.method import Method, Sent, Setup, setting
from idiolect.core.tree import Params, Tree


class ClassMeans(NamedTuple):
    """Mean outputs by class: a client's report, a row of the server's state, or a teacher."""

    outputs: Tensor  # [class, output]
    known: Tensor  # [class] 1 where there is an example of the class behind it


class Collected(NamedTuple):
    """What a client carries from step to step."""

    params: Params
    memory: Tree
    outputs: Tensor  # [class, output] sums over the examples so far
    examples: Tensor  # [class]


@dataclass(frozen=True, kw_only=True)
class FedDistill(NewcomerMessage, NewcomerModel, Method):
    """Clients learn from the mean outputs that the others have for each class."""

    title: ClassVar[str] = "FedDistill"
    needs_classes: ClassVar[str] = "a mean output"
    paper: ClassVar[str] = "Jeong et al. 2018, Algorithm 1"
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "pfllib": {
            "lr": 0.005,
            "batch": 10,
            "average": "logits",
            "distance": "squared",
            "leave_out": False,
        }
    }

    pull: float = setting(1.0, "weight of the distance to the mean outputs (γ)", least=0)
    average: str = setting(
        "shares", "what is averaged: outputs after the softmax, or logits before it",
        choices=("shares", "logits"),
    )  # fmt: skip
    distance: str = setting(
        "entropy", "distance to the mean: cross-entropy, or squared error of what is averaged",
        choices=("entropy", "squared"),
    )  # fmt: skip
    leave_out: bool = setting(True, "leave a client's own outputs out of what it learns from")
    newcomer_epochs: int = setting(20, "passes in which a newcomer trains", least=1, deploy=True)

    def init_server(self, setup: Setup) -> ClassMeans:
        """Nobody has reported: [client, class, output] and [client, class]."""
        known = setup.sizes.new_zeros(setup.clients, setup.classes)
        return ClassMeans(known.unsqueeze(-1).repeat(1, 1, setup.classes), known)

    def init_personal(self, setup: Setup) -> Params:
        """Each client has a network of its own, which it never sends."""
        return setup.params

    def send(self, state: ClassMeans, cohort: Tensor) -> Sent:
        """Send each client the mean of the others."""
        counted = torch.ones(len(cohort), len(state.known)).to(state.known)
        if self.leave_out:
            counted = counted.scatter(1, cohort.unsqueeze(1), 0.0)
        return Sent(own=_mean(state, counted))

    def welcome(self, state: ClassMeans, cohort: Tensor) -> Sent:
        """Send newcomers the mean of all clients."""
        return Sent(own=_mean(state, torch.ones(len(cohort), len(state.known)).to(state.known)))

    def client_step(self, sent: Sent, personal: Params, local: Local) -> tuple[ClassMeans, Params]:
        """Train towards the mean outputs; report those of the examples on the way."""
        optimiser = self.local_optimiser(local)
        loss = partial(self._loss, local, sent.own)

        def step(now: Collected, batch: Batch) -> Collected:
            found = self._averaged(local.logits(now.params, batch.x)).flatten(0, -2)
            member = losses.by_class(batch.y, batch.weight, len(now.examples))
            gradient = local.gradient(loss, now.params, batch)
            return Collected(
                *optimiser.step(now.params, gradient, now.memory),
                now.outputs + member.T @ found,
                now.examples + member.sum(0),
            )

        nothing = tree.zeros_like(sent.own)
        start = Collected(personal, optimiser.init(personal), nothing.outputs, nothing.known)
        end: Collected = local.scan(
            step, start, batch=self.batch, epochs=self.epochs, steps=self.steps
        )
        means = end.outputs / end.examples.clamp(min=1e-12).unsqueeze(-1)
        return ClassMeans(means, (end.examples > 0).to(means.dtype)), end.params

    def server_step(self, state: ClassMeans, cohort: Tensor, reports: ClassMeans) -> ClassMeans:
        """Take the cohort's averages in."""
        taken: ClassMeans = tree.put(state, cohort, reports)
        return taken

    def deploy(self, sent: Sent, personal: Params, local: Local) -> Params:
        """Use the own network."""
        return personal

    def adapt(self, sent: Sent, personal: Params, local: Local) -> Params:
        """A newcomer trains its network towards the mean outputs."""
        loss = partial(self._loss, local, sent.own)
        return self.fit(local, personal, loss, lr=self.lr, epochs=self.newcomer_epochs)

    def models(self, sent: Sent, deployed: Params) -> dict[str, Tree]:
        """There are only the clients' own networks."""
        return {"personal": deployed} if deployed else {}

    def _averaged(self, logits: Tensor) -> Tensor:
        return losses.log_shares(logits).exp() if self.average == "shares" else logits

    def _loss(self, local: Local, teacher: ClassMeans, params: Params, batch: Batch) -> Tensor:
        logits = local.logits(params, batch.x, batch.training, weight=batch.weight)
        target, known = teacher.outputs[batch.y], teacher.known[batch.y]
        if self.distance == "squared":
            off = (self._averaged(logits) - target).square().mean(-1)
        else:
            shares = target if self.average == "shares" else target.softmax(-1)
            off = -(shares * losses.log_shares(logits)).sum(-1)
        pull = self.pull * losses.weighted_mean(off * known, batch.weight)
        return local.task.loss(logits, batch.y, batch.weight) + pull


def _mean(state: ClassMeans, counted: Tensor) -> ClassMeans:
    """Average the rows that count [receiver, client], class by class over those who have it."""
    clients = counted @ state.known
    sums = torch.einsum("rc,ck,cko->rko", counted, state.known, state.outputs)
    return ClassMeans(sums / clients.clamp(min=1).unsqueeze(-1), (clients > 0).to(sums.dtype))
