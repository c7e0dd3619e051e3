"""Adapters: the few numbers that clients train beside a frozen base that all of them share."""

import copy
import fnmatch
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from idiolect.core.batchnorm import BatchNorm
from idiolect.errors import ConfigError, ModelError, suggest
from idiolect.kernels.attention_layers import StackedMultiheadAttention
from idiolect.kernels.low_rank import low_rank_linear
from idiolect.models.bases import find_base

Patterns = tuple[str, ...]

ATTENTION: Patterns = (
    *("q_proj", "k_proj", "v_proj", "o_proj"),  # ours, LLaMA's
    *("c_attn", "query_key_value", "qkv", "qkv_proj", "Wqkv"),  # all three in one layer
    *("query", "key", "value", "q_lin", "k_lin", "v_lin", "out_lin"),  # BERT's, DistilBERT's
    "out_proj",
)
"""Names that libraries give to the projections of attention."""

_MAMBA = frozenset({"falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h"})
_PAST = ("out_proj", "conv1d")  # their weights are read past the layer, so PEFT refuses them


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """Which parameters a client trains; those of the base are frozen and shared."""

    kind: ClassVar[str] = ""

    head: bool | None = None  # train the last layer too; absent: where the network made it anew
    start: str | None = None  # the folder of an adapter as PEFT writes it, to begin with
    digest: str | None = None  # of that folder; see `bases`

    def attach(self, model: nn.Module) -> None:
        """Make the adapter a part of a network, all of whose own parameters are frozen."""
        raise NotImplementedError

    def settings(self) -> dict[str, Any]:
        """Return the options, as written in a file."""
        return {one.name: getattr(self, one.name) for one in fields(self)}


@dataclass(frozen=True, kw_only=True)
class _Targeted(Adapter):
    targets: Patterns = ()  # of layers' names; empty: attention's projections, else dense layers

    def __post_init__(self) -> None:
        given: Any = self.targets
        if isinstance(given, str) or not all(isinstance(one, str) for one in given):
            raise ConfigError(
                f"adapter.targets is {given!r}, expected a list of names such as ['q_proj']"
            )
        object.__setattr__(self, "targets", tuple(given))


@dataclass(frozen=True, kw_only=True)
class LoRA(_Targeted):
    """W x + alpha / rank · B (A x), with A drawn and B zero at first (Hu et al. 2021)."""

    kind: ClassVar[str] = "lora"

    rank: int = 8
    alpha: float = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rank < 1:
            raise ConfigError(f"adapter.rank is {self.rank}, expected 1 or more")
        if not self.alpha > 0:
            raise ConfigError(f"adapter.alpha is {self.alpha}, expected more than 0")

    def attach(self, model: nn.Module) -> None:
        """Give each target A and B."""
        for _, layer in find_targets(model, self.targets, fused=True):
            _become(layer, _LOW_RANK)
            shapes = layer.low_rank_shapes(self.rank)
            kind = next(layer.parameters()).dtype
            a, b = (torch.empty(shape, dtype=kind) for shape in shapes)
            nn.init.kaiming_uniform_(a, a=math.sqrt(5))
            layer.lora_A, layer.lora_B = nn.Parameter(a), nn.Parameter(b.zero_())
            layer.low_rank_scale = self.alpha / self.rank


@dataclass(frozen=True, kw_only=True)
class IA3(_Targeted):
    """A factor for each output of the targets, one at first (Liu et al. 2022)."""

    kind: ClassVar[str] = "ia3"

    def attach(self, model: nn.Module) -> None:
        """Give each target its factors."""
        for _, layer in find_targets(model, self.targets):
            outputs = _outputs(layer)
            _become(layer, _SCALED)
            layer.ia3 = nn.Parameter(layer.weight.new_ones(outputs))


@dataclass(frozen=True, kw_only=True)
class Bias(_Targeted):
    """The biases that the targets have, or all biases (BitFit, Ben Zaken et al. 2022)."""

    kind: ClassVar[str] = "bias"

    def attach(self, model: nn.Module) -> None:
        """Let biases be trained."""
        layers = find_targets(model, self.targets) if self.targets else model.named_modules()
        found = [own for _, layer in layers if (own := layer._parameters.get("bias")) is not None]
        if not found:
            raise ModelError(
                f"{type(model).__name__} has no biases there to train; choose other targets, or "
                "another adapter, such as lora"
            )
        for bias in found:
            bias.requires_grad_()


