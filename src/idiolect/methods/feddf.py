"""FedDF and pFedDF: the server averages clients of equal networks, then lets all teach each.

Lin et al., "Ensemble Distillation for Robust Model Fusion in Federated Learning", NeurIPS 2020,
Algorithms 1 and 3. Parameters are averaged within an architecture; then each average learns, on
unlabelled public examples that the server holds, the softmax of the mean logits of all received
models, whatever their architecture. By default that is a number of passes over the round's public
examples, as in KT-pFL's comparison. The preset `code` is the authors': up to 10,000 steps of Adam
on all public examples, its rate falling along a cosine, until 1,000 steps have gained nothing. They
look at the accuracy on labelled examples of the server's own every 100 steps; a server here has
none, and looks at the distillation loss on a tenth of the public examples, held out for that. Where
models of several runs are fused at once, a run that has stopped waits for the others.

pFedDF (Zhang et al. 2021, footnote 2): the last fused model of its architecture, fine-tuned by
every client on its own data.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from idiolect.core import optim, tree
from idiolect.core.capabilities import ArchitectureState
from idiolect.core.client import Batch, Local
from idiolect.core.method import Method, Report, Sent, Setup, mean_report, setting
from idiolect.core.tree import Params, Tree
from idiolect.errors import ConfigError

_CHECKED = 100  # steps from one look at what is held out to the next


class Fusing(NamedTuple):
    """How far the server's training of one model has come."""

    params: Params
    memory: Tree
    taken: Tensor


