"""CUDA graphs in sequence: each captures what some work launches and replays it as asked."""

import contextlib
import gc
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")


class GraphSequence:
    """Graphs replayed one after the other, each some number of times."""

    def __init__(self) -> None:
        self._parts: list[tuple[Any, int]] = []
        self._pool = torch.cuda.graph_pool_handle()  # one for all, since they run in turn
        self._stream = type(torch.cuda.current_stream())()  # the usual one cannot be captured
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

    def repeat(self, piece: Callable[[], None], times: int) -> None:
        """Within recorded work, capture a piece once, to be replayed some times."""
        self._end(1)
        self._part(piece, times)
        self._begin()

    def replay(self) -> None:
        """Run what was recorded."""
        for graph, times in self._parts:
            for _ in range(times):
                graph.replay()

    def _whole(self, work: Callable[[], Any]) -> Any:
        self._parts.clear()
        self.recording = True
        try:
            return self.run(lambda: self._part(work, 1))
        finally:
            self.recording = False

    def _part(self, work: Callable[[], Any], times: int) -> Any:
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

    def _end(self, times: int) -> None:
        graph, _ = self._parts[-1]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The CUDA Graph is empty")  # between two pieces, say
            graph.capture_end()
        self._parts[-1] = (graph, times)


def side_by_side(works: Sequence[Callable[[], Result]], streams: list[Any]) -> list[Result]:
    """Launch each work on a stream of its own, the first one first; `streams` grow as needed.

    All begin when what was launched before is done, and whatever is launched next waits for all.
    """
    current = torch.cuda.current_stream()
    kind = type(current)
    streams += [kind() for _ in range(len(works) - len(streams))]
    done = []
    try:
        for work, stream in zip(works, streams, strict=False):
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                done.append(work())
    finally:
        for stream in streams[: len(works)]:
            current.wait_stream(stream)
    return done


def release_cached_memory() -> None:
    """Release unused memory: a graph's pool cannot use what torch has cached elsewhere."""
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
