"""Networks that do not fit are told before the first round, in one line."""

import pytest
import torch
from torch import nn

import worlds
from idiolect.errors import ModelError
from idiolect.methods import FedAvg
from idiolect.models import LeNet5


def start(build):
    return worlds.simulation(FedAvg(), worlds.federation(), build=build)


def test_a_network_for_images_on_a_table_of_features():
    with pytest.raises(ModelError, match=r"network 'main' cannot be built: ValueError: not enough"):
        start(lambda: LeNet5((worlds.FEATURES,), worlds.CLASSES))


def test_a_network_that_takes_another_shape():
    with pytest.raises(ModelError, match=r"fails on examples of shape \(4,\): RuntimeError: mat1"):
        start(lambda: nn.Linear(worlds.FEATURES + 1, worlds.CLASSES))


@pytest.mark.parametrize(
    ("build", "got"),
    [
        (lambda: nn.Linear(worlds.FEATURES, 7), r"\(2, 7\)"),
        (lambda: Pair(), "tuple"),
    ],
)
def test_a_network_that_returns_something_else(build, got):
    with pytest.raises(ModelError, match=rf"returns {got} .* expected logits of shape \(2, 3\)"):
        start(build)


def test_trying_leaves_torchs_random_state_alone():
    before = torch.get_rng_state()
    start(worlds.Normed)
    assert torch.equal(before, torch.get_rng_state())


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(worlds.FEATURES, worlds.CLASSES)

    def forward(self, x):
        return self.fc(x), x
