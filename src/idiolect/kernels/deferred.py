"""Lazy evaluation: tensors that are computed when something reads them.

The gradient by the weights of a layer is written once and read once, by the step that adds it to
the weights: for a large layer that takes longer than all else that is done to it, and for a small
one it is a launch. Where it is lazy, the step computes and adds it at once; whatever else reads it
evaluates it first. A loss of which only the gradient is wanted is never computed. To torch a lazy
tensor is a tensor like others, under vmap and grad too.
"""

import copy
import functools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor


class Gap(NamedTuple):
    """Twice a number for each row times the way from `there` to `here`; either may be one row."""

    scales: Tensor
    here: Tensor
    there: Tensor


class Terms(NamedTuple):
    """What a row of a tensor is the sum of: numbers some way `apart`, or products; and a gap.

    With `second` [row, example, in], `first` is [row, example, out], and the products of each
    example's numbers, [out, in], are added up.
    """

    first: Tensor
    stride: int  # numbers of `first` from row to row
    many: int
    apart: int  # numbers from term to term
    second: Tensor | None = None
    gap: Gap | None = None


class Deferred(ABC):
    """How a lazy tensor is evaluated; its rows are those of clients."""

    strides: tuple[int, ...] | None = None  # of images, in their own order; others have no gaps

    def __init__(self, shape: Sequence[int], like: Tensor) -> None:
        """Note a shape, and a tensor of the same kind on the same device."""
        self.shape, self.like = torch.Size(shape), like
        self.wanted: WeakSet[Deferred] = WeakSet()  # lazy results, evaluated before it changes

    @abstractmethod
    def make(self) -> Tensor:
        """Evaluate it, in its order in memory."""

    def merged(self, func: Any, args: tuple[Any, ...], own: "DeferredTensor") -> Any:
        """Fuse an operation on it, and others, with its evaluation; None where that cannot be.

        `own` is it, among the arguments.
        """
        return None

    def added(self, factor: float, to: Tensor) -> Tensor | None:
        """Return something plus factor times this; None where one launch for all leaves is better.

        `to` may have a single row for all clients.
        """
        return None

    def terms(self) -> Terms | None:
        """Return what it is the sum of; None where it has to be evaluated."""
        return None

    def gap(self) -> Gap | None:
        """Return the gap that it is; None for others."""
        return None

    def laid(self) -> Tensor:
        """Return it as it lies in memory, perhaps in another order: what is asked of torch."""
        return self.made

    @functools.cached_property
    def made(self) -> Tensor:
        """Its value, computed once."""
        return self.make()

    @property
    def waits(self) -> bool:
        """Whether it is not evaluated yet; whoever reads it may also change it."""
        return "made" not in self.__dict__


class Factored(Deferred):
    """Rows that are a common one plus products of factors, and need not be computed to be averaged.

    It is made of memory that stays: what is recorded writes there again.
    """

    LARGEST: ClassVar[float] = 2.0**112  # a product of which sums of 2¹⁴ are finite

    @abstractmethod
    def largest(self) -> Tensor:
        """Return each example's largest product [row, example]: if they are sound, so are rows.

        Either factor alone may be large where the other is small. Were the common row not finite,
        neither would factors be, which were made by way of it.
        """

    @abstractmethod
    def mean(self, share: Tensor, left_out: Tensor) -> Tensor:
        """Return the sum over rows, each times its share; those left out may be emptied."""

    @abstractmethod
    def again(self) -> "Factored":
        """Return the same of the same memory, to be computed anew."""


class Ones(Deferred):
    """Nothing but ones."""

    def make(self) -> Tensor:
        """Return them."""
        return torch.ones(self.shape, dtype=self.like.dtype, device=self.like.device)


class _Later(Deferred):
    """A lazy operation on lazy tensors: a sum, a product, or a row."""

    def __init__(self, func: Any, args: tuple[Any, ...]) -> None:
        forms = (
            torch.empty(one.shape, device="meta") if isinstance(one, Tensor) else one
            for one in args
        )
        like = next(one for one in args if isinstance(one, DeferredTensor)).deferred.like
        super().__init__(func(*forms).shape, like)
        self._func, self._args = func, args
        for one in args:
            if isinstance(one, DeferredTensor):
                one.deferred.wanted.add(self)
        if func is _aten.select.int:  # they share memory
            self.wanted = args[0].deferred.wanted

    def make(self) -> Tensor:
        """Do it."""
        made: Tensor = self._func(*computed(self._args))
        return made.contiguous()

    def terms(self) -> Terms | None:
        """Return what a gradient is the sum of to which a gap was added."""
        for one, other in (self._args, self._args[::-1]):
            if self._func is _aten.add.Tensor and (gap := _gap(other)):
                terms = terms_of(one)
                return terms._replace(gap=gap) if terms and terms.gap is None else None
        return None


def _gap(one: Any) -> Gap | None:
    """Return the gap that an argument is, if nothing has read it yet."""
    if isinstance(one, DeferredTensor) and one.deferred.waits:
        return one.deferred.gap() if one.shape[:1] == one.deferred.shape[:1] else None
    return None


def terms_of(x: Any) -> Terms | None:
    """Return what the rows of a tensor are sums of: where they are no sums, they themselves."""
    if not isinstance(x, Tensor) or not x.dim():
        return None
    if isinstance(x, DeferredTensor) and x.deferred.waits and len(x) == x.deferred.shape[0]:
        if (found := x.deferred.terms()) is not None:
            return found
    x = computed(x).contiguous()
    return Terms(x, x.shape[1:].numel(), 1, 0)


