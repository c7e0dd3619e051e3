"""Residual sums, and ReLU after them, as parts of the normalisations beside them.

In `relu(norm(x) + carried)` three passes over images can be one, and so can what comes back: sums
of the gradients that meet where a network parts, what ReLU lets through, and the normalisation's
own. But a network calls these one by one. So normalised images, and gradients by the images of
convolutions, are lazy (`deferred`) where they lie in memory with channels last: what is added to
them, and ReLU, is noted, and fused with them in `norm.cu`. Whatever else reads them evaluates them.
This is below vmap and autograd, to which all operations are what they were.
"""

import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Protocol
from weakref import WeakSet

import torch
from torch import Tensor
from torch.autograd import Function
from torch.utils._python_dispatch import TorchDispatchMode

from idiolect.kernels.compiled import attempt, launch
from idiolect.kernels.deferred import Deferred, DeferredTensor, computed
from idiolect.kernels.vmap_rules import call, vmaps_under_way

_ON = True  # off: every operation by itself, to compare
_THREADS = 256
_BYTES = 16  # that a thread takes at once
_KINDS = (torch.float32, torch.bfloat16)

_aten = torch.ops.aten
_within = threading.local()


class Work(Protocol):
    """A normalisation that can be done, several times if need be."""

    @property
    def given(self) -> Sequence[Tensor]:
        """What it is made of."""

    def done(self, added: Tensor | None, relu: bool) -> Tensor:
        """Normalise, add images and apply ReLU."""


