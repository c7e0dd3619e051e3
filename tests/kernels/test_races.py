"""Random trainings whose weights' gradients and steps go to a second stream race nowhere.

Every operation on memory is watched, whoever launches it: two of which one writes are refused
unless a stream, or a wait of one for another, orders them. Memory that is free again counts as
written by whoever next takes some on the stream that it was taken on, which is as soon as an
allocator may give it away.
"""

import contextlib
import copy
import pickle
import random
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from idiolect.core import graph_scan, tree
from idiolect.core.network import replace_layers
from idiolect.kernels import convolution, cuda_graph, second_stream
from idiolect.kernels import fused_tree_ops as at_once
from idiolect.kernels.convolution import PLAIN
from idiolect.kernels.cuda_graph import GraphSequence
from idiolect.kernels.deferred import Deferred, DeferredTensor, Terms, computed, settled, terms_of

Params = dict[str, Tensor]
Event = dict[int, int]  # by stream, how many of its operations came before


class Stream:
    """What is launched on it comes after what it has `seen`."""

    count = 0

    def __init__(self, priority: int = 0) -> None:
        Stream.count += 1
        self.stream_id, self.priority = Stream.count, priority
        self.seen: Event = {self.stream_id: 0}

    def record_event(self) -> Event:
        return {**self.seen}

    def wait_event(self, event: Event) -> None:
        for stream, place in event.items():
            self.seen[stream] = max(place, self.seen.get(stream, 0))

    def wait_stream(self, other: "Stream") -> None:
        self.wait_event(other.seen)


class Block:
    """Memory: on which stream it was taken, and the last operations on it."""

    def __init__(self, stream: Stream, memory: Any) -> None:
        self.stream, self.alive = stream, StorageWeakRef(memory)
        self.wrote: tuple[int, int, str] | None = None
        self.read: list[tuple[int, int, str]] = []


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows all operations."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.usual = self.now = Stream(second_stream.PRIORITY)
        self.blocks: dict[int, Block] = {}
        self.beside = 0  # operations on second streams

    @contextlib.contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self.now = self.now, stream
        try:
            yield
        finally:
            self.now = before

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(isinstance(one, DeferredTensor) for one in tensors((*args, *kwargs.values()))):
            with self:
                return DeferredTensor.__torch_dispatch__(func, types, args, kwargs)
        changed, read = list[Tensor](), list[Tensor]()
        for n, told in enumerate(func._schema.arguments):
            given = kwargs.get(told.name) if told.kwarg_only else (*args, *[None] * 99)[n]
            write = told.alias_info is not None and told.alias_info.is_write
            (changed if write else read).extend(tensors(given))
        made = func(*args, **kwargs)
        old = {place(one) for one in (*changed, *read)}
        fresh = [one for one in tensors(made) if place(one) not in old]
        if not changed and not fresh:
            return made  # another view
        self.now.seen[self.now.stream_id] += 1
        self.beside += self.now.priority == 0
        for one in fresh:
            self.taken(func)
            self.blocks[place(one)] = Block(self.now, one.untyped_storage())
        for one in read:
            self.touch(one, str(func), write=False)
        for one in (*changed, *fresh):
            self.touch(one, str(func), write=True)
        return made

    def taken(self, func: Any) -> None:
        """Take memory: perhaps what was given back."""
        for key, block in [*self.blocks.items()]:
            if block.alive.expired() and block.stream is self.now:
                self.ordered(block, f"memory for {func}", write=True)
                del self.blocks[key]

    def touch(self, one: Tensor, name: str, write: bool) -> None:
        if one.device.type == "meta":
            return
        block = self.blocks.setdefault(place(one), Block(self.usual, one.untyped_storage()))
        self.ordered(block, name, write)
        done = (self.now.stream_id, self.now.seen[self.now.stream_id], name)
        if write:
            block.wrote, block.read = done, []
        else:
            block.read.append(done)

    def ordered(self, block: Block, name: str, write: bool) -> None:
        for stream, number, other in (
            *([block.wrote] if block.wrote else []), *(block.read if write else []),
        ):  # fmt: skip
            assert self.now.seen.get(stream, 0) >= number, f"{name} may run before {other}"


def tensors(given: Any) -> list[Tensor]:
    if isinstance(given, Tensor):
        return [given]
    several = isinstance(given, list | tuple)
    return [found for one in given for found in tensors(one)] if several else []


def place(one: Tensor) -> int:
    return int(one.untyped_storage()._cdata)