def _may_wait(func: Any, args: tuple[Any, ...], kwargs: Any) -> bool:
    """Say whether an operation is one of losses, or adds a gap to a gradient: perhaps never read.

    Other tensors may be changed before it is computed, and so may what was computed, of which there
    may be views; numbers are not.
    """
    if not all(one.deferred.waits for one in args if isinstance(one, DeferredTensor)):
        return False
    if func is _aten.select.int:  # with which vmap asks for the type of a product with a number
        return bool(args[1] == 0)  # other rows would not be views once they were without gaps
    if func not in (_aten.add.Tensor, _aten.mul.Tensor) or kwargs or len(args) != 2:
        return False
    if all(isinstance(one, DeferredTensor | int | float) or _number(one) for one in args):
        return len({one.dtype for one in args if isinstance(one, DeferredTensor)}) == 1
    pair = func is _aten.add.Tensor and all(isinstance(one, Tensor) for one in args)
    alike = pair and args[0].shape == args[1].shape and args[0].dtype == args[1].dtype
    return alike and any(map(_gap, args)) and all(one.is_contiguous() for one in args)


def _number(one: Any) -> bool:
    return isinstance(one, Tensor) and not one.dim() and not one.is_cuda


class DeferredTensor(Tensor):
    """A wrapper of a lazy value, in its own shape or that of a view; reading it evaluates it."""

    deferred: Deferred

    @staticmethod
    def __new__(cls, deferred: Deferred, seen: Tensor | None = None) -> "DeferredTensor":
        """Wrap it in its own shape, or with the shape and strides of a view."""
        like, shape, strides = deferred.like, deferred.shape, deferred.strides
        if seen is not None:
            shape, strides = seen.shape, seen.stride()
        own: DeferredTensor = torch.Tensor._make_wrapper_subclass(
            cls, shape, strides=strides, dtype=like.dtype, device=like.device
        )
        own.deferred = deferred
        return own

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]
        """Show its value."""
        return repr(computed(self))

    def __deepcopy__(self, memo: Any) -> Any:
        """Copy its value."""
        return copy.deepcopy(computed(self), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Save its value."""
        return computed(self).__reduce_ex__(protocol)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Take a view, go on lazily, or evaluate it and do what is asked."""
        if func in _LOOKS:
            own = args[0]
            stand = torch.empty_strided(own.shape, own.stride(), device="meta")
            seen = func(stand, *args[1:], **kwargs or {})
            ordered = own.deferred.strides is not None or seen.is_contiguous()
            if ordered and seen.numel() == own.numel():
                return cls(own.deferred, seen)
        images = [one for one in args if isinstance(one, cls) and one.deferred.strides is not None]
        for own in () if kwargs else images:
            if (done := own.deferred.merged(func, args, own)) is not None:
                return done
        if not images and func is _aten.ones_like.default:  # with which a backward pass begins
            return cls(Ones(args[0].shape, args[0].deferred.like))
        if not images and _may_wait(func, args, kwargs):
            return cls(_Later(func, args))
        for own in _shared(func, args, kwargs or {}):
            for late in (*own.deferred.wanted, own.deferred):
                _ = late.made
        return func(*computed(args, laid=True), **computed(kwargs or {}, laid=True))


def _shared(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[DeferredTensor]:
    """Yield lazy arguments that the operation changes in place, or returns views of."""
    for place, told in enumerate(func._schema.arguments):
        if told.alias_info is not None:
            given = args[place] if place < len(args) else kwargs.get(told.name)
            several = given if isinstance(given, list | tuple) else (given,)
            yield from (one for one in several if isinstance(one, DeferredTensor))


def computed(given: Any, laid: bool = False) -> Any:
    """Evaluate what is lazy among arguments of any form.

    The value is contiguous, as its wrapper said, unless it may be as it is `laid` out.
    """
    if isinstance(given, DeferredTensor):
        late = given.deferred
        made = late.laid() if laid else late.made
        if late.strides is None:
            return made.reshape(given.shape)
        return made.as_strided(given.shape, given.stride())
    if type(given) in (tuple, list):
        return type(given)(computed(one, laid) for one in given)
    if type(given) is dict:
        return {name: computed(one, laid) for name, one in given.items()}
    return given


def images_computed(given: Any) -> Any:
    """Evaluate lazy images, which most functions cannot take."""
    ours = isinstance(given, DeferredTensor) and given.deferred.strides is not None
    return computed(given) if ours else given


def alone(given: Tensor) -> bool:
    """Say whether nothing lies beside a tensor in its memory, such as a copy of stepped weights."""
    return given.untyped_storage().nbytes() <= given.numel() * given.element_size()


def settled(given: Tensor) -> Tensor:
    """Evaluate a tensor, unless it consists of factors, which are there already."""
    return given if factored(given) is not None else computed(given, laid=True)


def anew(given: Tensor) -> Tensor:
    """Return a tensor of the same memory, which was written anew; factors are lazy again."""
    found = getattr(given, "deferred", None)
    return DeferredTensor(found.again()) if isinstance(found, Factored) else given


def factored(given: Tensor) -> Factored | None:
    """Return the factors of which the rows of a tensor consist, unless they were computed."""
    if isinstance(given, DeferredTensor) and given.shape == given.deferred.shape:
        found = given.deferred
        return found if isinstance(found, Factored) and found.waits else None
    return None


_aten = torch.ops.aten
_LOOKS = {
    _aten.view.default, _aten._unsafe_view.default, _aten._reshape_alias.default,
    _aten.unsqueeze.default, _aten.squeeze.dim, _aten.squeeze.dims, _aten.expand.default,
    _aten.permute.default, _aten.transpose.int, _aten.detach.default, _aten.alias.default,
}  # fmt: skip