@dataclass(frozen=True, kw_only=True)
class Prompts(Adapter):
    """Vectors before the embedded places of a sequence (Lester et al. 2021)."""

    kind: ClassVar[str] = "prompts"

    count: int = 8

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ConfigError(f"adapter.count is {self.count}, expected 1 or more")

    def attach(self, model: nn.Module) -> None:
        """Give the network prompts, drawn from its embeddings' distribution."""
        if not hasattr(model, "prompts"):
            raise ModelError(
                f"{type(model).__name__} has no place for prompts; they go before the tokens of "
                "decoder, encoder, vit and hf: networks; choose lora"
            )
        own: Any = model
        width, deviation = own.prompts_like()
        own.prompts = nn.Parameter(torch.randn(self.count, width) * deviation)


@dataclass(frozen=True, kw_only=True)
class Last(_Targeted):
    """The last layers that have parameters, as they are; or those that the targets name."""

    kind: ClassVar[str] = "last"

    layers: int = 1

    def attach(self, model: nn.Module) -> None:
        """Let the last layers be trained."""
        if self.targets:
            chosen = [own for name, own in model.named_modules() if _fits(name, self.targets)]
        else:
            held = [m for m in model.modules() if any(True for _ in m.parameters(recurse=False))]
            chosen = held[-self.layers :]
        if self.layers < 1 or not chosen:
            raise ConfigError(f"adapter.layers is {self.layers}, expected 1 or more")
        for layer in chosen:
            layer.requires_grad_()


ADAPTERS: dict[str, type[Adapter]] = {own.kind: own for own in (LoRA, IA3, Bias, Prompts, Last)}


def make_adapter(given: "str | Adapter | Mapping[str, Any]") -> Adapter:
    """Make an adapter of its name, of a table with its name and options, or take it as it is."""
    if isinstance(given, Adapter):
        return given
    options = {"name": given} if isinstance(given, str) else dict(given)
    name = options.pop("name", None)
    if name not in ADAPTERS:
        raise ConfigError(f"unknown adapter {suggest(str(name), ADAPTERS)}")
    known = [one.name for one in fields(ADAPTERS[name])]
    for key in options:
        if key not in known:
            raise ConfigError(f"unknown key adapter.{key}: {suggest(key, known)}")
    return ADAPTERS[name](**options)


