"""Learning from each other's predictions: what FedMD, Sim-pFL, TopK-pFL and KT-pFL share.

Zhang et al., "Parameterized Knowledge Transfer for Personalized Federated Learning", NeurIPS 2021,
Algorithm 1. A client's network never leaves it: clients exchange soft predictions on the round's
public examples, and a server mixes them into a teacher for each client. The methods differ only in
the weights of that mixture.

The paper's round is: train, predict, (server mixes), distil. Turned by one step it needs a single
exchange: distil from the teacher of the round before, train, predict. Public examples are known by
the run's seed and the round, so nothing but predictions crosses the network.

With cohorts, the teachers of a round are mixed from the predictions of the cohort before, weights
renormalised over it; whoever comes next learns from them, whether it was in that cohort or not.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from idiolect.core import tree
from idiolect.core.capabilities import NewcomerMessage, NewcomerModel, StateTrace
from idiolect.core.client import Batch, Local
from idiolect.core.method import Method, Sent, Setup, setting
from idiolect.core.task import Task
from idiolect.core.tree import Params, Tree
from idiolect.errors import ConfigError

KT_PFL_BASELINE = {"gain": "code", "batch": 16, "epochs": 10, "first_epochs": 4, "lr": 0.02}
"""How the released code of KT-pFL trains what it is compared with, at temperature 1."""


class SoftReport(NamedTuple):
    """What a client uploads: predictions on the round's public examples, and its size."""

    prediction: Tensor  # [example, output]: of classes rows on the simplex
    size: Tensor


class TeacherState(NamedTuple):
    """What the server keeps: who learns from whom, and what each would be taught now."""

    affinity: Tensor  # [receiver, sender]
    teachers: Tensor  # [client, example, output]; zero where there is nothing to teach yet
    real: Tensor | tuple[()] = ()  # something where predictions are no shares of classes


