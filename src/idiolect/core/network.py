"""A module as a pure function: the form in which methods call networks."""

import copy
import itertools
import math
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from idiolect.core import batchnorm, randomness, tree
from idiolect.core.task import Classes, Task
from idiolect.core.tree import Params
from idiolect.errors import MethodError, ModelError
from idiolect.kernels.attention_layers import StackedFunctions, StackedMultiheadAttention
from idiolect.kernels.conv_relu_pool import conv_relu, conv_relu_pool
from idiolect.kernels.convolution import StackedConv2d
from idiolect.kernels.group_norm import StackedGroupNorm, norm_relu
from idiolect.kernels.layer_norm import StackedLayerNorm
from idiolect.kernels.linear import StackedLinear, linear_relu
from idiolect.kernels.max_pool import HostMaxPool2d, halves
from idiolect.kernels.recurrent import LAYERS
from idiolect.kernels.residual import Residuals, merges_on
from idiolect.kernels.vmap_rules import GroupedFunction, call, differs_everywhere

Spot = tuple[str, dict[str, Any], str, Tensor]
"""A parameter's name, the dict of a layer that holds it, its key there, and the layer's own."""


Part = Literal["logits", "features", "head"]
"""What is run: the whole network, all before its head, or the head on features."""

_THROUGH = nn.Identity()

_OF_THE_BATCH = (
    "answers one example otherwise when another of its batch changes, so padding would change "
    "results; let it look at each example alone (nn.GroupNorm or "
    "idiolect.core.batchnorm.BatchNorm instead of means over a batch, attention with "
    "batch_first=True)"
)


