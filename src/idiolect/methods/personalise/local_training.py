"""Local training from a federated model: what fine-tuning, freezing, distillation and EWC share.

The loss at one client is (1 − α) · cross-entropy + α T² · KL(federated ‖ own) + λ/2 · Σ F (A − G)²;
α = 0 and λ = 0 is fine-tuning. Equation 6 of Pye and Yu (2021) puts αK² on the cross-entropy, which
the code it builds on does not; F is the diagonal of the Fisher information, example by example.

F is there to say what matters to the federated task, so it is of the federation's data: after the
rounds every client computes its own at the federated model, and is held by the mean of all
(`ewc_fisher = "federation"`). A client does not know that mean before the exchange, so it trains
with its own F first. That is all there is for `ewc_fisher = "client"`, for a method without a
federated model, and under a private rule, beside which nothing may leave a client.
"""

from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import grad

from idiolect.core import tree
from idiolect.core.client import Batch, Local
from idiolect.core.method import Method, Sent
from idiolect.core.tree import Params, Tree
from idiolect.errors import ConfigError, MethodError

_FISHER_BYTES = 1 << 28  # of single examples' gradients at a time; on CUDA a share of its memory
_FISHER_SHARE = 24
_FISHER_BATCH = 64


class StartingPoint(NamedTuple):
    """What local training starts from, and what it is held to."""

    start: Tree  # the model that is adapted: what the inner method would deploy
    federated: Tree  # the teacher: the global model where there is one, else the start
    anchor: Params  # what EWC holds to: the federated parameters, if they are of one form


class LossTerms(NamedTuple):
    """Weights of what is added to the cross-entropy; None leaves a term out altogether."""

    kd: float | Tensor | None = None  # α
    temperature: float | Tensor = 1.0  # T
    ewc: float | Tensor | None = None  # λ


class FisherHold(NamedTuple):
    """What a client keeps until `hear`: where it starts from, and its own F."""

    at: StartingPoint
    importance: Params
    voice: Tensor  # 1, or 0 without examples or without a federated model


class FisherSum(NamedTuple):
    """What a client contributes to the exchange, from 0 to 1; or a sum over clients."""

    voices: Tensor
    importance: Params


def ground(base: Method, sent: Sent, deployed: Tree) -> StartingPoint:
    """Find the models that an inner method offers for adaptation."""
    models = base.models(sent, deployed)
    start = models["personal"]
    federated = models.get("global", start)
    own, common = parameters(base, start), parameters(base, federated)
    return StartingPoint(start, federated, common if _alike(own, common) else own)


def _alike(left: Params, right: Params) -> bool:
    return {n: p.shape for n, p in left.items()} == {n: p.shape for n, p in right.items()}


def held(base: Method, sent: Sent, deployed: Tree, importance: Params, local: Local) -> FisherHold:
    """Return what a client keeps until it gets the mean of all clients' F."""
    models, at = base.models(sent, deployed), ground(base, sent, deployed)
    own, common = parameters(base, at.start), parameters(base, at.federated)
    joint = "global" in models and _alike(own, common)
    return FisherHold(at, importance, (local.size > 0).to(local.size.dtype) * float(joint))


def contribution(own: FisherHold) -> FisherSum:
    """Return the client's F; above 1 it counts as 1, the most that may be exchanged."""
    shares = tree.map(lambda leaf: own.voice * leaf.clamp(0, 1), own.importance)
    return FisherSum(own.voice, shares)


def of_all(own: FisherHold, others: FisherSum) -> Params:
    """Return the mean of all clients' F, this one's among them; its own where no other has one."""
    mine = contribution(own)
    count = mine.voices + others.voices

    def mean(one: Tensor, rest: Tensor, alone: Tensor) -> Tensor:
        return torch.where(count > 0.5, (one + rest) / count.clamp(min=1), alone)

    found: Params = tree.map(mean, mine.importance, others.importance, own.importance)
    return found


def parameters(base: Method, model: Tree) -> Params:
    """Return the parameters inside a model."""
    inner = model if isinstance(model, dict) else getattr(model, "params", None)
    if not isinstance(inner, dict):
        raise MethodError(
            f"the model that {base.title or type(base).__name__} deploys is no set of parameters, "
            "so it cannot be trained on; mix it with an expert (moe), or wrap another method"
        )
    return inner


def refilled(model: Tree, params: Params) -> Tree:
    """Put other parameters into a model."""
    return params if isinstance(model, dict) else model._replace(params=params)


def chosen(
    params: Params, only_head: bool, layers: int, names: tuple[str, ...]
) -> Callable[[str], bool]:
    """Say which parameters are trained: all, or freeze-base's, by patterns or as last layers."""
    if not only_head:
        return params.__contains__
    if not names:
        return tree.split_layers(params, layers)[1].__contains__
    for pattern in names:
        if not any(fnmatchcase(name, pattern) for name in params):
            raise ConfigError(
                f"fb_names: {pattern!r} fits no parameter; there are {', '.join(params)}"
            )
    return lambda name: any(fnmatchcase(name, pattern) for pattern in names)


