"""Rounds of clients of unequal size in bfloat16, by way of weights as a step leaves them."""

import contextlib
from collections.abc import Iterator
from typing import Any

import emulate
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from idiolect.bench.workloads import federation
from idiolect.core import tree
from idiolect.core.client import Local
from idiolect.engine import block_runner
from idiolect.engine.architecture import Architecture
from idiolect.engine.backend import Backend
from idiolect.engine.rounds import SeededRun, Simulation
from idiolect.kernels import (
    convolution,
    convolution_library,
    row_average,
    second_stream,
    weight_order,
)
from idiolect.kernels.convolution import PLAIN
from idiolect.kernels.convolution_cuda import ConvShape
from idiolect.kernels.deferred import DeferredTensor, computed
from idiolect.methods import FedAvg


class Residual(nn.Module):
    """A residual network of one block with group norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 32, 3, padding=1)
        self.one, self.other = (nn.Conv2d(32, 32, 3, padding=1, bias=False) for _ in range(2))
        self.norms = nn.ModuleList(nn.GroupNorm(4, 32) for _ in range(3))
        self.last = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norms[0](self.first(x).float()))
        y = F.relu(self.norms[1](self.one(x).float()))
        x = F.relu(x + self.norms[2](self.other(y).float()))
        return self.last(x.mean((2, 3)))


class Stream:
    """Notes who waits for it."""

    def __init__(self, told: list[str]) -> None:
        self.told = told

    def wait_stream(self, other: Any) -> None:
        self.told.append("stream")

    def wait_event(self, event: Any) -> None:
        self.told.append("event")

    def record_event(self) -> None:
        pass


@contextlib.contextmanager
def second(patch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Do as if all were being captured, and a second stream were there."""
    told: list[str] = []
    first = Stream(told)
    for where, name, stand_in in (
        (torch.cuda, "current_stream", lambda device=None: first),
        (torch.cuda, "stream", contextlib.nullcontext),
        (second_stream, "_seconds", {first: Stream(told)}),
        (second_stream, "_on_gpu", lambda x: True),
        (convolution, "_PRODUCTS", 1),
        (convolution, "_DEEPER", 32),
    ):
        patch.setattr(where, name, stand_in)
    second_stream.begin(first)
    try:
        yield told
    finally:
        second_stream.end(first)


@pytest.mark.skipif(emulate.COMPILER is None, reason="needs g++ to run CUDA sources")
@pytest.mark.parametrize(
    ("half", "near", "beside"), [(False, 2e-5, False), (False, 2e-5, True), (True, 0.2, True)]
)
def test_rounds_by_stepped_weights_are_those_of_the_sequential_backend(
    half: bool, near: float, beside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every use the copy in bfloat16 is that of the weights, also where steps are padding.

    And where weights' gradients and steps are beside the rest, so that weights are deferred.
    """
    stepped: list[bool] = []
    copies: list[bool] = []
    late: list[bool] = []
    chosen: list[int] = []

    def form(task: str, s: ConvShape, *inputs: Tensor) -> Any:
        if s.channels < 32:
            return PLAIN[task](*inputs, s)
        if task != "weight_gradient":
            images, w = inputs
            late.append(isinstance(w, DeferredTensor))
            w = computed(w, laid=True)  # as the function does whose place this takes
            exact = w.to(images.dtype)
            laid = w.permute(0, 1, 3, 4, 2)
            stepped.append(laid.is_contiguous())
            copies.append(stepped[-1] and weight_order._copy_behind(laid) is not None)
            turned = weight_order.turned(w, images)
            assert torch.equal(turned, exact.permute(0, 2, 3, 4, 1))
            by_taps = weight_order.by_taps(w, images, s.channels)
            assert torch.equal(by_taps, exact.permute(0, 1, 3, 4, 2))
        inputs = computed(inputs, laid=True)
        made = convolution_library.forms(task, s, rounded=True)["rows"](*inputs, s)
        return made if task == "weight_gradient" else made.contiguous()  # for torch's group norm

    def choose(keep: Tensor, xs: Any, ys: Any, own: Any = tree.at_once.choose) -> Any:
        chosen.append(len(xs))
        return own(keep, xs, ys)

    fed, ends = federation([9, 14, 4], (3, 4, 4)), []
    for kind in ("sequential", "vectorised"):
        if kind == "vectorised":
            emulate.use(monkeypatch)
            for where, name, stand_in in (
                (convolution, "halved_on_cuda", lambda x: half),
                (convolution, "float32_on_cuda", lambda x: True),
                (block_runner, "PADDING", 1.0),  # one block of all
                (convolution, "fastest_form", form),
                (row_average, "_has_kernels", lambda leaf: True),
                (tree, "_in_one_launch", lambda xs, ys: tree.transformed() and len(xs) > 1),
                (tree.at_once, "choose", choose),
                (Local, "_clients_beneath", lambda local: None),
            ):
                monkeypatch.setattr(where, name, stand_in)
        torch.manual_seed(0)
        run = [SeededRun(0, fed.train_data)]
        backend = Backend(kind, "cpu", width=3 if kind == "vectorised" else None)
        sim = Simulation(
            FedAvg(batch=5, lr=0.1), run, {"all": Architecture(Residual)}, backend=backend
        )
        before = tree.map(torch.clone, sim.tree["server"])
        with second(monkeypatch) if beside else contextlib.nullcontext([]) as forks:
            for _ in range(2):
                sim.advance()
        assert bool(forks) == (beside and kind == "vectorised")
        ends.append(tree.map(torch.sub, sim.tree["server"], before))
    assert any(stepped) and any(copies) == half and not all(copies)
    assert chosen and any(late) == beside
    exact, made = (tree.named(one) for one in ends)
    for name, leaf in exact.items():
        assert float((made[name] - leaf).norm()) <= near * float(leaf.norm()), name
