"""A module called with parameters from outside: as torch.func.functional_call does, but quicker."""

import copy

import pytest
import torch
from torch import nn
from torch.func import functional_call, vjp, vmap

from idiolect.core import network
from idiolect.core.batches import Pool
from idiolect.core.batchnorm import BatchNorm
from idiolect.core.network import Network


class Tied(nn.Module):
    """Two names for one weight, a layer used twice, running statistics and a constant."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight
        self.again = self.first
        self.norm = BatchNorm(4)
        self.register_buffer("constant", torch.full((4,), 2.0))

    def forward(self, x):
        return self.again(self.norm(self.second(self.first(x)))) * self.constant


@pytest.mark.parametrize("training", [False, True])
def test_a_call_is_functional_call(training):
    torch.manual_seed(0)
    model = Tied()
    network = Network(model)
    params = {name: torch.randn_like(leaf).abs() for name, leaf in network.params.items()}
    assert sorted(params) == [
        "first.bias", "first.weight", "norm.bias", "norm.running_mean", "norm.running_var",
        "norm.weight",
    ]  # fmt: skip
    x = torch.randn(3, 4)
    expected = functional_call(copy.deepcopy(model).train(training), params, (x,))
    assert torch.equal(network(params, x, training), expected)
    # Another call must not see what the first one was given.
    own = copy.deepcopy(model).train(training)
    assert torch.equal(network(network.params, x, training), own(x))


def test_a_copy_has_places_of_its_own():
    """Threads work on copies: what one is given must not reach the other's module."""
    network = Network(nn.Linear(2, 2))
    other = copy.deepcopy(network)
    seen = []
    network._modes[True].register_forward_hook(lambda *_: seen.append(other._modes[True].weight))
    network({name: leaf + 1 for name, leaf in network.params.items()}, torch.ones(1, 2), True)
    assert torch.equal(seen[0], other.params["weight"])
    assert other._modes[True].weight is not network._modes[True].weight


def test_an_error_amid_a_call_leaves_the_module_as_it_was():
    class Refuses(nn.Linear):
        def forward(self, x):
            raise ValueError("no")

    network = Network(Refuses(2, 2))
    own = network._modes[False].weight
    with pytest.raises(ValueError, match="no"):
        network(network.params, torch.ones(1, 2), False)
    assert network._modes[False].weight is own


@pytest.mark.parametrize("shape", [(), (5,), (2, 3, 4)])
@pytest.mark.parametrize("kind", [torch.uint8, torch.float32, torch.int64])
def test_examples_are_taken_as_indexing_takes_them(shape, kind):
    x = torch.randint(0, 200, (30, *shape)).to(kind)
    pool = Pool(x, torch.arange(30))
    rows = torch.randint(0, 30, (4, 6))
    assert torch.equal(pool.examples(rows), x[rows])
    assert torch.equal(torch.vmap(pool.examples)(rows), x[rows])
    assert torch.equal(pool.labels(rows), rows)


class Custom(nn.Module):
    """A module of a user's, which may look at `self.training`."""

    def forward(self, x):
        return x * (2 if self.training else 1)


@pytest.mark.parametrize(
    "layer, steady",
    [
        (nn.ReLU(), True),
        (nn.GroupNorm(2, 4), True),
        (nn.Dropout(0.0), True),
        (nn.Dropout(0.1), False),
        (nn.RReLU(), False),
        (BatchNorm(4), False),
        (nn.BatchNorm1d(4), False),
        (nn.InstanceNorm1d(4), False),
        (Custom(), False),
    ],
    ids=repr,
)
def test_only_known_layers_surely_do_the_same_in_training(layer, steady):
    """Mutual learning then takes one forward pass where it would take two."""
    assert Network(nn.Sequential(nn.Linear(4, 4), layer)).steady is steady


@pytest.mark.parametrize("shared", [False, True])
def test_dropout_of_a_stack_draws_for_each_client(
    shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where all clients are given the same; a gradient is there where a number was left."""
    monkeypatch.setattr(network, "_on_cuda", lambda x: True)
    layer = network.replace_layers(nn.Dropout(0.25))
    x = torch.rand(400) + 0.5 if shared else torch.rand(3, 400) + 0.5

    def both(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y, back = vjp(layer, x)
        once = back(torch.full_like(y, 3.0))[0]
        twice = vjp(lambda g: back(g)[0], torch.ones_like(y))[1](torch.full_like(y, 2.0))[0]
        return y, once, twice

    work = vmap(lambda _, x: both(x), (0, None if shared else 0), randomness="different")
    y, once, twice = work(torch.zeros(3), x)
    left = y != 0
    assert torch.equal(left, once != 0)
    assert not torch.equal(left[0], left[1])
    assert 0.65 < left.double().mean() < 0.85
    torch.testing.assert_close(y, torch.where(left, x / 0.75, 0.0))
    torch.testing.assert_close(once, torch.where(left, torch.tensor(4.0), torch.tensor(0.0)))
    torch.testing.assert_close(twice, torch.where(left, torch.tensor(8 / 3), torch.tensor(0.0)))
