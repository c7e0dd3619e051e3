"""A mixture of experts: the federated model and one that the client trained alone.

y = α(x) · G(x) + (1 − α(x)) · DE(x) in probabilities, with G what the inner method deploys and DE
the domain expert. α is one number for each client, chosen on its validation data, or a gate that is
fitted there and looks at every example (Peterson, Kanani, Marathe, 2019).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from idiolect.core import losses, optim, tree
from idiolect.core.capabilities import Facts, JointPrediction, adapt, facts
from idiolect.core.client import Batch, Local
from idiolect.core.method import Method, Sent, setting
from idiolect.core.task import Classes, Task
from idiolect.core.tree import Params, Tree
from idiolect.core.wrap import Wrapper
from idiolect.errors import MethodError

_CLASSES = Classes()


@dataclass(frozen=True, kw_only=True)
class MixSettings:
    """How the expert is trained, and how the two are mixed."""

    expert_epochs: int = setting(20, "passes in which a client trains its expert", least=1)
    expert_lr: float = setting(0.01, "learning rate of the expert", above=0)
    gate: str = setting(
        "scalar",
        "α: one number, or a gate that sees an example, by its input or by both models' outputs",
        choices=("scalar", "inputs", "outputs"),
    )
    moe_weights: tuple[float, ...] = setting(
        (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.0),
        "weights of the federated model to choose from (α)",
        least=0,
        most=1,
    )
    moe_select: str = setting(
        "posterior",
        "how α is chosen on validation data: the one of least loss or best accuracy, or the mean "
        "of all by how likely they make the labels, unless 1 classifies more of them",
        choices=("posterior", "loss", "accuracy"),
    )
    gate_epochs: int = setting(50, "passes over the validation data that fit a gate", least=1)
    gate_lr: float = setting(0.01, "learning rate of a gate (Adam)", above=0)


class Mixed(NamedTuple):
    """Two models and how they are mixed; a weight of 1 is the first model alone, exactly."""

    model: Tree
    expert: Params
    weight: Tensor
    gate: Params | tuple[()] = ()


class LocalExpert(NamedTuple):
    """A model that the client trained by itself."""

    params: Params


@dataclass(frozen=True, kw_only=True)
class Mixture(Facts, JointPrediction, MixSettings, Wrapper):
    """Any method, mixed at each client with a local expert."""

    tunes: ClassVar[bool] = True
    starts_over: ClassVar[bool] = True

    @property
    def chooses(self) -> bool:
        """Validation rows weigh the expert."""
        return True

    def titled(self, title: str) -> str:
        """Name the part."""
        return f"{title} + MoE"

    def deploy(self, sent: Sent, personal: Tree, local: Local) -> tuple[Tree, Mixed]:
        """Train an expert beside what the inner method deploys, and mix them."""
        inner, own = local.alike(
            lambda: self.base.deploy(sent, personal, local), lambda: expert(self.base, self, local)
        )
        return self._mixed(inner, own, sent, local)

    def adapt(self, sent: Sent, personal: Tree, local: Local) -> tuple[Tree, Mixed]:
        """Do the same for a newcomer."""
        inner, own = local.alike(
            lambda: adapt(self.base, sent, personal, local), lambda: expert(self.base, self, local)
        )
        return self._mixed(inner, own, sent, local)

    def models(self, sent: Sent, deployed: tuple[Tree, Mixed]) -> dict[str, Tree]:
        """The mixture, the expert by itself, and the inner method's other models."""
        if not deployed:
            return self.base.models(sent, ())
        inner, mixed = deployed
        others = self.base.models(sent, inner)
        return {**others, "personal": mixed, "local": LocalExpert(mixed.expert)}

    def predict(self, model: Tree, x: Tensor, local: Local) -> Tensor:
        """Mix, where it is a mixture."""
        return predict(self.base, model, x, local, self.gate)

    def predict_all(self, models: dict[str, Tree], x: Tensor, local: Local) -> dict[str, Tensor]:
        """Run what several mixtures have in common once."""
        return predict_all(self.base, models, x, local, self.gate)

    def facts(self, deployed: tuple[Tree, Mixed]) -> dict[str, Tensor]:
        """Add the weight of the federated model, where it is one number."""
        inner, mixed = deployed
        own = {} if mixed.gate else {"moe_weight": mixed.weight}
        return {**facts(self.base, inner), **own}

    def _mixed(self, inner: Tree, own: Params, sent: Sent, local: Local) -> tuple[Tree, Mixed]:
        model = self.base.models(sent, inner)["personal"]
        return inner, mixed(self.base, model, own, self, local)


