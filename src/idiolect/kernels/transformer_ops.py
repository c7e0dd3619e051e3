"""Rotary positions and gated units in one pass each way on CUDA.

As separate operations, and their gradients as vmap takes them apart, they take longer than all the
products of a small transformer. All functions are differentiable any number of times.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from idiolect.kernels.compiled import REALS, attempt, launch
from idiolect.kernels.vmap_rules import GroupedFunction, call

_THREADS = 256


class Angles:
    """Cosines and sines [place, half a head's width]: constants of a function, kept from vmap."""

    def __init__(self, cosine: Tensor, sine: Tensor, sign: int = 1) -> None:
        self.cosine, self.sine, self.sign = cosine, sine, sign

    def back(self) -> "Angles":
        """Return the angles of the turn back."""
        return Angles(self.cosine, self.sine, -self.sign)

    def plain(self, x: Tensor) -> Tensor:
        """Turn [..., place, head, number], in torch."""
        cosine, sine = (t[:, None].to(x.dtype) for t in (self.cosine, self.sign * self.sine))
        first, second = x.chunk(2, -1)
        return torch.cat([first * cosine - second * sine, second * cosine + first * sine], -1)


def rotated(x: Tensor, angles: Angles) -> Tensor:
    """Turn each pair of numbers (n, n + half) of [example, place, head, number] by its angle."""
    y: Tensor = call(_Rotated, x, angles)
    return y


class _Rotated(GroupedFunction):
    """x [example, place, head, number] -> the same, turned."""

    @staticmethod
    def forward(x: Tensor, angles: Angles) -> Tensor:
        if not _suits(x) or x.shape[-1] % 8:
            return angles.plain(x)
        return attempt("rotary positions", lambda: _turned(x, angles), lambda: angles.plain(x))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.angles = inputs[1]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return call(_Rotated, gradient, ctx.angles.back()), None


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) · up."""
    y: Tensor = call(_Gated, gate, up)
    return y


class _Gated(GroupedFunction):
    """gate, up -> silu(gate) · up."""

    @staticmethod
    def forward(gate: Tensor, up: Tensor) -> Tensor:
        def plain() -> Tensor:
            return F.silu(gate) * up

        if not _suits(gate) or gate.numel() % 4:
            return plain()
        return attempt("gated units", lambda: _launched_gate(gate, up), plain)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return call(_GatedGradient, gradient, *ctx.saved_tensors)


class _GatedGradient(GroupedFunction):
    """The gradient by silu(gate) · up, gate, up -> those by gate and up."""

    @staticmethod
    def forward(g: Tensor, gate: Tensor, up: Tensor) -> Any:
        def plain() -> tuple[Tensor, Tensor]:
            return _gate_gradient(g, gate, up)

        if not _suits(gate) or gate.numel() % 4:
            return plain()
        return attempt("gated units", lambda: _launched_gate_gradient(g, gate, up), plain)

    @staticmethod
    def backward(ctx: Any, *further: Tensor) -> Any:
        pull: Any = torch.func.vjp(_gate_gradient, *ctx.saved_tensors)[1]
        return pull(further)


def _gate_gradient(g: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    opened = gate.sigmoid()
    return g * up * opened * (1 + gate * (1 - opened)), g * gate * opened


# Launches.


def _suits(x: Tensor) -> bool:
    known = x.dtype in REALS or x.dtype == torch.bfloat16
    return x.is_cuda and known and 0 < x.numel() < 1 << 32


def _kind(x: Tensor) -> dict[str, int | str]:
    kind: dict[str, int | str] = {"THREADS": _THREADS}
    return kind | ({"HALF": 1} if x.dtype == torch.bfloat16 else {"REAL": REALS[x.dtype]})


def _launch(
    name: str, constants: Mapping[str, int | str], given: Sequence[Tensor], quads: int
) -> None:
    grid = (-(-quads // _THREADS), 1, 1)
    launch("transformer.cu", name, constants, grid, _THREADS, [*given, quads])


def _turned(x: Tensor, angles: Angles) -> Tensor:
    x = x.contiguous()
    out, half = torch.empty_like(x), x.shape[-1] // 2
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    sizes = {"HALF_WIDTH": half, "HEADS": x.shape[-2], "PLACES": x.shape[-3]}
    constants = {**_kind(x), "TURN": 1, "SIGN": angles.sign, **sizes}
    cosine, sine = (t.to(wide).contiguous() for t in (angles.cosine, angles.sine))
    _launch("turn", constants, [x, cosine, sine, out], x.numel() // 8)
    return out


def _launched_gate(gate: Tensor, up: Tensor) -> Tensor:
    gate, up = gate.contiguous(), up.contiguous()
    out = torch.empty_like(gate)
    _launch("gated", {**_kind(gate), "GATE": 1}, [gate, up, out], gate.numel() // 4)
    return out


def _launched_gate_gradient(g: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    g, gate, up = g.contiguous(), gate.contiguous(), up.contiguous()
    out = torch.empty_like(gate), torch.empty_like(up)
    given = [g, gate, up, *out]
    _launch("gated_gradient", {**_kind(gate), "GATE": 1}, given, gate.numel() // 4)
    return out
