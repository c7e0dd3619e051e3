"""Batch normalisation that is right for federated clients: masked, carried, averaged.

`torch.nn.BatchNorm2d` would normalise by padded examples too, and write its running statistics in
place, past the mask and out of sight of checkpoint and server. Here padding has no weight, and the
running statistics are leaves of the parameters' tree that no gradient reaches: a gradient
holds how far they drift instead (`tree.Drift`), and the step that applies it moves them.
"""

import copy
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils.parametrizations import _OrthMaps, _Orthogonal

from idiolect.core import tree
from idiolect.errors import ModelError

STATISTICS = ("running_mean", "running_var")

_ACTIVE = threading.local()  # the pass under way, of each thread


class BatchStatistics(NamedTuple):
    """What one layer saw of one batch."""

    layer: "BatchNorm"
    mean: Tensor
    variance: Tensor  # unbiased
    known: Tensor  # whether there were two values, which a variance needs


class TrainingPass:
    """One run of a network in training mode: which examples count, and what the layers saw."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight  # [example] 1 for an example, 0 for padding
        self.seen: list[BatchStatistics] = []


@contextmanager
def masked(weight: Tensor) -> Iterator[TrainingPass]:
    """Give the layers of the network that runs inside the weight of each example."""
    before = getattr(_ACTIVE, "now", None)
    _ACTIVE.now = TrainingPass(weight)
    try:
        yield _ACTIVE.now
    finally:
        _ACTIVE.now = before


class BatchNorm(nn.Module):
    """Batch normalisation of [example, channel, ...], equal to torch's where nothing is padded.

    Outside of Idiolect it behaves as `torch.nn.BatchNorm2d` does. A batch of a single value for a
    channel, at which torch raises, is normalised to zero and leaves the statistics as they were.
    """

    def __init__(
        self, features: int, eps: float = 1e-5, momentum: float = 0.1, affine: bool = True
    ) -> None:
        super().__init__()
        self.features, self.eps, self.momentum = features, eps, momentum
        self.weight = nn.Parameter(torch.ones(features)) if affine else None
        self.bias = nn.Parameter(torch.zeros(features)) if affine else None
        self.running_mean: Tensor
        self.running_var: Tensor
        self.register_buffer("running_mean", torch.zeros(features))
        self.register_buffer("running_var", torch.ones(features))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise by the batch in training, by the running statistics otherwise."""
        if not self.training:
            # A variance that noise was added to may be below zero.
            return self._scaled(x, self.running_mean, self.running_var.clamp(min=0))
        now: TrainingPass | None = getattr(_ACTIVE, "now", None)
        alone = now is None
        now = now or TrainingPass(x.new_ones(x.shape[0]))
        if now.weight.shape[0] != x.shape[0]:
            raise ModelError(
                f"BatchNorm sees {x.shape[0]} rows for {now.weight.shape[0]} examples, so it "
                "cannot know padding; keep one row per example up to it, or use GroupNorm"
            )
        seen, variance = self._look(x, now.weight)
        if alone:
            self._move(seen)
        now.seen.append(seen)
        return self._scaled(x, seen.mean, variance)

    def _look(self, x: Tensor, weight: Tensor) -> tuple[BatchStatistics, Tensor]:
        """Return what the layer saw, and the biased variance that normalises."""
        over = [0, *range(2, x.dim())]
        share = weight.reshape(-1, *[1] * (x.dim() - 1))
        values = weight.sum() * math.prod(x.shape[2:])  # of each channel
        count = values.clamp(min=1)
        mean = (x * share).sum(over) / count
        off = x - _along(mean, x)
        variance = (off.square() * share).sum(over) / count
        unbiased = variance * (count / (count - 1).clamp(min=1))
        return BatchStatistics(self, mean, unbiased, values > 1), variance

    def _scaled(self, x: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        factor = (variance + self.eps).rsqrt()
        normed = (x - _along(mean, x)) * _along(
            factor if self.weight is None else factor * self.weight, x
        )
        return normed if self.bias is None else normed + _along(self.bias, x)

    def _move(self, seen: BatchStatistics) -> None:
        """Update the own statistics in place, as a layer of plain torch does."""
        with torch.no_grad():
            for name, batch in zip(STATISTICS, (seen.mean, seen.variance), strict=True):
                own: Tensor = getattr(self, name)
                own.copy_(torch.where(seen.known, own.lerp(batch, self.momentum), own))

    def extra_repr(self) -> str:
        """Say the options, as torch's layers do."""
        affine = self.weight is not None
        return f"{self.features}, eps={self.eps}, momentum={self.momentum}, affine={affine}"


class RunningStatistics:
    """The running statistics of the parameters a gradient is taken of, moved by its passes."""

    def __init__(self, start: Mapping[str, Tensor]) -> None:
        self._start = start
        self._passes: list[tuple[bool, dict[str, tuple[Tensor, Tensor, float]]]] = []

    def note(
        self, params: Mapping[str, Tensor], names: Mapping[nn.Module, str], ran: TrainingPass
    ) -> None:
        """Note a pass that a network made with some parameters."""
        own = all(params.get(name) is leaf for name, leaf in self._start.items())
        for seen in ran.seen:
            moves = {
                f"{names[seen.layer]}{leaf}": (batch.detach(), seen.known, seen.layer.momentum)
                for leaf, batch in zip(STATISTICS, (seen.mean, seen.variance), strict=True)
            }
            self._passes.append((own, moves))

    def drifts(self) -> dict[str, Tensor]:
        """Return how far each statistic moves, pass after pass.

        Where a loss also runs another model (a teacher in training mode), only the passes of the
        parameters themselves count. Where none is of these very tensors, the loss ran on what it
        derived from them, as a second-order step does, and all count.
        """
        mine = any(own for own, _ in self._passes)
        now = dict(self._start)
        for own, moves in self._passes:
            if own or not mine:
                for name, (batch, known, momentum) in moves.items():
                    if name in now:
                        moved = now[name] + momentum * (batch - now[name])
                        now[name] = torch.where(known, moved, now[name])
        return {name: now[name] - leaf for name, leaf in self._start.items()}


def layers(model: nn.Module) -> dict[nn.Module, str]:
    """Find the layers of batch normalisation, and the start of their leaves' names."""
    return {
        layer: f"{name}." if name else ""
        for name, layer in model.named_modules()
        if isinstance(layer, BatchNorm)
    }


def learned(model: nn.Module) -> dict[str, Tensor]:
    """Return what training changes: trainable parameters and running statistics, layer by layer."""
    trainable = {name for name, value in model.named_parameters() if value.requires_grad}
    found: dict[str, Tensor] = {}
    for prefix, layer in model.named_modules():
        start = f"{prefix}." if prefix else ""
        own = {f"{start}{name}": value for name, value in layer.named_parameters(recurse=False)}
        found |= {name: value for name, value in own.items() if name in trainable}
        if isinstance(layer, BatchNorm):
            found |= {f"{start}{name}": getattr(layer, name) for name in STATISTICS}
    return found


def is_statistic(name: str) -> bool:
    """Say whether a leaf of this name is a running statistic, which no gradient trains."""
    return name.rpartition(".")[2] in STATISTICS


def parameters(params: tree.Tree) -> tree.Params:
    """Return the leaves that are trained, by name: distances and norms are over these alone.

    Running statistics are in other units than weights; they are averaged or chosen along with them.
    """
    named = params if type(params) is dict else tree.named(params)
    if any(not isinstance(leaf, Tensor) for leaf in named.values()):
        named = tree.named(params)
    return {name: leaf for name, leaf in named.items() if not is_statistic(name)}


def _along(channels: Tensor, x: Tensor) -> Tensor:
    """Lay a value per channel along the second axis of x."""
    return channels.reshape(-1, *[1] * (x.dim() - 2))


# Torch's own layers are refused before training, or replaced.


def check(model: nn.Module) -> None:
    """Refuse what would be silently wrong: layers whose result depends on padded examples."""
    for name, layer in model.named_modules():
        if _sees_the_batch(layer):
            masked = (
                ", or masked_batch_norm_instead(model) to keep batch normalisation"
                if isinstance(layer, _BatchNorm)
                else ""
            )
            raise ModelError(
                f"layer {name!r} is {type(layer).__name__}, whose statistics would take in padding "
                "and never be averaged; use idiolect.models.group_norm_instead(model), which "
                f"returns the network with every such layer replaced{masked}"
            )
        if wrong := _unfit(layer):
            raise ModelError(f"layer {name!r} is {type(layer).__name__}, {wrong}")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ModelError(f"{type(model).__name__} has no trainable parameter; give it a layer")


def _unfit(layer: nn.Module) -> str:
    """Say what else of a layer cannot be done for many clients, and what to do, or nothing."""
    if isinstance(layer, LazyModuleMixin) and layer.has_uninitialized_params():
        return "which has no sizes yet; run the network once on an example before it is given"
    made = [key for key, own in vars(layer).items() if isinstance(own, Tensor) and not own.is_leaf]
    if made:
        return (
            f"whose {made[0]!r} is computed by a hook that cannot be copied; instead of "
            "torch.nn.utils.weight_norm use torch.nn.utils.parametrizations.weight_norm, and "
            "after pruning torch.nn.utils.prune.remove"
        )
    for name, own in layer.named_parameters(recurse=False):
        if own.is_complex():
            return (
                f"whose {name!r} has complex numbers, which optimisers and averages do not take; "
                "keep real ones [..., 2] and make torch.view_as_complex of them"
            )
    if isinstance(layer, _Orthogonal) and layer.orthogonal_map == _OrthMaps.householder:
        return (
            "which keeps whole numbers among what is trained and loses them by the rounding of an "
            "average; say orthogonal_map='matrix_exp' or 'cayley'"
        )
    if getattr(layer, "max_norm", None) is not None:
        return "whose max_norm changes its weight while it is read; shorten the vectors it gives"
    if getattr(layer, "scale_grad_by_freq", False):
        return "whose scale_grad_by_freq counts padding too; leave it out"
    return ""


def _sees_the_batch(layer: nn.Module) -> bool:
    return isinstance(layer, _BatchNorm) or (
        isinstance(layer, _NormBase) and layer.track_running_stats
    )


def masked_batch_norm_instead(model: nn.Module) -> nn.Module:
    """Return a copy with each batch normalisation of torch replaced by one that heeds padding.

    Weights and running statistics are taken over. Evaluation goes by running statistics, also where
    torch's layer kept none, since a prediction must not depend on what else is in the batch.
    """
    return with_layers_replaced(model, _BatchNorm, _masked)


def with_layers_replaced(
    model: nn.Module, kind: type[_NormBase], other: Callable[[Any], nn.Module]
) -> nn.Module:
    """Copy a network with its layers of a kind replaced, where they see the batch."""
    if isinstance(model, kind):
        return other(model)
    model = copy.deepcopy(model)
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if isinstance(child, kind) and _sees_the_batch(child):
                setattr(parent, name, other(child))
    return model


def _masked(layer: _BatchNorm) -> BatchNorm:
    if layer.momentum is None:
        raise ModelError(
            f"{type(layer).__name__} has momentum None: an average over all batches so far, whose "
            "number cannot be averaged over clients; give it a momentum such as 0.1"
        )
    masked = BatchNorm(layer.num_features, layer.eps, layer.momentum, layer.affine)
    if layer.affine:
        masked.weight, masked.bias = (
            nn.Parameter(p.detach().clone(), p.requires_grad) for p in (layer.weight, layer.bias)
        )
    if layer.running_mean is not None and layer.running_var is not None:
        masked.running_mean, masked.running_var = (
            layer.running_mean.clone(),
            layer.running_var.clone(),
        )
    return masked.train(layer.training)
