"""One model out of many candidates, by a rule that few validation examples cannot fool.

A client's model is p(y | x) = Σ w_m p_m(y | x) over its candidates m. The weights are those of

    max over w of  Σ_i log Σ_m w_m p_m(y_i | x_i)  +  c Σ_m q_m log w_m,    Σ w_m = 1,

over validation examples i: the mixture's log-likelihood, and a prior q that counts as c examples.
The sum is concave in w. With few examples w stays near q, an average of all or what the others
chose (`pooling`); with many it goes where the likelihood is. One candidate gets all only if no
mixture explains the data better.

Other clients help twice, by sums of a few numbers that all contribute (`Votes`); each client gets
the sum over the others. Both uses are empirical Bayes. The prior q is the mean of the others'
weights. And where a client's few examples cannot show whether its mixture is more accurate than its
local model, the others' gains are a prior for its own: with n others whose gains g have the mean μ,
the variance v and squared standard errors of e in the mean,

    gain ~ N(μ, τ²),    τ² = (v − e) + (v / n) (n − 1) / (n − 3)

is what they differ by beyond chance, and what μ itself is uncertain by (Student's t). Together with
the gain on its own validation data that makes a posterior, normal again.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from idiolect.core import losses, tree
from idiolect.core.client import Batch, Local
from idiolect.core.task import Task
from idiolect.core.tree import Params

_TURNS = 50  # of the fixed-point iteration
_TINY = 1e-30
_AT_ONCE = 100  # examples about which all candidates are asked together: they take room
_FEWEST = 4  # others; of three the mean's variance is not known
_LEAST = 1e-12


class Blend(NamedTuple):
    """Some networks of one form and their weights, the heaviest first."""

    members: Params  # [member, ...]
    weights: Tensor  # [member]


class CandidateScores(NamedTuple):
    """What candidates say of a client's validation data."""

    chances: Tensor  # [label, candidate] of the true class
    counts: Tensor  # [label] 1, or 0 for padding
    accuracies: Tensor  # [candidate]


def scored(candidates: Params, local: Local) -> CandidateScores:
    """Ask every candidate about every validation example."""
    task = local.task

    def ask(batch: Batch) -> Tensor:
        def one(params: Params) -> Tensor:
            found = task.evidence(local.logits(params, batch.x), batch.y, batch.weight)
            return torch.stack([found.chance, found.right, found.counts.to(found.chance.dtype)], -1)

        said: Tensor = local.each(one, candidates).movedim(0, -1)  # [..., 3, candidate]
        return said

    rows = local.rows(ask, "val", batch=_AT_ONCE)
    rows = rows.reshape(-1, *rows.shape[-2:])  # an example's labels stand one behind the other
    chances, right, counts = rows.unbind(-2)
    counts = counts[:, 0]
    accuracies = (right * counts.unsqueeze(-1)).sum(0) / counts.sum()
    return CandidateScores(task.relative(chances, counts), counts, accuracies)


def sound(candidates: Params, scores: CandidateScores) -> Tensor:
    """Say which candidates are numbers throughout: one that diverged is none."""
    checks = [leaf.isfinite().reshape(len(leaf), -1).all(1) for leaf in candidates.values()]
    said = (scores.chances.isfinite() | (scores.counts == 0).unsqueeze(-1)).all(0)
    return torch.stack([*checks, said]).all(0)


def even(sound: Tensor) -> Tensor:
    """Return a prior that is the same for every sound candidate."""
    prior = tree.double(sound)
    return prior / prior.sum().clamp(min=1)


def fitted(scores: CandidateScores, prior: Tensor, caution: float | Tensor) -> Tensor:
    """Return the weights [candidate] of the rule above; the prior where there are no examples.

    What is no candidate has no prior. Each turn gives every example to the candidates that explain
    it, by share, and counts.
    """
    prior = prior.to(scores.chances.dtype)
    chances = torch.where(prior > 0, scores.chances.clamp(min=_TINY), 0.0)
    weights = prior
    for _ in range(_TURNS):
        shares = chances * weights
        shares = shares / shares.sum(1, keepdim=True).clamp(min=_TINY)
        held = (shares * scores.counts.unsqueeze(1)).sum(0)
        weights = (held + caution * prior) / (scores.counts.sum() + caution)
    return weights


def alone(place: Tensor, scores: CandidateScores) -> Tensor:
    """Return weights that are all on one candidate."""
    order = torch.arange(scores.chances.shape[1], device=place.device)
    return (order == place).to(scores.chances.dtype)


def blended(candidates: Params, weights: Tensor, most: int) -> tuple[Blend, Tensor]:
    """Keep the largest weights, the first of equal ones; return the mixture and what is left.

    What is left adds up to 1 and has a place for every candidate.
    """
    ordered, places = weights.sort(descending=True, stable=True)
    ordered, places = ordered[:most], places[:most]
    ordered = ordered / ordered.sum()
    members = tree.map(lambda leaf: leaf.index_select(0, places), candidates)
    return Blend(members, ordered), torch.zeros_like(weights).scatter(0, places, ordered)


def finite(model: Blend) -> Tensor:
    """Say whether a mixture's members of some weight are numbers throughout."""
    own = [leaf.isfinite().reshape(len(leaf), -1).all(1) for leaf in model.members.values()]
    return (torch.stack(own).all(0) | (model.weights == 0)).all()