@dataclass(frozen=True)
class AdaptedNetwork:
    """Builds a network whose base is frozen, with an adapter drawn under the run's seed.

    A base without stored weights is drawn under one seed for all runs: it is what they share.
    """

    build: Callable[[], nn.Module]
    adapter: Adapter

    def __call__(self) -> nn.Module:
        """Build base and adapter."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            base = self.build()
        return adapt_network(base, self.adapter)


def adapt_network(base: nn.Module, adapter: Adapter) -> nn.Module:
    """Return a network with an adapter around it; the base is left alone, its tensors are shared.

    Batch normalisation of the base goes by its running statistics, which are frozen too.
    """
    shared: dict[int, Any] = {id(held): held for held in base.buffers()}
    for held in base.parameters():
        shared[id(held)] = nn.Parameter(held.detach(), requires_grad=False)
    model = copy.deepcopy(base, shared)
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if isinstance(child, BatchNorm | _BatchNorm):
                setattr(parent, name, FrozenNorm(child))
    for layer in model.modules():
        # Torch's own read weights past the layers that hold them, and so past their adapters.
        if type(layer) is nn.MultiheadAttention:
            layer.__class__ = StackedMultiheadAttention
        if isinstance(layer, nn.TransformerEncoderLayer):
            layer.activation_relu_or_gelu = 0  # no "fast path" in evaluation
    new = tuple(getattr(model, "new_layers", ()))
    for name in new if adapter.head is None else [_last_layer(model)] * adapter.head:
        model.get_submodule(name).requires_grad_()  # as a whole, so it is no target any more
    adapter.attach(model)
    for held in model.parameters():
        if held.requires_grad:  # trained: no tensor of the base any more
            held.data = held.data.clone()
    model.adapter = adapter  # type: ignore[assignment]
    if adapter.start is not None:
        from idiolect.models.peft_files import load_peft

        load_peft(model, find_base(adapter.start, adapter.digest))
    return model


def _last_layer(model: nn.Module) -> str:
    """Name the last layer that has parameters."""
    return [name for name, _ in model.named_parameters()][-1].rpartition(".")[0]


class FrozenNorm(nn.Module):
    """Batch normalisation by running statistics that stay as they are."""

    scale: Tensor
    shift: Tensor

    def __init__(self, layer: Any) -> None:
        super().__init__()
        if layer.running_mean is None:
            raise ModelError(
                "the base has batch normalisation without running statistics, so it cannot be "
                "frozen; use idiolect.models.group_norm_instead(model)"
            )
        scale = (layer.running_var + layer.eps).rsqrt()
        scale = scale if layer.weight is None else scale * layer.weight.detach()
        shift = -layer.running_mean * scale
        self.register_buffer("scale", scale)
        self.register_buffer("shift", shift if layer.bias is None else shift + layer.bias.detach())

    def forward(self, x: Tensor) -> Tensor:
        """Scale and shift each channel."""
        along = (-1, *[1] * (x.dim() - 2))
        return x * self.scale.reshape(along) + self.shift.reshape(along)


# Finding the layers to adapt.


def find_targets(
    model: nn.Module, patterns: Sequence[str], fused: bool = False
) -> list[tuple[str, Any]]:
    """Find the layers that patterns name, or by default those of attention, else dense ones.

    `fused`, of lora, takes torch's attention, whose query, key and value are one matrix, for such a
    layer, and by default no convolution of several groups.
    """
    held = [(n, m) for n, m in model.named_modules() if _adaptable(m) or (fused and _is_fused(m))]
    config = getattr(getattr(model, "network", None), "config", None)
    past = _PAST if fused and getattr(config, "model_type", "") in _MAMBA else ()
    if not patterns:
        held = [(name, own) for name, own in held if not _fits(name, past)]
    elif named := [name for name, _ in held if _fits(name, past) and _fits(name, patterns)]:
        raise ModelError(
            f"adapter.targets {list(patterns)} name {named[0]!r}, whose weight kernels of Mamba "
            "read past the layer, so neither they nor PEFT take an adapter there; leave "
            f"{' and '.join(past)} out"
        )
    if patterns:
        found = [(name, own) for name, own in held if _fits(name, patterns)]
        if found:
            return found
        known = sorted({name.rpartition(".")[2] for name, _ in held})
        raise ModelError(
            f"adapter.targets {list(patterns)} name no dense layer or convolution of "
            f"{type(model).__name__}; it has {', '.join(known) or 'none'}"
        )
    found = [(name, own) for name, own in held if _fits(name, ATTENTION) or _is_fused(own)]
    if not found and held:
        last = _last_layer(model)
        whole = [(n, m) for n, m in held if not (fused and getattr(m, "groups", 1) > 1)]
        names = dict(model.named_parameters())  # a tied head's weight has the embedding's name
        tied = {n for n, m in whole if "weight" in m._parameters and f"{n}.weight" not in names}
        found = [(name, own) for name, own in whole if name != last and name not in tied]
    if not found:
        raise ModelError(
            f"{type(model).__name__} has no layer to adapt by default; name some with "
            "adapter.targets, or use the adapter 'last'"
        )
    return found


def _fits(name: str, patterns: Sequence[str]) -> bool:
    """Say whether a pattern fits: the last part of a name, or, where it has a dot, all of it."""
    last = name.rpartition(".")[2]
    return any(fnmatch.fnmatchcase(name if "." in one else last, one) for one in patterns)


def _adaptable(layer: nn.Module) -> bool:
    """Say whether a layer is of a kind that takes an adapter, and frozen."""
    known = isinstance(layer, nn.Linear | nn.Conv2d) or _is_conv1d(layer)
    return known and not any(own.requires_grad for own in layer.parameters())


def _is_fused(layer: nn.Module) -> bool:
    held = isinstance(layer, nn.MultiheadAttention) and layer.in_proj_weight is not None
    return held and not any(own.requires_grad for own in layer.parameters())


def _is_conv1d(layer: nn.Module) -> bool:
    """Say whether a layer is GPT-2's dense layer, whose weight is [in, out]."""
    return hasattr(layer, "nf") and any(own.__name__ == "Conv1D" for own in type(layer).__mro__)


