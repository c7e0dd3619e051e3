"""Work that is recorded on a second stream, beside the rest of a round.

The gradient by the weights of a convolution is read by the step alone, which comes after the whole
backward pass. Products keep matrix units busy, and what the pass does meanwhile, such as gradients
of normalisations, keeps memory busy: side by side they take less time than in turn. So while a
graph is captured such work goes to a second stream, which waits for what it is given, and whoever
reads the result waits for it. The step that adds such a gradient to the weights follows there, and
the next step's forward pass waits for a layer's weights when it comes to that layer. The first
stream has the higher priority: everything depends on it.

An allocator knows that memory is free from the order of one stream. What was made on the first is
held here till that has waited for the second. What was made on the second may be freed once it was
read, since all later work on the second waits for the first.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from idiolect.kernels.deferred import Deferred, DeferredTensor, Terms, alone, computed

_ON = True  # off: all on one stream, to compare
_STEPS = True  # off: steps on the first stream, to compare
_MOST = 1 << 31  # bytes held for the second stream, at most; then the first waits
PRIORITY = -1  # of streams that are captured; that of others, and of second ones, is 0
_PLAIN = torch.contiguous_format
STREAMS = 32  # of a priority: torch has so many, and gives them out in turn

_seconds: dict[Any, Any] = {}
"""Of each stream that was captured, its second. A product takes its workspace from the stream, so
no two graphs that may run side by side share one: `cuda_graph` makes no others of this priority."""
_recording: dict[Any, "_Pair"] = {}  # by the first stream


def _second_of(first: Any) -> Any:
    """Return a stream's second, which is no other's as far as there are so many."""
    if first not in _seconds:
        kind, taken = type(first), [*_seconds.values()]
        found = (kind() for _ in range(STREAMS))
        _seconds[first] = next((one for one in found if one not in taken), None) or kind()
    return _seconds[first]


class _Pair:
    """A stream that is captured and its second, with the work that the first may wait for."""

    def __init__(self, first: Any) -> None:
        self.first = first
        self._second: Any = None  # till there is work for it
        self.open: list[_Beside] = []

    def launch(
        self, work: Callable[..., Tensor | None], given: tuple[Tensor, ...]
    ) -> Tensor | None:
        """Do some work on the second stream, once what it is given is there."""
        if sum(one.held for one in self.open) > _MOST:
            self.join()
        self._second = _second_of(self.first)
        self._second.wait_stream(self.first)
        with torch.cuda.stream(self._second):
            made = work(*given)
            if made is None:  # it has to be done otherwise
                return None
            late = _Beside(self, made, given, self._second.record_event())
        self.open.append(late)
        return DeferredTensor(late)

    def wait(self, late: "_Beside") -> None:
        """Let the first stream wait for some work, and for all before it."""
        if late in self.open:
            self.first.wait_event(late.event)
            self._forget(self.open.index(late) + 1)

    def join(self) -> None:
        """Let the first stream wait for all."""
        try:
            if self._second is not None:
                self.first.wait_stream(self._second)
        finally:
            self._forget(len(self.open))

    def _forget(self, many: int) -> None:
        for late in self.open[:many]:
            late.given = ()
        del self.open[:many]


class _Beside(Deferred):
    """What is made on the second stream: whoever reads it waits."""

    def __init__(self, pair: _Pair, inner: Tensor, given: tuple[Tensor, ...], event: Any) -> None:
        like = inner.deferred.like if isinstance(inner, DeferredTensor) else inner
        super().__init__(inner.shape, like)
        self._pair, self._inner = pair, inner
        self.given, self.event = given, event

    @property
    def held(self) -> int:
        """Bytes of what it is made of."""
        return sum(one.nbytes for one in self.given)

    def make(self) -> Tensor:
        """Return it alone: what others change in place is not changed in a copy behind it."""
        made = self.laid()
        return made.contiguous() if alone(made) else made.clone(memory_format=_PLAIN)

    def laid(self) -> Tensor:
        """Return it in its own order: weights as steps leave them."""
        self._pair.wait(self)
        made: Tensor = computed(self._inner, laid=True) if self.waits else self.made
        return made

    def added(self, factor: float, to: Tensor) -> Tensor | None:
        """Return something plus factor times this, where it knows how: beside the rest as well."""
        late = self._late()
        if late is None:
            return None
        if _STEPS and self in self._pair.open:
            return self._pair.launch(
                functools.partial(late.added, factor), (computed(to, laid=True),)
            )
        self._pair.wait(self)
        return late.added(factor, to)

    def terms(self) -> Terms | None:
        """Return what it is the sum of."""
        self._pair.wait(self)
        late = self._late()
        return None if late is None else late.terms()

    def _late(self) -> Deferred | None:
        """Return what it is, if that is not computed yet."""
        found = self._inner
        return (
            found.deferred if isinstance(found, DeferredTensor) and found.deferred.waits else None
        )


def begin(first: Any) -> None:
    """Let work go beside a stream, whose capture has begun."""
    if _ON:
        _recording[first] = _Pair(first)


def end(first: Any) -> None:
    """Let a stream wait for all that was done beside it, before its capture ends."""
    if (pair := _recording.pop(first, None)) is not None:
        pair.join()


def beside(work: Callable[..., Tensor | None], *given: Tensor) -> Tensor | None:
    """Do some work on given tensors: on the second stream while the present one is recorded."""
    # What is deferred is computed before, since others may read it on the first stream.
    given = computed(given, laid=True)
    pair = _present(given[0])
    return work(*given) if pair is None else pair.launch(work, given)


def before_change(of: Tensor) -> None:
    """Let the present stream wait for all that was done beside it, which may read what changes."""
    if (pair := _present(of)) is not None:
        pair.join()


def _present(like: Tensor) -> _Pair | None:
    """Return the present stream with its second, if it is recorded."""
    if not _recording or not _on_gpu(like):
        return None
    return _recording.get(torch.cuda.current_stream(like.device))


def _on_gpu(x: Tensor) -> bool:
    return x.is_cuda
