"""Group normalisation in which every client of a stack has its own factors.

vmap splits torch's into some fifty operations a layer going backward; here it is one launch of
`norm.cu` each way, including the ReLU that often follows, and with channels last a residual sum
between them (`residual`). Differentiable any number of times.
"""

import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from idiolect.kernels import residual
from idiolect.kernels.autotune import FEW, Form, fastest
from idiolect.kernels.compiled import launch, round_up
from idiolect.kernels.deferred import Deferred, DeferredTensor, computed
from idiolect.kernels.vmap_rules import GroupedFunction, call, float32_on_cuda, halved_on_cuda

_WARP = 32
_WARPS = 8  # of a block, at most
_MANY_THREADS, _MOST_THREADS = 512, 1024  # of a block with channels last
_HELD = (32, 64)  # bytes of a pixel in a block that holds its pixels in registers, at least
_KEPT = 8  # pixels that a thread holds, at most
_ROOM = 100 * 1024  # bytes of shared memory of a block, at most
_GRADIENT_INPUTS = 7  # of the plain task; then what is merged with it
_GRADIENTS = {  # tasks by whether the gradient is a sum, and whether ReLU cut something off
    (False, False): "gradient",
    (True, False): "gradient of a sum",
    (False, True): "cut gradient",
    (True, True): "cut gradient of a sum",
}


class StackedGroupNorm(nn.GroupNorm):
    """Group normalisation that is fast under vmap on CUDA; elsewhere it is torch's own."""

    @staticmethod
    def suits(layer: nn.Module) -> bool:
        """Return whether a layer is of the plain kind that can be replaced."""
        return type(layer) is nn.GroupNorm and layer.affine

    def forward(self, x: Tensor) -> Tensor:
        """Normalise groups of channels, then scale and shift each channel."""
        if not _suits_kernel(x):
            own: Tensor = super().forward(x)
            return own
        return _normalised(self, x, relu=False)


def norm_relu(layer: nn.Module, x: Tensor) -> Tensor:
    """Normalise and apply ReLU: in one launch under vmap on CUDA."""
    if not isinstance(layer, StackedGroupNorm) or not _suits_kernel(x):
        return layer(x).relu()  # type: ignore[no-any-return]
    return _normalised(layer, x, relu=True)


def _suits_kernel(x: Tensor) -> bool:
    return (float32_on_cuda(x) or halved_on_cuda(x)) and x.dim() > 2


def _normalised(layer: nn.GroupNorm, x: Tensor, relu: bool) -> Tensor:
    pixels = x.flatten(2)[None]
    options = (layer.num_groups, layer.eps, relu)
    y: Tensor = call(_Normalise, pixels, layer.weight[None], layer.bias[None], *options)[0]
    return residual.no_view(y.squeeze(0).reshape(x.shape))


