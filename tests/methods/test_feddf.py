"""FedDF and pFedDF by hand, and over two architectures."""

import math

import pytest
import torch

import worlds
from idiolect.core import tree
from idiolect.core.method import Report, Sent
from idiolect.errors import ConfigError
from idiolect.methods import FedAvg, FedDF, PFedDF
from methods.tiny import Line, client, close, line, pair, plus, setup, sigmoid, slope

PUBLIC = [(2.0, 0), (-1.0, 1)]


def feddf(**settings):
    plain = {"sample": 2, "public_batch": 2, "fuse_optimiser": "sgd", "fuse_lr": 0.5, "lr": 0.1}
    return FedDF(**{**plain, **settings})


def test_models_of_an_architecture_are_averaged_by_size():
    reports = Report(
        {"w": torch.tensor([0.0, 4.0]).double(), "b": torch.tensor([1.0, 1.0]).double()},
        torch.tensor([1.0, 3.0]).double(),
    )
    assert pair(feddf().group_step(line((9, 9)), reports)) == close((3.0, 1.0))
    assert pair(feddf(uniform=True).group_step(line((9, 9)), reports)) == close((2.0, 1.0))


@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("stacked", [False, True])
def test_the_server_learns_the_softmax_of_mean_logits(temperature, stacked):
    """Two models say z = (1, 3) and (3, −5) of the two examples: taught is z = (2, −1).

    ∇ T² KL = T · mean of (p_T − q_T) · (x, 1), from (0, 0) where p_T = ½.
    """
    method = feddf(temperature=temperature)
    said = torch.tensor([[[0, 1], [0, 3]], [[0, 3], [0, -5]]]).double()
    state = method.server_step(None, torch.arange(2), said)
    assert state.tolist() == [[0.0, 2.0], [0.0, -1.0]]
    down = (0.0, 0.0)
    for (x, _), z in zip(PUBLIC, (2.0, -1.0), strict=True):
        error = 0.5 - sigmoid(z / temperature)
        down = plus(down, temperature * error / 2, (x, 1.0))
    local = client(train=[], public=PUBLIC, stacked=stacked)
    assert pair(method.fuse(line((0, 0)), state, local)) == close(plus((0.0, 0.0), -0.5, down))


def test_the_servers_optimiser_is_adam_unless_told_otherwise():
    """Adam's first step is the rate in the direction of the sign."""
    method = feddf(fuse_optimiser="adam", fuse_lr=0.01)
    state = torch.tensor([[0.0, 9.0], [0.0, 9.0]]).double()
    fused = method.fuse(line((0, 0)), state, client(train=[], public=PUBLIC))
    assert pair(fused) == close((0.01, 0.01), 1e-6)


def test_a_client_trains_the_fused_model_and_a_report_is_read_on_public_examples():
    start = (0.3, -0.2)
    report, kept = feddf().client_step(Sent(group=line(start)), (), client(public=PUBLIC))
    end = plus(start, -0.1, slope(start, [(2.0, 1)]))
    assert pair(report.params) == close(end) and kept == ()
    read = feddf().read(report, client(public=PUBLIC))
    assert read[:, 1].tolist() == close([2 * end[0] + end[1], -end[0] + end[1]])


def test_pfeddf_tunes_what_feddf_fused():
    start = (0.3, -0.2)
    at = start
    for _ in range(3):
        at = plus(at, -0.2, slope(at, [(2.0, 1)]))
    method = PFedDF(tune_epochs=3, tune_lr=0.2)
    assert pair(method.deploy(Sent(group=line(start)), (), client())) == close(at)
    assert pair(FedDF().deploy(Sent(group=line(start)), (), client())) == start
    assert PFedDF(lr=0.3).training() == FedDF(lr=0.3).training()


def test_without_public_examples_it_is_refused():
    with pytest.raises(ConfigError, match="FedDF: needs 2 public examples on the server"):
        feddf().init_server(setup(Line(), public=1))
    with pytest.raises(ConfigError, match="FedDF: needs some public examples on the server"):
        feddf(sample=0).init_server(setup(Line()))
    assert feddf().init_server(setup(Line(), public=2)).shape == (2, 2)
    assert feddf().init_server(setup(Line(), public=9)).shape == (2, 2)
    assert feddf(sample=0).init_server(setup(Line(), public=1)).shape == (1, 2)


