"""Cross-entropy of all clients' batches in one launch, and its slope in another.

Written out, it is some twenty kernels for each step of a stack, most of them over a few numbers.
All functions are differentiable any number of times.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from idiolect.kernels.compiled import attempt, kernel
from idiolect.kernels.fused_tree_ops import REALS, own
from idiolect.kernels.vmap_rules import call, into_groups

_MOST = 1 << 16  # logits of a client; with more, one block for each client is too few


def suits(logits: Tensor, labels: Tensor, weight: Tensor) -> bool:
    """Say whether the loss of a batch is better taken in one piece."""
    return (
        logits.is_cuda
        and logits.dtype in REALS
        and weight.dtype == logits.dtype
        and labels.dtype == torch.int64
        and labels.shape == weight.shape == logits.shape[:-1]
        and 0 < logits.numel() <= _MOST
    )


def cross_entropy(logits: Tensor, labels: Tensor, weight: Tensor) -> Tensor:
    """Return the weighted mean over labels [...] of logits [..., class]; see `losses`."""
    rows = logits.reshape(1, -1, logits.shape[-1])
    loss: Tensor = call(_Loss, rows, labels.reshape(1, -1), weight.reshape(1, -1))
    return loss.squeeze(0)  # an index would be filled up with zeros going back


class _Loss(Function):
    """Logits [client, row, class], labels and weight [client, row] -> a loss for each client."""

    @staticmethod
    def forward(logits: Tensor, labels: Tensor, weight: Tensor) -> Tensor:
        given = (logits, labels, weight)
        if not own(logits):
            return _plain(*given)
        return attempt("losses", lambda: _launched(*given), lambda: _plain(*given))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, pull: Tensor) -> Any:
        logits, labels, weight = ctx.saved_tensors
        slope = by_weight = None
        if ctx.needs_input_grad[0]:
            slope = call(_Slope, pull, logits, labels, weight)
        if ctx.needs_input_grad[2]:
            each = _each(logits, labels)
            apart = each - _plain(logits, labels, weight)[:, None]
            by_weight = pull[:, None] * apart / _total(weight)
        return slope, None, by_weight

    @staticmethod
    def vmap(info: Any, dims: Any, *inputs: Tensor) -> Any:
        made = call(_Loss, *into_groups(info.batch_size, dims, inputs))
        return made.unflatten(0, (info.batch_size, -1)), 0


class _Slope(Function):
    """The derivative of a loss by its logits, times `pull` [client]."""

    @staticmethod
    def forward(pull: Tensor, logits: Tensor, labels: Tensor, weight: Tensor) -> Tensor:
        def plain() -> Tensor:
            return pull[:, None, None] * _plain_slope(logits, labels, weight)

        if not own(logits):
            return plain()
        return attempt("slopes", lambda: _launched_slope(pull, logits, labels, weight), plain)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, push: Tensor) -> Any:
        pull, logits, labels, weight = ctx.saved_tensors
        by_pull = bend = None
        if ctx.needs_input_grad[0]:
            by_pull = (push * _plain_slope(logits, labels, weight)).sum((1, 2))
        if ctx.needs_input_grad[1]:
            likely = logits.softmax(-1)
            away = push - (likely * push).sum(-1, keepdim=True)
            share = pull[:, None] * weight / _total(weight)
            bend = share[..., None] * likely * away
        return by_pull, bend, None, None

    @staticmethod
    def vmap(info: Any, dims: Any, *inputs: Tensor) -> Any:
        made = call(_Slope, *into_groups(info.batch_size, dims, inputs))
        return made.unflatten(0, (info.batch_size, -1)), 0


def _launched(logits: Tensor, labels: Tensor, weight: Tensor) -> Tensor:
    out, threads = logits.new_empty(len(logits)), _threads(logits)
    kernel("fused.cu", "loss", _constants(logits, threads), 8 * threads // 32)(
        (len(logits), 1, 1),
        (threads, 1, 1),
        [logits.contiguous(), *_laid(labels), *_laid(weight), out, *_sizes(logits)],
        8 * threads // 32,
    )
    return out


def _launched_slope(pull: Tensor, logits: Tensor, labels: Tensor, weight: Tensor) -> Tensor:
    out = torch.empty_like(logits, memory_format=torch.contiguous_format)
    threads = _threads(logits)
    kernel("fused.cu", "loss_slope", _constants(logits, threads))(
        (len(logits), max(1, logits.shape[1] // 64), 1),
        (threads, 1, 1),
        [
            pull.contiguous(), logits.contiguous(), *_laid(labels), *_laid(weight), out,
            *_sizes(logits),
        ],
    )  # fmt: skip
    return out


def _laid(rows: Tensor) -> tuple[Tensor, int]:
    """Return rows that lie close within a client, and how far it is to the next client.

    A step's labels are part of those of many steps: no need to copy them.
    """
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    return rows, rows.stride(0)


def _each(logits: Tensor, labels: Tensor) -> Tensor:
    return logits.logsumexp(-1) - logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1)


def _total(weight: Tensor) -> Tensor:
    return weight.sum(1, keepdim=True).clamp(min=1e-12)


def _plain(logits: Tensor, labels: Tensor, weight: Tensor) -> Tensor:
    return (_each(logits, labels) * weight).sum(1) / _total(weight)[:, 0]


def _plain_slope(logits: Tensor, labels: Tensor, weight: Tensor) -> Tensor:
    right = torch.zeros_like(logits).scatter(-1, labels.unsqueeze(-1), 1.0)
    return (logits.softmax(-1) - right) * (weight / _total(weight))[..., None]


def _threads(logits: Tensor) -> int:
    """Return the threads of a block: a warp for each row, up to 16."""
    return 32 * min(16, logits.shape[1])


def _sizes(logits: Tensor) -> tuple[int, int]:
    return logits.shape[1], logits.shape[2]


def _constants(logits: Tensor, threads: int) -> dict[str, int | str]:
    return {"LOSS": 1, "REAL": REALS[logits.dtype], "THREADS": threads}