class Parts(Deferred):
    """A sum of parts, which a step adds up and leaves in another order, as kernels do."""

    def __init__(self, parts: Tensor, alone: bool) -> None:
        super().__init__(parts.shape[1:], parts)
        self.parts, self.alone = parts, alone

    def make(self) -> Tensor:
        return self.parts.sum(0)

    def added(self, factor: float, to: Tensor) -> Tensor | None:
        if not self.alone:
            return None
        made = torch.add(to, self.parts.sum(0), alpha=factor)
        return made.movedim(2, -1).contiguous().movedim(-1, 2)

    def terms(self) -> Terms:
        return Terms(self.parts, self.parts[0, 0].numel(), len(self.parts), self.parts[0].numel())


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    watch = Watch()

    class Graph:
        def capture_begin(self, **_: Any) -> None:
            """Do nothing."""

        def capture_end(self) -> None:
            """Do nothing."""

    for where, name, stand_in in (
        (torch.cuda, "CUDAGraph", Graph),
        (torch.cuda, "graph_pool_handle", lambda: "a pool"),
        (torch.cuda, "stream", watch.on),
        (torch.cuda, "current_stream", lambda device=None: watch.now),
        (second_stream, "_on_gpu", lambda x: True),
        (second_stream, "_seconds", {}),
        (cuda_graph, "_ALIVE", weakref.WeakSet()),
        (convolution, "float32_on_cuda", lambda x: True),
        (tree, "_in_one_launch", lambda xs, ys: tree.transformed() and len(xs) > 1),
    ):  # fmt: skip
        monkeypatch.setattr(where, name, stand_in)
    return watch