@dataclass(frozen=True, kw_only=True)
class Distilled(NewcomerMessage, NewcomerModel, StateTrace, Method):
    """Train on private data, and towards a mixture of the others' predictions on public data."""

    public: ClassVar[str] = "clients"

    sample: int = setting(
        3000, "public examples of a round, the same for everyone (|D_r|); 0: all of them", least=0
    )
    public_batch: int = setting(256, "public examples in a step of distillation", least=1)
    distil_epochs: int = setting(1, "passes over the round's public examples (R)", least=1)
    distil_lr: float = setting(0.0, "learning rate of distillation (η₂); 0: the local one", least=0)
    temperature: float = setting(1.0, "temperature of the predictions (T)", above=0)
    gain: str = setting(
        "hinton",
        "factor of the distillation loss: T² (hinton), 1 (Eq. 6), 1 / classes (released code)",
        choices=("hinton", "paper", "code"),
    )
    labelled: bool = setting(False, "learn the labels of the public examples too")
    settle: bool = setting(
        False, "distil once more before use, as Algorithm 1 ends a round", deploy=True
    )
    first_epochs: int = setting(
        0,
        "local epochs of the second round, one more in each that follows up to `epochs`; the first "
        "has one (released code of KT-pFL); 0: `epochs` in every round",
        least=0,
    )
    newcomer_epochs: int = setting(20, "passes in which a newcomer trains", least=1, deploy=True)

    def init_server(self, setup: Setup) -> TeacherState:
        """Everyone with data counts alike; there is nothing to teach yet."""
        held = self._held(setup)
        count = setup.clients
        filled = (setup.sizes > 0).to(setup.sizes.dtype)
        affinity = (filled / filled.sum().clamp(min=1)).repeat(count, 1)
        teachers = setup.sizes.new_zeros(count, held, setup.classes)
        shares = setup.task.kind == "classes"
        return TeacherState(affinity, teachers, () if shares else setup.sizes.new_ones(()))

    def init_personal(self, setup: Setup) -> Params:
        """A client keeps a network of its own architecture."""
        return setup.params

    def send(self, state: TeacherState, cohort: Tensor) -> Sent:
        """Each client gets the predictions it should learn."""
        return Sent(own=state.teachers[cohort])

    def welcome(self, state: TeacherState, cohort: Tensor) -> Sent:
        """A newcomer is in nobody's mixture yet."""
        return Sent()

    def client_step(self, sent: Sent, personal: Params, local: Local) -> tuple[SoftReport, Params]:
        """Distil from the last teacher, train on private data, predict this round's examples."""
        trained = self.train(self.distil(sent.own, personal, local), local)
        return SoftReport(self.predictions(trained, local), local.size), trained

    def train(self, params: Params, local: Local) -> Params:
        """Train on private data: a round's epochs, or as many as this round has."""
        if not self.first_epochs:
            return self.fit(local, params)
        later = (self.first_epochs + local.round - 1).clamp(max=self.epochs)
        due = torch.where(local.round == 0, torch.ones_like(later), later)
        steps = due * (local.size / self.batch).ceil()
        optimiser = self.local_optimiser(local)

        def step(carry: Tree, batch: Batch) -> Tree:
            taken, *old = carry
            new = optimiser.step(old[0], local.gradient(local.loss, old[0], batch), old[1])
            return (taken + 1, *tree.where(taken < steps, tuple(new), tuple(old)))

        carry = (torch.zeros_like(local.size), params, optimiser.init(params))
        trained: Params = local.scan(step, carry, batch=self.batch, epochs=self.epochs)[1]
        return trained

    def distil(self, teacher: Tensor, params: Params, local: Local) -> Params:
        """Take steps towards a teacher [example, class] of the round before, if there is one."""

        def loss(params: Params, batch: Batch) -> Tensor:
            logits = local.logits(params, batch.x, batch.training, weight=batch.weight)
            soft = self.towards(local.task, logits, teacher[batch.place], batch.weight)
            if self.labelled:
                soft = soft + local.task.loss(logits, batch.y, batch.weight)
            return soft

        taught = local.fit(
            loss,
            params,
            self.local_optimiser(local, self.distil_lr or None),
            "public",
            batch=self.public_batch,
            epochs=self.distil_epochs,
            sample=self.sample,
            ago=1,
        )
        chosen: Params = tree.where((teacher != 0).any(), taught, params)
        return chosen

    def towards(self, task: Task, outputs: Tensor, target: Tensor, weight: Tensor) -> Tensor:
        """Return how far outputs are from what was taught; of numbers the squared error."""
        if not task.softens:
            return task.distil_from(outputs, target, weight)
        soft = task.distil_from(outputs / self.temperature, target, weight)
        return self._factor(outputs.shape[-1]) * soft

    def predictions(self, params: Params, local: Local) -> Tensor:
        """Predict this round's public examples at the temperature."""

        def soft(batch: Batch) -> Tensor:
            return local.task.soften(local.logits(params, batch.x), self.temperature)

        return local.rows(soft, "public", sample=self.sample)

    def server_step(self, state: TeacherState, cohort: Tensor, reports: SoftReport) -> TeacherState:
        """Learn who should learn from whom in the cohort; mix everyone's next teacher from it."""
        known = state.affinity[cohort][:, cohort]
        real = isinstance(state.real, Tensor)
        learned = self.learn(known, reports, len(cohort) / len(state.affinity), real)
        rows = state.affinity[cohort].index_copy(1, cohort, learned)
        affinity = state.affinity.index_copy(0, cohort, rows)
        weights = self.mix(affinity[:, cohort])
        teachers = torch.tensordot(weights, reports.prediction, dims=1)
        return TeacherState(affinity, teachers, state.real)

    def learn(self, known: Tensor, reports: SoftReport, share: float, real: bool = False) -> Tensor:
        """Return the cohort's new affinities [receiver, sender] from what it predicted.

        `share` is the cohort's part of all clients; predictions may be `real` numbers instead of
        shares of classes.
        """
        return known

    def mix(self, affinity: Tensor) -> Tensor:
        """Turn affinities to a cohort [client, sender] into weights; a row of zeros: no teacher."""
        return tree.shares(affinity)

    def deploy(self, sent: Sent, personal: Params, local: Local) -> Params:
        """Use the own network."""
        return self.distil(sent.own, personal, local) if self.settle else personal

    def adapt(self, sent: Sent, personal: Params, local: Local) -> Params:
        """Without a teacher, and perhaps without public examples, a newcomer trains alone.

        It starts from the initial network, so it needs what Local needs, not one round.
        """
        return self.fit(local, personal, lr=self.lr, epochs=self.newcomer_epochs)

    def models(self, sent: Sent, deployed: Params) -> dict[str, Tree]:
        """There are only the clients' own networks."""
        return {"personal": deployed} if deployed else {}

    def trace(self, state: TeacherState) -> dict[str, Tensor]:
        """Record who learns from whom: [receiver, sender], rows on the simplex."""
        return {"weights": self.mix(state.affinity)}

    def _factor(self, classes: int) -> float:
        return {"hinton": self.temperature**2, "paper": 1.0, "code": 1 / classes}[self.gain]

    @property
    def asks_labels(self) -> str:
        """Say which setting makes use of the public examples' labels, if one does."""
        return "labelled is true" if self.labelled else ""

    def _held(self, setup: Setup) -> int:
        """Return how many public examples a round has; refuse what the data cannot give."""
        owner = type(self).__name__
        if self.first_epochs and self.steps:
            raise ConfigError(
                f"{owner}: first_epochs is {self.first_epochs} and steps is {self.steps}: a round "
                "is counted in one or the other; leave one of them out"
            )
        if setup.public < max(1, self.sample):
            given = f"has {setup.public}" if setup.public else "is missing"
            raise ConfigError(
                f"{owner}: needs {self.sample or 'some'} public examples and data.public {given}; "
                "name a larger source there, or lower sample"
            )
        if (asking := self.asks_labels) and not setup.public_labels:
            raise ConfigError(
                f"{owner}: {asking}, but the public examples have other classes than the private "
                "ones; leave it out, or choose a public source of the same classes"
            )
        return self.sample or setup.public
