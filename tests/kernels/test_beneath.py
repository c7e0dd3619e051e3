"""Layers, losses and gradients of a stack beneath vmap are those that torch.func finds."""

import pytest
import torch
from torch.func import grad, vmap
from torch.nn import functional as F

from idiolect.core import losses
from idiolect.errors import MethodError
from idiolect.kernels import beneath, linear
from idiolect.kernels.beneath import stacked_gradient

CLIENTS, CLASSES = 3, 5


def stacks(examples: int, inside: int = 7, classes: int = CLASSES) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    real = {"generator": draw, "dtype": torch.float64}
    x = torch.randn(CLIENTS, examples, inside, **real)
    w, b = torch.randn(CLIENTS, classes, inside, **real), torch.randn(CLIENTS, classes, **real)
    y = torch.randint(classes, (CLIENTS, examples), generator=draw)
    weight = torch.rand(CLIENTS, examples, **real)
    weight[:, -1] = 0
    weight[2] = 0  # padding alone
    return [w, b, x, y, weight]


def plain(params: dict[str, torch.Tensor], x, y, weight) -> torch.Tensor:
    each = F.cross_entropy(F.linear(x, params["w"], params["b"]), y, reduction="none")
    return (each * weight).sum() / weight.sum().clamp(min=1e-12)


def ours(params: dict[str, torch.Tensor], x, y, weight) -> torch.Tensor:
    return losses.cross_entropy(linear.stacked_linear(x, params["w"], params["b"]), y, weight)


def gradient(params, *batch):
    clients = beneath.clients_of_stack()
    assert clients == CLIENTS
    found, others = stacked_gradient(
        lambda at: (ours(at, *batch), {"seen": at["w"].sum()}), params, clients
    )
    return found | others


@pytest.mark.parametrize("examples", [2, 9])  # fewer and more than classes: two orders of products
def test_gradients_of_a_stack_are_those_of_torch(examples: int, monkeypatch) -> None:
    used: list[type] = []
    call = beneath._call
    monkeypatch.setattr(beneath, "_call", lambda f, *given: used.append(f) or call(f, *given))
    w, b, *batch = stacks(examples)
    found = vmap(gradient)({"w": w, "b": b}, *batch)
    right = vmap(grad(plain))({"w": w, "b": b}, *batch)
    for name, own in right.items():
        torch.testing.assert_close(found[name], own)
        assert not found[name].requires_grad
    assert found["w"].stride() == w.stride()
    torch.testing.assert_close(found["seen"], w.sum((1, 2)))
    assert used == [beneath._HostLinear, beneath._HostCrossEntropy]


def test_parameters_that_all_share_have_a_gradient_for_each_client() -> None:
    """As in a round's first step; the others are shared, or not used at all."""
    w, b, *batch = stacks(4)
    shared = {"w": w[0], "b": b[0], "unused": torch.ones(2, dtype=torch.float64)}
    found = vmap(lambda *own: gradient(shared, *own))(*batch)
    right = vmap(grad(plain), in_dims=(None, 0, 0, 0))(shared, *batch)
    for name, own in right.items():
        torch.testing.assert_close(found[name], own)


def test_a_value_without_parameters_has_gradients_of_zeros() -> None:
    found = vmap(
        lambda w: stacked_gradient(lambda at: (torch.ones(()), {}), {"w": w}, CLIENTS)[0]["w"]
    )(torch.ones(CLIENTS, 2))
    assert found.tolist() == [[0, 0]] * CLIENTS


def test_a_hidden_layer_passes_its_gradient_on() -> None:
    w, b, x, y, weight = stacks(4)
    before = torch.randn(CLIENTS, 7, 7, dtype=torch.float64)

    def deep(function, loss):
        def objective(params, x, y, weight):
            inside = function(x, params["v"], params["c"]).relu()
            return loss(function(inside, params["w"], params["b"]), y, weight)

        return objective

    params = {"v": before, "c": torch.zeros(CLIENTS, 7, dtype=torch.float64), "w": w, "b": b}
    torchs = deep(F.linear, lambda out, y, weight: losses.single_cross_entropy(out, y, weight))
    own = deep(linear.stacked_linear, losses.cross_entropy)
    found = vmap(
        lambda at, *batch: stacked_gradient(lambda p: (own(p, *batch), {}), at, CLIENTS)[0]
    )(params, x, y, weight)
    right = vmap(grad(torchs))(params, x, y, weight)
    for name in params:
        torch.testing.assert_close(found[name], right[name])


def test_within_another_transform_nothing_is_done_beneath() -> None:
    """There the result may be differentiated again."""
    w, b, *batch = stacks(4)
    seen = []

    def objective(params, *own):
        seen.append(beneath.clients_of_stack())
        return ours(params, *own)

    found = vmap(grad(objective))({"w": w, "b": b}, *batch)
    torch.testing.assert_close(found, vmap(grad(plain))({"w": w, "b": b}, *batch))
    assert seen == [None] and beneath.clients_of_stack() is None


