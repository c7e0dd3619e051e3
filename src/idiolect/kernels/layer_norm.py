"""Layer normalisation in which every client of a stack has its own factors.

vmap splits torch's into dozens of operations going backward. What is normalised knows nothing of
clients: torch's fused kernels do that for all rows at once, and only the factors are each client's.
For rows of up to a thousand numbers `layer_norm.cu` does all in one launch each way, where that is
faster. Differentiable any number of times.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from idiolect.kernels.autotune import Form, fastest
from idiolect.kernels.compiled import REALS, launch
from idiolect.kernels.vmap_rules import GroupedFunction, call

_SHORT = 1024  # numbers of a row that fit into the registers of a warp
_WARP = 32
_THREADS = 256
_WAVES = 4  # blocks of the backward pass for each multiprocessor


class StackedLayerNorm(nn.LayerNorm):
    """Layer normalisation that is fast under vmap."""

    @staticmethod
    def suits(layer: nn.Module) -> bool:
        """Return whether a layer is of the plain kind that can be replaced."""
        return type(layer) is nn.LayerNorm and layer.elementwise_affine

    def forward(self, x: Tensor) -> Tensor:
        """Normalise each row, then scale and shift each of its numbers."""
        last = len(self.normalized_shape)
        if x.shape[x.dim() - last :] != torch.Size(self.normalized_shape):
            own: Tensor = super().forward(x)  # says what is wrong
            return own
        if x.dtype != self.weight.dtype:  # as autocast has it
            x = x.to(self.weight.dtype)
        rows, weight = x.reshape(1, -1, self.weight.numel()), self.weight.reshape(1, -1)
        bias = torch.zeros_like(weight) if self.bias is None else self.bias.reshape(1, -1)
        y: Tensor = call(_LayerNorm, rows, weight, bias, self.eps)[0]
        return y.reshape(x.shape)


class _LayerNorm(GroupedFunction):
    """x [group, row, number], w and b [group, number] -> y, means, scales."""

    joins_examples = True

    @staticmethod
    def forward(x: Tensor, w: Tensor, b: Tensor, eps: float) -> Any:
        return _fastest("layer_norm", eps, x, w, b)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        x, w, _, ctx.eps = inputs
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, w, *output[1:])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> Any:
        return *call(_LayerNormGradient, gradient, *ctx.saved_tensors, ctx.eps), None


class _LayerNormGradient(GroupedFunction):
    """The gradient by y, x, w, means, scales -> the gradients by x, w and b."""

    @staticmethod
    def forward(
        gradient: Tensor, x: Tensor, w: Tensor, mean: Tensor, scale: Tensor, eps: float
    ) -> Any:
        return _fastest("layer_norm_gradient", eps, gradient, x, w, mean, scale)

    @staticmethod
    def backward(ctx: Any, *further: Tensor) -> Any:
        gradient, x, w, _, _ = ctx.saved_tensors
        (eps,) = ctx.options

        def plain(gradient: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
            off = x - x.mean(-1, keepdim=True)
            scale = (off.square().mean(-1, keepdim=True) + eps).rsqrt()
            standard, scaled = off * scale, gradient * w[:, None]
            level = scaled.mean(-1, keepdim=True)
            tilt = (scaled * standard).mean(-1, keepdim=True)
            dx = scale * (scaled - level - standard * tilt)
            return dx, (gradient * standard).sum(1), gradient.sum(1)

        pull: Any = torch.func.vjp(plain, gradient, x, w)[1]
        return *pull(further), None, None, None


class LayerNormSizes(NamedTuple):
    """The sizes of a stack of rows [group, row, number], and the layer's option."""

    groups: int
    rows: int
    width: int
    eps: float


def _fastest(task: str, eps: float, *inputs: Tensor) -> Any:
    x = inputs[0]
    sizes = LayerNormSizes(*x.shape, eps)  # type: ignore[call-arg]
    return fastest(task, sizes, lambda: forms(task, sizes), *inputs)


def forms(task: str, sizes: LayerNormSizes) -> dict[str, Form]:
    """Return all ways to do a task, by name."""
    plain, own = _FORMS[task]
    short = sizes.width % 4 == 0 and sizes.width <= _SHORT and sizes.rows > 0
    return {"plain": plain, "short": own} if short else {"plain": plain}


def _plain_normalise(
    x: Tensor, w: Tensor, b: Tensor, sizes: LayerNormSizes
) -> tuple[Tensor, Tensor, Tensor]:
    standard, mean, scale = torch.native_layer_norm(x, x.shape[2:], None, None, sizes.eps)
    return torch.addcmul(b[:, None], standard, w[:, None]), mean, scale


def _plain_gradient(
    gradient: Tensor, x: Tensor, w: Tensor, mean: Tensor, scale: Tensor, sizes: LayerNormSizes
) -> tuple[Tensor, Tensor, Tensor]:
    back = torch.ops.aten.native_layer_norm_backward
    mask = [True, False, False]
    dx = back(gradient * w[:, None], x, x.shape[2:], mean, scale, None, None, mask)[0]
    standard = (x - mean) * scale
    return dx, (gradient * standard).sum(1), gradient.sum(1)


def _normalise(
    x: Tensor, w: Tensor, b: Tensor, sizes: LayerNormSizes
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch a few threads for each row."""
    s, x = sizes, _close(x)
    y, mean = torch.empty_like(x), x.new_empty(s.groups, s.rows, 1)
    scale, lanes = torch.empty_like(mean), _lanes(s)
    grid = (-(-s.rows * lanes // _THREADS), s.groups, 1)
    given = [x, _close(w), _close(b), y, mean, scale, s.rows]
    launch("layer_norm.cu", "normalise", _constants(s, x) | {"FORWARD": 1}, grid, _THREADS, given)
    return y, mean, scale


def _gradient(
    gradient: Tensor, x: Tensor, w: Tensor, mean: Tensor, scale: Tensor, sizes: LayerNormSizes
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch blocks that take some rows of a client each, and add up what they found."""
    s, x, side = sizes, _close(x), _THREADS // _lanes(sizes)
    parts = max(1, min(-(-s.rows // side), _WAVES * _processors(x) // s.groups))
    each = -(-s.rows // parts)
    parts = -(-s.rows // each)
    dx, sums = torch.empty_like(x), x.new_empty(2, parts, s.groups, s.width)
    given = [_close(gradient), x, _close(w), mean.contiguous(), scale.contiguous(), dx, sums]
    shared = side * s.width * x.element_size()
    grid = (parts, s.groups, 1)
    constants = _constants(s, x)
    launch("layer_norm.cu", "gradients", constants, grid, _THREADS, [*given, s.rows, each], shared)
    total = sums.sum(1)
    return dx, total[0], total[1]


def _lanes(s: LayerNormSizes) -> int:
    """Return how many threads share a row: a power of two, up to a warp."""
    return min(_WARP, 1 << (s.width // 4).bit_length() - 1)


def _constants(s: LayerNormSizes, x: Tensor) -> dict[str, int | str]:
    sizes: dict[str, int | str] = {"WIDTH": s.width, "LANES": _lanes(s), "EPS": repr(s.eps)}
    return {**sizes, "THREADS": _THREADS, "REAL": REALS[x.dtype]}


def _close(tensor: Tensor) -> Tensor:
    """Return a tensor without gaps that can be read four numbers at a time."""
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


def _processors(x: Tensor) -> int:
    return torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 2


_FORMS: dict[str, tuple[Form, Form]] = {  # plain, and by kernel
    "layer_norm": (_plain_normalise, _normalise),
    "layer_norm_gradient": (_plain_gradient, _gradient),
}
