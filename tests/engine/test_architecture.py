"""Networks that do not fit are told before the first round, in one line."""

from typing import ClassVar

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
    with pytest.raises(ModelError, match=rf"returns {got} .* expected outputs of shape \(2, 3\)"):
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


class Seen(nn.Linear):
    """Notes of which class it is when it runs."""

    met: ClassVar[list[str]] = []

    def __init__(self) -> None:
        super().__init__(worlds.FEATURES, worlds.CLASSES)
        self.inner = nn.Linear(worlds.CLASSES, worlds.CLASSES)

    def forward(self, x):
        self.met.append(type(self.inner).__name__)
        return self.inner(super().forward(x))


@pytest.mark.parametrize(
    ("kind", "layer"), [("vectorised", "StackedLinear"), ("sequential", "Linear")]
)
def test_clients_one_by_one_have_torchs_own_layers(kind, layer):
    Seen.met.clear()
    worlds.simulation(FedAvg(), worlds.federation(), kind=kind, build=Seen).advance()
    assert set(Seen.met) - {"Identity"} == {layer}  # that stands for the head where it is sought


def test_a_network_that_vmap_cannot_map_has_torchs_own_layers():
    class Recurrent(Seen):
        def __init__(self) -> None:
            super().__init__()
            self.own = nn.LSTM(1, 2, proj_size=1)

    Seen.met.clear()
    simulation = worlds.simulation(FedAvg(), worlds.federation(), build=Recurrent)
    simulation.advance()
    assert set(Seen.met) == {"Linear"}
    assert "LSTM, which torch cannot vmap" in simulation.notices[0]
