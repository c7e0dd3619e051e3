"""Batch normalisation: torch's where nothing is padded, and right where something is."""

import copy

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap

import worlds
from idiolect.core import optim, tree
from idiolect.core.batchnorm import BatchNorm, learned, masked
from idiolect.core.client import Local, Network, Pool
from idiolect.engine.batch_plan import BatchPlanner, ClientRows
from idiolect.errors import MethodError, ModelError
from idiolect.models import check, group_norm_instead, masked_batch_norm_instead

SHAPES = [(6, 3), (6, 3, 5), (6, 3, 4, 5)]


def images(stacked=False, sizes=(12,)):
    """Clients of so many little images; return the images, and a maker of each client's Local."""
    torch.manual_seed(4)
    pool = Pool(2 + 3 * torch.randn(sum(sizes), 2, 5, 5), torch.randint(0, 3, (sum(sizes),)))
    rows = torch.arange(sum(sizes)).split(sizes)
    book = BatchPlanner({"train": pool}, torch.device("cpu"))
    book.turn([ClientRows(0, n, {"train": own.numpy()}) for n, own in enumerate(rows)], 0)
    networks = {"main": Network(convolutional())}
    zero = torch.zeros(())
    return pool, lambda slot: Local(networks, book, slot, zero, zero, stacked)


def convolutional(norm=BatchNorm):
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), norm(4), nn.ReLU(), nn.Conv2d(4, 3, 3), norm(3), nn.Flatten()
    )


@pytest.mark.parametrize("shape", SHAPES)
def test_alone_it_is_torchs_layer(shape, float64):
    """Outputs, gradients and running statistics, over steps, then in evaluation mode."""
    kind = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d}[len(shape)]
    theirs, ours = kind(3, momentum=0.3), BatchNorm(3, momentum=0.3)
    for _ in range(3):
        x = (5 + 2 * torch.randn(shape)).requires_grad_()
        left, right = theirs(x), ours(x)
        assert torch.allclose(left, right, 1e-12, 1e-12)
        slopes = [torch.autograd.grad(y.pow(3).sum(), x)[0] for y in (left, right)]
        assert torch.allclose(*slopes, 1e-9, 1e-9)
    assert torch.allclose(theirs.running_mean, ours.running_mean, 1e-12)
    assert torch.allclose(theirs.running_var, ours.running_var, 1e-12)
    assert not torch.allclose(ours.running_mean, torch.zeros(3))
    assert torch.allclose(theirs.eval()(x), ours.eval()(x), 1e-12, 1e-12)


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("adam", [False, True])
def test_one_client_trains_as_a_loop_of_plain_torch_does(stacked, adam, float64):
    """Weights and running statistics after three epochs of full batches of four, in that order.

    With momentum and weight decay, of which the statistics must get neither.
    """
    pool, local = images(stacked=stacked)
    shown = []
    local(torch.tensor(0)).scan(lambda c, b: shown.append(b.row) or c, (), batch=4, epochs=3)
    rule = optim.adam(0.01, weight_decay=0.3) if adam else optim.sgd(0.1, 0.9, 0.3)

    start = Network(convolutional()).params

    def client(slot):
        own = local(slot)
        return own.fit(own.loss, start, rule, batch=4, epochs=3)

    ours = vmap(client)(torch.zeros(1, dtype=torch.int64)) if stacked else client(torch.tensor(0))
    theirs = convolutional(nn.BatchNorm2d)
    if adam:
        descent = torch.optim.Adam(theirs.parameters(), 0.01, weight_decay=0.3)
    else:
        descent = torch.optim.SGD(theirs.parameters(), 0.1, 0.9, weight_decay=0.3)
    for rows in shown:
        descent.zero_grad()
        nn.functional.cross_entropy(theirs(pool.x[rows]), pool.y[rows]).backward()
        descent.step()
    expected = {n: v for n, v in theirs.state_dict().items() if not n.endswith("tracked")}
    assert len(shown) == 9 and ours.keys() == expected.keys()
    for name, value in expected.items():
        got = ours[name][0] if stacked else ours[name]
        assert torch.allclose(got, value, 1e-9, 1e-9), name


