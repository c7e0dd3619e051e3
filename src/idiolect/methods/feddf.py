"""FedDF and pFedDF: the server averages clients of equal networks, then lets all teach each.

Lin et al., "Ensemble Distillation for Robust Model Fusion in Federated Learning", NeurIPS 2020,
Algorithms 1 and 3. Parameters are averaged within an architecture; then each average learns, on
unlabelled public examples that the server holds, the softmax of the mean logits of all received
models, whatever their architecture. The authors stop on a validation set of the server's own; here
it is a number of passes over the round's public examples.

pFedDF (Zhang et al. 2021, footnote 2): the last fused model of its architecture, fine-tuned by
every client on its own data.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from idiolect import losses, optim
from idiolect.errors import ConfigError
from idiolect.local import Batch, Local
from idiolect.method import Method, Report, Sent, Setup, mean_report, setting
from idiolect.tree import Params, Tree


@dataclass(frozen=True, kw_only=True)
class FedDF(Method):
    """FedAvg within each architecture; on the server every average learns from all models."""

    title: ClassVar[str] = "FedDF"
    paper: ClassVar[str] = "Lin et al. 2020, Algorithm 3"
    public: ClassVar[str] = "server"
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "code": {"lr": 0.1, "batch": 64, "epochs": 40, "public_batch": 128}
    }

    sample: int = setting(3000, "public examples of a round; 0: all of them", least=0)
    public_batch: int = setting(256, "public examples in a step of the server", least=1)
    fuse_epochs: int = setting(1, "passes of the server over the round's public examples", least=1)
    fuse_lr: float = setting(0.001, "learning rate of the server", above=0)
    fuse_optimiser: str = setting("adam", "optimiser of the server", choices=("adam", "sgd"))
    temperature: float = setting(1.0, "temperature of teacher and student", above=0)
    uniform: bool = setting(False, "weigh clients alike instead of by their examples")

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
        target = (state / self.temperature).softmax(-1)

        def loss(params: Params, batch: Batch) -> Tensor:
            logits = local.logits(params, batch.x, batch.training, weight=batch.weight)
            soft = losses.divergence_from(
                logits / self.temperature, target[batch.place], batch.weight
            )
            return self.temperature**2 * soft

        rule = optim.adam if self.fuse_optimiser == "adam" else optim.sgd
        return local.fit(
            loss,
            group,
            rule(self.fuse_lr),
            "public",
            batch=self.public_batch,
            epochs=self.fuse_epochs,
            sample=self.sample,
        )

    def deploy(self, sent: Sent, personal: Tree, local: Local) -> Params:
        """Use the fused model."""
        fused: Params = sent.group
        return fused

    def models(self, sent: Sent, deployed: Params) -> dict[str, Tree]:
        """The client's model, and the fused one of its architecture."""
        return {"personal": deployed, "global": sent.group}


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
        rule = self.rule(local, self.tune_lr)
        return local.fit(local.loss, sent.group, rule, batch=self.batch, epochs=self.tune_epochs)
