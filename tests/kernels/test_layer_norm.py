"""Stacked layer normalisation against torch's own, in double precision."""

import emulate
import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap

from idiolect.core.network import replace_layers
from idiolect.kernels import layer_norm
from idiolect.kernels.layer_norm import StackedLayerNorm

CLIENTS = 3


@pytest.fixture(params=["plain", "kernels"])
def way(request, monkeypatch):
    """Take either form: torch's operations, or the CUDA source, thread by thread on a CPU."""
    if request.param == "plain":
        return
    if emulate.COMPILER is None:
        pytest.skip("needs g++ to run CUDA sources")
    emulate.use(monkeypatch)

    def last(task, sizes, forms, *inputs):
        return list(forms().values())[-1](*inputs, sizes)

    monkeypatch.setattr(layer_norm, "fastest", last)
    monkeypatch.setattr(layer_norm, "_THREADS", 32)


def pair(shape, **options):
    layers = [nn.LayerNorm(shape, eps=1e-3, **options) for _ in range(2)]
    return replace_layers(nn.ModuleList(layers[:1]))[0], layers[1]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("shape", "rows"), [(6, (4, 5)), ((2, 3), (4,)), (6, ())])
@pytest.mark.parametrize("shared", ["nothing", "rows", "factors"])
def test_gradients_and_second_derivatives(shape, rows, bias, shared, float64):
    """Factors and rows may each be everyone's own or the same for all."""
    check(shape, rows, bias, shared)


@pytest.mark.parametrize(("shape", "rows"), [(20, (19,)), (140, (3,)), ((2, 4), (33,))])
def test_kernels_of_rows_that_fill_no_warp(shape, rows, way, float64):
    """Rows of 20 numbers take 4 threads, the last of their fours one; 140 take a warp twice."""
    check(shape, rows, True, "nothing")


def check(shape, rows, bias, shared):
    torch.manual_seed(0)
    ours, theirs = pair(shape, bias=bias)
    assert type(ours) is StackedLayerNorm
    sizes = (shape,) if isinstance(shape, int) else shape
    x = torch.randn(CLIENTS, *rows, *sizes)
    params = {name: torch.randn(CLIENTS, *sizes) for name, _ in theirs.named_parameters()}
    dims = (0, 0)
    if shared == "rows":
        x, dims = x[0], (0, None)
    if shared == "factors":
        params, dims = {name: leaf[0] for name, leaf in params.items()}, (None, 0)

    def loss(layer):
        return lambda params, x: functional_call(layer, params, (x,)).tanh().pow(2).sum()

    def curved(layer):
        def bend(params, x):
            by_params, by_x = grad(loss(layer), (0, 1))(params, x)
            return by_x.pow(3).sum() + sum(leaf.pow(3).sum() for leaf in by_params.values())

        return grad(bend, (0, 1))

    for made in (loss, lambda layer: grad(loss(layer), (0, 1)), curved):
        left, right = (vmap(made(layer), dims)(params, x) for layer in (ours, theirs))
        torch.testing.assert_close(left, right, rtol=1e-8, atol=1e-10)


def test_what_is_left_to_torch():
    plain = replace_layers(nn.ModuleList([nn.LayerNorm(4, elementwise_affine=False)]))[0]
    assert type(plain) is nn.LayerNorm
    ours, _ = pair(4)
    with pytest.raises(RuntimeError, match="normalized_shape"):
        ours(torch.zeros(2, 5))
    with torch.autocast("cpu", torch.bfloat16):
        assert ours(torch.ones(2, 4, dtype=torch.bfloat16)).dtype == torch.float32
