"""FedCP: a small network decides, feature by feature, what goes to a global and a personal head.

Zhang et al., "FedCP: Separating Feature Information for Personalized Federated Learning via
Conditional Policy", KDD 2023, Algorithm 1. The features h of an example, times the unit vector v of
the sum of the personal head's class weights, enter the policy network (dense, layer norm, ReLU);
of the two numbers it gives for each feature a softmax makes shares r and 1 − r. The personal head
takes r ⊙ h, the global head (1 − r) ⊙ h, and their logits are added. The client trains body,
personal head and policy, while the global head and a copy of the global body stand still; λ times
the MMD² of its features to that copy's keeps them alike (the released code's Gaussian kernels of
widths 10, 15, 20 and 50). The server averages, by examples, bodies, policies, and the means of each
client's personal and global head; the personal head stays. v is the gradient of the sum of a head's
logits in the features, so that any head will do; it is that of the head before the round.

The released code draws the shares by a Gumbel softmax, in evaluation too, so that its predictions
are random; the paper has none, nor have we. A newcomer trains a head, from the global one, with the
rest fixed.

Written from notes and released code: the paper's text was not at hand to check equation numbers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.func import grad
from torch.nn import functional

from idiolect.core import tree
from idiolect.core.capabilities import NewcomerModel
from idiolect.core.client import Batch, Local
from idiolect.core.method import Report, Sent, Setup, setting
from idiolect.core.network import drawn_dense
from idiolect.core.tree import Params, Tree
from idiolect.methods.fedavg import FedAvg

POLICY = "policy."  # before the names of the policy's parameters
WIDTHS = (10.0, 15.0, 20.0, 50.0)


class Separated(NamedTuple):
    """What a client uses: what is shared (network and policy), and its own head."""

    params: Params
    head: Params


@dataclass(frozen=True, kw_only=True)
class FedCP(NewcomerModel, FedAvg):
    """A shared policy parts each example's features between a global and a personal head."""

    title: ClassVar[str] = "FedCP"
    paper: ClassVar[str] = "Zhang et al. 2023 (FedCP), Algorithm 1"
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "paper": {"lr": 0.005, "batch": 10, "align": 5.0}
    }

    head_layers: int = setting(1, "how many last layers the personal head has", least=1)
    align: float = setting(5.0, "weight of the distance to the global features (λ)", least=0)
    newcomer_epochs: int = setting(
        10, "passes in which a newcomer trains its head", least=1, deploy=True
    )

    def init_server(self, setup: Setup) -> Params:
        """Draw the policy from the run's seed."""
        draw, width = torch.Generator().manual_seed(setup.seed), setup.features[-1]
        dense = drawn_dense(width, 2 * width, draw, setup.sizes)
        norm = {"scale": torch.ones_like(dense["bias"]), "shift": torch.zeros_like(dense["bias"])}
        return {**setup.params, **{POLICY + name: leaf for name, leaf in (dense | norm).items()}}

    def init_personal(self, setup: Setup) -> Params:
        """A client holds a head."""
        return tree.split_layers(setup.params, self.head_layers)[1]

    def client_step(self, sent: Sent, personal: Params, local: Local) -> tuple[Report, Params]:
        """Train body, personal head and policy; report the mean of both heads."""
        received = _network(sent.shared)
        start, still = {**received, **personal}, {name: received[name] for name in personal}

        def loss(params: Params, batch: Batch) -> Tensor:
            given: dict[str, Any] = {"training": batch.training, "weight": batch.weight}
            network = _network(params)
            features = local.features(network, batch.x, **given)
            before = local.features(received, batch.x)
            mine, rest = separate(params, _context(start, features, local), features)
            logits = local.head(network, mine, **given)
            logits = logits + local.head({**network, **still}, rest, **given)
            wanted = local.task.loss(logits, batch.y, batch.weight)
            return wanted + self.align * discrepancy(features, before, batch.weight)

        trained = self.fit(local, {**sent.shared, **personal}, loss)
        head = {name: trained[name] for name in personal}
        upload = {name: (leaf + sent.shared[name]) / 2 for name, leaf in head.items()}
        return Report({**trained, **upload}, local.size), head

    def deploy(self, sent: Sent, personal: Params, local: Local) -> Separated:
        """Put the own head beside what is shared."""
        return Separated(sent.shared, personal)

    def adapt(self, sent: Sent, personal: Params, local: Local) -> Separated:
        """A newcomer trains a head, from the global one."""

        def loss(head: Params, batch: Batch) -> Tensor:
            logits = self.predict(Separated(sent.shared, head), batch.x, local)
            return local.task.loss(logits, batch.y, batch.weight)

        start = {name: sent.shared[name] for name in personal}
        head = self.fit(local, start, loss, lr=self.lr, epochs=self.newcomer_epochs)
        return Separated(sent.shared, head)

    def models(self, sent: Sent, deployed: Separated) -> dict[str, Tree]:
        """The global head was never trained alone: there is no global model."""
        return {"personal": deployed} if deployed else {}

    def predict(self, model: Separated, x: Tensor, local: Local) -> Tensor:
        """Add the outputs of both heads, each on its part of the features."""
        network = _network(model.params)
        own = {**network, **model.head}
        features = local.features(own, x)  # of more than the last layer the head makes them too
        mine, rest = separate(model.params, _context(own, features, local), features)
        return local.head(own, mine) + local.head(network, rest)


def separate(policy: Params, context: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
    """Return the personal and the global part of features, by the policy under a context."""
    weight, bias, scale, shift = (
        policy[POLICY + name] for name in ("weight", "bias", "scale", "shift")
    )
    hidden = functional.linear(features * context, weight, bias)
    raw = functional.layer_norm(hidden, scale.shape, scale, shift).relu()
    first, second = raw.chunk(2, -1)
    share = (first - second).sigmoid()  # a softmax of two
    return features * share, features * (1 - share)


def discrepancy(
    left: Tensor, right: Tensor, weight: Tensor, widths: Sequence[float | Tensor] = WIDTHS
) -> Tensor:
    """Return the squared maximum mean discrepancy of two samples, padding ignored."""
    left, right, one = left.flatten(0, -2), right.flatten(0, -2), weight.reshape(-1)
    share = one / one.sum().clamp(min=1e-12)

    def alike(a: Tensor, b: Tensor) -> Tensor:
        apart = a.square().sum(-1).unsqueeze(1) + b.square().sum(-1) - 2 * a @ b.T
        kernel = torch.stack([torch.exp(-apart / (2 * width)) for width in widths]).sum(0)
        return share @ kernel @ share

    return alike(left, left) + alike(right, right) - 2 * alike(left, right)


def _context(own: Params, features: Tensor, local: Local) -> Tensor:
    """Return v of a head at length one: how the sum of its logits grows with each feature."""
    nothing = torch.zeros_like(features[:1])
    gradient = grad(lambda at: local.head(own, at).sum())(nothing).detach()
    unit: Tensor = gradient / gradient.norm(dim=-1, keepdim=True).clamp(min=1e-12)
    return unit


def _network(params: Params) -> Params:
    """Return the parameters but the policy's."""
    return {name: leaf for name, leaf in params.items() if not name.startswith(POLICY)}