@pytest.mark.parametrize("shape", SHAPES)
def test_padding_enters_neither_output_nor_statistics(shape, float64):
    layer = BatchNorm(3)
    x = torch.randn(shape)
    weight = torch.tensor([1.0, 1, 0, 1, 0, 1])
    rubbish = torch.where(weight.reshape(-1, *[1] * (len(shape) - 1)) > 0, x, 1e6)
    with masked(weight) as padded:
        out = layer(rubbish)
    with masked(torch.ones(4)) as exact:
        only = layer(x[weight > 0])
    assert torch.allclose(out[weight > 0], only, 1e-9, 1e-9)
    for left, right in zip(padded.seen[0][1:], exact.seen[0][1:], strict=True):
        assert torch.allclose(left, right)
    assert torch.equal(layer.running_mean, torch.zeros(3))  # told, not written


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("real", [0, 1])
def test_a_batch_too_small_for_a_variance_moves_nothing(stacked, real, float64):
    """One value to a channel: the output is the shift, the statistics stay, all is finite."""
    net = worlds.Batched()
    network = Network(net)
    weight = torch.zeros(3)
    weight[:real] = 1
    x, y = torch.randn(3, worlds.FEATURES), torch.tensor([0, 1, 2])
    pool = Pool(x, y)
    member = ClientRows(0, 0, {"train": torch.arange(max(real, 1)).numpy()})
    book = BatchPlanner({"train": pool}, torch.device("cpu"))
    book.turn([member], 0)
    zero = torch.zeros(())
    own = Local({"main": network}, book, torch.tensor(0), zero, zero, stacked)

    def step(params, batch):
        batch = batch._replace(weight=batch.weight * real)
        return tree.axpy(-0.1, own.gradient(own.loss, params, batch), params)

    after = own.scan(step, network.params, batch=3)
    assert all(bool(torch.isfinite(leaf).all()) for leaf in after.values())
    for name in network.statistics:
        assert torch.equal(after[name], network.params[name]), name
    assert torch.equal(after["fc2.bias"], network.params["fc2.bias"]) == (real == 0)


def test_sequential_is_vectorised_on_ragged_clients(float64):
    """Twelve, seven and two examples in batches of four: a short last batch, and padding alone."""
    rule = optim.sgd(0.1, 0.9)

    def client(stacked):
        _, local = images(stacked=stacked, sizes=(12, 7, 2))
        start = Network(convolutional()).params

        def run(slot):
            own = local(slot)
            return own.fit(own.loss, start, rule, batch=4, epochs=2)

        return run

    mapped = vmap(client(True))(torch.arange(3))
    for n in range(3):
        alone = client(False)(torch.tensor(n))
        for name, value in alone.items():
            assert torch.allclose(mapped[name][n], value, 1e-10, 1e-10), (n, name)


def test_a_second_derivative_is_torchs(float64):
    """Hessian-vector products through the layer, against the module of torch itself."""
    theirs = convolutional(nn.BatchNorm2d)
    ours = masked_batch_norm_instead(theirs)
    x = torch.randn(6, 2, 5, 5)
    found = []
    for net in (theirs, ours):
        params = {name: value.detach() for name, value in net.named_parameters()}

        def loss(params, net=net):
            bare = {n: b.clone() for n, b in net.named_buffers()}
            return functional_call(copy.deepcopy(net), (params, bare), (x,)).logsumexp(-1).sum()

        bent = grad(lambda p, loss=loss: tree.norm(grad(loss)(p)))(params)
        found.append(bent)
    assert not worlds.differing(*found, 1e-9)
    assert float(tree.norm(found[0])) > 1


# Drifts: how gradients and steps treat the statistics.


def test_a_gradient_tells_slopes_and_drifts_and_only_drifts_ignore_factors(float64):
    _, local = images()
    own, network = local(torch.tensor(0)), Network(convolutional())
    seen = {}

    def step(params, batch):
        seen["x"] = batch.x
        # Neither the loss's factor, nor a pull or decay of everything, reaches the statistics.
        far = tree.map(lambda leaf: leaf + 100, params)
        loss = lambda p, b: 1e-9 * own.loss(p, b) + tree.sqdist(p, far) + tree.dot(p, p)  # noqa: E731
        slope = own.gradient(loss, params, batch)
        seen["slope"] = slope
        return tree.axpy(-1e-9, slope, params)

    after = own.scan(step, network.params, batch=12)
    first = nn.functional.conv2d(
        seen["x"], network.params["0.weight"], network.params["0.bias"]
    ).transpose(0, 1).flatten(1)  # fmt: skip
    assert torch.allclose(after["1.running_mean"], 0.1 * first.mean(1), 1e-12)
    assert torch.allclose(after["1.running_var"], 0.9 + 0.1 * first.var(1), 1e-12)
    drifts = {n for n, leaf in seen["slope"].items() if isinstance(leaf, tree.Drift)}
    assert drifts == network.statistics == {
        f"{n}.{s}" for n in (1, 4) for s in ("running_mean", "running_var")
    }  # fmt: skip
    assert float(tree.norm(seen["slope"])) == pytest.approx(
        float(tree.norm({n: v for n, v in seen["slope"].items() if n not in drifts}))
    )