def test_the_preset_is_what_the_code_does():
    code = FedDF(**FedDF.presets["code"])
    assert (code.lr, code.batch, code.epochs, code.public_batch) == (0.1, 64, 40, 128)
    assert (code.fuse_lr, code.fuse_optimiser, code.temperature) == (0.001, "adam", 1.0)
    assert (code.fuse_steps, code.patience, code.fuse_schedule) == (10_000, 1000, "cosine")
    assert code.sample == 0  # all public examples


def learned(start, target, steps, rate, rows=PUBLIC):
    """Plain steps on KL to z on all rows; `rate` is told how many went before."""
    at = start
    for taken in range(steps):
        down = (0.0, 0.0)
        for (x, _), z in zip(rows, target, strict=True):
            error = sigmoid(at[0] * x + at[1]) - sigmoid(z)
            down = plus(down, error / len(rows), (x, 1.0))
        at = plus(at, -rate(taken), down)
    return at


@pytest.mark.parametrize("stacked", [False, True])
def test_steps_are_counted_and_the_rate_falls_along_a_cosine(stacked):
    """Seven steps, at 0.5 · ½ (1 + cos(π t / 7)) after t of them."""
    method = feddf(fuse_steps=7, fuse_schedule="cosine")
    state = torch.tensor([[0.0, 2.0], [0.0, -1.0]]).double()
    local = client(train=[], public=PUBLIC, stacked=stacked)
    fused = method.fuse(line((0, 0)), state, local)
    falling = learned((0, 0), (2.0, -1.0), 7, lambda t: 0.25 * (1 + math.cos(math.pi * t / 7)))
    assert pair(fused) == close(falling, 1e-6)


@pytest.mark.parametrize("stacked", [False, True])
def test_the_server_stops_when_what_is_held_out_gains_nothing(stacked):
    """Looks come every 100 steps; the second of two examples is held out, and says the opposite.

    Learning the first makes it worse from the first look on: with a patience of 200 it is over
    after 200 of 1,000 steps. Without any it takes all.
    """
    rows, state = [(1.0, 0), (1.0, 1)], torch.tensor([[0.0, 3.0], [0.0, -3.0]]).double()
    local = client(train=[], public=rows, stacked=stacked)
    method = feddf(fuse_steps=1000, patience=200, fuse_lr=0.01)
    fused = method.fuse(line((0, 0)), state, local)
    stopped = learned((0, 0), (3.0,), 200, lambda t: 0.01, rows[:1])
    assert pair(fused) == close(stopped, 1e-6)
    on = feddf(fuse_steps=300, fuse_lr=0.01).fuse(line((0, 0)), state, local)
    assert pair(on) == close(learned((0, 0), (3.0, -3.0), 300, lambda t: 0.01, rows), 1e-6)


def test_patience_is_of_a_number_of_steps():
    with pytest.raises(ConfigError, match="set fuse_steps too"):
        FedDF(patience=5)


@pytest.fixture
def mixed(float64):
    method = FedDF(sample=5, public_batch=3, batch=3, lr=0.1)
    return worlds.simulation(method, worlds.with_public(), architectures=worlds.TWO)


def test_what_crosses_are_the_parameters_of_each_clients_own_architecture(mixed):
    """Normed has 63 numbers, Plain 15; three clients of one, two of the other have data.

    Predictions are the server's own work and cross nothing.
    """
    sizes = [
        sum(leaf.numel() for leaf in build().parameters())
        for build in (worlds.Normed, worlds.Plain)
    ]
    numbers = 3 * sizes[0] + 2 * sizes[1]
    (traffic,) = mixed.advance().traffic
    assert traffic.bytes_down == 8 * numbers
    assert traffic.bytes_up == 8 * numbers + 5 * 4 * 2  # and a size each


def test_an_architecture_without_anyone_in_the_cohort_still_learns(mixed):
    """Only clients 1, 2 and 4 come: the other network's model learns from what they say."""
    mixed.cohort = lambda run: torch.tensor([1, 2, 4]).numpy()
    before = tree.map(torch.clone, mixed.groups[1].groups[0])
    mixed.advance()
    after = mixed.groups[1].groups[0]
    assert worlds.differing(before, after)


def test_networks_of_one_kind_need_no_other(float64):
    """With a rate of nothing the server's part is FedAvg."""
    method = FedDF(sample=5, batch=3, lr=0.1, fuse_optimiser="sgd", fuse_lr=1e-37)
    fused = worlds.simulation(method, worlds.with_public())
    plain = worlds.simulation(FedAvg(batch=3, lr=0.1), worlds.with_public())
    for _ in range(2):
        fused.advance()
        plain.advance()
    assert not worlds.differing(fused.groups[0].groups[0], plain.states[0], 1e-12)
