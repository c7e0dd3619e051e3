"""What is recorded on a second stream is there before it is read, and what it reads till then.

Streams that stand in for CUDA's know what was launched before, on them and on those that they
waited for: an operation that is launched where something it reads may not be done yet is refused.
That CUDA does the same, and that it takes less time, is for a GPU to say.
"""

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from idiolect.core import graph_scan, tree
from idiolect.core.network import replace_layers
from idiolect.kernels import convolution, cuda_graph, second_stream, weight_order
from idiolect.kernels.convolution import PLAIN
from idiolect.kernels.convolution_cuda import ConvShape
from idiolect.kernels.cuda_graph import GraphSequence
from idiolect.kernels.deferred import Deferred, DeferredTensor, computed, settled


class Chip:
    """Streams, and on which of them what is launched now."""

    def __init__(self) -> None:
        chip = self

        class Stream:
            count = 0

            def __init__(self, priority: int = 0) -> None:
                Stream.count += 1
                self.stream_id, self.priority = Stream.count, priority
                self.done: set[str] = set()

            def record_event(self) -> set[str]:
                return {*self.done}

            def wait_event(self, event: set[str]) -> None:
                self.done |= event

            def wait_stream(self, other: "Stream") -> None:
                if chip.fails:
                    raise RuntimeError("the capture is invalid")
                self.done |= other.done

        self.Stream, self.now, self.capturing, self.fails = Stream, Stream(), 0, False
        self.usual = self.now

    @contextlib.contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        before, self.now = self.now, stream
        try:
            yield
        finally:
            self.now = before

    def launch(self, name: str, *reads: str) -> None:
        assert self.now.done.issuperset(reads), f"{name} may run before {reads}"
        self.now.done.add(name)


@pytest.fixture
def chip(monkeypatch: pytest.MonkeyPatch) -> Chip:
    chip = Chip()

    class Graph:
        def capture_begin(self, **_: Any) -> None:
            chip.capturing += 1

        def capture_end(self) -> None:
            chip.capturing -= 1

    stand_ins = {
        "CUDAGraph": Graph, "graph_pool_handle": lambda: "a pool", "stream": chip.on,
        "current_stream": lambda device=None: chip.now,
    }  # fmt: skip
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(second_stream, "_on_gpu", lambda x: True)
    monkeypatch.setattr(second_stream, "_seconds", {})
    monkeypatch.setattr(cuda_graph, "_ALIVE", weakref.WeakSet())
    return chip


def recorded(work: Callable[[], Any]) -> Any:
    return GraphSequence()._whole(work)


def test_who_reads_waits_and_others_do_not(chip: Chip) -> None:
    def product(x: Tensor) -> Tensor:
        chip.launch("product", "input")
        return 2 * x

    def work() -> None:
        chip.launch("input")
        x = torch.ones(3)
        made = second_stream.beside(product, x)
        first = chip.now
        assert "product" not in first.done  # what comes now may run at the same time
        chip.launch("norm", "input")
        assert made.sum() == 6
        chip.launch("step", "norm", "product")
        assert first.priority < second_stream._seconds[first].priority  # lower is first

    recorded(work)


def test_work_is_done_in_turn_and_readers_wait_for_no_more_than_they_read(chip: Chip) -> None:
    def work() -> None:
        made = []
        for name in ("one", "two", "three"):
            chip.launch(f"gradient {name}")

            def product(x: Tensor, name: str = name) -> Tensor:
                chip.launch(name, f"gradient {name}")
                return x + 1

            made.append(second_stream.beside(product, torch.zeros(2)))
        assert made[1].sum() == 2
        assert chip.now.done >= {"one", "two"} and "three" not in chip.now.done
        assert made[0].sum() == made[2].sum() == 2
        assert "three" in chip.now.done

    recorded(work)


