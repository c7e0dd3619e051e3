"""CUDA graphs in sequence: each captures what some work launches and replays it as asked."""

import contextlib
import gc
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, TypeVar

import torch

from idiolect.kernels import second_stream

Result = TypeVar("Result")
Times = int | Callable[[], int]
"""How often something is replayed; asked at each replay where it is not always the same."""


class GraphSequence:
    """Graphs replayed one after the other, each some number of times."""

    def __init__(self) -> None:
        self._parts: list[tuple[Any, Times]] = []
        self._pool = torch.cuda.graph_pool_handle()  # one for all, since they run in turn
        self._stream = _own_stream()  # the usual one cannot be captured
        _ALIVE.add(self)
        self.recording = False
        self.warmed = False  # whether the work had to run once before it could be captured

    def run(self, work: Callable[[], Any]) -> Any:
        """Run some work on the stream that is captured."""
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            done = work()
        current.wait_stream(self._stream)
        return done

    def record(self, work: Callable[[], Any]) -> Any:
        """Capture what some work launches; it runs only if it has to be `warmed` for that."""
        try:
            return self._whole(work)
        except torch.OutOfMemoryError:
            raise
        except (
            RuntimeError
        ):  # something is missing that only a first run makes: a handle, a workspace
            self.run(work)
            self.warmed = True
            return self._whole(work)

    def repeat(self, piece: Callable[[], None], times: Times) -> None:
        """Within recorded work, capture a piece once, to be replayed some times."""
        self._end(1)
        self._part(piece, times)
        self._begin()

    def replay(self) -> None:
        """Run what was recorded."""
        for launch in self.launches():
            launch()

    def launches(self) -> Iterator[Callable[[], None]]:
        """Yield what launches each graph in turn: called one after the other they are a replay."""
        for graph, times in self._parts:
            for _ in range(times if isinstance(times, int) else times()):
                yield graph.replay

    def _whole(self, work: Callable[[], Any]) -> Any:
        self._parts.clear()
        self.recording = True
        try:
            return self.run(lambda: self._part(work, 1))
        finally:
            self.recording = False

    def _part(self, work: Callable[[], Any], times: Times) -> Any:
        self._begin()
        try:
            done = work()
        except BaseException:
            with contextlib.suppress(RuntimeError):  # the first error says more
                self._end(1)
            raise
        self._end(times)
        return done

    def _begin(self) -> None:
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        self._parts.append((graph, 1))
        second_stream.begin(self._stream)

    def _end(self, times: Times) -> None:
        graph, _ = self._parts[-1]
        try:
            second_stream.end(self._stream)
        finally:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "The CUDA Graph is empty")  # between two pieces
                graph.capture_end()
        self._parts[-1] = (graph, times)


_ALIVE: "weakref.WeakSet[GraphSequence]" = weakref.WeakSet()
BESIDE: list[Any] = []  # for works that run side by side, one list for the whole process


def _own_stream(beside: Sequence[Any] = BESIDE) -> Any:
    """Return a stream on which nothing else is captured or run, as far as there are such.

    A matrix product takes its workspace from the stream on which it is captured. Graphs captured on
    the same stream and replayed side by side would write to the same workspace, and so would a
    graph and what is launched kernel by kernel on its stream.
    """
    kind = type(torch.cuda.current_stream())
    captured = {own._stream.stream_id for own in _ALIVE}
    for taken in (captured | {own.stream_id for own in beside}, captured):
        for _ in range(second_stream.STREAMS):
            stream = kind(priority=second_stream.PRIORITY)
            if stream.stream_id not in taken:
                return stream
    return kind(priority=second_stream.PRIORITY)


Later = list[GraphSequence]
"""What is to be replayed later, in turn with others, instead of at once."""


def side_by_side(works: Sequence[Callable[[Later], Result]], streams: list[Any]) -> list[Result]:
    """Do each work on a stream of its own; `streams` grow as needed.

    All begin when what was launched before is done, and whatever is launched next waits for all.
    What works leave to be replayed later is launched graph by graph in turn, the first work's
    first: the host may have to wait while hundreds of graphs of one stream are under way, and the
    others would stand idle.
    """
    current = torch.cuda.current_stream()
    while len(streams) < len(works):
        streams.append(_own_stream(streams))
    done: list[Result] = []
    turns: list[tuple[Any, Iterator[Callable[[], None]]]] = []
    try:
        for work, stream in zip(works, streams, strict=False):
            stream.wait_stream(current)
            later: Later = []
            with torch.cuda.stream(stream):
                done.append(work(later))
            turns += [(stream, chain.from_iterable(tape.launches() for tape in later))]
        while turns:
            turns = [
                (stream, launches) for stream, launches in turns if _launched(stream, launches)
            ]
    finally:
        for stream in streams[: len(works)]:
            current.wait_stream(stream)
    return done


def _launched(stream: Any, launches: Iterator[Callable[[], None]]) -> bool:
    """Launch the next graph on a stream; say whether there was one."""
    launch = next(launches, None)
    if launch is not None:
        with torch.cuda.stream(stream):
            launch()
    return launch is not None


def release_cached_memory() -> None:
    """Release unused memory: a graph's pool cannot use what torch has cached elsewhere.

    That takes a while, and is not needed where torch could have as much again as it has.
    """
    free, _ = torch.cuda.mem_get_info()
    if free > torch.cuda.memory_reserved():
        return
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
