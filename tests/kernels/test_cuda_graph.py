"""What is recorded on a tape is replayed in turn, pieces of it as often as they ask.

A stand-in for CUDA notes what is launched while a graph is captured, and launches it on replay;
that CUDA itself does so, `benchmarks/gpu_check.py` says.
"""

import contextlib
import warnings

import pytest
import torch

from idiolect.core import graph_scan
from idiolect.kernels import autotune, cuda_graph
from idiolect.kernels.cuda_graph import GraphSequence, side_by_side


class Chip:
    """Launches, or notes in the graph that is being captured."""

    def __init__(self):
        self.done, self.capturing = [], None

    def launch(self, name):
        (self.done if self.capturing is None else self.capturing).append(name)


@pytest.fixture
def chip(monkeypatch):
    """Put a stand-in in place of CUDA's graphs and streams."""
    chip = Chip()

    class Graph:
        def capture_begin(self, pool, capture_error_mode):
            assert chip.capturing is None
            assert pool == "a pool"
            self.noted = chip.capturing = []

        def capture_end(self):
            if chip.capturing is not self.noted:
                raise RuntimeError("nothing is being captured here")
            if not self.noted:
                warnings.warn("The CUDA Graph is empty.", stacklevel=1)
            chip.capturing = None

        def replay(self):
            chip.done += self.noted

    class Stream:
        stream_id = 0

        def __init__(self, priority=0):
            pass

        def wait_stream(self, other):
            pass

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "a pool")
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (8, 9))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 7)
    return chip


@pytest.mark.filterwarnings("error")
def test_parts_are_replayed_in_turn_and_as_often_as_asked(chip):
    tape = GraphSequence()

    def work():
        chip.launch("before")
        tape.repeat(lambda: chip.launch("step"), 3)
        tape.repeat(lambda: chip.launch("other step"), 2)  # nothing in between: an empty graph
        chip.launch("after")
        return "made"

    assert tape.record(work) == "made"
    assert chip.done == []
    wanted = ["before", *3 * ["step"], *2 * ["other step"], "after"]
    tape.replay()
    assert chip.done == wanted
    tape.replay()
    assert chip.done == 2 * wanted


def test_how_often_a_part_is_replayed_may_be_asked_each_time(chip):
    tape, asked = GraphSequence(), iter([2, 0])

    def work():
        tape.repeat(lambda: chip.launch("step"), lambda: next(asked))
        chip.launch("after")

    tape.record(work)
    tape.replay()
    tape.replay()
    assert chip.done == ["step", "step", "after", "after"]


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no room"), ValueError("oh")])
def test_an_error_within_a_piece_comes_out_as_it_is(chip, error):
    tape = GraphSequence()

    def fails():
        raise error

    with pytest.raises(type(error), match=str(error)):
        tape.record(lambda: tape.repeat(fails, 3))
    assert chip.capturing is None


@pytest.mark.parametrize("times", [1, 5])
def test_what_is_repeated_is_done_so_often(chip, times):
    graph_scan.repeat(lambda: chip.launch("step"), times)
    assert chip.done == times * ["step"]


def test_what_needs_a_warm_up_gets_it_and_it_counts(chip):
    def piece():
        if chip.capturing is not None and not chip.done:
            raise RuntimeError("no workspace yet")
        chip.launch("step")

    graph_scan.repeat(piece, 5)
    assert chip.done == 5 * ["step"]


def test_what_cannot_be_captured_is_done_as_it_comes(chip):
    def piece():
        if chip.capturing is not None:
            raise RuntimeError("the host has to wait\nand so on")
        chip.launch("step")

    with pytest.warns(UserWarning, match="not captured, so slower: the host has to wait$"):
        graph_scan.repeat(piece, 4)
    assert chip.done == 4 * ["step"]


def test_a_lack_of_memory_is_no_reason_to_go_on(chip):
    def piece():
        raise torch.OutOfMemoryError("no room")

    with pytest.raises(torch.OutOfMemoryError):
        graph_scan.repeat(piece, 4)


def test_a_form_without_room_says_so_and_nothing_else(chip):
    """It may be tried again for fewer clients; nobody minds that its graph was empty."""

    def form():
        if chip.capturing is not None:
            raise torch.OutOfMemoryError("no room")

    with warnings.catch_warnings(), pytest.raises(torch.OutOfMemoryError):
        warnings.simplefilter("error")
        autotune.milliseconds(form)


def scanned(graphs, chip, steps):
    def fold(number, carry, count):
        for _ in range(count):
            chip.launch("step")
        return carry

    graphs.scan(fold, torch.zeros(()), steps, torch.device("cpu"))


def test_a_round_is_recorded_by_the_folder_that_folds_in_it(chip):
    """Of a fold with slow steps three are recorded as they come, then four, to be replayed."""
    graphs, tape = graph_scan.GraphScan(), GraphSequence()
    graphs._slow = True

    def work():
        chip.launch("before")
        scanned(graphs, chip, 15)
        return "made"

    assert graphs.record(tape, work) == "made"
    tape.replay()
    assert chip.done == ["before", *15 * ["step"]]
    assert [times for _, times in tape._parts] == [1, 3, 1]


