"""Scaled dot-product attention of all clients' examples in one launch.

Torch has no rule for mapping its fused attention, and vmap then runs it client by client. An
example's attention knows nothing of clients, so their axis joins that of the examples. Torch's
kernels are made for long rows of places; those of `attention.cu` are for short ones.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from idiolect.kernels.autotune import Form, fastest
from idiolect.kernels.compiled import REALS, launch, round_up
from idiolect.kernels.vmap_rules import GroupedFunction, call

_WIDEST = 128  # numbers of a head that the fused kernels of CUDA take in every precision
_SHORT = 160  # places, and _NARROW numbers of a head, up to which our kernels are tried
_NARROW = 64
_EACH = 16  # numbers of a place that a thread takes
_THREADS = 288
_SHARED = 100 * 1024  # bytes of shared memory with which two blocks fit on a multiprocessor
_ALIGNED = 32  # places, of which torch's kernel wants the logarithms of a multiple in memory


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Return softmax(q kᵀ · scale) v of [example, head, place, number].

    `mask` [example or 1, head or 1, place or 1, key] is true where a key is seen; every place has
    to see one. `causal`: a place sees those up to itself. The scale is 1 / √numbers unless given.
    """
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    if q.shape[:2] != k.shape[:2]:  # a fused kernel would not say so, but end the process
        raise ValueError(f"{q.shape[1]} heads of queries and {k.shape[1]} of keys; repeat the keys")
    if mask is not None:
        mask = mask.expand(len(q), *mask.shape[1:])
    out: Tensor = call(_Attention, q, k, v, mask, causal, scale)[0]
    return out


