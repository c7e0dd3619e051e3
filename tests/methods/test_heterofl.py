"""HeteroFL by hand, and that a block of the wide network is the narrow network."""

import math

import pytest
import torch
from torch import nn

import worlds
from idiolect.core import tree
from idiolect.core.batchnorm import BatchNorm
from idiolect.core.client import Network
from idiolect.core.method import Sent
from idiolect.errors import MethodError
from idiolect.methods import FedAvg, HeteroFL
from idiolect.methods.heterofl import Masked, NestedReport
from methods.tiny import client, close, refuses, setup


class Wide(nn.Module):
    """Two hidden units without bias or nonlinearity: logits V U x."""

    def __init__(self, hidden=2):
        super().__init__()
        self.u = nn.Linear(1, hidden, bias=False, dtype=torch.float64)
        self.v = nn.Linear(hidden, 2, bias=False, dtype=torch.float64)

    def forward(self, x):
        return self.v(self.u(x.reshape(-1, 1)))


def wide(u=(0.5, 0.2), v=((0.0, 0.7), (1.0, 0.3))):
    return {
        "u.weight": torch.tensor(u, dtype=torch.float64).reshape(-1, 1),
        "v.weight": torch.tensor(v, dtype=torch.float64),
    }


def half():
    return torch.tensor(0.5).double()


@pytest.mark.parametrize("stacked", [False, True])
def test_one_step_of_the_narrow_network_by_hand(stacked):
    """Width ½ has the first of two units: h = u x / ½ = 2 u x, by the scaler; logits v h.

    u = ½, x = 2: h = 2, logits (0, 2), p = σ(2), e = p − 1 for class 1. ∂/∂v = (−e, e) h, and
    ∂/∂u = ((−e) 0 + e 1) · 2 x. The second unit gets no gradient and leaves as zero. Both classes
    are there, so that none is left out.
    """
    method = HeteroFL(lr=0.1, batch=1, steps=1)
    local = client([(2.0, 1), (2.0, 0)], main=Wide(), stacked=stacked)
    report, kept = method.client_step(Sent(wide(), half()), (), local)
    e = 1 / (1 + math.exp(-2.0)) - 1
    assert report.params["u.weight"].flatten().tolist() == close([0.5 - 0.1 * 4 * e, 0.0])
    assert report.params["v.weight"].tolist() == [close([0.2 * e, 0.0]), close([1 - 0.2 * e, 0.0])]
    assert float(report.width) == 0.5 and kept == () and report.classes.tolist() == [1.0, 1.0]


def test_without_the_scaler_outputs_are_as_they_are():
    method = HeteroFL(lr=0.1, scale=False, mask=False)
    report, _ = method.client_step(Sent(wide(), half()), (), client(main=Wide()))
    e = 1 / (1 + math.exp(-1.0)) - 1
    assert float(report.params["u.weight"][0, 0]) == close(0.5 - 0.1 * 2 * e)


def test_logits_of_absent_classes_are_zero_in_training_and_for_the_client():
    """Only class 1: logits (0, z) whatever row 0 says, and row 0 gets no gradient."""
    method = HeteroFL(lr=0.1, widths=(1.0,))
    at = wide(v=((5.0, 0.0), (1.0, 0.0)))
    local = client([(2.0, 1)], main=Wide())
    report, _ = method.client_step(Sent(at, torch.tensor(1.0).double()), (), local)
    e = 1 / (1 + math.exp(-1.0)) - 1
    assert report.classes.tolist() == [0.0, 1.0]
    assert report.params["v.weight"][:, 0].tolist() == close([5.0, 1 - 0.1 * e])
    x = torch.tensor([2.0]).double()
    deployed = method.deploy(Sent(at), (), local)
    assert method.predict(deployed, x, local).tolist() == [close([0.0, 1.0])]
    assert method.predict(at, x, local).tolist() == [close([5.0, 1.0])]
    every = HeteroFL(mask=False).deploy(Sent(at), (), local)
    assert every.classes.tolist() == [1.0, 1.0]


def reports(method):
    """A wide client with class 1 alone, and a narrow one with both; ten times the examples."""
    rows = [wide((1.0, 2.0), ((9.0, 9.0), (3.0, 4.0))), wide((3.0, 0.0), ((5.0, 0.0), (7.0, 0.0)))]
    return NestedReport(
        tree.stack(rows),
        torch.tensor([1.0, 0.5]).double(),
        torch.tensor([[0.0, 1.0], [1.0, 1.0]]).double(),
        torch.tensor([1.0, 10.0]).double(),
    )


def test_each_entry_is_averaged_over_those_who_have_it():
    """Unit 0: both. Unit 1: the wide one alone. Row 0 of v: the narrow one alone.

    So nobody has the second entry of row 0, and it stays.
    """
    method, start = HeteroFL(), wide((0.0, 0.0), ((0.1, 0.2), (0.3, 0.4)))
    new = method.server_step(start, torch.arange(2), reports(method))
    assert new["u.weight"].flatten().tolist() == close([2.0, 2.0])
    assert new["v.weight"].tolist() == [close([5.0, 0.2]), close([5.0, 4.0])]
    by_size = HeteroFL(uniform=False).server_step(start, torch.arange(2), reports(method))
    assert by_size["u.weight"].flatten().tolist() == close([31 / 11, 2.0])


