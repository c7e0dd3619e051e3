"""A dense layer in which every client of a stack has its own weights.

vmap makes it batched products with a bias added, and its gradients products, sums and scalings;
here each is one launch where that is faster, as measured once a shape. All functions are
differentiable any number of times.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from idiolect.kernels import dense
from idiolect.kernels.autotune import fastest
from idiolect.kernels.dense import Dense
from idiolect.kernels.vmap_rules import call, into_groups, mapped, single


class StackedLinear(nn.Linear):
    """A dense layer that is fast under vmap on CUDA; elsewhere it is torch's own."""

    @staticmethod
    def suits(layer: nn.Module) -> bool:
        """Say whether a layer is of the plain kind that can be replaced."""
        return type(layer) is nn.Linear and layer.bias is not None

    def forward(self, x: Tensor) -> Tensor:
        """Return x Aᵀ + b."""
        if not single(x) or x.dim() < 2:
            own: Tensor = super().forward(x)
            return own
        rows = x.reshape(1, -1, x.shape[-1])
        y: Tensor = call(_Linear, rows, self.weight[None], self.bias[None])
        return y.squeeze(0).reshape(*x.shape[:-1], -1)


def linear_relu(layer: nn.Linear, x: Tensor) -> Tensor:
    """Return ReLU(x Aᵀ + b): at once under vmap on CUDA."""
    if not isinstance(layer, StackedLinear) or not single(x) or x.dim() != 2:
        return layer(x).relu()  # type: ignore[no-any-return]
    y: Tensor = call(_Rectified, x[None], layer.weight[None], layer.bias[None])
    return y.squeeze(0)


class _Linear(Function):
    """x [group, example, in], w [group, out, in], b [group, out] -> y [group, example, out]."""

    @staticmethod
    def forward(x: Tensor, w: Tensor, b: Tensor) -> Any:
        return _done("forward", _sizes(x, w.shape[1]), x, w, b)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:2])

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Any:
        return _back(ctx.needs_input_grad, slope, *ctx.saved_tensors)

    @staticmethod
    def vmap(info: Any, dims: Any, *inputs: Tensor) -> Any:
        return mapped(_Linear, info.batch_size, dims, inputs, ())


class _Rectified(Function):
    """The same, cut off below 0."""

    @staticmethod
    def forward(x: Tensor, w: Tensor, b: Tensor) -> Any:
        return _done("rectified", _sizes(x, w.shape[1]), x, w, b)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:2], output)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Any:
        x, w, y = ctx.saved_tensors
        slope = torch.ops.aten.threshold_backward(slope, y, 0)  # as ReLU's own, in one launch
        return _back(ctx.needs_input_grad, slope, x, w)

    @staticmethod
    def vmap(info: Any, dims: Any, *inputs: Tensor) -> Any:
        return mapped(_Rectified, info.batch_size, dims, inputs, ())


def _back(wanted: tuple[bool, ...], slope: Tensor, x: Tensor, w: Tensor) -> Any:
    dx = call(_Images, slope, w) if wanted[0] else None
    dw, db = call(_Kernels, slope, x) if any(wanted[1:]) else (None, None)
    return dx, dw, db


class _Images(Function):
    """slope, w -> the gradient with respect to x."""

    @staticmethod
    def forward(slope: Tensor, w: Tensor) -> Any:
        return _done("images", _sizes(slope, w.shape[1], w.shape[2]), slope, w)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> Any:
        slope, w = ctx.saved_tensors
        return torch.bmm(dx, w.mT), torch.bmm(slope.mT, dx)

    @staticmethod
    def vmap(info: Any, dims: Any, *inputs: Tensor) -> Any:
        return mapped(_Images, info.batch_size, dims, inputs, ())


class _Kernels(Function):
    """slope, x -> the gradients with respect to w and b."""

    @staticmethod
    def forward(slope: Tensor, x: Tensor) -> Any:
        return _done("kernels", _sizes(x, slope.shape[2]), slope, x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, dw: Tensor, db: Tensor) -> Any:
        slope, x = ctx.saved_tensors
        return torch.bmm(x, dw.mT) + db[:, None], torch.bmm(slope, dw)

    @staticmethod
    def vmap(info: Any, dims: Any, *inputs: Tensor) -> Any:
        out = call(_Kernels, *into_groups(info.batch_size, dims, inputs))
        return tuple(part.unflatten(0, (info.batch_size, -1)) for part in out), (0, 0)


def _sizes(examples: Tensor, outside: int, inside: int | None = None) -> Dense:
    groups, count, own = examples.shape
    return Dense(groups, count, inside or own, outside)


def _done(task: str, sizes: Dense, *inputs: Tensor) -> Any:
    return fastest(task, sizes, lambda: dense.forms(task, sizes), *inputs)