@dataclass(frozen=True, kw_only=True)
class FedDF(ArchitectureState, Method):
    """FedAvg within each architecture; on the server every average learns from all models."""

    title: ClassVar[str] = "FedDF"
    paper: ClassVar[str] = "Lin et al. 2020, Algorithm 3"
    public: ClassVar[str] = "server"
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "code": {
            "lr": 0.1,
            "batch": 64,
            "epochs": 40,
            "public_batch": 128,
            "sample": 0,
            "fuse_steps": 10_000,
            "fuse_schedule": "cosine",
            "patience": 1000,
        }
    }

    sample: int = setting(3000, "public examples of a round; 0: all of them", least=0)
    public_batch: int = setting(256, "public examples in a step of the server", least=1)
    fuse_epochs: int = setting(1, "passes of the server over the round's public examples", least=1)
    fuse_steps: int = setting(0, "steps of the server instead of passes; 0: use passes", least=0)
    fuse_schedule: str = setting(
        "constant", "how its rate changes over fuse_steps", choices=("constant", "cosine")
    )
    patience: int = setting(
        0, "steps without gain on held-out public examples that end it; 0: take all", least=0
    )
    fuse_lr: float = setting(0.001, "learning rate of the server", above=0)
    fuse_optimiser: str = setting("adam", "optimiser of the server", choices=("adam", "sgd"))
    temperature: float = setting(1.0, "temperature of teacher and student", above=0)
    uniform: bool = setting(False, "weigh clients alike instead of by their examples")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.fuse_steps and (self.patience or self.fuse_schedule != "constant"):
            raise ConfigError(
                f"{type(self).__name__}: patience and fuse_schedule are of a number of steps; set "
                "fuse_steps too, or leave them out"
            )

    def init_server(self, setup: Setup) -> Tensor:
        """The mean logits of all models on the round's public examples."""
        if setup.public < max(1, self.sample):
            raise ConfigError(
                f"{type(self).__name__}: needs {self.sample or 'some'} public examples on the "
                f"server and data.public has {setup.public}; name a larger source there, or lower "
                "sample"
            )
        return setup.sizes.new_zeros(self.sample or setup.public, setup.classes)

    def init_group(self, setup: Setup) -> Params:
        """One model for each architecture."""
        return setup.params

    def send(self, state: Tensor, cohort: Tensor) -> Sent:
        """Nothing but the model of the client's architecture."""
        return Sent()

    def client_step(self, sent: Sent, personal: Tree, local: Local) -> tuple[Report, Tree]:
        """Train the fused model on private data."""
        return Report(self.fit(local, sent.group), local.size), personal

    def read(self, report: Report, local: Local) -> Tensor:
        """See what a received model says of the round's public examples."""

        def raw(batch: Batch) -> Tensor:
            return local.logits(report.params, batch.x)

        return local.rows(raw, "public", sample=self.sample)

    def server_step(self, state: Tensor, cohort: Tensor, reports: Tensor) -> Tensor:
        """Average what all models say."""
        return reports.mean(0)

    def group_step(self, group: Params, reports: Report) -> Params:
        """Average the models of an architecture."""
        return mean_report(reports, self.uniform)

    def fuse(self, group: Params, state: Tensor, local: Local) -> Params:
        """Let an average learn what all models say together."""
        target = local.task.soften(state, self.temperature)
        held = max(1, len(target) // 10) if self.patience else 0
        inside = len(target) - held
        optimiser = optim.adam if self.fuse_optimiser == "adam" else optim.sgd
        falls = self.fuse_schedule == "cosine"

        def apart(logits: Tensor, target: Tensor, weight: Tensor) -> Tensor:
            if not local.task.softens:
                return local.task.distil_from(logits, target, weight)
            soft = local.task.distil_from(logits / self.temperature, target, weight)
            return self.temperature**2 * soft

        def loss(params: Params, batch: Batch) -> Tensor:
            weight = batch.weight
            if held and batch.place is not None:
                weight = weight * (batch.place < inside)
            logits = local.logits(params, batch.x, batch.training, weight=weight)
            return apart(logits, target[batch.place], weight)

        def step(carry: Fusing, batch: Batch) -> Fusing:
            rate: float | Tensor = self.fuse_lr
            if falls:
                rate = rate * optim.cosine(self.fuse_steps)(carry.taken)
            gradient = local.gradient(loss, carry.params, batch)
            params, memory = optimiser(rate).step(carry.params, gradient, carry.memory)
            return Fusing(params, memory, carry.taken + 1)

        def fold(carry: Fusing, steps: int) -> Fusing:
            folded: Fusing = local.scan(
                step,
                carry,
                "public",
                batch=self.public_batch,
                epochs=self.fuse_epochs,
                steps=steps,
                sample=self.sample,
            )
            return folded

        def mistaken(params: Params) -> Tensor:
            """The loss on what is held out."""

            def raw(batch: Batch) -> Tensor:
                return local.logits(params, batch.x)

            said = local.rows(raw, "public", sample=self.sample)[inside:]
            return apart(said, target[inside:], torch.ones_like(said[:, 0]))

        memory = optimiser(self.fuse_lr).init(group)
        now = Fusing(group, memory, local.size.new_zeros(()))
        if not self.patience:
            return fold(now, self.fuse_steps).params
        least, waited = mistaken(group), local.size.new_zeros(())
        for done in range(0, self.fuse_steps, _CHECKED):
            steps = min(_CHECKED, self.fuse_steps - done)
            going = waited < self.patience
            if _surely_not(going):
                break
            now = tree.where(going, fold(now, steps), now)
            lost = mistaken(now.params)
            waited = torch.where(lost < least, 0.0, waited + steps)
            least = torch.minimum(lost, least)
        return now.params

    def deploy(self, sent: Sent, personal: Tree, local: Local) -> Params:
        """Use the fused model."""
        fused: Params = sent.group
        return fused

    def models(self, sent: Sent, deployed: Params) -> dict[str, Tree]:
        """The client's model, and the fused one of its architecture."""
        return {"personal": deployed, "global": sent.group}


def _surely_not(going: Tensor) -> bool:
    """Say whether it is known here that nothing goes on: not in a graph, nor for many at once."""
    if going.is_cuda:
        return False
    try:
        return not bool(going)
    except RuntimeError:  # under vmap there is no single answer
        return False


@dataclass(frozen=True, kw_only=True)
class PFedDF(FedDF):
    """FedDF, then local training of the fused model at every client."""

    title: ClassVar[str] = "pFedDF"
    paper: ClassVar[str] = "Zhang et al. 2021, footnote 2"
    trained_as: ClassVar[type[Method] | None] = FedDF
    tunes: ClassVar[bool] = True

    tune_epochs: int = setting(
        20, "passes over the client's data after training", least=1, deploy=True
    )
    tune_lr: float = setting(0.01, "learning rate of the fine-tuning", above=0, deploy=True)

    def deploy(self, sent: Sent, personal: Tree, local: Local) -> Params:
        """Fine-tune the fused model."""
        return self.fit(local, sent.group, lr=self.tune_lr, epochs=self.tune_epochs)