def surely_better(scores: CandidateScores, weights: Tensor, margin: float) -> Tensor:
    """Say whether a mixture is more likely than the first candidate, beyond chance.

    The gain of log-likelihood, example by example, has a mean above `margin` standard errors. One
    example has no standard error, and proves nothing.
    """
    chances = scores.chances.nan_to_num().clamp(min=_TINY)
    gains = (chances * weights).sum(1).clamp(min=_TINY).log() - chances[:, 0].log()
    count = scores.counts.sum()
    mean = (gains * scores.counts).sum() / count
    spread = ((gains - mean).square() * scores.counts).sum() / (count - 1).clamp(min=1)
    return (mean > margin * (spread / count).sqrt()) & (count > 1)


def predict(model: Blend, x: Tensor, local: Local) -> Tensor:
    """Return log Σ w_m softmax(logits_m): logits again. Other tasks mix outputs as they do."""
    if local.task.kind != "classes":
        outputs = local.each(lambda params: local.logits(params, x), model.members)
        beside = model.weights.reshape(-1, *[1] * (outputs.dim() - 1))
        return local.task.mixture(torch.where(beside > 0, outputs, 0.0), model.weights.log())
    said = local.each(lambda params: local.logits(params, x).log_softmax(-1), model.members)
    weights = model.weights.reshape(-1, *[1] * (said.dim() - 1))
    # A member of no weight may be anything, even no number.
    return (torch.where(weights > 0, said, 0.0) + weights.log()).logsumexp(0)


class Compared(NamedTuple):
    """A mixture beside the first candidate, on validation data; NaN where there are none."""

    accuracy: Tensor
    gain: Tensor  # of accuracy over the first candidate
    error: Tensor  # the gain's standard error, squared; 0 for one example


def compared(model: Blend, first: Params, local: Local) -> Compared:
    """Compare a mixture with another model, label by label."""

    def score(batch: Batch) -> Tensor:
        said = (predict(model, batch.x, local), local.logits(first, batch.x))
        ours, theirs = (_right(local.task, one, batch) for one in said)
        gains = ours - theirs
        values = (ours, gains, gains.square())
        return torch.stack([losses.weighted_mean(value, batch.weight) for value in values])

    total, count = local.total(score, "val")
    accuracy, gain, square = (total / count).unbind()
    error = (square - gain.square()).clamp(min=0) / (count - 1).clamp(min=1)
    return Compared(accuracy, gain, error)


def _right(task: Task, outputs: Tensor, batch: Batch) -> Tensor:
    """Return how right each label is, or each example of several labels or intervals."""
    if task.kind == "classes":
        return losses.right(outputs, batch.y).to(batch.weight.dtype)
    found = task.evidence(outputs, batch.y, batch.weight)
    if found.right.dim() == batch.weight.dim():
        return found.right * (found.counts > 0)
    return (found.right * found.counts).sum(-1) / found.counts.sum(-1).clamp(min=1e-12)


def best_of(scores: CandidateScores, sound: Tensor) -> Tensor:
    """Return the place of the best accuracy; of equal ones by likelihood, then by order."""
    counts = scores.counts.unsqueeze(1)
    likelihood = (scores.chances.nan_to_num().clamp(min=_TINY).log() * counts).sum(0)
    right = torch.where(sound, scores.accuracies.nan_to_num(), -1.0)
    mark = torch.where(right >= right.max() - 1e-6, likelihood, float("-inf"))
    order = torch.arange(len(mark), device=mark.device)
    return torch.where(mark >= mark.max() - 1e-6, order, len(mark)).min()


class Votes(NamedTuple):
    """What a client contributes to the exchange, from −1 to 1; or a sum over clients."""

    voices: Tensor  # 1 for a client with evidence; all is 0 for others
    weights: Tensor  # [candidate] of its mixture, chosen without the others
    gain: Tensor  # of accuracy on validation data, over its local model
    square: Tensor  # of the gain
    error: Tensor  # the gain's standard error, squared


def votes(weights: Tensor, compared: Compared, evident: Tensor) -> Votes:
    """Return a client's contribution; zeros unless it has examples of its own."""
    gain, error = compared.gain, compared.error
    whole = Votes(torch.ones_like(gain), weights, gain, gain.square(), error)
    return Votes(*(torch.where(evident, leaf, 0.0) for leaf in whole))


def prior(others: Votes, sound: Tensor, caution: float, heed: float) -> tuple[Tensor, Tensor]:
    """Return q, and the examples that it counts as: `heed`, or `caution` without votes."""
    weights = torch.where(sound, others.weights, 0.0)
    total = weights.sum()  # 0 without any voice
    heard = total > 0
    q = torch.where(heard, weights / total.clamp(min=_LEAST), even(sound).to(weights.dtype))
    return q, torch.where(heard, total.new_full((), heed), total.new_full((), caution))


def mean_gain(others: Votes) -> Tensor:
    """Return μ, by how much more accurate the others' mixtures are; NaN without votes."""
    return others.gain / others.voices


def surely_gains(compared: Compared, evident: Tensor, others: Votes, trust: float) -> Tensor:
    """Say whether the posterior mean of a client's gain is above `trust` posterior deviations.

    Who has no evidence of its own goes by the others' alone. An own standard error below theirs may
    be luck (no example on which the two models differ), so theirs is the least.
    """
    n = others.voices
    mean, error = others.gain / n, others.error / n
    variance = ((others.square - n * mean.square()) / (n - 1)).maximum(error)
    spread = variance - error + variance / n * (n - 1) / (n - 3)
    theirs = 1 / spread.clamp(min=_LEAST)
    ours = torch.where(evident, 1 / compared.error.maximum(error).clamp(min=_LEAST), 0.0)
    gain = torch.where(evident, compared.gain, 0.0)
    posterior = (gain * ours + mean * theirs) / (ours + theirs)
    sure = posterior > trust * (ours + theirs).rsqrt()
    return sure & (n > _FEWEST - 0.5)
