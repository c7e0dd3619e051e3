"""Say before training which layers of a network cannot be trained correctly, and what to use."""

import copy
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from idiolect.core.batchnorm import BatchNorm
from idiolect.errors import ModelError
from idiolect.models.layers import dividing

_RECURRENT = (nn.RNNBase, nn.RNNCellBase)


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
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ModelError(f"{type(model).__name__} has no trainable parameter; give it a layer")


def mappable(model: nn.Module) -> str:
    """Return why vmap cannot map this network, or an empty string where it can."""
    for name, layer in model.named_modules():
        if isinstance(layer, _RECURRENT):
            return (
                f"layer {name!r} is {type(layer).__name__}, which torch cannot vmap; its clients "
                "are trained one after the other"
            )
    return ""


def group_norm_instead(model: nn.Module, groups: int = 8) -> nn.Module:
    """Return a copy with each batch normalisation replaced by group normalisation.

    Group normalisation looks at one example at a time, so neither padding nor averaging over
    clients can disturb it. `groups` is lowered where it does not divide a layer's channels.
    """
    return _replaced(model, _NormBase, lambda layer: _group_norm(layer, groups))


def masked_batch_norm_instead(model: nn.Module) -> nn.Module:
    """Return a copy with each batch normalisation of torch replaced by one that heeds padding.

    Weights and running statistics are taken over. Evaluation goes by running statistics, also where
    torch's layer kept none, since a prediction must not depend on what else is in the batch.
    """
    return _replaced(model, _BatchNorm, _masked)


def _sees_the_batch(layer: nn.Module) -> bool:
    return isinstance(layer, _BatchNorm) or (
        isinstance(layer, _NormBase) and layer.track_running_stats
    )


def _replaced(
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


def _group_norm(layer: _NormBase, groups: int) -> nn.GroupNorm:
    channels = layer.num_features
    return nn.GroupNorm(dividing(groups, channels), channels, affine=layer.affine)


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