def test_arithmetic_on_drifts(float64):
    """Applied to numbers they move them; among themselves they add; slopes pass them by."""
    number, drift = torch.tensor(5.0), tree.Drift(torch.tensor(2.0))
    for moved in (
        tree.axpy(-0.1, drift, number),
        tree.axpy(number, drift, number),
        tree.add(number, drift),
        tree.sub(number, tree.scale(9.0, drift)),
    ):
        assert float(moved) == 7
    assert tree.axpy(0.5, number, drift) == drift  # weight decay added to a gradient
    assert float(tree.sub(drift, drift).by) == 0
    pair = {"a": drift, "b": torch.tensor(3.0)}
    assert float(tree.norm(pair)) == 3 and float(tree.dot(pair, {"a": number, "b": number})) == 15
    assert tree.drifting(pair) and not tree.drifting({"b": number})


def test_only_the_models_own_passes_count(float64):
    """A teacher that runs in training mode inside the loss moves nothing of the student's."""
    _, local = images()
    ends = []
    for teaches in (False, True):
        own, params = local(torch.tensor(0)), Network(convolutional()).params
        teacher = tree.map(lambda leaf: leaf + 1, params)

        def loss(p, batch, own=own, teacher=teacher, teaches=teaches):
            return own.loss(p, batch) + (0 * own.loss(teacher, batch) if teaches else 0)

        ends.append(own.fit(loss, params, optim.sgd(0.1), batch=4))
    assert not worlds.differing(*ends, 1e-12)


def test_a_layer_that_runs_twice_moves_twice(float64):
    """A momentum of ½ on mean m, twice, from 0: first m / 2, then ¾ m."""
    layer = BatchNorm(4, momentum=0.5, affine=False)

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.out = layer, nn.Linear(4, 3)

        def forward(self, x):
            return self.out(self.norm(x) + self.norm(x))

    world = worlds.federation((6,), (0,))
    own = worlds.local(world, 0, build=Twice)
    after = own.fit(own.loss, Network(Twice()).params, optim.sgd(0.1), batch=6)
    x = torch.from_numpy(world.dataset.x[world.train[0]]).double()
    assert torch.allclose(after["norm.running_mean"], 0.75 * x.mean(0), 1e-6)


# What is refused, and the fixer.


def test_training_mode_outside_of_a_gradient_is_refused():
    own = worlds.local(worlds.federation(), 0, build=worlds.Batched)
    params = Network(worlds.Batched()).params
    with pytest.raises(MethodError, match=r"outside of local\.gradient and local\.fit.*group"):
        own.scan(lambda c, batch: own.loss(params, batch), torch.tensor(0.0), batch=3)


def test_examples_without_known_weights_are_refused_and_can_be_given_them():
    own = worlds.local(worlds.federation(), 0, build=worlds.Batched)
    params = Network(worlds.Batched()).params

    def fit(**more):
        def loss(p, batch):
            given = {name: value(batch) for name, value in more.items()}
            return own.logits(p, 2 * batch.x, batch.training, **given).sum()

        return own.fit(loss, params, optim.sgd(0.1), batch=3)

    with pytest.raises(MethodError, match=r"cannot tell padding.*weight=batch\.weight"):
        fit()
    assert worlds.differing(params, fit(weight=lambda batch: batch.weight), 1e-3)


def test_rows_that_are_not_examples_are_refused():
    with masked(torch.ones(2)), pytest.raises(ModelError, match="sees 6 rows for 2 examples"):
        BatchNorm(3)(torch.randn(6, 3))


def test_the_fixer_keeps_weights_statistics_and_frozen_parameters():
    model = convolutional(nn.BatchNorm2d)
    with torch.no_grad():
        for value in model.state_dict().values():
            if value.is_floating_point():
                value.add_(torch.rand_like(value))
    model[1].weight.requires_grad_(False)
    fixed = masked_batch_norm_instead(model)
    check(fixed)
    assert isinstance(fixed[1], BatchNorm) and isinstance(model[1], nn.BatchNorm2d)
    x = torch.randn(4, 2, 5, 5)
    assert torch.allclose(model.eval()(x), fixed.eval()(x), atol=1e-5)
    assert "1.weight" not in learned(fixed) and "1.running_var" in learned(fixed)
    assert isinstance(masked_batch_norm_instead(nn.SyncBatchNorm(3, affine=False)), BatchNorm)
    assert isinstance(group_norm_instead(nn.BatchNorm1d(3)), nn.GroupNorm)


def test_both_fixers_are_named_and_a_cumulative_average_is_refused():
    with pytest.raises(ModelError, match=r"'1' is BatchNorm2d.*group_norm_instead.*masked_batch"):
        check(convolutional(nn.BatchNorm2d))
    with pytest.raises(ModelError, match=r"momentum None.*such as 0\.1"):
        masked_batch_norm_instead(nn.BatchNorm2d(3, momentum=None))