def test_vmap_goes_on_where_something_fails_beneath() -> None:
    def fails(x):
        with pytest.raises(ValueError), beneath.Beneath():
            raise ValueError
        return x + beneath.clients_of_stack()

    assert vmap(fails)(torch.zeros(2)).tolist() == [2, 2]


def test_under_autocast_a_layer_is_torchs() -> None:
    x, w, b = torch.ones(2, 4, 7), torch.full((2, CLASSES, 7), 1.001), torch.ones(2, CLASSES)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(vmap(linear.stacked_linear)(x, w, b), vmap(F.linear)(x, w, b))


@pytest.mark.parametrize("examples", [2, 9])  # fewer and more than classes
def test_a_layers_outputs_may_be_changed_in_place(examples: int) -> None:
    """As by nn.ReLU(inplace=True)."""

    def objective(function):
        def loss(params, x, y, weight):
            out = function(x, params["w"], params["b"])
            out[:, 0] *= 2
            return losses.weighted_mean(out.relu_().logsumexp(-1), weight)

        return loss

    w, b, *batch = stacks(examples)
    params, own = {"w": w, "b": b}, objective(linear.stacked_linear)
    found = vmap(
        lambda at, *batch: stacked_gradient(lambda p: (own(p, *batch), {}), at, CLIENTS)[0]
    )(params, *batch)
    right = vmap(grad(objective(F.linear)))(params, *batch)
    for name in params:
        torch.testing.assert_close(found[name], right[name], rtol=1e-12, atol=1e-12)


def test_a_bias_for_all_outputs_is_not_taken_for_one_of_clients() -> None:
    w, _, x, *_ = stacks(CLIENTS)
    b = torch.arange(CLIENTS, dtype=torch.float64)
    torch.testing.assert_close(vmap(linear.stacked_linear)(x, w, b), vmap(F.linear)(x, w, b))


def test_a_loss_of_several_numbers_is_refused() -> None:
    """As torch refuses it; their sum would be another loss."""
    with pytest.raises(MethodError, match=r"shape \[2\]"):
        vmap(lambda w: stacked_gradient(lambda at: (at["w"], {}), {"w": w}, CLIENTS)[0]["w"])(
            torch.ones(CLIENTS, 2)
        )


def twice(params, x, y, weight, layer=F.linear):
    """A layer that is used twice, and weights that are also used outside of a layer."""
    inside = layer(layer(x, params["v"], params["c"]).relu(), params["v"], params["c"])
    beside = params["w"].square().sum() + params["v"].sin().sum()
    out = layer(inside, params["w"], params["b"])
    return losses.weighted_mean(out.logsumexp(-1), weight) + beside


@pytest.mark.parametrize("spare", [False, True])
@pytest.mark.parametrize("examples", [2, 9])
def test_a_descent_is_a_step_along_the_gradient(examples: int, spare: bool) -> None:
    """Derived from torch's own gradient: params - rate · gradient, whatever is multiplied when."""
    w, b, *batch = stacks(examples)
    square = torch.linspace(-1, 1, CLIENTS * 49, dtype=torch.float64).reshape(CLIENTS, 7, 7)
    given = {"v": square, "c": torch.zeros_like(square[:, 0]), "w": w, "b": b}
    given["unused"] = torch.ones(CLIENTS, 2, dtype=torch.float64)
    before = {name: leaf.clone() for name, leaf in given.items()}
    slopes = vmap(grad(twice))(given, *batch)

    def descent(params, *own):
        return beneath.stacked_descent(
            lambda at: twice(at, *own, layer=linear.stacked_linear), params, CLIENTS, 0.3, spare
        )

    found = vmap(descent)(given, *batch)
    for name, leaf in before.items():
        torch.testing.assert_close(found[name], leaf - 0.3 * slopes[name])
        assert found[name].stride() == leaf.stride() and not found[name].requires_grad
        assert (found[name].data_ptr() == given[name].data_ptr()) == spare
        assert spare or torch.equal(given[name], leaf)


def test_a_descent_does_not_write_to_what_all_share() -> None:
    w, b, *batch = stacks(4)
    shared = {"w": w[0], "b": b[0]}
    before = w[0].clone()
    found = vmap(
        lambda *own: beneath.stacked_descent(lambda at: ours(at, *own), shared, CLIENTS, 0.3, False)
    )(*batch)
    right = vmap(grad(plain), in_dims=(None, 0, 0, 0))(shared, *batch)
    assert torch.equal(w[0], before)
    for name, slope in right.items():
        torch.testing.assert_close(found[name], shared[name] - 0.3 * slope)


def test_the_gradient_by_a_layers_weights_is_never_made(monkeypatch) -> None:
    """It is as large as the weights of all clients, and a descent only adds it to them."""
    w, b, *batch = stacks(4)
    made: list[tuple[int, ...]] = []
    product = torch.bmm
    monkeypatch.setattr(
        torch, "bmm", lambda *given: made.append(product(*given).shape) or product(*given)
    )
    vmap(
        lambda at, *own: beneath.stacked_descent(lambda p: ours(p, *own), at, CLIENTS, 0.3, False)
    )({"w": w, "b": b}, *batch)
    assert w.shape not in made
