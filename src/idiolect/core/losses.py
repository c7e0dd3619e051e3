"""Batch losses that ignore padding: each is a mean over labels weighted by `weight`.

Labels and weights are [example], or [example, place] where every place of a sequence has a label;
logits have one axis more, the classes.
"""

import torch
from torch import Tensor
from torch.nn import functional

from idiolect.core.tree import transformed
from idiolect.kernels import beneath
from idiolect.kernels import cross_entropy as entropy

_FEW = 16  # classes, below which torch's log_softmax is slow over the last axis of a CPU's tensor


def weighted_mean(values: Tensor, weight: Tensor) -> Tensor:
    """Average one value per label; a batch of padding alone counts as zero."""
    return (values * weight).sum() / weight.sum().clamp(min=1e-12)


def log_shares(logits: Tensor) -> Tensor:
    """Log of softmax over the classes."""
    if logits.is_cuda or logits.shape[-1] >= _FEW:
        return logits.log_softmax(-1)
    return logits.transpose(-1, -2).log_softmax(-2).transpose(-1, -2)


def cross_entropy(logits: Tensor, labels: Tensor, weight: Tensor) -> Tensor:
    """Cross-entropy with integer labels."""
    if not transformed():
        return single_cross_entropy(logits, labels, weight)
    if logits.is_cuda and entropy.suits(logits, labels, weight):
        return entropy.cross_entropy(logits, labels, weight)
    # Equal to F.cross_entropy, which vmap would take apart into many more kernels.
    label = labels.unsqueeze(-1)
    if not logits.is_cuda and logits.shape[-1] < _FEW:
        share = _share(weight)
        if beneath.suits_cross_entropy(logits, labels, share):
            return beneath.cross_entropy(logits, labels, share)
        return weighted_mean(-log_shares(logits).gather(-1, label).squeeze(-1), weight)
    true = logits.gather(-1, label).squeeze(-1)
    return weighted_mean(logits.logsumexp(-1) - true, weight)


def single_cross_entropy(logits: Tensor, labels: Tensor, weight: Tensor) -> Tensor:
    """Do the same for a single client, by the operations that cost the host least."""
    flat = labels.dim() == 1  # then there is nothing to flatten, which would still take a call
    label = labels if flat else labels.flatten()
    if label.dtype != torch.int64:  # others have no loss in torch
        label = label.long()
    rows = logits if flat else logits.flatten(0, -2)
    each = functional.cross_entropy(rows, label, reduction="none")
    if each.dtype != weight.dtype:  # shares would have the digits of the fewer
        return torch.dot(each, weight.flatten().to(each.dtype)) / weight.sum().clamp(min=1e-12)
    share = _share(weight)
    return torch.dot(each, share if flat else share.flatten())


def _share(weight: Tensor) -> Tensor:
    """Return the shares of a batch's weights; those of most batches were noted by `by_step`."""
    share: Tensor | None = getattr(weight, "share", None)
    return shares(weight, weight.dim()) if share is None else share


def shares(weight: Tensor, axes: int = 1) -> Tensor:
    """Divide weights by their sum over the last axes; those of padding alone stay zeros."""
    return weight / weight.sum([*range(-axes, 0)], keepdim=True).clamp(min=1e-12)


def by_step(weight: Tensor) -> tuple[Tensor, ...]:
    """Cut a client's weights [step, example] by steps, each with its `share`.

    So a loss need not launch the same three operations in every step.
    """
    pieces = weight.unbind(0)
    for piece, own in zip(pieces, shares(weight).unbind(0), strict=True):
        piece.share = own  # type: ignore[attr-defined]
    return pieces


def right(logits: Tensor, labels: Tensor) -> Tensor:
    """Return for each label whether its logit is the highest; a NaN among them is no answer."""
    # argmax calls NaN the highest, so a broken model would be right about the first class.
    return (logits.argmax(-1) == labels) & ~logits.isnan().any(-1)


def accuracy(logits: Tensor, labels: Tensor, weight: Tensor) -> Tensor:
    """Share of labels whose logit is the highest."""
    return weighted_mean(right(logits, labels).to(weight.dtype), weight)


def divergence(student: Tensor, teacher: Tensor, weight: Tensor) -> Tensor:
    """KL(softmax(teacher) ‖ softmax(student)), summed over classes (torch's `batchmean`).

    The teacher is a constant: no gradient flows into it.
    """
    target = log_shares(teacher.detach())
    gap = target.exp() * (target - log_shares(student))
    return weighted_mean(gap.sum(-1), weight)


def divergence_from(student: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    """KL(target ‖ softmax(student)) for a target given as probabilities [example, class]."""
    target = target.detach()
    gap = target * (target.clamp(min=1e-30).log() - log_shares(student))
    return weighted_mean(gap.sum(-1), weight)


def soft_cross_entropy(student: Tensor, teacher: Tensor, weight: Tensor) -> Tensor:
    """H(softmax(teacher), softmax(student)): the divergence plus a constant, so equal gradients."""
    target = teacher.detach().softmax(-1)
    return weighted_mean(-(target * log_shares(student)).sum(-1), weight)


def distil(
    student: Tensor, teacher: Tensor, weight: Tensor, temperature: float | Tensor = 1.0
) -> Tensor:
    """Hinton's soft loss T²·KL at temperature T; T² keeps its gradient's size independent of T."""
    return temperature**2 * divergence(student / temperature, teacher / temperature, weight)


def binary_divergence(student: Tensor, target: Tensor) -> Tensor:
    """KL of two shares, target and 1 − target, from a logit's; one value for each logit."""
    target = target.detach()
    there = target * (target.clamp(min=1e-30).log() - functional.logsigmoid(student))
    rest = 1 - target
    absent = rest * (rest.clamp(min=1e-30).log() - functional.logsigmoid(-student))
    return there + absent


def by_class(labels: Tensor, weight: Tensor, classes: int) -> Tensor:
    """Return the weight of each label in the column of its class: [label, class], in one row each.

    Its transpose times values [label, ...] adds those of each class up.
    """
    one = labels.reshape(-1, 1) == torch.arange(classes, device=labels.device)
    return one * weight.reshape(-1, 1)