def test_what_is_read_on_the_second_stream_stays_till_the_first_has_waited(chip: Chip) -> None:
    def work() -> None:
        x, other = torch.ones(3), torch.ones(3)
        seen = [weakref.ref(one) for one in (x, other)]
        made = [second_stream.beside(lambda given: given + 1, one) for one in (x, other)]
        del x, other
        gc.collect()
        assert all(one() is not None for one in seen)
        made[0].sum()
        assert [one() is not None for one in seen] == [False, True]
        made[1].sum()
        assert not any(one() is not None for one in seen)

    recorded(work)


def test_no_more_is_held_than_so_many_bytes(chip: Chip, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(second_stream, "_MOST", 20)

    def product(x: Tensor) -> Tensor:
        chip.launch(f"product {len(x)}")
        return x + 1

    def work() -> None:
        made = [second_stream.beside(product, torch.zeros(n)) for n in (3, 4)]
        assert "product 3" not in chip.now.done  # 12 bytes, then 28
        made.append(second_stream.beside(product, torch.zeros(5)))
        assert {"product 3", "product 4"} <= chip.now.done and "product 5" not in chip.now.done
        assert [float(one.sum()) for one in made] == [3, 4, 5]

    recorded(work)


def test_a_capture_ends_when_all_is_joined_read_or_not(chip: Chip) -> None:
    """CUDA refuses to end one otherwise. Each piece of a round is one."""
    tape = GraphSequence()

    def product(x: Tensor) -> Tensor:
        chip.launch("product")
        return x + 1

    kept = []

    def piece() -> None:
        kept.append(second_stream.beside(product, torch.zeros(2)))

    tape._whole(lambda: [piece(), tape.repeat(piece, 3), piece()])
    assert "product" in tape._stream.done and not second_stream._recording
    assert not any(one.deferred.given for one in kept)
    chip.usual.done.clear()
    assert all(one.sum() == 2 for one in kept)  # there already: nobody waits
    assert not chip.usual.done
    assert len(second_stream._seconds) == 1  # one second stream for all pieces


@pytest.mark.parametrize("where", ["beside", "between", "joining"])
def test_an_error_leaves_nothing_behind(where: str, chip: Chip) -> None:
    tape = GraphSequence()

    def product(x: Tensor) -> Tensor:
        chip.launch("product")
        return x / (1 // (where != "beside"))

    def work() -> None:
        second_stream.beside(product, torch.ones(2))
        chip.fails = where == "joining"
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        tape._whole(work)
    assert not second_stream._recording and not chip.capturing
    assert "product" in tape._stream.done or where == "joining"
    chip.fails = False
    made = tape._whole(lambda: second_stream.beside(lambda x: x + 1, torch.ones(2)))
    assert made.sum() == 4  # the next capture is as any other


@pytest.mark.parametrize("off", ["switch", "no GPU", "not recorded", "another stream"])
def test_otherwise_work_is_done_at_once(
    off: str, chip: Chip, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work() -> None:
        x = torch.ones(2)
        with chip.on(chip.Stream()) if off == "another stream" else contextlib.nullcontext():
            made = second_stream.beside(lambda given: given + 1, x)
        assert type(made) is Tensor and not second_stream._seconds

    if off == "switch":
        monkeypatch.setattr(second_stream, "_ON", False)
    if off == "no GPU":
        monkeypatch.undo()
    if off in ("not recorded", "no GPU"):
        work()
    else:
        recorded(work)


class Sum(Deferred):
    """One that a step adds by itself, or does not."""

    def __init__(self, chip: Chip, x: Tensor, known: bool = True, parts: str = "parts") -> None:
        super().__init__(x.shape, x)
        self.chip, self.x, self.known, self.parts = chip, x, known, parts

    def make(self) -> Tensor:
        self.chip.launch(f"sum of {self.parts}", self.parts)
        return self.x

    def added(self, factor: float, to: Tensor) -> Tensor | None:
        if not self.known:
            return None
        self.chip.launch("step", "parts")
        return to + factor * self.x


@pytest.mark.parametrize("how", ["added", "added by others", "made", "added later", "switch"])
def test_a_step_follows_beside_and_what_is_deferred_is_computed_by_who_reads_it(
    how: str, chip: Chip, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(second_stream, "_STEPS", how != "switch")
    at_once = how in ("added later", "switch")

    def product(x: Tensor) -> Tensor:
        chip.launch("parts", "sum of earlier parts")
        return DeferredTensor(Sum(chip, x, how != "added by others"))

    def work() -> None:
        chip.launch("earlier parts")
        given = DeferredTensor(Sum(chip, torch.ones(2, 3), parts="earlier parts"))
        made = second_stream.beside(product, given)
        assert isinstance(made, DeferredTensor) and made.deferred.waits
        assert "sum of earlier parts" in chip.now.done  # others may read it on the first stream
        if how == "made":
            assert computed(made).sum() == 6
            assert chip.now.done >= {"parts", "sum of parts"}
            return
        if how == "added later":
            second_stream.beside(lambda x: x + 1, torch.ones(2)).sum()
        weights = torch.ones(2, 3)
        there = weakref.ref(weights)
        found = made.deferred.added(2.0, weights)
        del weights
        if how == "added by others":
            assert found is None and computed(made).sum() == 6
            return
        assert found is not None and ("step" in chip.now.done) == at_once
        assert (there() is None) == at_once
        assert found.sum() == 18
        assert chip.now.done >= {"parts", "step"} and there() is None

    recorded(work)


def test_weights_in_another_order_are_without_gaps_for_who_asks_only_the_stand_in(
    chip: Chip,
) -> None:
    """A kernel of ours is given `x.contiguous()`, which torch asks the wrapper alone for."""

    def work() -> None:
        laid = torch.arange(24.0).reshape(2, 4, 3)
        exact = laid.mT.contiguous()
        made = second_stream.beside(lambda x: x.mT, laid)
        assert made.shape == (2, 3, 4)
        assert settled(made).data_ptr() == laid.data_ptr()  # as steps leave weights: not copied
        assert torch.equal(made.view(2, 12) + 0.0, exact.view(2, 12))
        given = computed(made.contiguous())
        assert given.is_contiguous() and torch.equal(given, exact)
        assert torch.equal(made + 0.0, exact)

    recorded(work)


@pytest.mark.parametrize("before", [False, True])
def test_weights_in_another_order_that_are_changed_in_part_are_changed(
    before: bool, chip: Chip
) -> None:
    """Whatever shape they are seen in, and whether a kernel read them before or not."""

    def work() -> None:
        exact = torch.arange(24.0).reshape(2, 3, 4)
        made = second_stream.beside(lambda x: x.mT, exact.mT.contiguous())
        if before:
            assert torch.equal(computed(made), exact)
        middle = made[:, 1]
        made.view(2, 12).mul_(2.0)
        made.add_(1.0)
        middle.mul_(3.0)
        exact.mul_(2.0).add_(1.0)[:, 1].mul_(3.0)
        assert torch.equal(computed(made), exact) and torch.equal(settled(made), exact)
        assert torch.equal(middle, exact[:, 1])

    recorded(work)


@pytest.mark.parametrize("side", [1, 3])
@pytest.mark.parametrize(
    "change",
    [
        lambda w: w.mul_(2.0),
        lambda w: w[:, 0].mul_(2.0),
        lambda w: w.data.view(-1).mul_(2.0),
        vmap(lambda w: w[0].mul_(2.0)),
    ],
)
def test_no_copy_in_bfloat16_lies_behind_weights_that_were_changed(
    side: int, change: Callable[[Tensor], Tensor], chip: Chip
) -> None:
    """Below wrapper subclasses torch does not count what is changed in place."""

    def work() -> None:
        exact = torch.randn(2, 4, 6, side, side)
        made = second_stream.beside(lambda w: weight_order.as_stepped(w, True), exact)
        change(made)
        change(exact)
        laid = settled(made).permute(0, 1, 3, 4, 2)
        assert torch.equal(laid, exact.permute(0, 1, 3, 4, 2))
        assert not laid.is_contiguous() or weight_order._copy_behind(laid) is None

    recorded(work)


def test_what_is_held_is_overwritten_when_all_was_done_beside(chip: Chip) -> None:
    """Also what nobody reads may have to read it."""

    def product(x: Tensor) -> Tensor:
        chip.launch("product")
        return x + 1

    def work() -> None:
        held = torch.ones(2)
        second_stream.beside(product, held)
        graph_scan.overwrite([held], [torch.zeros(2)])
        assert "product" in chip.now.done and held.sum() == 0

    recorded(work)


def test_no_two_streams_share_a_second_while_there_are_others(chip: Chip) -> None:
    """Products would share a workspace."""
    pool = [chip.Stream() for _ in range(second_stream.STREAMS)]
    turns = iter([0, 0, 0, 1, *range(32), 2])

    class Stream(chip.Stream):
        def __new__(cls, priority: int = 0) -> Any:
            return pool[next(turns)]

    firsts = [object.__new__(Stream) for _ in range(3)]
    seconds = [second_stream._second_of(first) for first in firsts]
    assert seconds == [pool[0], pool[1], pool[2]]
    assert [second_stream._second_of(first) for first in firsts] == seconds


@pytest.mark.parametrize("side", [1, 3])
def test_kernels_find_the_copy_behind_weights_that_are_deferred(
    side: int, chip: Chip, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the order of weights of 1x1 cannot be told from any other."""
    shape = ConvShape(2, 1, 6, 3, 3, 4, side, side, 1, 0)
    given: list[Tensor] = []
    monkeypatch.setitem(PLAIN, "convolve", lambda x, w, shape: given.append(w))

    def work() -> None:
        exact = torch.randn(2, 4, 6, side, side)
        made = second_stream.beside(lambda w: weight_order.as_stepped(w, True), exact)
        like = torch.empty(0, dtype=torch.bfloat16)
        convolution.fastest_form("convolve", shape, torch.randn(2, 1, 6, 3, 3), made)
        assert type(given[0]) is Tensor
        laid = weight_order.by_taps(given[0], like, 6)
        assert torch.equal(laid, exact.permute(0, 1, 3, 4, 2).bfloat16())
        memory = settled(made).untyped_storage()
        assert laid.untyped_storage().data_ptr() == memory.data_ptr()

    recorded(work)


def test_gradients_of_a_network_are_those_on_one_stream(
    chip: Chip, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only those by weights of deep convolutions go beside; bit for bit the same."""
    beside: list[tuple[int, bool]] = []
    first = [chip.usual]
    second = second_stream._seconds.get

    def form(task: str, shape: Any, *inputs: Tensor) -> Any:
        if task == "weight_gradient":
            beside.append((shape.channels, chip.now is second(first[0])))
        return PLAIN[task](*inputs, shape)

    for name, stand_in in (
        ("float32_on_cuda", lambda x: True), ("fastest_form", form), ("_PRODUCTS", 1),
        ("_DEEPER", 4),
    ):  # fmt: skip
        monkeypatch.setattr(convolution, name, stand_in)
    torch.manual_seed(0)
    layers = (nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 5, 3, bias=False), nn.Conv2d(5, 5, 1))
    model = replace_layers(nn.ModuleList(layers))
    params = {name: torch.randn(2, *one.shape) for name, one in model.named_parameters()}
    x = torch.randn(2, 3, 3, 6, 6)

    class Through(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = model

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    through = Through()

    def step(params: dict[str, Tensor], x: Tensor) -> Any:
        def loss(own: dict[str, Tensor]) -> Tensor:
            named = {f"layers.{name}": one for name, one in own.items()}
            return functional_call(through, named, (x,)).square().sum()

        return tree.axpy(-0.1, grad(loss)(params), params)

    def stepped() -> Any:
        return vmap(step)(params, x)

    tape = GraphSequence()
    ends = [stepped()]
    first[0] = tape._stream
    ends.append(tape._whole(stepped))
    assert beside == [(5, False), (4, False), (3, False), (5, True), (4, True), (3, False)]
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in params)