class Residuals(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is entered, as a network runs, normalisations are lazy: sums may be fused with them.

    Each is evaluated before what it is made of changes, or when the network has run.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.waiting: WeakSet[_Normalised] = WeakSet()

    def __enter__(self) -> "Residuals":
        """Make them lazy."""
        self._outer, _within.now = getattr(_within, "now", None), self
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        """Do those that still wait."""
        super().__exit__(kind, error, where)  # type: ignore[no-untyped-call]
        _within.now = self._outer
        if error is None:
            self._compute(None)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Do, before something is changed in place, what is made of it."""
        if self.waiting and _changes(func):
            self._compute({*_memories((*args, *(kwargs or {}).values()))})
        return func(*args, **(kwargs or {}))

    def _compute(self, changed: set[int] | None) -> None:
        for one in [*self.waiting]:
            if one.waits and (changed is None or not changed.isdisjoint(one.memories)):
                _ = one.made
        if changed is None:
            self.waiting.clear()


def _changes(func: Any) -> bool:
    schema = getattr(func, "_schema", None)
    return schema is None or bool(schema.is_mutable)


def _memories(given: Any) -> list[int]:
    """Return the memories of tensors, of any form; what waits has none."""
    if isinstance(given, list | tuple):
        return [found for one in given for found in _memories(one)]
    if isinstance(given, DeferredTensor):
        given = None if given.deferred.waits else given.deferred.made
    return [given.untyped_storage()._cdata] if isinstance(given, Tensor) else []


def merges_on(x: Tensor) -> bool:
    """Say whether normalisations may wait in a network that is given x: those of many clients."""
    return _ON and x.is_cuda and vmaps_under_way() > 0


def may_wait(x: Tensor) -> bool:
    """Say whether a normalisation of images with channels last may wait."""
    return getattr(_within, "now", None) is not None and _suits(x)


def waiting(work: Work, x: Tensor) -> DeferredTensor:
    """Return what a normalisation of x makes, to be done later."""
    return DeferredTensor(_Normalised(work, x.shape, x.stride(), x, _within.now))


def no_view(x: Tensor) -> Tensor:
    """Return what waits as a tensor of its own.

    Where a view is changed in place, as by `+=`, autograd would copy its gradient into zeros.
    """
    below = x
    while torch._C._functorch.is_functorch_wrapped_tensor(below):
        below = torch._C._functorch.get_unwrapped(below)
    if not isinstance(below, DeferredTensor) or below.deferred.strides is None:
        return x
    own: Tensor = call(_NoView, x)
    return own


class _NoView(Function):
    """Nothing is done."""

    @staticmethod
    def forward(x: DeferredTensor) -> Tensor:
        return DeferredTensor(x.deferred, x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Keep nothing."""

    @staticmethod
    def vmap(info: Any, dims: Any, x: Tensor) -> Any:
        """Map over clients."""
        return call(_NoView, x), dims[0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def tagged(gradient: Tensor) -> Tensor:
    """Return a gradient by images, so that it may wait for what is added to it."""
    if not _ON or not _suits(gradient) or not _last(gradient):
        return gradient
    return DeferredTensor(Gradient((gradient,), None, gradient))


def _suits(x: Tensor) -> bool:
    return x.is_cuda and x.dtype in _KINDS


def _last(x: Tensor) -> bool:
    """Say whether images are [image, row, column, group, channel], which no weights are."""
    if x.dim() != 5 or len(x) == 1 or x.data_ptr() % _BYTES:
        return False
    groups, _, channels, height, width = x.shape
    pixel = groups * channels
    strides = (channels, height * width * pixel, 1, width * pixel, pixel)
    return _equal(strides, x.stride(), x.shape)


def _equal(strides: Sequence[int], others: Sequence[int], shape: Sequence[int]) -> bool:
    return all(size == 1 or a == b for a, b, size in zip(strides, others, shape, strict=True))


def _ordered(made: Tensor, strides: Sequence[int]) -> Tensor:
    """Return images in an order in memory: torch's forms may leave them in another."""
    if _equal(made.stride(), strides, made.shape):
        return made
    return torch.empty_strided(made.shape, strides, dtype=made.dtype, device=made.device).copy_(
        made
    )


class _Images(Deferred):
    """Images that are deferred, in an order in memory without gaps."""

    def __init__(self, shape: Sequence[int], strides: Sequence[int], like: Tensor) -> None:
        super().__init__(shape, like)
        self.strides = (*strides,)

    def _matching(self, other: Any, own: DeferredTensor) -> Tensor | None:
        """Return other images of the same kind and order as `own`, in this shape, else None.

        What they are deferred to is computed.
        """
        alike = (
            isinstance(other, Tensor)
            and other.shape == own.shape
            and other.dtype == own.dtype
            and other.device == own.device
            and _equal(other.stride(), own.stride(), own.shape)
        )
        if not alike or (isinstance(other, DeferredTensor) and other.deferred is self):
            return None
        other = computed(other)
        return None if other.data_ptr() % _BYTES else self.of(other)

    def of(self, images: Tensor) -> Tensor:
        """Return images that lie in memory as these do, in their shape."""
        return images.as_strided(self.shape, self.strides or ())


class _Normalised(_Images):
    """What a normalisation makes, perhaps with other images added."""

    def __init__(
        self,
        work: Work,
        shape: Sequence[int],
        strides: Sequence[int],
        like: Tensor,
        within: Residuals,
        added: Tensor | None = None,
    ) -> None:
        super().__init__(shape, strides, like.new_empty(0))
        self._work, self._within, self._added = work, within, added
        within.waiting.add(self)

    @property
    def memories(self) -> list[int]:
        """The memories that it is made of."""
        return _memories([*self._work.given, self._added])

    def make(self) -> Tensor:
        """Normalise and add."""
        self._within.waiting.discard(self)
        return self._done(relu=False)

    def _done(self, relu: bool) -> Tensor:
        return _ordered(self._work.done(self._added, relu), self.strides or ())

    def merged(self, func: Any, args: tuple[Any, ...], own: DeferredTensor) -> Any:
        """Note what is added; with ReLU all is done."""
        if not self.waits:
            return None
        if func in (_aten.relu.default, _aten.relu_.default):
            made = self._done(relu=True)
            if func is _aten.relu.default:
                return made.as_strided(own.shape, own.stride())
            self.__dict__["made"] = made
            self._within.waiting.discard(self)
            return own
        adds = func is _aten.add.Tensor or (func is _aten.add_.Tensor and own is args[0])
        if not adds or self._added is not None:
            return None
        other = self._matching(args[1] if own is args[0] else args[0], own)
        if other is None:
            return None
        if func is _aten.add_.Tensor:
            self._added = other
            return own
        given = (self._work, self.shape, self.strides or (), self.like, self._within, other)
        return DeferredTensor(_Normalised(*given), own)


class Gradient(_Images):
    """The sum of one or two gradients; where ReLU's result was 0, 0."""

    def __init__(self, parts: tuple[Tensor, ...], cut: Tensor | None, laid: Tensor) -> None:
        super().__init__(laid.shape, laid.stride(), laid.new_empty(0))
        self._parts, self._cut = parts, cut

    def parts(self, like: Tensor) -> tuple[tuple[Tensor, ...], Tensor | None]:
        """Return what it is the sum of, and what ReLU made, as another tensor lies in memory."""
        parts, cut = (self._parts, self._cut) if self.waits else ((self.made,), None)
        laid = [one.as_strided(like.shape, like.stride()) for one in parts]
        return (*laid,), None if cut is None else cut.as_strided(like.shape, like.stride())

    def keep(self, made: Tensor, like: Tensor) -> None:
        """Take note that it was made, for others that read it; `like` as in `parts`."""
        self.__dict__["made"] = self.of(_ordered(made, like.stride()))
        self._parts, self._cut = (), None

    def make(self) -> Tensor:
        """Add up, and cut off."""
        parts, cut = self._parts, self._cut
        if len(parts) == 2 and cut is not None and cut.is_cuda:
            made = attempt(
                "sums of gradients",
                lambda: _masked_sum(*parts, cut),
                lambda: _plain_sum(parts, cut),
            )
        else:
            made = _plain_sum(parts, cut)
        self._parts, self._cut = (), None
        return made

    def merged(self, func: Any, args: tuple[Any, ...], own: DeferredTensor) -> Any:
        """Note what is added, or what ReLU cut off."""
        parts, cut = (self._parts, self._cut) if self.waits else ((self.made,), None)
        if func is _aten.add.Tensor and len(parts) == 1 and cut is None:
            other = self._matching(args[1] if own is args[0] else args[0], own)
            if other is not None:
                return self._before(Gradient((*parts, other), None, parts[0]), own)
        if func is _aten.threshold_backward.default and own is args[0] and cut is None:
            seen = self._matching(args[1], own) if args[2] == 0 else None
            if seen is not None:
                return self._before(Gradient(parts, seen, parts[0]), own)
        return None

    def _before(self, late: "Gradient", own: DeferredTensor) -> DeferredTensor:
        """Return what is made of this, which is done before this is changed."""
        self.wanted.add(late)
        return DeferredTensor(late, own)


def _plain_sum(parts: tuple[Tensor, ...], cut: Tensor | None) -> Tensor:
    total = parts[0] if len(parts) == 1 else parts[0] + parts[1]
    return total if cut is None else _aten.threshold_backward(total, cut, 0)


def _masked_sum(one: Tensor, other: Tensor, cut: Tensor) -> Tensor:
    made, several = torch.empty_like(one), _BYTES // one.element_size()
    if made.stride() != one.stride() or one.numel() % several:
        return _plain_sum((one, other), cut)
    constants: dict[str, int | str] = {
        "THREADS": _THREADS, "V": several, "C": 1, "PARTS": 1, "PIXELS": 1, "EPS": "0.f",
        **({"HALF": 1} if one.dtype == torch.bfloat16 else {}),
    }  # fmt: skip
    packs = one.numel() // several
    grid = (-(-packs // _THREADS), 1, 1)
    launch("norm.cu", "masked_sum", constants, grid, _THREADS, [one, other, cut, made, packs])
    return made
