"""Say before training which layers of a network cannot be trained correctly, and what to use."""

import copy

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from idiolect.errors import ModelError

_RECURRENT = (nn.RNNBase, nn.RNNCellBase)


def check(model: nn.Module) -> None:
    """Refuse what would be silently wrong: layers whose result depends on padded examples."""
    for name, layer in model.named_modules():
        if _sees_the_batch(layer):
            raise ModelError(
                f"layer {name!r} is {type(layer).__name__}, whose statistics would take in padding "
                "and never be averaged; use GroupNorm: idiolect.models.group_norm_instead(model) "
                "returns the network with every such layer replaced"
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
    if isinstance(model, _NormBase):
        return _group_norm(model, groups)
    model = copy.deepcopy(model)
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if isinstance(child, _NormBase) and _sees_the_batch(child):
                setattr(parent, name, _group_norm(child, groups))
    return model


def _sees_the_batch(layer: nn.Module) -> bool:
    return isinstance(layer, _BatchNorm) or (
        isinstance(layer, _NormBase) and layer.track_running_stats
    )


def _group_norm(layer: _NormBase, groups: int) -> nn.GroupNorm:
    while layer.num_features % groups:
        groups -= 1
    return nn.GroupNorm(groups, layer.num_features, affine=layer.affine)