class Network:
    """A module as a pure function of its parameters, in training and in evaluation mode."""

    def __init__(
        self,
        model: nn.Module,
        precision: str = "fp32",
        stacked: bool = True,
        task: Task | None = None,
    ) -> None:
        """`bf16` multiplies in bfloat16 where torch's autocast deems it safe.

        A network that runs many clients at once has layers made for that (`stacked`). `task` says
        what its outputs mean; by default they are logits of classes.
        """
        self.task: Task = task or Classes()
        self.params: Params = {
            name: value.detach().clone() for name, value in batchnorm.learned(model).items()
        }
        self._shapes = {name: value.shape for name, value in self.params.items()}
        trainable = {name for name, value in model.named_parameters() if value.requires_grad}
        for name in sorted(filter(batchnorm.is_statistic, trainable)):
            raise ModelError(
                f"parameter {name!r} has the name of a running statistic, which is not trained; "
                "give it another name"
            )
        # Running means and variances: carried, sent and averaged as parameters are, not trained.
        self.statistics = frozenset(self.params.keys() - trainable)
        self.norms = frozenset(
            f"{name}.{own}" if name else own
            for name, layer in model.named_modules()
            if isinstance(layer, nn.GroupNorm | nn.LayerNorm | batchnorm.BatchNorm)
            for own in batchnorm.learned(layer)
        )
        self._held = frozenset(_state(model))
        self.running = False  # while it is being run: its layers may draw
        # Code of somebody's: what it does is known by trial only.
        self.foreign = not all(map(known, model.modules()))
        self._spoils = False  # whether it changes the examples it is given, so that it gets a copy
        self.draws = any(_draws(layer) for layer in model.modules())  # dropout and the like
        self.steady = not self.draws and all(_steady(layer) for layer in model.modules())
        self._halved, self._stacked = precision == "bf16", stacked
        # Two copies rather than one switched back and forth: `train()` is hidden state. What is
        # frozen is in memory once.
        frozen = self._frozen(model)
        self._modes = {mode: copy.deepcopy(model, {**frozen}).train(mode) for mode in (False, True)}
        for layer in itertools.chain(*(own.modules() for own in self._modes.values())):
            if isinstance(layer, nn.Embedding | nn.EmbeddingBag):
                layer.sparse = False  # the same numbers, which can be mapped and averaged
        # Whether a mode's module calls what torch does not map (or wrongly), in whose place ours is
        # put: seen when it is run. Torch's layers and ours do not, but embeddings with padding.
        foreign = stacked and not all(map(_mapped, model.modules()))
        self._replaces: dict[bool, bool | None] = dict.fromkeys((False, True), foreign and None)
        if stacked:
            self._modes = {mode: replace_layers(own) for mode, own in self._modes.items()}
        self._merges = any(isinstance(own, StackedGroupNorm) for own in self._modes[True].modules())
        self._layers = batchnorm.layers(self._modes[True])
        # The layer of the last parameter, which the head is unless the module declares another.
        self._last = tree.layer_of(list(self._shapes)[-1])
        self._declared: bool | None = None  # whether it does; unknown before `find_head`
        self.features: tuple[int, ...] = ()  # shape of an example's features, once known
        self._locate()

    def _frozen(self, model: nn.Module) -> dict[int, Tensor]:
        """Return what copies of a module share, by the identity of its own: frozen parameters.

        In half precision the matrices among them are so once and for all, not in every product.
        """

        def held(own: nn.Parameter) -> Tensor:
            half = self._halved and own.dim() > 1 and own.is_floating_point()
            value = own.detach().bfloat16() if half else own.detach()
            return nn.Parameter(value, requires_grad=False)

        return {id(own): held(own) for own in model.parameters() if not own.requires_grad}

    def to(self, device: torch.device) -> "Network":
        """Move constants (buffers) to a device, where the parameters will come from outside."""
        for model in self._modes.values():
            model.to(device)
        self.params = tree.to(self.params, device)
        self._locate()
        return self

    def _locate(self) -> None:
        """Note where each mode's module holds the tensors that parameters take the place of.

        `functional_call` finds them anew in every call, which takes as long as a small network.
        """
        self._spots = {mode: _spots(model, self._shapes) for mode, model in self._modes.items()}

    def find_head(self, examples: Tensor) -> bool:
        """Find where the head begins, by trial on examples; return whether it was found.

        A module declares it by two methods, `features(x)` and `head(features)`; otherwise the head
        is the last layer with parameters, if the module ends with it.
        """
        with torch.no_grad():
            expected = self(self.params, examples, training=False)
            for self._declared in (True, False):
                try:
                    features = self(self.params, examples, False, "features")
                    logits = self(self.params, features, False, "head")
                except Exception:  # whatever a foreign module does when it is taken apart
                    continue
                if logits.shape == expected.shape and torch.allclose(logits, expected, 1e-4, 1e-5):
                    self.features = tuple(features.shape[1:])
                    return True
        self._declared = None
        return False

    def _part(self, model: nn.Module, part: Part, x: Tensor) -> Tensor:
        """Run the module before its head, or its head."""
        output: Tensor
        if self._declared:
            output = getattr(model, part)(x)
            return output
        layer = model.get_submodule(self._last)
        if part == "head":
            output = layer(x)
            return output
        if layer is model:
            return x
        above, _, name = self._last.rpartition(".")
        layers = model.get_submodule(above)._modules
        layers[name] = _THROUGH
        try:
            output = model(x)
            return output
        finally:
            layers[name] = layer

    def __call__(self, params: Params, x: Tensor, training: bool, part: Part = "logits") -> Tensor:
        """Return logits [example, class], or run a part of the network."""
        if {name: value.shape for name, value in params.items()} != self._shapes:
            raise MethodError(self._misfit(params))
        if part != "logits" and self._declared is None and not self.find_head(_ramp(x)):
            raise ModelError(
                f"{type(self._modes[False]).__name__} does not end with its last layer that has "
                f"parameters ({self._last!r}), so its features are unknown; give it two methods, "
                "features(x) and head(features), such that forward(x) is head(features(x))"
            )
        if not self._halved:
            return self._run(params, x, training, part)
        # Casts are not cached: under vmap a cached one would outlive the tensors it wraps.
        with torch.autocast(x.device.type, torch.bfloat16, cache_enabled=False):
            logits = self._run(params, x, training, part)
        return logits.to(next(iter(params.values())).dtype)

    def _run(self, params: Params, x: Tensor, training: bool, part: Part) -> Tensor:
        """Call the module with these parameters in the place of its own, as torch.func does."""
        spots = self._spots[training]
        x = x.clone() if self._spoils else x
        self.running = True
        try:
            for name, holder, key, _ in spots:
                holder[key] = params[name]
            model = self._modes[training]
            with Residuals() if self._merges and merges_on(x) else nullcontext():
                if self._replaces[training] is False:
                    return model(x) if part == "logits" else self._part(model, part, x)
                with StackedFunctions() as ours:
                    done = model(x) if part == "logits" else self._part(model, part, x)
            if part != "head":
                self._replaces[training] = ours.called
            return done
        finally:
            self.running = False
            for _, holder, key, own in spots:
                holder[key] = own

    def fault(self, x: Tensor, training: bool) -> str:
        """Return what of a module would be wrong in silence, or an empty string: by trying.

        `x` are a few examples, beside which padding must change nothing.
        """
        model = self._modes[training]
        if self.foreign and (wrong := self._written(x, training)):
            return wrong

        def run(padding: Tensor, params: Params) -> Tensor:
            torch.manual_seed(0)  # layers that draw do so alike
            weight = torch.tensor([1.0] * len(x) + [0.0] * len(padding), device=x.device)
            with torch.enable_grad(), batchnorm.masked(weight):
                return self(params, torch.cat([x, padding]), training)

        far = x[-1:] + 2 * x.abs().amax() + 1 if x.is_floating_point() else x[-1:]
        first, before = run(far, self.params), _state(model)
        second, after = run(x[:1], self.params), _state(model)
        changed = [
            name
            for name, own in after.items()
            # What it had no place for at first it only leaves behind, such as shares of attention.
            if name in self._held and not _equal(before.get(name), own)
        ]
        if changed:
            return (
                f"changes {changed[0]!r} whenever it runs, which would be shared by all clients "
                "and neither averaged nor saved; keep it as it is (instead of spectral_norm, "
                "torch.nn.utils.parametrizations.weight_norm; for running statistics, "
                "idiolect.core.batchnorm.BatchNorm)"
            )
        if _trainable(first).keys() & _trainable(second).keys():
            return (
                "computes with tensors that are trainable but not among its parameters, so nobody "
                "would train them; keep layers in an nn.ModuleList or nn.ModuleDict, tensors as "
                "nn.Parameter, and call layers in methods: a lambda keeps those of the first module"
            )
        again = run(x[:1], self.params) if self.foreign else second
        # A GPU may add in another order each time.
        if (again - second).abs().nan_to_num().amax() > 1e-3 * second.abs().nan_to_num().amax():
            return (
                "gives other results when it runs again on the same examples, so it keeps "
                "something between runs, which all clients would share and nobody would average "
                "or save; let results follow from parameters, buffers and examples alone"
            )
        largest = first[: len(x)].abs().nan_to_num().amax()
        off = (first - second)[: len(x)].abs().nan_to_num().amax()
        if off > 1e-3 * largest:
            return _OF_THE_BATCH
        # Another number of rows is drawn for otherwise, and rounded otherwise.
        if not (self.draws or self._halved):
            more = run(torch.cat([x[:1], x[:1]]), self.params)
            if (more[: len(x)] - second[: len(x)]).abs().nan_to_num().amax() > 1e-2 * largest:
                return _OF_THE_BATCH
        if training and self.foreign and (name := self._sparse(partial(run, far))):
            return (
                f"gives a sparse gradient of {name!r}, which no mean takes; leave sparse=True out"
            )
        if training and not self._stacked and self._recomputes(partial(run, far)):
            return (
                "runs a part again to take its gradient (torch.utils.checkpoint), which would be "
                "done with other parameters; call that part as it is"
            )
        return ""

    def _written(self, x: Tensor, training: bool) -> str:
        """Note what somebody's module draws and writes to; return what of it is wrong."""
        weight = torch.ones(len(x), device=x.device)
        drawn, others = _drawn(x), randomness.others()
        for factor in (1, 1000):  # large parameters meet the limits that it sets them
            params = {name: own * factor for name, own in self.params.items()}
            kept = {name: (own.clone(), own.data_ptr()) for name, own in params.items()}
            given = x.clone()
            try:
                with torch.no_grad(), batchnorm.masked(weight):
                    self(params, given, training)
            except Exception:  # of numbers that are too large for it
                if factor == 1:
                    raise
            self._spoils |= not _equal(given, x)
            for name, own in params.items():
                was, place = kept[name]
                if own.data_ptr() != place or not _equal(own, was):
                    return (
                        f"changes its parameter {name!r} while it runs, which would be changed for "
                        "all clients; compute with what is made of it, as in F.linear(x, "
                        "self.weight.clamp(-1, 1)), or by torch.nn.utils.parametrize"
                    )
        if randomness.others() != others:  # another thread may draw meanwhile, but not each time
            others = randomness.others()
            with torch.no_grad(), batchnorm.masked(weight):
                self(self.params, x.clone(), training)
        if randomness.others() != others:
            return (
                "draws random numbers by Python's random or by NumPy, which would differ from run "
                "to run; draw by torch (nn.Dropout, torch.rand)"
            )
        if _drawn(x) == drawn:
            return ""
        if not training:
            return (
                "draws random numbers in evaluation too, so its scores would be left to chance; "
                "give F.dropout and the like training=self.training, or take nn.Dropout"
            )
        self.draws, self.steady = True, False
        return ""

    def _sparse(self, run: Callable[[Params], Tensor]) -> str:
        """Name a parameter whose gradient is a sparse tensor, if there is one."""
        params = {n: own.clone().requires_grad_() for n, own in self.params.items()}
        output = run(params)
        if not output.requires_grad:
            return ""
        found = torch.autograd.grad(output.sum(), [*params.values()], allow_unused=True)
        named = zip(params, found, strict=True)
        return next((name for name, own in named if own is not None and own.is_sparse), "")

    def _recomputes(self, run: Callable[[Params], Tensor]) -> bool:
        """Say whether a gradient depends on the module's own parameters, not on those given.

        Those are in their place but while it runs. Here they are no numbers.
        """
        fixed = {name: self.params[name] for name in self.statistics}
        params = {n: p.clone().requires_grad_() for n, p in self.params.items() if n not in fixed}
        spots, nan = self._spots[True], torch.tensor(math.nan)
        found = []
        try:
            for odd in (False, True):
                self._spots[True] = [
                    (name, holder, key, nan.to(own).expand_as(own) if odd else own)
                    for name, holder, key, own in spots
                ]
                total = run({**fixed, **params}).sum()
                found.append(torch.autograd.grad(total, [*params.values()], allow_unused=True))
        except RuntimeError:  # torch's, which found other tensors than it had saved
            return True
        finally:
            self._spots[True] = spots
            for _, holder, key, own in spots:
                holder[key] = own
        return not all(itertools.starmap(_equal, zip(*found, strict=True)))

    def run_noted(
        self,
        params: Params,
        x: Tensor,
        weight: Tensor,
        moving: batchnorm.RunningStatistics,
        part: Part,
    ) -> Tensor:
        """Run a part in training mode, and note what batch normalisation saw of the batch."""
        with batchnorm.masked(weight) as ran:
            output = self(params, x, True, part)
        moving.note(params, self._layers, ran)
        return output

    def apart(self) -> "Network":
        """Return a copy that a trial may spoil; what is frozen is shared."""
        frozen = {id(p): p for p in self._modes[True].parameters() if not p.requires_grad}
        return copy.deepcopy(self, {**frozen})

    @property
    def constants(self) -> dict[str, Tensor]:
        """Buffers and frozen parameters: what no one trains, averages or sends."""
        model = self._modes[False]
        frozen = {n: p.detach() for n, p in model.named_parameters() if not p.requires_grad}
        held = {**dict(model.named_buffers()), **frozen}
        return {name: value for name, value in held.items() if name not in self.statistics}

    def _misfit(self, params: Params) -> str:
        """Name the first parameter that torch would have left as it was, or dropped."""
        for name in sorted(params.keys() | self._shapes):
            got, expected = (
                str(tuple(shapes[name])) if name in shapes else "absent"
                for shapes in ({n: p.shape for n, p in params.items()}, self._shapes)
            )
            if got != expected:
                break
        return (
            f"parameter {name!r} is {got}, but the client's network expects {expected}; give "
            "`logits` all trainable parameters of that network and nothing else"
        )