def _outputs(layer: Any) -> int:
    return int(layer.nf if _is_conv1d(layer) else layer.weight.shape[0])


# Layers with an adapter. A layer takes another class and keeps its own parameters and their names.


class LowRankLinear(nn.Linear):
    """A frozen dense layer with A and B."""

    lora_A: nn.Parameter
    lora_B: nn.Parameter
    low_rank_scale: float

    def low_rank_shapes(self, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the shapes of A and B."""
        return (rank, self.in_features), (self.out_features, rank)

    def forward(self, x: Tensor) -> Tensor:
        """Return W x + scale · B (A x)."""
        own = self.lora_A, self.lora_B, self.low_rank_scale
        return low_rank_linear(x, self.weight, self.bias, *own)


class _LowRankAdded(nn.Module):
    """Adds B (A x) to whatever a dense layer of another make returns."""

    def low_rank_shapes(self: Any, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        outputs = _outputs(self)
        return (rank, self.weight.numel() // outputs), (outputs, rank)

    def forward(self: Any, x: Tensor) -> Tensor:
        base: Tensor = super().forward(x)
        low = F.linear(x.reshape(-1, x.shape[-1]), self.lora_A)
        added: Tensor = self.low_rank_scale * F.linear(low, self.lora_B).view(base.shape)
        return base + added


class LowRankConv2d(nn.Conv2d):
    """A frozen convolution with a narrow one, A, and one of 1×1, B, beside it."""

    def low_rank_shapes(self, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the shapes of A and B."""
        if self.groups > 1:
            raise ModelError("a convolution of several groups takes no lora; choose other targets")
        return (rank, *self.weight.shape[1:]), (self.out_channels, rank, 1, 1)

    def forward(self: Any, x: Tensor) -> Tensor:
        """Return the convolution and its low-rank change."""
        base: Tensor = super().forward(x)
        low = self._conv_forward(x, self.lora_A, None)
        mixed = torch.einsum("nrhw,or->nohw", low, self.lora_B.flatten(1))
        added: Tensor = base + self.low_rank_scale * mixed
        return added


class LowRankAttention(StackedMultiheadAttention):
    """Torch's attention with A and B beside the matrix of query, key and value."""

    lora_A: nn.Parameter
    lora_B: nn.Parameter
    low_rank_scale: float

    def low_rank_shapes(self, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the shapes of A and B."""
        return (rank, self.embed_dim), (3 * self.embed_dim, rank)

    def _entered(self, given: Sequence[Tensor], same: bool) -> Sequence[Tensor]:
        if same:
            own = self.lora_A, self.lora_B, self.low_rank_scale
            return low_rank_linear(given[0], self.in_proj_weight, self.in_proj_bias, *own).chunk(
                3, -1
            )
        low = [F.linear(x, self.lora_A) for x in given]
        parts = zip(super()._entered(given, same), low, self.lora_B.chunk(3), strict=True)
        return [base + self.low_rank_scale * F.linear(own, b) for base, own, b in parts]


class _Scaled(nn.Module):
    """Multiplies the outputs of a layer by factors."""

    def forward(self: Any, x: Tensor) -> Tensor:
        base: Tensor = super().forward(x)
        factors: Tensor = self.ia3
        return base * (factors[:, None, None] if isinstance(self, nn.Conv2d) else factors)


_LOW_RANK: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: LowRankLinear,
    nn.Conv2d: LowRankConv2d,
    StackedMultiheadAttention: LowRankAttention,
    nn.Module: _LowRankAdded,
}
_SCALED: dict[type[nn.Module], type[nn.Module]] = {nn.Module: _Scaled}


def _become(layer: nn.Module, forms: dict[type[nn.Module], type[nn.Module]]) -> None:
    """Give a layer the class with an adapter: that made for its own class, or one over it."""
    own = type(layer)
    if own not in forms:
        general = forms[nn.Module]
        if isinstance(layer, nn.Conv2d) and general is _LowRankAdded:
            general = LowRankConv2d
        forms[own] = type(f"{general.__name__.strip('_')}{own.__name__}", (general, own), {})
    layer.__class__ = forms[own]