def expert(base: Method, settings: MixSettings, local: Local) -> Params:
    """Train a model on the client's data alone, from where the federation started."""
    return base.fit(local, local.initial, lr=settings.expert_lr, epochs=settings.expert_epochs)


def mixed(base: Method, model: Tree, own: Params, settings: MixSettings, local: Local) -> Mixed:
    """Choose α, or fit a gate, on validation data."""
    if settings.gate == "scalar":
        return Mixed(model, own, _weight(base, model, own, settings, local))
    middle = local.numbers([0.5])[0]
    return Mixed(model, own, middle, _gate(base, model, own, settings, local))


def predict(base: Method, model: Tree, x: Tensor, local: Local, gate: str) -> Tensor:
    """Return logits of a mixture, an expert by itself, or one of the inner method's models."""
    if isinstance(model, LocalExpert):
        return local.logits(model.params, x)
    if not isinstance(model, Mixed):
        return base.predict(model, x, local)
    first = base.predict(model.model, x, local)
    return _joined(local.task, model, x, first, local.logits(model.expert, x), gate)


def predict_all(
    base: Method, models: dict[str, Tree], x: Tensor, local: Local, gate: str
) -> dict[str, Tensor]:
    """Do the same for several models; what is made of the same tensors is run once."""
    known: dict[Any, Tensor] = {}

    def once(run: Callable[[Tree], Tensor], model: Tree) -> Tensor:
        leaves = {name: id(leaf) for name, leaf in tree.named(model).items()}
        key = (run, type(model), tuple(leaves.items()))
        if not leaves or key not in known:  # without tensors models cannot be told apart
            known[key] = run(model)
        return known[key]

    def federated(model: Tree) -> Tensor:
        return base.predict(model, x, local)

    def alone(params: Params) -> Tensor:
        return local.logits(params, x)

    def said(model: Tree) -> Tensor:
        if isinstance(model, LocalExpert):
            return once(alone, model.params)
        if not isinstance(model, Mixed):
            return once(federated, model)
        return _joined(local.task, model, x, said(model.model), once(alone, model.expert), gate)

    return {name: said(model) for name, model in models.items()}


def _joined(task: Task, model: Mixed, x: Tensor, first: Tensor, other: Tensor, gate: str) -> Tensor:
    """Mix the outputs of a mixture's two models; a weight of 1 is the first, gate or not."""
    if model.gate:
        mixed = _gated(task, model.gate, gate, x, first, other)
        return torch.where(model.weight >= 1, first, mixed)
    return _at(task, model.weight, first, other)


def blend(
    first: Tensor, other: Tensor, share: Tensor, rest: Tensor, task: Task = _CLASSES
) -> Tensor:
    """Return log(α · softmax(first) + (1 − α) · softmax(other)), given log α and log(1 − α).

    Those are logits again. Other tasks mix their outputs as they do.
    """
    if task.kind != "classes":
        return task.mixture(torch.stack([first, other]), torch.stack([share, rest]))
    return torch.logaddexp(share + first.log_softmax(-1), rest + other.log_softmax(-1))


