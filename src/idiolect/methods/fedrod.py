"""FedRoD: a generic head trained as if classes were balanced, and a personal one beside it.

Chen, Chao, "On Bridging Generic and Personalized Federated Learning for Image Classification", ICLR
2022, Algorithm 1 with the linear personal head (their hypernetwork variant is not done). Body and
generic head minimise the balanced softmax: cross-entropy after the log of how often the client has
each class is added to the logits, so that clients with other classes pull alike. The personal head
minimises plain cross-entropy of the sum of both heads' logits; no gradient of it reaches the body
or the generic head. The server averages body and generic head by examples: the global model. The
sum is the personal model. The personal head starts as the generic one, as in PFLlib. A newcomer
fits a personal head on the fixed rest. Classes that a client has not are left out of its balanced
softmax. Classification only.

Written from notes and PFLlib's code (the authors' repository holds none): the paper's text was not
at hand to check equation numbers.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from idiolect.core import batchnorm, losses, tree
from idiolect.core.capabilities import NewcomerModel, Preparation
from idiolect.core.client import Batch, Local
from idiolect.core.method import Report, Sent, Setup, setting
from idiolect.core.tree import Params, Tree
from idiolect.errors import ConfigError
from idiolect.methods.fedavg import FedAvg

OWN = "personal."  # before the names of the personal head's parameters


class PersonalHead(NamedTuple):
    """What a client keeps: its head, and how often it has each class."""

    head: Params
    prior: Tensor  # [class] adds up to one


class TwoHeads(NamedTuple):
    """What a client uses: the generic network and a second head."""

    params: Params
    head: Params


@dataclass(frozen=True, kw_only=True)
class FedRoD(Preparation, NewcomerModel, FedAvg):
    """Clients share a network trained on balanced classes and add a head of their own to it."""

    title: ClassVar[str] = "FedRoD"
    needs_classes: ClassVar[str] = "a share in the balanced loss"
    paper: ClassVar[str] = "Chen and Chao 2022, Algorithm 1"
    presets: ClassVar[dict[str, dict[str, Any]]] = {"pfllib": {"lr": 0.005, "batch": 10}}

    head_layers: int = setting(1, "how many last layers the personal head has", least=1)
    newcomer_epochs: int = setting(
        10, "passes in which a newcomer trains its head", least=1, deploy=True
    )

    def init_personal(self, setup: Setup) -> PersonalHead:
        """The personal head starts as the generic one; classes are not counted yet."""
        head = tree.split_layers(setup.params, self.head_layers)[1]
        for name in filter(batchnorm.is_statistic, head):
            raise ConfigError(
                f"FedRoD: head_layers = {self.head_layers} takes {name!r} into the personal head, "
                "whose running statistics it does not keep; lower it, or use norm = 'group'"
            )
        return PersonalHead(head, setup.sizes.new_zeros(setup.classes))

    def prepare(self, sent: Sent, personal: PersonalHead, local: Local) -> PersonalHead:
        """Count the classes."""
        return personal._replace(prior=local.class_shares(len(personal.prior)))

    def client_step(
        self, sent: Sent, personal: PersonalHead, local: Local
    ) -> tuple[Report, PersonalHead]:
        """Train both at once; report the generic network, keep the head."""
        log_prior = personal.prior.clamp(min=1e-30).log()

        def loss(params: Params, batch: Batch) -> Tensor:
            own, generic = _parted(params)
            given: dict[str, Any] = {"training": batch.training, "weight": batch.weight}
            features = local.features(generic, batch.x, **given)
            logits = local.head(generic, features, **given)
            fixed = {name: leaf.detach() for name, leaf in generic.items()}
            personal, below = {**fixed, **own}, features.detach()
            if self.head_layers > 1:  # layers of the personal head may lie before the features
                below = local.features(personal, batch.x, **given)
            added = local.head(personal, below, **given)
            balanced = losses.cross_entropy(logits + log_prior, batch.y, batch.weight)
            both = logits.detach() + added
            return balanced + losses.cross_entropy(both, batch.y, batch.weight)

        whole = {**sent.shared, **{OWN + name: leaf for name, leaf in personal.head.items()}}
        head, generic = _parted(self.fit(local, whole, loss))
        return Report(generic, local.size), personal._replace(head=head)

    def deploy(self, sent: Sent, personal: PersonalHead, local: Local) -> TwoHeads:
        """Add the own head to the global network."""
        return TwoHeads(sent.shared, personal.head)

    def adapt(self, sent: Sent, personal: PersonalHead, local: Local) -> TwoHeads:
        """A newcomer trains a head beside the fixed network."""

        def loss(head: Params, batch: Batch) -> Tensor:
            logits = self.predict(TwoHeads(sent.shared, head), batch.x, local)
            return losses.cross_entropy(logits, batch.y, batch.weight)

        head = self.fit(local, personal.head, loss, lr=self.lr, epochs=self.newcomer_epochs)
        return TwoHeads(sent.shared, head)

    def models(self, sent: Sent, deployed: TwoHeads) -> dict[str, Tree]:
        """Both heads together, and the generic one."""
        return {"personal": deployed, "global": sent.shared}

    def predict(self, model: TwoHeads | Params, x: Tensor, local: Local) -> Tensor:
        """Return the generic logits, or those of both heads added up."""
        if not isinstance(model, TwoHeads):
            return local.logits(model, x)
        features, personal = local.features(model.params, x), {**model.params, **model.head}
        below = local.features(personal, x) if self.head_layers > 1 else features
        return local.head(model.params, features) + local.head(personal, below)


def _parted(params: Params) -> tuple[Params, Params]:
    """Part the personal head, under the names of the generic one, from the generic network."""
    own, generic = tree.split(params, lambda name: name.startswith(OWN))
    return {name.removeprefix(OWN): leaf for name, leaf in own.items()}, generic
