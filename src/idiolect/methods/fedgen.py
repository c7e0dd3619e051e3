"""FedGen: the server learns to generate features of each class, which clients train their head on.

Zhu, Hong, Zhou, "Data-Free Knowledge Distillation for Heterogeneous Federated Learning", ICML 2021,
Algorithm 1. Clients train the global model and report it with how many labels of each class they
have. The server averages the models as FedAvg does, and trains a generator G(z | y), from noise and
a class to what enters the head, until the received heads together recognise the class (Eq. 4).
In the next rounds clients add to their loss that of their own head on generated features, whose
classes are drawn as they were among the labels of the last cohort (Eq. 5); before the first report
all classes are drawn alike. The generator is one hidden layer with batch normalisation and ReLU; it
normalises by the batch at the server and at clients. Its optimiser is Adam, whose memory lasts from
round to round.

Eq. 4 takes the mean of the heads' logits. Weighed by examples, that is the logits of the averaged
head, which is used here: the same where the head is one linear layer, as it is unless a network
declares another. The server learns the numbers of labels by class of each client that reports, and
all hear their shares in the cohort. Personal is the global model. The paper's variant in which only
heads are shared is not here.

PFLlib (d832e76) draws labels from those of all clients, absent ones too, and uniform noise; with
new clients it stops, since it calls `set_parameters` with three arguments where two are taken.

Written from notes and PFLlib's code: the paper's text was not at hand to check equation numbers.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from idiolect.core import losses, optim
from idiolect.core.capabilities import ArchitectureState
from idiolect.core.client import Batch, Local
from idiolect.core.method import Method, Report, Sent, Setup, mean_report, setting
from idiolect.core.network import drawn_dense
from idiolect.core.tree import Params, Tree


class Taught(NamedTuple):
    """What the server keeps for an architecture: model, generator, its optimiser's memory."""

    params: Params
    generator: Params
    memory: Tree


class Counted(NamedTuple):
    """What a client reports: its model, its examples, and its labels by class."""

    params: Params
    size: Tensor
    classes: Tensor