class Net(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Conv2d(2, 2, 2 * (n % 2) + 1, padding=n % 2, bias=n == 0) for n in range(depth)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


def sgd(w: Params, m: Params, g: Params) -> Any:
    return tree.axpy(-0.1, g, w), m


def momentum(w: Params, m: Params, g: Params) -> Any:
    m = tree.axpy(1.0, g, tree.scale(0.9, m))
    return tree.axpy(-0.1, m, w), m


def decayed(w: Params, m: Params, g: Params) -> Any:
    return tree.axpy(-0.1, tree.axpy(0.01, w, g), w), m


def clipped(w: Params, m: Params, g: Params) -> Any:
    return tree.axpy(-0.1, tree.scale(1 / (1 + tree.norm(g)), g), w), m


def chosen(w: Params, m: Params, g: Params) -> Any:
    return tree.where(g["layers.0.bias"].sum() > 0, tree.axpy(-0.1, g, w), w), m


def twice(w: Params, m: Params, g: Params) -> Any:
    return tree.axpy(-0.05, g, tree.axpy(-0.1, g, w)), m


def in_place(w: Params, m: Params, g: Params) -> Any:
    total = tree.map(lambda leaf: leaf + 2.0 * leaf, g)
    changed(g, 0.5)
    new = tree.axpy(-0.1, g, tree.axpy(-0.1, total, w))
    changed(new, 0.9)
    return new, m


def changed(leaves: Params, by: float) -> None:
    """Change leaves, and parts of them."""
    for leaf in leaves.values():
        leaf[0].mul_(by)
        leaf.mul_(by)
        leaf[1:] -= 0.01


def thrown_away(w: Params, m: Params, g: Params) -> Any:
    tree.axpy(-0.1, g, w)
    return w, tree.axpy(1.0, {name: g[name] if n else m[name] for n, name in enumerate(g)}, m)


STEPS = (sgd, sgd, momentum, decayed, clipped, chosen, twice, in_place, thrown_away)


@pytest.mark.parametrize("seed", range(20))
def test_random_trainings(seed: int, watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    depth = draw.randint(2, 5)
    late = {n: draw.choice(("one stream", "made", "parts", "added")) for n in range(64)}
    order = [draw.choice(STEPS) for _ in range(draw.randint(2, 5))]
    pieces = [draw.random() < 0.3 for _ in order]
    again = draw.random() < 0.3  # a step uses the gradient at where another step leads
    breaks = [draw.randrange(len(order)) if draw.random() < 0.3 else -1]  # a capture, the first
    count, exactly = [0], [True]

    def form(task: str, shape: Any, *inputs: Any) -> Any:
        made = PLAIN[task](*computed(inputs, laid=True), shape)
        if task != "weight_gradient":
            return made
        count[0] += 1
        how = "made" if exactly[0] else late[count[0] % 64]
        if how in ("made", "one stream"):
            return made
        return DeferredTensor(Parts(torch.stack([0.5 * made, 0.5 * made]), how == "added"))

    monkeypatch.setattr(convolution, "fastest_form", form)
    monkeypatch.setattr(
        convolution, "_takes_long", lambda s: late[(count[0] + 1) % 64] != "one stream"
    )
    monkeypatch.setattr(second_stream, "_MOST", draw.choice((1 << 31, 2000)))
    monkeypatch.setattr(second_stream, "_STEPS", draw.random() < 0.8)
    model = replace_layers(Net(depth))
    first = {name: torch.randn(2, *one.shape).double() for name, one in model.named_parameters()}
    x = torch.randn(2, 2, 2, 3, 3).double()

    def loss(w: Params, x: Tensor) -> Tensor:
        return functional_call(model, w, (x,)).square().sum()

    def step(which: Callable[..., Any], state: Any) -> Any:
        def own(w: Params, m: Params, x: Tensor) -> Any:
            g = grad(loss)(w, x)
            return which(w, m, grad(loss)(tree.axpy(-0.01, g, w), x) if again else g)

        return vmap(own)(*state, x)

    def work(tape: GraphSequence | None) -> Any:
        state: Any = tree.map(torch.clone, (first, tree.map(torch.zeros_like, first)))
        for n, (which, cut) in enumerate(zip(order, pieces, strict=True)):
            if tape and breaks[0] == n:
                breaks[0] = -1
                raise RuntimeError("cannot be captured")
            if not cut:
                state = step(which, state)
                continue
            held = tree.map(torch.clone, state)

            def piece(held: Any = held, which: Any = which) -> None:
                graph_scan.overwrite(tree.leaves(held), tree.leaves(step(which, held)))

            tape.repeat(piece, 1) if tape and tape.recording else piece()
            state = held
        return tree.map(settled, state)

    exact = work(None)
    count[0], exactly[0] = 0, False
    with watch:
        tape = GraphSequence()
        made = tape.record(lambda: work(tape))
        sums = [leaf.sum() for leaf in tree.leaves(made)]  # on the usual stream
    assert all(map(torch.isfinite, sums)) and watch.beside and not second_stream._recording
    for one, other in zip(tree.leaves(made), tree.leaves(exact), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-7, atol=1e-9)


def added_up(terms: Terms | None) -> Tensor:
    assert terms is not None
    return terms.first.sum(0) if terms.many > 1 else terms.first


READERS: dict[str, Callable[[Tensor], Any]] = {
    "sum": lambda t: t + 1.0,
    "number": lambda t: 2.0 * t,
    "norm": lambda t: t.norm(),
    "item": lambda t: torch.tensor(t.sum().item()),
    "view": lambda t: t.view(-1).square(),
    "turned": lambda t: t.mT.clone(),
    "row": lambda t: t[0].exp(),
    "column": lambda t: t[:, 1].exp(),
    "pieces": lambda t: torch.stack(t.unbind(2)),
    "repeated": lambda t: t.expand(2, *t.shape).sum(0),
    "detached": lambda t: t.detach().clone(),
    "data": lambda t: t.data.clone(),
    "another type": lambda t: t.to(torch.float32),
    "copy": lambda t: torch.empty_like(t).copy_(t),
    "joined": lambda t: torch.cat([t, t]),
    "all leaves": lambda t: torch._foreach_add([t], [t])[0],
    "out": lambda t: torch.add(t, t, out=torch.empty_like(t.detach().clone())),
    "choice": lambda t: torch.where(t > 0, t, 0.0),
    "mapped": lambda t: vmap(lambda v: v.cumsum(0))(t),
    "gradient": lambda t: grad(lambda v: v.pow(3).sum())(t),
    "saved": lambda t: pickle.loads(pickle.dumps(t)),
    "deep copy": copy.deepcopy,
    "shown": lambda t: torch.tensor(len(repr(t))),
    "read later": lambda t: [t, t.view(4, 6), t.contiguous()],
    "changed": lambda t: [t.mul_(2.0), t],
    "column changed": lambda t: [t[:, 1].mul_(2.0), t],
    "view changed": lambda t: [t.view(-1).mul_(2.0), t],
    "overwritten": lambda t: [t.copy_(torch.ones(2, 3, 4)), t],
    "changed by": lambda t: torch.ones(2, 3, 4).double().mul_(t),
    "changed later": lambda t: [2.0 * t, t.neg_()],
    "step": lambda t: at_once.step(0.5, [t, t], [torch.ones_like(t).add(0.0), t])[0],
    "step from it": lambda t: at_once.step(0.5, [torch.ones(2, 3, 4).double()] * 2, [t, t])[0],
    "terms": lambda t: added_up(terms_of(t)),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("how", ["plain", "turned", "parts", "added"])
def test_whoever_reads_waits(reader: str, how: str, watch: Watch) -> None:
    exact = torch.arange(-12.0, 12.0).double().reshape(2, 3, 4)
    laid = exact.mT.contiguous()

    def work(x: Tensor) -> Tensor:
        if how in ("plain", "turned"):
            return x.mT.contiguous() + 0.0 if how == "plain" else (x + 0.0).mT
        return DeferredTensor(Parts(torch.stack([0.5 * x.mT, 0.5 * x.mT]), how == "added"))

    def recorded() -> Any:
        others = [second_stream.beside(torch.clone, torch.ones(3)) for _ in range(2)]
        made = READERS[reader](second_stream.beside(work, laid))
        return [one + 0.0 for one in tensors([computed([made]), computed(others)])]

    with watch:
        found = GraphSequence()._whole(recorded)[:-2]
    wanted = [one + 0.0 for one in tensors([READERS[reader](exact)])]
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)
