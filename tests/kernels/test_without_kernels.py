"""Kernels are optional: where none can be compiled or launched, torch does the same work."""

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import worlds
from idiolect.bench.workloads import federation
from idiolect.engine.architecture import Architecture
from idiolect.engine.backend import Backend
from idiolect.engine.rounds import SeededRun, Simulation
from idiolect.kernels import (
    compiled,
    conv_relu_pool,
    convolution,
    cross_entropy,
    fused_tree_ops,
    group_norm,
    linear,
)
from idiolect.methods import METHODS


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(),
        nn.Conv2d(4, 4, 3, padding=1, groups=4), nn.Conv2d(4, 6, 3), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(6, 6, 2), nn.ReLU(), nn.Flatten(),
        nn.Linear(24, 8), nn.ReLU(), nn.Linear(8, 10),
    )  # fmt: skip


def trained(method: str) -> Any:
    fed = federation([9, 6, 4], (1, 8, 8))
    sim = Simulation(
        METHODS[method](batch=4, lr=0.05),
        [SeededRun(0, fed.train_data)],
        {"all": Architecture(network)},
        backend=Backend("vectorised", "cpu", width=3),
    )
    for _ in range(2):
        sim.advance()
    return sim.tree


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Take this CPU for a GPU without driver or compiler; return the operations that failed."""

    def no_driver() -> None:
        raise OSError("libcuda.so.1: cannot open shared object file")

    def fastest(task: str, sizes: Any, forms: Callable[[], dict[str, Any]], *inputs: Tensor) -> Any:
        plain, *own = forms().values()
        return compiled.attempt(
            f"{type(sizes).__name__} {task}",
            lambda: own[0](*inputs, sizes),
            lambda: plain(*inputs, sizes),
        )

    failed: set[str] = set()
    monkeypatch.setattr(compiled, "_failed", failed)
    monkeypatch.setattr(compiled, "make_current", no_driver)
    monkeypatch.setattr(Tensor, "is_cuda", True)
    monkeypatch.setattr(compiled, "has_kernels", lambda tensor: True)
    chip = SimpleNamespace(multi_processor_count=3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: chip)
    for layer in (linear, convolution, group_norm):
        monkeypatch.setattr(layer, "fastest", fastest)
    for layer in (linear, convolution, group_norm, conv_relu_pool):
        monkeypatch.setattr(layer, "float32_on_cuda", lambda x: True)
    monkeypatch.setattr(fused_tree_ops, "suit", lambda xs, ys: len(xs) > 1)
    monkeypatch.setattr(cross_entropy, "suits", lambda *given: True)
    return failed


@pytest.mark.filterwarnings("ignore:no kernel for .* here, so slower. libcuda.so.1")
@pytest.mark.parametrize("method", ["fedavg", "pfedme"])
def test_everything_works_without(method: str, request: pytest.FixtureRequest) -> None:
    expected = trained(method)
    failed = request.getfixturevalue("broken")
    found = trained(method)
    assert not worlds.differing(found, expected, 1e-5)
    tasks = {re.sub(r"^\w+Sizes |^ConvShape ", "", what) for what in failed}
    assert tasks >= {
        "convolve", "conv_relu", "conv_relu_pool", "input_gradient", "weight_gradient", "masks",
        "unpooling", "forward", "relu", "normalise", "gradient", "gradients", "steps",
    }  # fmt: skip