def test_widths_are_dealt_in_turn_or_drawn_by_the_client():
    method = HeteroFL(widths=(1.0, 0.5))
    assert method.send(wide(), torch.tensor([3, 0, 2])).own.tolist() == [0.5, 1.0, 1.0]
    drawing = HeteroFL(widths=(1.0, 0.5), assign="dynamic", lr=0.1, batch=3)
    world, widths = worlds.federation(), set()
    network = Network(worlds.Normed()).params
    for number in range(8):
        local = worlds.local(world, 0, round=number)
        report, _ = drawing.client_step(Sent(network, torch.tensor(1.0)), (), local)
        widths.add(float(report.width))
    assert widths == {1.0, 0.5}


class Deep(nn.Module):
    """A convolution, batch normalisation, flattening, two dense layers; of some width."""

    def __init__(self, width=1.0):
        super().__init__()
        channels, units = math.ceil(4 * width), math.ceil(6 * width)
        self.conv = nn.Conv2d(1, channels, 3, padding=1)
        self.norm = BatchNorm(channels)
        self.one = nn.Linear(channels * 16, units)
        self.two = nn.Linear(units, 3)

    def forward(self, x):
        x = self.norm(self.conv(x)).relu()
        return self.two(self.one(x.flatten(1)).relu())


@pytest.mark.parametrize("width", [1.0, 0.5, 0.3])
def test_a_block_computes_what_the_narrow_network_does(width, float64):
    """By shapes the block is the narrow network, and with its values so are the logits."""
    torch.manual_seed(0)
    whole, narrow = Network(Deep()), Network(Deep(width))
    held = HeteroFL().held(whole.params, torch.tensor(width))
    inside = {name: leaf * held[name] for name, leaf in whole.params.items()}
    block = {}
    for name, like in narrow.params.items():
        assert int(held[name].sum()) == like.numel(), name
        block[name] = whole.params[name][tuple(slice(size) for size in like.shape)]
        if name == "one.weight":  # channels × 16 places
            columns = held[name][0].bool()
            block[name] = whole.params[name][: like.shape[0], columns]
    x = torch.randn(5, 1, 4, 4)
    assert torch.allclose(whole(inside, x, False), narrow(block, x, False))


def test_as_many_columns_as_an_earlier_layer_has_units_come_from_that_one():
    """At width 0.3 a layer after 8 units has ⌈2.4⌉ = 3 columns, though a layer of 2 lies between.

    Taken for two channels of four places each it would have ⌈0.6⌉ of them, four columns.
    """
    params = {"a.weight": torch.zeros(8, 5), "b.weight": torch.zeros(2, 8)}
    params |= {"c.weight": torch.zeros(3, 8), "d.weight": torch.zeros(4, 3)}
    held = HeteroFL().held(params, torch.tensor(0.3))
    assert held["c.weight"].sum(1).tolist() == [3.0, 0.0, 0.0]


def test_normalisation_of_the_input_is_whole():
    layers = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 2))
    held = HeteroFL().held(Network(layers).params, torch.tensor(0.5))
    assert [int(held[f"{n}.bias"].sum()) for n in range(4)] == [4, 3, 3, 2]


def test_at_full_width_with_all_classes_it_is_fedavg(float64):
    world = worlds.federation()
    ends = []
    for method in (
        HeteroFL(widths=(1.0,), mask=False, uniform=False, lr=0.1, batch=3),
        FedAvg(lr=0.1, batch=3),
    ):
        simulation = worlds.simulation(method, world)
        for _ in range(2):
            simulation.advance()
        ends.append(simulation.states[0])
    assert not worlds.differing(*ends, 1e-12)


def test_statistics_are_those_of_the_clients_own_examples(float64):
    """Before it is used, the model's running statistics move over the client's examples."""
    world = worlds.federation()
    network = Network(worlds.Batched()).params
    method = HeteroFL(batch=7)
    local = worlds.local(world, 0, build=worlds.Batched)
    deployed = method.deploy(Sent(network), (), local)
    assert isinstance(deployed, Masked)
    x = torch.tensor(world.dataset.x[world.train[0]]).double()
    seen = (x @ network["fc1.weight"].T + network["fc1.bias"]).mean(0)
    assert torch.allclose(deployed.params["norm.running_mean"], 0.1 * seen, atol=1e-6)
    assert torch.equal(deployed.params["fc1.weight"], network["fc1.weight"])


def test_recurrent_networks_are_refused():
    told = setup(Wide())._replace(params={"lstm.weight_ih_l0": torch.zeros(8, 2)})
    with pytest.raises(MethodError, match=r"'lstm.weight_ih_l0' is of a recurrent layer"):
        HeteroFL().init_server(told)


def test_settings_out_of_range_are_refused():
    refuses(HeteroFL, "widths", (1.0, 0.0), "above 0")
    refuses(HeteroFL, "widths", (1.0, 1.5), "at most 1")
    refuses(HeteroFL, "assign", "random", "one of 'fixed', 'dynamic'")
    assert HeteroFL(**HeteroFL.presets["code"]).clip == 1.0