def adapted(
    base: Method,
    at: StartingPoint,
    trained: Callable[[str], bool],
    terms: LossTerms,
    importance: Params,
    local: Local,
    lr: float | Tensor,
    epochs: int,
) -> Tree:
    """Train the chosen parameters of a model on the client's data; the others stay as they are.

    With frozen layers the network runs in evaluation mode, so that they stay in every respect.
    """
    start = parameters(base, at.start)
    part, rest = tree.split(start, trained)
    anchor = {name: at.anchor[name] for name in part}

    def whole(part: Params) -> Params:
        return {name: part[name] if name in part else rest[name] for name in start}

    def logits(part: Params, batch: Batch) -> Tensor:
        if isinstance(at.start, dict):
            training = batch.training and not rest
            return local.logits(whole(part), batch.x, training, weight=batch.weight)
        return base.predict(refilled(at.start, whole(part)), batch.x, local)

    def loss(part: Params, batch: Batch) -> Tensor:
        own = logits(part, batch)
        total = local.task.loss(own, batch.y, batch.weight)
        if terms.kd is not None:
            taught = base.predict(at.federated, batch.x, local).detach()
            soft = local.task.distil(own, taught, batch.weight, terms.temperature)
            total = (1 - terms.kd) * total + terms.kd * soft
        if terms.ewc is not None:
            gaps = [
                (importance[name] * (part[name] - anchor[name]).square()).sum() for name in part
            ]
            total = total + terms.ewc / 2 * torch.stack(gaps).sum()
        return total

    fitted = base.fit(local, part, loss, lr=lr, epochs=epochs)
    return refilled(at.start, whole(fitted))


def side_by_side(part: Params, clients: int) -> int:
    """Return of how many examples gradients are held at once, given who else holds as many."""
    first = next(iter(part.values()))
    room = _FISHER_BYTES
    if first.is_cuda:
        # Of all there is rather than of what is free: a run that is repeated should do the same.
        room = torch.cuda.get_device_properties(first.device).total_memory // _FISHER_SHARE
    weight = sum(leaf.numel() * leaf.element_size() for leaf in part.values())
    return max(1, min(_FISHER_BATCH, room // (clients * weight)))


def fisher(base: Method, at: StartingPoint, trained: Callable[[str], bool], local: Local) -> Params:
    """Return the mean over the client's examples of each one's squared gradient at the anchor."""
    part, rest = tree.split(at.anchor, trained)

    def loss(part: Params, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        whole = {name: part[name] if name in part else rest[name] for name in at.anchor}
        own = base.predict(refilled(at.start, whole), x.unsqueeze(0), local)
        return local.task.loss(own, y.unsqueeze(0), weight.unsqueeze(0))

    def by_batch(batch: Batch) -> Params:
        """Where one patient alone has no loss, square a batch's gradient, times its patients."""

        def together(part: Params) -> Tensor:
            whole = {name: part[name] if name in part else rest[name] for name in at.anchor}
            own = base.predict(refilled(at.start, whole), batch.x, local)
            return local.task.loss(own, batch.y, batch.weight)

        gradients, rows = grad(together)(part), batch.weight.sum()
        return {name: rows * gradient.square() for name, gradient in gradients.items()}

    def squares(batch: Batch) -> Params:
        each = (batch.x, batch.y, batch.weight)
        gradients = torch.vmap(grad(loss), (None, 0, 0, 0))(part, *each)
        labels = batch.weight.reshape(len(batch.weight), -1).sum(1)  # one, or a sequence's words
        share = labels / labels.sum().clamp(min=1e-12)
        return {
            n: torch.tensordot(share, gradient.square(), 1) for n, gradient in gradients.items()
        }

    def one_by_one(batch: Batch) -> Params:
        gradients = grad(loss)(part, batch.x[0], batch.y[0], batch.weight[0])
        return {name: gradient.square() for name, gradient in gradients.items()}

    if not local.task.single:
        found: Params = tree.map(
            lambda leaf: torch.where(leaf.isnan(), 0.0, leaf),
            local.mean(by_batch, "train", batch=base.batch),
        )
        return found
    try:
        mean = local.mean(squares, "train", batch=side_by_side(part, local.beside))
    except torch.OutOfMemoryError:  # a narrower block is the engine's to try
        raise
    except RuntimeError:  # a network that vmap cannot map: then one example at a time
        mean = local.mean(one_by_one, "train", batch=1)
    # Without examples there is nothing to hold on to, and nothing that would move either.
    return {name: torch.where(leaf.isnan(), 0.0, leaf) for name, leaf in mean.items()}