def _weight(base: Method, model: Tree, own: Params, settings: MixSettings, local: Local) -> Tensor:
    """Return the client's weight; one without validation data takes the first of the grid."""
    weights, task = local.numbers(settings.moe_weights), local.task

    def wrong(at: Tensor, batch: Batch) -> Tensor:
        """The share of wrong answers at each of some weights."""
        first, other = base.predict(model, batch.x, local), local.logits(own, batch.x)
        marks = [
            1 - task.score(_at(task, weight, first, other), batch.y, batch.weight)
            for weight in at.unbind()
        ]
        return torch.stack(marks)

    def loss(batch: Batch) -> Tensor:
        """The loss at each weight of the grid."""
        first, other = base.predict(model, batch.x, local), local.logits(own, batch.x)
        mixtures = [_at(task, weight, first, other) for weight in weights]
        return torch.stack([task.loss(one, batch.y, batch.weight) for one in mixtures])

    def surprise(batch: Batch) -> Tensor:
        """The cross-entropy at each weight of the grid."""
        if task.kind != "classes":
            return loss(batch)
        # Only the label's probability is needed: for a vocabulary of words that matters.
        label = batch.y.unsqueeze(-1)
        sure, alone = (
            logits.log_softmax(-1).gather(-1, label).squeeze(-1).exp()
            for logits in (base.predict(model, batch.x, local), local.logits(own, batch.x))
        )
        marks = [
            losses.weighted_mean(
                -(weight * sure + (1 - weight) * alone).clamp(min=1e-30).log(), batch.weight
            )
            for weight in weights
        ]
        return torch.stack(marks)

    by_accuracy = settings.moe_select == "accuracy"
    lost, labels = local.total(partial(wrong, weights) if by_accuracy else surprise, "val")
    if settings.moe_select != "posterior":
        best = first_least(torch.where(lost.isnan(), float("inf"), lost))
        return weights.index_select(0, best.reshape(1)).squeeze(0)
    # Few labels say little, and the least of eleven noisy figures less: each weight counts by how
    # likely it makes the labels. Many labels leave the best alone standing.
    mean = ((-task.surprise(lost, labels)).softmax(0) * weights).sum()
    mean = torch.where((labels == 0) | mean.isnan(), weights[0], mean)
    if 1.0 not in settings.moe_weights:
        return mean
    whole = torch.ones_like(mean)
    mistakes, _ = local.total(partial(wrong, torch.stack([mean, whole])), "val")
    half = 0.5 if task.kind == "classes" else 0.0  # half a mistake: rounding apart
    return torch.where(mistakes[0] > mistakes[1] + half, whole, mean)


def _at(task: Task, weight: Tensor, first: Tensor, other: Tensor) -> Tensor:
    """Blend at one weight; at 1 it is the first, to the last digit."""
    mixed = blend(first, other, weight.log(), (1 - weight).log(), task)
    return torch.where(weight >= 1, first, mixed)


def first_least(values: Tensor) -> Tensor:
    """Return the place of the least value; of those that rounding alone tells apart the first."""
    order, least = torch.arange(values.shape[0], device=values.device), values.min()
    equal = values <= least + 16 * torch.finfo(values.dtype).eps * least.abs()
    return torch.where(equal, order, values.shape[0]).min()


def _gate(base: Method, model: Tree, own: Params, settings: MixSettings, local: Local) -> Params:
    """Fit α(x) = sigmoid(w · features + b) on validation data by the mixture's loss."""
    width = _width(model, settings.gate, base, own, local)
    start = {"w": local.size.new_zeros(width), "b": local.size.new_zeros(())}

    def loss(gate: Params, batch: Batch) -> Tensor:
        first = base.predict(model, batch.x, local).detach()
        other = local.logits(own, batch.x).detach()
        blended = _gated(local.task, gate, settings.gate, batch.x, first, other)
        return local.task.loss(blended, batch.y, batch.weight)

    optimiser = optim.adam(settings.gate_lr)
    return local.fit(loss, start, optimiser, "val", batch=base.batch, epochs=settings.gate_epochs)


def _width(model: Tree, kind: str, base: Method, own: Params, local: Local) -> int:
    """Count the features of a gate, from the shape of an example."""
    seen: list[int] = []

    def look(batch: Batch) -> Tensor:
        first = base.predict(model, batch.x, local)
        seen.append(_features(local.task, kind, batch.x, first, first).shape[-1])
        return batch.weight.sum()

    local.mean(look, "train", batch=1)
    return seen[0]


def _features(task: Task, kind: str, x: Tensor, first: Tensor, other: Tensor) -> Tensor:
    if kind == "outputs" and task.kind != "classes":
        return torch.cat([first, other], -1)
    if kind == "outputs":
        return torch.cat([first.log_softmax(-1), other.log_softmax(-1)], -1)
    if not x.is_floating_point():
        raise MethodError(
            "gate = 'inputs' weighs numbers, and these examples are words; use gate = 'outputs'"
        )
    return x.flatten(1)


def _gated(task: Task, gate: Params, kind: str, x: Tensor, first: Tensor, other: Tensor) -> Tensor:
    """Blend by what a gate says of every example."""
    said = (_features(task, kind, x, first, other) @ gate["w"] + gate["b"]).unsqueeze(-1)
    return blend(first, other, logsigmoid(said), logsigmoid(-said), task)
