"""Cross-entropy of all clients' batches in one launch, and its gradient in another.

As separate operations it takes some twenty kernels for each step of a stack, most of them over a
few numbers. All functions are differentiable any number of times.
"""

from typing import Any

import torch
from torch import Tensor

from idiolect.kernels import compiled
from idiolect.kernels.compiled import REALS, attempt, launch
from idiolect.kernels.deferred import Deferred, DeferredTensor, Ones
from idiolect.kernels.vmap_rules import GroupedFunction, call

_MANY = 1 << 16  # logits of a client; with more, one block for each client is too few


def suits(logits: Tensor, labels: Tensor, weight: Tensor) -> bool:
    """Return whether the loss of a batch is better computed in one launch."""
    return (
        logits.is_cuda
        and logits.dtype in REALS
        and weight.dtype == logits.dtype
        and labels.dtype == torch.int64
        and labels.shape == weight.shape == logits.shape[:-1]
        and logits.numel() > 0
    )


def cross_entropy(logits: Tensor, labels: Tensor, weight: Tensor) -> Tensor:
    """Return the weighted mean over labels [...] of logits [..., class]; see `losses`."""
    rows = logits.reshape(1, -1, logits.shape[-1])
    loss: Tensor = call(_CrossEntropy, rows, labels.reshape(1, -1), weight.reshape(1, -1))
    return loss.squeeze(0)  # the backward pass of an index would allocate zeros


class _CrossEntropy(GroupedFunction):
    """Logits [client, row, class], labels and weight [client, row] -> a loss for each client."""

    @staticmethod
    def forward(*given: Tensor) -> Tensor:
        late = _Loss(*given)
        return DeferredTensor(late) if compiled.has_kernels(given[0]) else late.make()

    @staticmethod
    def backward(ctx: Any, factor: Tensor) -> Any:
        logits, labels, weight = ctx.saved_tensors
        by_logits = by_weight = None
        if ctx.needs_input_grad[0]:
            by_logits = call(_CrossEntropyGradient, factor, logits, labels, weight)
        if ctx.needs_input_grad[2]:
            each = _each(logits, labels)
            apart = each - _plain(logits, labels, weight)[:, None]
            by_weight = factor[:, None] * apart / _total(weight)
        return by_logits, None, by_weight


class _Loss(Deferred):
    """The losses, if anybody wants them: a step needs their gradients alone."""

    def __init__(self, *given: Tensor) -> None:
        super().__init__((len(given[0]),), given[0])
        self._given = given

    def make(self) -> Tensor:
        """Return a loss for each client."""
        given = self._given
        return attempt("losses", lambda: _launched(*given), lambda: _plain(*given), on=given[0])


class _CrossEntropyGradient(GroupedFunction):
    """The gradient of a loss by its logits, times `factor` [client]."""

    @staticmethod
    def forward(factor: Tensor, *given: Tensor) -> Tensor:
        def plain() -> Tensor:
            return factor[:, None, None] * _plain_gradient(*given)

        return attempt("gradients", lambda: _launched_gradient(factor, *given), plain, on=given[0])

    @staticmethod
    def backward(ctx: Any, further: Tensor) -> Any:
        factor, logits, labels, weight = ctx.saved_tensors
        by_factor = by_logits = None
        if ctx.needs_input_grad[0]:
            by_factor = (further * _plain_gradient(logits, labels, weight)).sum((1, 2))
        if ctx.needs_input_grad[1]:
            likely = logits.softmax(-1)
            away = further - (likely * further).sum(-1, keepdim=True)
            share = factor[:, None] * weight / _total(weight)
            by_logits = share[..., None] * likely * away
        return by_factor, by_logits, None, None


def _launched(logits: Tensor, labels: Tensor, weight: Tensor) -> Tensor:
    if logits[0].numel() > _MANY:
        each = logits.new_empty(logits.shape[:2])
        _launch("row_loss", -(-logits.shape[1] // 16), [], logits, labels, weight, each)
        return each.sum(1) / _total(weight)[:, 0]
    out = logits.new_empty(len(logits))
    _launch("loss", 1, [], logits, labels, weight, out)
    return out


def _launched_gradient(factor: Tensor, logits: Tensor, labels: Tensor, weight: Tensor) -> Tensor:
    out = torch.empty_like(logits, memory_format=torch.contiguous_format)
    blocks = max(1, logits.shape[1] // 64)
    alone = isinstance(factor, DeferredTensor) and isinstance(factor.deferred, Ones)
    scales = [] if alone else [factor.contiguous()]
    _launch("loss_gradient", blocks, scales or [out], logits, labels, weight, out, alone)
    return out


def _launch(
    name: str, blocks: int, before: list[Tensor], logits: Tensor, labels: Tensor, weight: Tensor,
    out: Tensor, alone: bool = False,
) -> None:  # fmt: skip
    threads = 32 * min(16, logits.shape[1])  # a warp for each row, up to 16
    constants: dict[str, int | str] = {"LOSS": 1, "THREADS": threads, "ALONE": int(alone)}
    constants["REAL"] = REALS[logits.dtype]
    given = [*before, logits.contiguous(), *_dense_rows(labels), *_dense_rows(weight), out]
    sizes = logits.shape[1:]
    grid, shared = (len(logits), blocks, 1), 8 * threads // 32
    launch("fused.cu", name, constants, grid, threads, [*given, *sizes], shared)


def _dense_rows(rows: Tensor) -> tuple[Tensor, int]:
    """Return rows without gaps within a client, and the stride from client to client.

    A step's labels are part of those of many steps, so they are not copied.
    """
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    return rows, rows.stride(0)


def _each(logits: Tensor, labels: Tensor) -> Tensor:
    return logits.logsumexp(-1) - logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1)


def _total(weight: Tensor) -> Tensor:
    return weight.sum(1, keepdim=True).clamp(min=1e-12)


def _plain(logits: Tensor, labels: Tensor, weight: Tensor) -> Tensor:
    return (_each(logits, labels) * weight).sum(1) / _total(weight)[:, 0]


def _plain_gradient(logits: Tensor, labels: Tensor, weight: Tensor) -> Tensor:
    right = torch.zeros_like(logits).scatter(-1, labels.unsqueeze(-1), 1.0)
    return (logits.softmax(-1) - right) * (weight / _total(weight))[..., None]