def drawn_dense(inside: int, outside: int, draw: torch.Generator, like: Tensor) -> Params:
    """Draw a dense layer as torch does: uniform within ± 1 / √inside."""
    bound = 1 / math.sqrt(inside)

    def uniform(*shape: int) -> Tensor:
        return ((torch.rand(shape, generator=draw, dtype=torch.float64) * 2 - 1) * bound).to(like)

    return {"weight": uniform(outside, inside), "bias": uniform(outside)}


def _state(model: nn.Module) -> dict[str, Any]:
    """Return what a module may change while it runs: its buffers, and numbers it counts in."""
    found: dict[str, Any] = {name: value.clone() for name, value in model.named_buffers()}
    for prefix, layer in model.named_modules():
        for name, own in vars(layer).items():
            if isinstance(own, int | float | Tensor):
                kept = own.detach().clone() if isinstance(own, Tensor) else own
                found[f"{prefix}.{name}".lstrip(".")] = kept
    return found


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and torch.allclose(one, other, 0, 0, equal_nan=True)
    return bool(one == other)


def _trainable(output: Tensor) -> dict[int, Tensor]:
    """Find the leaves that a result was computed of and that want a gradient."""
    found: dict[int, Tensor] = {}
    seen, todo = set(), [output.grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        own = getattr(node, "variable", None)
        if isinstance(own, Tensor):
            found[id(own)] = own
        todo += [before for before, _ in node.next_functions]
    return found


def _drawn(x: Tensor) -> bytes:
    """Return where the generator of the device of x stands."""
    state = torch.cuda.get_rng_state(x.device) if x.is_cuda else torch.get_rng_state()
    return state.numpy().tobytes()


def _ramp(x: Tensor) -> Tensor:
    """Make two examples like those of a batch, which may be mapped, to try a network on."""
    shape = (2, *x.shape[1:])
    if not x.is_floating_point():
        return torch.zeros(shape, dtype=x.dtype, device=x.device)
    ramp = torch.linspace(-1, 1, math.prod(shape), dtype=x.dtype, device=x.device)
    return ramp.reshape(shape)


def _spots(model: nn.Module, names: Iterable[str]) -> list[Spot]:
    """Find every place of the named parameters and statistics; tied ones have several."""
    held = [
        (f"{prefix}.{key}" if prefix else key, holder, key, own)
        for prefix, layer in model.named_modules(remove_duplicate=False)
        for holder in (layer._parameters, layer._buffers)
        for key, own in holder.items()
        if own is not None
    ]
    own_of = {name: own for name, _, _, own in held}
    found = {}
    for name in names:
        for _, holder, key, own in held:
            if own is own_of[name]:
                found[id(holder), key] = (name, holder, key, own)
    return list(found.values())


def _draws(layer: nn.Module) -> bool:
    """Say whether a layer draws random numbers in training: dropout, alone or in another; ours."""
    if getattr(layer, "draws", False) is True:
        return True
    rate = layer.p if isinstance(layer, _DropoutNd) else getattr(layer, "dropout", 0.0)
    return isinstance(rate, float) and rate > 0


def known(layer: nn.Module) -> bool:
    """Say whether a layer is torch's or ours."""
    return type(layer).__module__.partition(".")[0] in ("torch", "idiolect")


def _mapped(layer: nn.Module) -> bool:
    """Say whether a layer calls no function that our kernels replace."""
    return known(layer) and getattr(layer, "padding_idx", None) is None


def _steady(layer: nn.Module) -> bool:
    """Say whether a layer surely does the same in training and in evaluation.

    Torch's layers and ours do, with few exceptions; others may ask which it is.
    """
    return known(layer) and not isinstance(layer, nn.RReLU | batchnorm.BatchNorm | _NormBase)


# Layers that are fast for many clients at once.


class StackedSequential(nn.Sequential):
    """A sequence whose convolutions, dense layers and normalisations run with what follows."""

    def forward(self, x: Tensor) -> Tensor:
        """Run the layers, each with the ReLU, or ReLU and 2×2 max-pooling, after it."""
        layers = list(self)
        while layers:
            first, relu = layers[0], [type(layer) for layer in layers[1:2]] == [nn.ReLU]
            if isinstance(first, StackedLinear) and relu:
                x, layers = linear_relu(first, x), layers[2:]
            elif isinstance(first, StackedGroupNorm) and relu:
                x, layers = norm_relu(first, x), layers[2:]
            elif not isinstance(first, StackedConv2d) or not relu:
                x, layers = first(x), layers[1:]
            elif len(layers) > 2 and halves(layers[2]):
                x, layers = conv_relu_pool(first, x), layers[3:]
            else:
                x, layers = conv_relu(first, x), layers[2:]
        return x


class StackedDropout(nn.Dropout):
    """Dropout whose gradient is one launch on CUDA; torch's is three where it can be a variable."""

    @staticmethod
    def suits(layer: nn.Module) -> bool:
        """Return whether it has something to drop, and returns a new tensor."""
        return isinstance(layer, nn.Dropout) and 0 < layer.p < 1 and not layer.inplace

    def forward(self, x: Tensor) -> Tensor:
        """Return x with some numbers 0, others larger."""
        if not self.training or not _on_cuda(x) or not differs_everywhere(x):
            return super().forward(x)
        y: Tensor = call(_Drop, x[None], self.p)[0]
        return y.squeeze(0)


def _on_cuda(x: Tensor) -> bool:
    return x.is_cuda


class _Drop(GroupedFunction):
    """Dropout: x and a share -> the output, and the mask of what is kept."""

    @staticmethod
    def forward(x: Tensor, share: float) -> Any:
        return torch.native_dropout(x, share, True)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.scale = 1 / (1 - inputs[1])
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(output[1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> Any:
        return call(_DropGradient, gradient, *ctx.saved_tensors, ctx.scale), None


class _DropGradient(GroupedFunction):
    """The gradient, where something is left, and its scale -> the gradient before."""

    @staticmethod
    def forward(gradient: Tensor, left: Tensor, scale: float) -> Any:
        return torch.ops.aten.native_dropout_backward(gradient, left, scale)

    @staticmethod
    def backward(ctx: Any, further: Tensor) -> Any:
        _, left = ctx.saved_tensors
        return call(_DropGradient, further, left, *ctx.options), None, None


_STACKED: dict[type[nn.Module], Any] = {
    nn.Dropout: StackedDropout,
    nn.Conv2d: StackedConv2d,
    nn.MaxPool2d: HostMaxPool2d,
    nn.Linear: StackedLinear,
    NonDynamicallyQuantizableLinear: StackedLinear,  # at the end of attention
    nn.GroupNorm: StackedGroupNorm,
    nn.LayerNorm: StackedLayerNorm,
    nn.MultiheadAttention: StackedMultiheadAttention,
    **LAYERS,
}


def _hooked(layer: nn.Module) -> bool:
    """Say whether a layer has hooks, which a fused layer would not call."""
    return bool(layer._forward_hooks or layer._forward_pre_hooks)


def replace_layers(model: nn.Module) -> nn.Module:
    """Replace plain layers and sequences of them in place; parameters and names stay."""
    for layer in model.modules():
        stacked = _STACKED.get(type(layer))
        if stacked is not None and stacked.suits(layer):
            layer.__class__ = stacked
        if type(layer) is nn.Sequential and not any(map(_hooked, layer)):
            layer.__class__ = StackedSequential
        # Shortcuts of evaluation that call torch's attention and cannot be mapped.
        if isinstance(layer, nn.TransformerEncoderLayer):
            layer.activation_relu_or_gelu = 0
        if isinstance(layer, nn.TransformerEncoder):
            layer.use_nested_tensor = False
    return model
