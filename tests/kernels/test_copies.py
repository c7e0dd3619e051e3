"""A step copies no images between our kernels: counted on what torch is asked for."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.utils._python_dispatch import TorchDispatchMode

from idiolect.core.network import replace_layers
from idiolect.kernels import (
    compiled,
    convolution,
    convolution_cuda,
    convolution_halo,
    convolution_last,
    convolution_pointwise,
    group_norm,
    halves,
    weight_order,
)
from idiolect.models import layers
from idiolect.models.resnet import ResidualBlock
from idiolect.models.shufflenet import ShuffleUnit

OURS = ("halo", "matrix", "norm", "depthwise", "pointwise")
CLIENTS, IMAGES, SIDE = 3, 4, 8
_COPIES = ("clone", "copy_", "_to_copy", "cat", "stack")


class Copies(TorchDispatchMode):
    """Notes the sizes of all tensors that are copies of others, or joined of some."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func.__name__.partition(".")[0] in _COPIES:
            self.sizes.append(tuple(made.shape))
        return made


@pytest.fixture
def ours(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Let layers on a CPU take the way they take on a GPU of Hopper; nothing is launched."""

    def fastest(task: str, sizes: Any, forms: Callable[[], Mapping[str, Any]], *given: Any) -> Any:
        known = forms()
        name = next(own for kind in OURS for own in known if own.startswith(kind))
        return known[name](*given, sizes)

    def use(half: bool) -> None:
        for module in (convolution, group_norm, layers):
            monkeypatch.setattr(module, "halved_on_cuda", lambda x: half)
        for module in (convolution, group_norm, layers, halves):
            monkeypatch.setattr(module, "float32_on_cuda", lambda x: not half)

    for module in (
        convolution_cuda, convolution_halo, convolution_last, convolution_pointwise, group_norm,
        halves, weight_order,
    ):  # fmt: skip
        monkeypatch.setattr(module, "launch", lambda *given: None)
    for module in (convolution, group_norm):
        monkeypatch.setattr(module, "fastest", fastest)
    monkeypatch.setattr(compiled, "has_kernels", lambda tensor: True)
    monkeypatch.setattr(convolution_halo, "is_hopper", lambda: True)
    monkeypatch.setattr(convolution_cuda, "_parts", lambda steps, *given: (1, steps))
    return use


@pytest.mark.parametrize(
    ("unit", "half"),
    [(ShuffleUnit(48, 48, "group", 8), False), (ResidualBlock(64, 64, 1, "group", 8), True)],
)
def test_a_step_copies_no_images(unit: nn.Module, half: bool, ours: Callable[[bool], None]) -> None:
    """But where the network begins and ends."""
    ours(half)
    enter = nn.Conv2d(48, 64, 3, padding=1) if half else nn.Identity()
    model = replace_layers(nn.Sequential(enter, unit, unit, unit))
    params = {
        name: value.detach().expand(CLIENTS, *value.shape).contiguous()
        for name, value in model.named_parameters()
    }
    x = torch.randn(CLIENTS, IMAGES, 48, SIDE, SIDE)

    def loss(own: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(model, own, (x,)).float().pow(2).sum()

    with Copies() as seen:
        vmap(grad(loss))(params, x)
    images = [size for size in seen.sizes if torch.Size(size).numel() >= x.numel() // 2]
    # In bfloat16 the input is rounded and laid out, here and for its weights' gradient, and the
    # output made single again, with its gradient.
    assert len(images) == (5 if half else 0), images