def attention_shares(
    q: Tensor,
    k: Tensor,
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Return softmax(q kᵀ · scale) itself, where more is done with it than `attention` does."""
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    return _logits(q, k, mask, causal, scale).softmax(-1)


class _Attention(GroupedFunction):
    """q, k, v [example, head, place, number] and a mask, or none -> the same, and its logarithms.

    Those of the sums under the softmax [example, head, place] are for the backward pass alone.
    """

    @staticmethod
    def forward(
        q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float
    ) -> Any:
        return _fastest("attend", q, k, v, mask, causal, scale)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        *_, mask, ctx.causal, ctx.scale = inputs
        ctx.masked = mask is not None
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs[:3], *output, *([mask] if ctx.masked else []))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Any) -> Any:
        mask = () if ctx.masked else (None,)
        options = (*ctx.saved_tensors, *mask, ctx.causal, ctx.scale)
        return *call(_AttentionGradient, gradient, *options), None, None, None


class _AttentionGradient(GroupedFunction):
    """The gradient by the output, q, k, v, the output, its logarithms, mask -> by q, k and v."""

    @staticmethod
    def forward(
        g: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        logs: Tensor,
        mask: Tensor | None,
        causal: bool,
        scale: float,
    ) -> Any:
        return _fastest("attend_gradient", g, q, k, v, out, logs, mask, causal, scale)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        *_, mask, ctx.causal, ctx.scale = inputs
        ctx.save_for_backward(*inputs[:4], *([] if mask is None else [mask]))

    @staticmethod
    def backward(ctx: Any, *further: Tensor) -> Any:
        g, q, k, v, *mask = ctx.saved_tensors

        def plain(g: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
            return _gradient(g, q, k, v, mask[0] if mask else None, ctx.causal, ctx.scale)

        pull: Any = torch.func.vjp(plain, g, q, k, v)[1]
        return *pull(further), None, None, None, None, None


class AttentionSizes(NamedTuple):
    """The sizes of a stack of examples, and the options."""

    groups: int  # examples of all clients
    heads: int
    places: int
    keys: int
    width: int
    causal: bool
    scale: float
    masked: bool = False  # then a mask is given after the tensors


def _fastest(task: str, *given: Any) -> Any:
    """Do a task by torch or by our kernels, whichever is faster."""
    *tensors, mask, causal, scale = given
    q, k = tensors[:2] if task == "attend" else tensors[1:3]
    groups, heads, places, width = q.shape
    masked = mask is not None
    sizes = AttentionSizes(groups, heads, places, k.shape[2], width, causal, scale, masked)
    inputs = (*tensors, mask) if masked else tensors
    if not _suits(*tensors):
        return _PLAIN[task](*inputs, sizes)
    return fastest(task, sizes, lambda: forms(task, sizes), *inputs)


def _suits(*tensors: Tensor) -> bool:
    """Return whether our kernels can take these: short rows of equal kinds on a GPU."""
    first, *_ = tensors
    numbers = [one for one in tensors if one.dim() == 4]
    places, width = max(one.shape[2] for one in numbers), first.shape[3]
    return (
        first.is_cuda
        and first.dtype in (torch.float32, torch.bfloat16)
        and all(one.dtype == first.dtype and one.shape[3] == width for one in numbers)
        and places <= _SHORT
        and width <= _NARROW
        and width % 8 == 0
        and first.numel() > 0
    )


def forms(task: str, sizes: AttentionSizes) -> dict[str, Form]:
    """Return all ways to do a task, by name."""
    own = _OWN[task]
    return {"plain": _PLAIN[task]} | {
        f"short {rows}": functools.partial(own, rows=rows) for rows in (1, 2)
    }


def _plain_attend(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Any:
    """Return the result and its logarithms, by torch."""
    mask, sizes = _mask_and_sizes(rest)
    causal, scale = sizes.causal, sizes.scale
    kind, aten = _kernel(q, k, v, mask), torch.ops.aten
    if kind == "cpu":
        fused = aten._scaled_dot_product_flash_attention_for_cpu
        return fused(q, k, v, 0.0, causal, attn_mask=_bias(mask, q), scale=scale)
    if kind == "flash":
        fused = aten._scaled_dot_product_flash_attention
        return fused(q, k, v, 0.0, causal, False, scale=scale)[:2]
    if kind == "efficient":
        fused = aten._scaled_dot_product_efficient_attention
        out, logs, *_ = fused(q, k, v, _bias(mask, q, k), True, 0.0, causal, scale=scale)
        return out, logs[..., : sizes.places]  # there are more of them, in vain
    logits = _logits(q, k, mask, causal, scale)
    return logits.softmax(-1) @ v, logits.logsumexp(-1)


def _plain_gradient(
    g: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logs: Tensor,
    *rest: Any,
) -> Any:
    """Return the gradients by q, k and v, by torch, whatever form made the logarithms."""
    mask, sizes = _mask_and_sizes(rest)
    causal, scale = sizes.causal, sizes.scale
    kind, aten = _kernel(q, k, v, mask), torch.ops.aten
    if kind == "cpu":
        fused = aten._scaled_dot_product_flash_attention_for_cpu_backward
        bias = _bias(mask, q)
        return fused(g, q, k, v, out, logs, 0.0, causal, attn_mask=bias, scale=scale)
    if kind == "plain":  # for any logarithms and results: forms are compared on random ones
        share = (_logits(q, k, mask, causal, scale) - logs[..., None]).exp()
        by_logits = share * (g @ v.mT - (g * out).sum(-1, keepdim=True)) * scale
        return by_logits @ k, by_logits.mT @ q, share.mT @ g
    nothing = torch.zeros((), dtype=torch.int64, device=q.device)  # seeds of a dropout of 0
    if kind == "flash":
        fused = aten._scaled_dot_product_flash_attention_backward
        lengths = (None, None, q.shape[2], k.shape[2])
        rest = (0.0, causal, nothing, nothing)
        return fused(g, q, k, v, out, logs, *lengths, *rest, scale=scale)
    fused = aten._scaled_dot_product_efficient_attention_backward
    logs = F.pad(logs, (0, -sizes.places % _ALIGNED), value=math.inf)  # no place, so no share
    more = (nothing, nothing, 0.0, [True, True, True, False], causal)
    return fused(g, q, k, v, _bias(mask, q, k), out, logs, *more, scale=scale)[:3]


def _mask_and_sizes(rest: tuple[Any, ...]) -> tuple[Tensor | None, AttentionSizes]:
    *mask, sizes = rest
    return (mask[0] if mask else None), sizes


def _attend(q: Tensor, k: Tensor, v: Tensor, *rest: Any, rows: int = 1) -> tuple[Tensor, Tensor]:
    """Launch a block for a few heads; the result lies in memory with a place's heads together."""
    mask, s = _mask_and_sizes(rest)
    q, k, v = map(_in_fours, (q, k, v))
    out = q.new_empty(s.groups, s.places, s.heads, s.width).transpose(1, 2)
    logs = q.new_empty(s.groups, s.heads, s.places, dtype=_computed_in(q))
    near, threads = _cut(s.places, s, rows, lambda near: near * 2 * s.keys * s.width)
    given = [*_strided(q), *_strided(k), *_strided(v), *_seen(mask, q), *_strided(out), logs]
    _launch("attend", s, q, mask, (near, rows, threads), given, near * 2 * s.keys * s.width)
    return out, logs


def _attend_gradient(
    g: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logs: Tensor,
    *rest: Any,
    rows: int = 1,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients by q, k and v, which lie in memory beside each other."""
    mask, s = _mask_and_sizes(rest)
    g, q, k, v, out = map(_in_fours, (g, q, k, v, out))
    made = q.new_empty(s.groups, max(s.places, s.keys), 3, s.heads, s.width)
    dq, dk, dv = made.permute(2, 0, 3, 1, 4).unbind()
    longest, both = max(s.places, s.keys), s.places + s.keys

    def numbers(near: int) -> int:
        return near * (2 * both * s.width + 2 * s.places)

    near, threads = _cut(longest, s, rows, numbers)
    given = [one for tensor in (g, q, k, v, out) for one in _strided(tensor)]
    given += [logs.contiguous(), *_seen(mask, q), dq, dk, *_strided(dv)]
    _launch("attend_gradient", s, q, mask, (near, rows, threads), given, numbers(near))
    return dq[:, :, : s.places], dk[:, :, : s.keys], dv[:, :, : s.keys]


def _launch(
    name: str,
    s: AttentionSizes,
    q: Tensor,
    mask: Tensor | None,
    cut: tuple[int, int, int],
    given: list[Any],
    numbers: int,
) -> None:
    near, rows, threads = cut
    constants: dict[str, int | str] = {
        "HEADS": s.heads, "PLACES": s.places, "KEYS": s.keys, "WIDTH": s.width,
        "SCALE": repr(s.scale), "CAUSAL": int(s.causal), "MASKED": int(mask is not None),
        "NEAR": near, "SPLIT": _split(s), "ROWS": rows, "THREADS": threads,
        "CHUNK": min((5, 6, 4), key=lambda chunk: round_up(s.keys, chunk)),
    }  # fmt: skip
    constants |= {"HALF": 1} if q.dtype == torch.bfloat16 else {"REAL": REALS[q.dtype]}
    if name == "attend":
        constants["FORWARD"] = 1
    heads = s.groups * s.heads
    shared = numbers * _computed_in(q).itemsize
    grid = (-(-heads // near), 1, 1)
    launch("attention.cu", name, constants, grid, threads, [*given, heads], shared)


def _split(s: AttentionSizes) -> int:
    """Return how many threads share a place: a power of two of them."""
    return next(n for n in (1, 2, 4, 8) if s.width // n <= _EACH and s.width % (4 * n) == 0)


def _cut(
    places: int, s: AttentionSizes, rows: int, numbers: Callable[[int], int]
) -> tuple[int, int]:
    """Return the heads and threads of a block that leave the fewest threads idle."""
    units = -(-places // rows) * _split(s)
    near = max(
        (n for n in range(1, 9) if n == 1 or (units * n <= _THREADS and 4 * numbers(n) <= _SHARED)),
        key=lambda n: (units * n / round_up(units * n, 32), -n),
    )
    return near, round_up(units * near, 32)


def _in_fours(tensor: Tensor) -> Tensor:
    """Return a tensor whose numbers can be read four at a time, which most can as they lie."""
    size = tensor.element_size()
    fits = (
        tensor.stride(3) == 1
        and all(step % 4 == 0 for step in tensor.stride()[:3])
        and tensor.data_ptr() % min(4 * size, 16) == 0
        and tensor.stride(0) < 1 << 31
    )
    return tensor if fits else tensor.contiguous()


def _strided(tensor: Tensor) -> list[Any]:
    return [tensor, *tensor.stride()[:3]]


def _seen(mask: Tensor | None, q: Tensor) -> list[Any]:
    """Return a mask and its steps, 0 along what it is the same for."""
    if mask is None:
        return [q, 0, 0, 0]
    mask = mask if mask.stride(3) == 1 else mask.contiguous()
    steps = [0 if size == 1 else step for size, step in zip(mask.shape, mask.stride(), strict=True)]
    return [mask, *steps[:3]]


def _computed_in(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


_PLAIN: dict[str, Form] = {"attend": _plain_attend, "attend_gradient": _plain_gradient}
_OWN: dict[str, Form] = {"attend": _attend, "attend_gradient": _attend_gradient}


def _kernel(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> str:
    """Choose among torch's fused kernels, or the plain formula."""
    width = q.shape[-1]
    if width != v.shape[-1] or not q.dtype == k.dtype == v.dtype:
        return "plain"
    if not q.is_cuda:
        return "cpu" if q.device.type == "cpu" else "plain"
    if width % 8 or width > _WIDEST or q.dtype == torch.float64:
        return "plain"
    half = q.dtype in (torch.bfloat16, torch.float16)
    return "flash" if half and mask is None else "efficient"


def _bias(mask: Tensor | None, q: Tensor, k: Tensor | None = None) -> Tensor | None:
    """Return 0 where a key is seen and -∞ elsewhere, as fused kernels want it.

    Those of CUDA want it for every place, with rows of a multiple of eight numbers in memory.
    """
    if mask is None:
        return None
    bias = torch.zeros(mask.shape, dtype=q.dtype, device=q.device)
    bias.masked_fill_(~mask, -math.inf)
    if k is None:
        return bias
    keys = k.shape[2]
    bias = F.pad(bias, (0, -keys % 8))[..., :keys]
    return bias.expand(*q.shape[:3], keys)


def _logits(q: Tensor, k: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Tensor:
    logits: Tensor = (q * scale) @ k.mT
    if causal:
        seen = torch.ones(logits.shape[-2:], dtype=torch.bool, device=q.device).tril()
        logits = logits.masked_fill(~seen, -math.inf)
    return logits if mask is None else logits.masked_fill(~mask, -math.inf)


def _gradient(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients by q, k and v, as formulas that have gradients themselves."""
    share = _logits(q, k, mask, causal, scale).softmax(-1)
    by_share = g @ v.mT
    by_logits = share * (by_share - (by_share * share).sum(-1, keepdim=True)) * scale
    return by_logits @ k, by_logits.mT @ q, share.mT @ g