@dataclass(frozen=True, kw_only=True)
class FedGen(ArchitectureState, Method):
    """FedAvg whose clients also train their head on features that the server generates."""

    title: ClassVar[str] = "FedGen"
    paper: ClassVar[str] = "Zhu et al. 2021, Algorithm 1"
    needs_classes: ClassVar[str] = "generated features"
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "pfllib": {
            **{"lr": 0.005, "batch": 10, "noise": 512, "hidden": 512},
            **{"generator_lr": 0.005, "generator_steps": 1000, "generated": 10},
        }
    }

    pull: float = setting(1.0, "weight of the loss on generated features", least=0)
    noise: int = setting(32, "numbers of noise that the generator is given", least=1, most=1 << 16)
    hidden: int = setting(256, "hidden units of the generator", least=1, most=1 << 16)
    generator_lr: float = setting(0.0003, "learning rate of the generator (Adam)", above=0)
    generator_steps: int = setting(50, "steps of the generator in a round", least=0)
    generated: int = setting(32, "generated features in a step", least=2, most=1 << 16)
    uniform: bool = setting(False, "weigh clients alike instead of by their examples")

    def init_server(self, setup: Setup) -> Tensor:
        """All classes are likely alike."""
        return setup.sizes.new_full((setup.classes,), 1 / setup.classes)

    def init_group(self, setup: Setup) -> Taught:
        """Draw the generator from the run's seed."""
        draw, like = torch.Generator().manual_seed(setup.seed), setup.sizes
        inside = drawn_dense(self.noise + setup.classes, self.hidden, draw, like)
        outside = drawn_dense(self.hidden, setup.features[-1], draw, like)
        generator = {
            **{f"inside.{name}": leaf for name, leaf in inside.items()},
            "norm.scale": like.new_ones(self.hidden),
            "norm.shift": like.new_zeros(self.hidden),
            **{f"outside.{name}": leaf for name, leaf in outside.items()},
        }
        return Taught(setup.params, generator, self._optimiser().init(generator))

    def send(self, state: Tensor, cohort: Tensor) -> Sent:
        """Send the shares of the classes; model and generator are those of the architecture."""
        return Sent(state)

    def client_step(self, sent: Sent, personal: Tree, local: Local) -> tuple[Counted, Tree]:
        """Train on the own examples and, the head, on generated features."""
        optimiser, params = self.local_optimiser(local), sent.group.params

        def step(carry: Any, batch: Batch) -> Any:
            params, memory = carry
            drawn = self._drawn(sent.shared, local)
            features = generated(sent.group.generator, drawn, len(sent.shared))

            def loss(params: Params, batch: Batch) -> Tensor:
                said = local.head(params, features)
                taught = losses.cross_entropy(said, drawn.y, drawn.weight)
                return local.loss(params, batch) + self.pull * taught

            return optimiser.step(params, local.gradient(loss, params, batch), memory)

        start = params, optimiser.init(params)
        trained, _ = local.scan(step, start, batch=self.batch, epochs=self.epochs, steps=self.steps)
        classes = local.class_shares(len(sent.shared)) * local.size
        return Counted(trained, local.size, classes), personal

    def read(self, report: Counted, local: Local) -> Tensor:
        """Look at the labels of a report."""
        return report.classes

    def server_step(self, state: Tensor, cohort: Tensor, reports: Tensor) -> Tensor:
        """Take the shares of the classes among the cohort's labels."""
        counts = reports.sum(0)
        total = counts.sum()
        return torch.where(total > 0, counts / total.clamp(min=1e-12), state)

    def group_step(self, group: Taught, reports: Counted) -> Taught:
        """Average the models of an architecture."""
        return group._replace(
            params=mean_report(Report(reports.params, reports.size), self.uniform)
        )

    def fuse(self, group: Taught, state: Tensor, local: Local) -> Taught:
        """Train the generator until the averaged head recognises the classes."""

        def loss(generator: Params, batch: Batch) -> Tensor:
            said = local.head(group.params, generated(generator, batch, len(state)))
            return losses.cross_entropy(said, batch.y, batch.weight)

        generator, memory = group.generator, group.memory
        for _ in range(self.generator_steps):
            gradient = local.gradient(loss, generator, self._drawn(state, local))
            generator, memory = self._optimiser().step(generator, gradient, memory)
        return Taught(group.params, generator, memory)

    def deploy(self, sent: Sent, personal: Tree, local: Local) -> Params:
        """Use the global model."""
        params: Params = sent.group.params
        return params

    def models(self, sent: Sent, deployed: Params) -> dict[str, Tree]:
        """The client's model, and the global one of its architecture."""
        return {"personal": deployed, "global": sent.group.params}

    def _optimiser(self) -> optim.Optimiser:
        return optim.adam(self.generator_lr)

    def _drawn(self, shares: Tensor, local: Local) -> Batch:
        """Draw what the generator is given: noise, and classes by their shares."""
        chance = local.random.uniform(self.generated).unsqueeze(1)
        classes = (chance >= shares.cumsum(0)[:-1]).sum(1)
        noise = local.random.normal((self.generated, self.noise))
        return Batch(noise, classes, torch.ones_like(chance[:, 0]), classes)


def generated(generator: Params, drawn: Batch, classes: int) -> Tensor:
    """Generate features of the drawn classes."""
    wanted = (drawn.y.unsqueeze(1) == torch.arange(classes, device=drawn.y.device)).to(drawn.x)
    given = torch.cat([drawn.x, wanted], 1)
    inside = given @ generator["inside.weight"].T + generator["inside.bias"]
    centred = inside - inside.mean(0)
    normal = centred * torch.rsqrt(centred.square().mean(0) + 1e-5)
    hidden = (normal * generator["norm.scale"] + generator["norm.shift"]).relu()
    made: Tensor = hidden @ generator["outside.weight"].T + generator["outside.bias"]
    return made