class GroupNormSizes(NamedTuple):
    """The sizes of a stack of images [group, image, channel, pixel], and the layer's options."""

    groups: int
    images: int
    channels: int
    pixels: int
    parts: int  # groups of channels that are normalised together
    eps: float
    relu: bool  # whether ReLU follows

    def related(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Let y of a gradient's inputs, drawn at random, be made of the others, as it is in use."""
        if len(inputs) < _GRADIENT_INPUTS:
            return inputs
        gradient, x, w, mean, scale, y, b, *others = inputs
        each = self.channels // self.parts
        level, by = (one.repeat_interleave(each, 2) for one in (mean, scale))
        made = (_single(x) - level[..., None]) * (w[:, None] * by)[..., None] + b[:, None, :, None]
        y.copy_(made.relu() if self.relu else made)
        return gradient, x, w, mean, scale, y, b, *others


class _Normalise(GroupedFunction):
    """x [group, image, channel, pixel], w and b [group, channel] -> y, means, scales.

    Images may be bfloat16, then y is too; all else is in single precision.
    The options of both functions are (parts, eps, relu).
    """

    joins_examples = 1

    @classmethod
    def may_join(cls, first: Tensor, *rest: Any) -> bool:
        return first.stride(1) == first.shape[2] * first.stride(2)  # else it would be a copy

    @staticmethod
    def forward(x: Tensor, w: Tensor, b: Tensor, *options: Any) -> Any:
        sizes = GroupNormSizes(*x.shape, *options)
        if not sizes.relu and residual.may_wait(x) and _merges(x, sizes):
            work = _Work(x, w, b, sizes)
            statistics = (DeferredTensor(_Statistic(work, which)) for which in range(2))
            return residual.waiting(work, x), *statistics
        return _fastest("normalise", sizes, x, w, b)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        x, w, b, *ctx.options = inputs
        y, mean, scale = output
        y = y if ctx.options[2] else x  # which alone needs it: what is added to it in place may be
        ctx.mark_non_differentiable(mean, scale)
        ctx.set_materialize_grads(False)  # theirs would be zeros, made for nothing
        ctx.save_for_backward(x, w, mean, scale, y, b)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> Any:
        gradients = call(_NormaliseGradient, gradient, *ctx.saved_tensors, *ctx.options)
        return *gradients, None, None, None


class _NormaliseGradient(GroupedFunction):
    """The gradient by y, x, w, means, scales, y, b -> the gradients by x, w and b.

    Without ReLU, y is not read, and may be any images.
    """

    merges = True

    @staticmethod
    def forward(gradient: Tensor, *rest: Any) -> Any:
        x, *given = map(computed, rest)
        *given, parts, eps, relu = given
        sizes = GroupNormSizes(*x.shape, parts, eps, relu)  # type: ignore[call-arg]
        found = getattr(gradient, "deferred", None)
        alike = gradient.dtype == x.dtype and gradient.stride() == x.stride()
        if not (isinstance(found, residual.Gradient) and alike and _merges(x, sizes)):
            return _fastest("gradient", sizes, computed(gradient), x, *given)
        (first, *second), cut = found.parts(x)
        others = [*second] if cut is None else [*second, cut]
        task = _GRADIENTS[bool(second), cut is not None]
        dx, dw, db, *kept = _fastest(task, sizes, first, x, *given, *others)
        if kept:
            found.keep(kept[0], x)
        return dx, dw, db

    @staticmethod
    def backward(ctx: Any, *further: Tensor) -> Any:
        gradient, x, w, _, _, y, b = ctx.saved_tensors
        sizes = GroupNormSizes(*x.shape, *ctx.options)

        def recomputed(gradient: Tensor, x: Tensor, w: Tensor) -> Any:
            # Means and scales once more, since they depend on x.
            _, mean, scale = plain_normalise(x, w, torch.zeros_like(w), sizes)
            return plain_gradient(gradient, x, w, mean, scale, y, b, sizes)

        pull: Any = torch.func.vjp(recomputed, gradient, x, w)[1]
        return *pull(further), None, None, None, None, None, None, None


class _Work:
    """A normalisation that waits for what follows it."""

    def __init__(self, x: Tensor, w: Tensor, b: Tensor, sizes: GroupNormSizes) -> None:
        self.given, self._sizes = (x, w, b), sizes
        self._statistics: tuple[Tensor, ...] = ()

    def done(self, added: Tensor | None, relu: bool) -> Tensor:
        """Do it, and keep means and scales."""
        sizes = self._sizes._replace(relu=relu)
        task, others = ("normalise", ()) if added is None else ("normalise and add", (added,))
        y, *statistics = _fastest(task, sizes, *self.given, *others)
        self._statistics = self._statistics or (*statistics,)
        result: Tensor = y
        return result

    def statistic(self, which: int) -> Tensor:
        """Return means or scales, for which it may have to be done."""
        if not self._statistics:
            self.done(None, False)
        return self._statistics[which]


class _Statistic(Deferred):
    """Means or scales of a normalisation that waits."""

    def __init__(self, work: _Work, which: int) -> None:
        x, _, _ = work.given
        single = torch.float32 if x.dtype == torch.bfloat16 else x.dtype
        shape = (*x.shape[:2], work._sizes.parts)
        super().__init__(shape, x.new_empty(0, dtype=single))
        self._work, self._which = work, which

    def make(self) -> Tensor:
        """Return them."""
        return self._work.statistic(self._which)


def _merges(x: Tensor, sizes: GroupNormSizes) -> bool:
    """Say whether our kernels, with channels last, take images: these do more at once."""
    return sizes.groups * sizes.images > FEW and _channels_last(x, sizes)


def _fastest(task: str, sizes: GroupNormSizes, *inputs: Tensor) -> Any:
    if sizes.groups * sizes.images <= FEW:
        return _FORMS[task]["plain"](*inputs, sizes)
    last = _channels_last(inputs[0] if task.startswith("normalise") else inputs[1], sizes)
    name = f"{task}, channels last" if last else task  # another kernel, compared for itself
    return fastest(name, sizes, lambda: forms(task, sizes, inputs[0], last), *inputs)


def forms(task: str, sizes: GroupNormSizes, x: Tensor, last: bool) -> dict[str, Form]:
    """Return the ways to do a task; a block may hold what it has read."""
    known = dict(_FORMS[task])
    if not last and _kept_bytes("gradient" in task, sizes, x) <= _ROOM:
        known["held"] = functools.partial(known["norm"], least=1)
    for least in _HELD if last else ():
        rows = _block(x, sizes, least)[0]
        whole = least > _HELD[0] and _pieces_of(x, sizes, least) == _pieces_of(x, sizes, _HELD[0])
        if -(-sizes.pixels // rows) <= _KEPT and not whole:
            known[f"held {least}"] = functools.partial(known["norm"], least=least)
    return known


# The forms of both tasks: in torch's operations, and by `norm.cu`.


def plain_normalise(
    x: Tensor, w: Tensor, b: Tensor, sizes: GroupNormSizes
) -> tuple[Tensor, Tensor, Tensor]:
    """Return y = (x − mean) · scale · w + b, perhaps after ReLU, with means and scales."""
    kind, x = x.dtype, _single(x)
    pieces = _pieces(x, sizes)
    variance, mean = torch.var_mean(pieces, -1, correction=0)
    scale = (variance + sizes.eps).rsqrt()
    y = _standardised(x, mean, scale, sizes) * w[:, None, :, None] + b[:, None, :, None]
    return (y.relu() if sizes.relu else y).to(kind), mean, scale


def plain_gradient(
    gradient: Tensor, x: Tensor, w: Tensor, mean: Tensor, scale: Tensor, y: Tensor, b: Tensor,
    sizes: GroupNormSizes,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients by x, w and b; what ReLU cut off is seen by y."""
    half, x, gradient = x.dtype, _single(x), _single(gradient)
    if sizes.relu:
        gradient = torch.ops.aten.threshold_backward(gradient, y.to(gradient.dtype), 0)
    standard = _standardised(x, mean, scale, sizes)
    scaled = _pieces(gradient * w[:, None, :, None], sizes)
    level = scaled.mean(-1, keepdim=True)
    pieces = _pieces(standard, sizes)
    tilt = (scaled * pieces).mean(-1, keepdim=True)
    dx = (scale[..., None] * (scaled - level - pieces * tilt)).reshape(x.shape)
    return dx.to(half), (gradient * standard).sum((1, 3)), gradient.sum((1, 3))


def plain_normalise_and_add(
    x: Tensor, w: Tensor, b: Tensor, added: Tensor, sizes: GroupNormSizes
) -> tuple[Tensor, Tensor, Tensor]:
    """Return y + what is added, perhaps after ReLU, with means and scales."""
    y, mean, scale = plain_normalise(x, w, b, sizes._replace(relu=False))
    y = y + added
    return y.relu() if sizes.relu else y, mean, scale


def plain_merged_gradient(*inputs: Any, plus: bool, masked: bool) -> tuple[Tensor, ...]:
    """Return the gradients, of the sum of two; where ReLU's result was 0 it is 0, and returned.

    The second, and the result, come after the other tensors.
    """
    gradient, *given = inputs[:_GRADIENT_INPUTS]
    *others, sizes = inputs[_GRADIENT_INPUTS:]
    if plus:
        gradient = gradient + others[0]
    if masked:
        gradient = torch.ops.aten.threshold_backward(gradient, others[-1], 0)
    made: tuple[Tensor, ...] = plain_gradient(gradient, *given, sizes)  # type: ignore[call-arg]
    return (*made, gradient) if masked else made


def _single(x: Tensor) -> Tensor:
    return x.float() if x.dtype == torch.bfloat16 else x


def _pieces(x: Tensor, sizes: GroupNormSizes) -> Tensor:
    """View what is normalised together as the last axis."""
    return x.reshape(*x.shape[:2], sizes.parts, -1)


def _standardised(x: Tensor, mean: Tensor, scale: Tensor, sizes: GroupNormSizes) -> Tensor:
    standard = (_pieces(x, sizes) - mean[..., None]) * scale[..., None]
    return standard.reshape(x.shape)


def cuda_normalise(
    x: Tensor, w: Tensor, b: Tensor, *others: Any, least: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Do the same in one launch, images in the order in memory that they have.

    What is added has that of x, with channels last.
    """
    *added, sizes = others
    last = _channels_last(x, sizes)
    x = x if last else x.contiguous()
    y = _empty_like(x, last)
    mean, scale = (w.new_empty(*x.shape[:2], sizes.parts) for _ in range(2))
    given = [x, w.contiguous(), b.contiguous(), *(added or [x]), y, mean, scale]
    _launch("normalise", sizes, given, x, last, least, PLUS=len(added))
    return y, mean, scale


def cuda_gradient(
    *inputs: Any, least: int = 0, plus: bool = False, masked: bool = False
) -> tuple[Tensor, ...]:
    """Do the same in one launch, and one that adds up over images.

    What ReLU cut off is seen by y made anew of x, w and b, so that y need not be read.
    """
    gradient, x, w, mean, scale, _, b, *others, sizes = inputs
    last = _channels_last(x, sizes)
    order = _ordered_last if last else torch.Tensor.contiguous
    x = order(x)
    gradient = gradient.to(x.dtype)
    if last or not _readable(gradient):
        gradient = order(gradient)
    dx = _empty_like(x, last)
    parts = w.new_empty(2, *x.shape[:3])
    factors = [one.contiguous() for one in (w, mean, scale, b)]
    kept = [_empty_like(x, last)] if masked else []
    merged = [others[0] if plus else x, others[-1] if masked else x, *(kept or [dx])]
    given = [gradient, x, *factors, dx, *parts, *merged]
    _launch("gradients", sizes, given, x, last, least, PLUS=int(plus), MASKED=int(masked))
    dw, db = _totals(parts)
    return dx, dw, db, *kept


def _totals(parts: Tensor) -> Tensor:
    """Sum [which, group, image, channel] over images."""
    which, groups, images, channels = parts.shape
    out = parts.new_empty(which, groups, channels)
    threads = _WARP * _WARPS
    constants: dict[str, int | str] = {"C": channels, "THREADS": threads}
    constants |= {"PARTS": 1, "PIXELS": 1, "V": 1, "EPS": "0.f"}  # of what is compiled beside it
    grid = (-(-channels // _WARP), which * groups, 1)
    launch("norm.cu", "totals", constants, grid, threads, [parts, out, images], 4 * threads)
    return out


def _readable(gradient: Tensor) -> bool:
    """Say whether a gradient, perhaps some channels of another, can be read where it is."""
    images, whole = gradient.shape[1], 16 // gradient.element_size()
    far, apart, pixel = gradient.stride()[1:]
    aligned = far % whole == apart % whole == 0 and gradient.data_ptr() % 16 == 0
    return pixel == 1 and gradient.stride(0) == images * far and aligned


def _channels_last(x: Tensor, sizes: GroupNormSizes) -> bool:
    """Say whether images are [image, pixel, group, channel] in memory, and the kernels suit."""
    groups, _, channels, pixels = x.shape
    strides = (channels, pixels * groups * channels, 1, groups * channels)
    ordered = x.stride() == strides and pixels > 1 and x.data_ptr() % 16 == 0
    return ordered and math.prod(_block(x, sizes)) <= _MOST_THREADS


def _ordered_last(x: Tensor) -> Tensor:
    return x.permute(1, 3, 0, 2).contiguous().permute(2, 0, 3, 1)


def _empty_like(x: Tensor, last: bool) -> Tensor:
    groups, images, channels, pixels = x.shape
    if not last:
        return torch.empty_like(x)
    return x.new_empty(images, pixels, groups, channels).permute(2, 0, 3, 1)


def _several(x: Tensor, sizes: GroupNormSizes) -> int:
    """Return how many neighbouring channels of a piece a thread takes at once: 16 bytes or less."""
    return math.gcd(16 // x.element_size(), sizes.channels // sizes.parts)


def _kept_bytes(gradients: bool, sizes: GroupNormSizes, x: Tensor) -> int:
    """Return the bytes of a piece, and of its gradients, that are held with channels first."""
    piece = sizes.channels // sizes.parts * sizes.pixels * x.element_size()
    return 2 * piece if gradients else piece


def _pieces_of(x: Tensor, sizes: GroupNormSizes, least: int) -> int:
    """Return the pieces of a block: all, or so many that a pixel has at least some bytes."""
    each = sizes.channels // sizes.parts * x.element_size()
    fit = (n for n in range(1, sizes.parts + 1) if sizes.parts % n == 0 and n * each >= least)
    return next(fit, sizes.parts) if least else sizes.parts


def _block(x: Tensor, sizes: GroupNormSizes, least: int = 0) -> tuple[int, int]:
    """Return how many pixels a block with channels last takes at a time, and threads for each."""
    pieces = _pieces_of(x, sizes, least)
    lanes = sizes.channels // sizes.parts * pieces // _several(x, sizes)
    whole = _WARP // math.gcd(lanes, _WARP)  # pixels that fill warps
    most = min(_MANY_THREADS // lanes, sizes.pixels)
    return max(1, most // whole) * whole, lanes


def _launch(
    name: str, sizes: GroupNormSizes, tensors: list[Tensor], x: Tensor, last: bool, least: int,
    **merged: int,
) -> None:  # fmt: skip
    constants: dict[str, int | str] = {
        "C": sizes.channels, "PARTS": sizes.parts, "PIXELS": sizes.pixels,
        "EPS": f"{sizes.eps!r}f",
        **({"HALF": 1} if x.dtype == torch.bfloat16 else {}),
        **{which: 1 for which, there in merged.items() if there},
    }  # fmt: skip
    blocks = sizes.groups * sizes.images
    rest = tensors[0].stride()[1:3] if name == "gradients" else ()
    if last:
        several, (rows, lanes) = _several(x, sizes), _block(x, sizes, least)
        threads, held = rows * lanes, _pieces_of(x, sizes, least)
        constants |= {"LAST": 1, "GROUPS": sizes.groups, "HELD": held}
        constants |= {"KEPT": -(-sizes.pixels // rows)} if least else {}
        blocks *= sizes.parts // held
        shared = 4 * (2 * threads * several if name == "gradients" else threads + held)
    else:
        each = sizes.channels // sizes.parts
        # The gradients take a warp for each channel; without them, threads enough for the numbers.
        warps = each if name == "gradients" else each * sizes.pixels // (_WARP * 4)
        threads = _WARP * max(1, min(_WARPS, warps))
        blocks, shared = blocks * sizes.parts, 4 * threads // _WARP
        if least:
            constants |= {"KEPT": 1}
            shared = round_up(shared, 16) + _kept_bytes(name == "gradients", sizes, x)
        idle = _WARP if name == "gradients" else 1  # packs of a channel, so that no thread idles
        most = math.gcd(16 // x.element_size(), sizes.pixels)
        several = max(1, min(most, _power(sizes.pixels // idle)))
        if any(one.data_ptr() % 16 for one in tensors if one.shape == x.shape):
            several = 1
    constants |= {"THREADS": threads, "V": several}
    launch(
        "norm.cu",
        name,
        constants,
        (blocks, 1, 1),
        threads,
        [*tensors, sizes.images, int(sizes.relu), *rest],
        shared,
    )


def _power(number: int) -> int:
    """Return the largest power of two up to a number."""
    return 1 << number.bit_length() >> 1


_FORMS: dict[str, dict[str, Form]] = {
    "normalise": {"plain": plain_normalise, "norm": cuda_normalise},
    "normalise and add": {"plain": plain_normalise_and_add, "norm": cuda_normalise},
    "gradient": {"plain": plain_gradient, "norm": cuda_gradient},
    **{
        task: {
            "plain": functools.partial(plain_merged_gradient, plus=plus, masked=masked),
            "norm": functools.partial(cuda_gradient, plus=plus, masked=masked),
        }
        for (plus, masked), task in _GRADIENTS.items()
        if plus or masked
    },
}