def test_a_round_that_needs_a_warm_up_folds_in_it_as_it_comes(chip):
    """It is done once, fifteen steps; then it is recorded, and replayed like any other."""
    graphs, tape = graph_scan.GraphScan(), GraphSequence()
    graphs._slow = True

    def work():
        if chip.capturing is not None and not chip.done:
            raise RuntimeError("no workspace yet")
        scanned(graphs, chip, 15)

    graphs.record(tape, work)
    assert tape.warmed and chip.done == 15 * ["step"]
    tape.replay()
    assert chip.done == 30 * ["step"]
    assert [times for _, times in tape._parts] == [1, 3, 1]


def test_of_a_long_fold_a_piece_is_recorded(chip):
    """Of 103 steps two come first, 101 = 12 * 8 + 5 = 11 * 9 + 2 follow: 13 are recorded."""
    graphs, tape = graph_scan.GraphScan(), GraphSequence()
    graphs._slow = False
    graphs.record(tape, lambda: scanned(graphs, chip, 103))
    assert [times for _, times in tape._parts] == [1, 11, 1]
    assert [len(graph.noted) for graph, _ in tape._parts] == [4, 9, 0]
    tape.replay()
    assert chip.done == 103 * ["step"]


@pytest.mark.parametrize(("reserved", "released"), [(7, 0), (8, 2)])
def test_cached_memory_is_released_where_it_may_be_needed(chip, monkeypatch, reserved, released):
    called = []
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: reserved)
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda name=name: called.append(name))
    cuda_graph.release_cached_memory()
    assert len(called) == released


def numbered_streams(monkeypatch, told, now):
    """Put streams that can be told apart in place of CUDA's; the first is the usual one."""

    class Stream:
        count = 0

        def __init__(self, priority=0):
            Stream.count += 1
            self.stream_id = Stream.count % 33
            self.name = f"stream {Stream.count}"

        def wait_stream(self, other):
            told.append(f"{self.name} waits for {other.name}")

    @contextlib.contextmanager
    def on(stream):
        now.append(stream.name)
        yield
        now.pop()

    main = Stream()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: main)
    monkeypatch.setattr(torch.cuda, "stream", on)
    return Stream


def test_works_side_by_side_begin_after_what_was_and_end_before_what_comes(monkeypatch):
    """Each on a stream of its own, in the order given; also where one of them fails."""
    told, now = [], []
    numbered_streams(monkeypatch, told, now)

    def work(name):
        told.append(f"{name} on {now[-1]}")
        return name

    streams = []
    works = [lambda later: work("long"), lambda later: work("short")]
    assert side_by_side(works, streams) == ["long", "short"]
    assert told == [
        "stream 2 waits for stream 1", "long on stream 2",
        "stream 3 waits for stream 1", "short on stream 3",
        "stream 1 waits for stream 2", "stream 1 waits for stream 3",
    ]  # fmt: skip
    with pytest.raises(ZeroDivisionError):
        side_by_side([lambda later: 1 // 0], streams)
    assert told[-1] == "stream 1 waits for stream 2" and len(streams) == 2


def test_what_is_replayed_side_by_side_is_launched_in_turn_the_longest_first(chip, monkeypatch):
    told, now = [], []
    numbered_streams(monkeypatch, told, now)

    def recorded(name, pieces):
        tape = GraphSequence()
        tape.record(lambda: tape.repeat(lambda: chip.launch(name), pieces))
        for graph, _ in tape._parts:
            graph.replay = lambda noted=graph.noted: chip.done.extend(
                (own, now[-1]) for own in noted
            )
        return tape

    tapes = [recorded("long", 4), recorded("short", 2)]
    side_by_side([lambda later, own=own: later.append(own) for own in tapes], streams := [])
    first, second = (own.name for own in streams)
    assert chip.done == [
        ("long", first), ("short", second), ("long", first), ("short", second),
        ("long", first), ("long", first),
    ]  # fmt: skip
    assert told[-2:] == [f"stream 1 waits for {name}" for name in (first, second)]


def test_no_two_sequences_are_captured_on_one_stream(chip, monkeypatch):
    """Torch gives out its 32 streams in turn; products find their workspace by the stream."""
    kind = numbered_streams(monkeypatch, [], [])
    first = GraphSequence()
    for _ in range(32):
        kind()  # the next one would be the first one's
    second = GraphSequence()
    assert first._stream.stream_id != second._stream.stream_id
    many = [GraphSequence() for _ in range(40)]  # there are no more than there are
    assert len({own._stream.stream_id for own in [first, second, *many]}) == 33


def test_none_is_captured_where_others_run_side_by_side(chip, monkeypatch):
    """What is launched kernel by kernel on a stream has the workspace of graphs captured there."""
    kind = numbered_streams(monkeypatch, [], [])
    captured = [GraphSequence() for _ in range(3)]
    side_by_side([lambda later: None] * 2, cuda_graph.BESIDE)
    try:
        for _ in range(29):
            kind()  # the next two would be those on which works run
        captured += [GraphSequence() for _ in range(9)]
        ids = [own._stream.stream_id for own in captured]
        ids += [own.stream_id for own in cuda_graph.BESIDE]
        assert len(set(ids)) == 14
    finally:
        cuda_graph.BESIDE.clear()
