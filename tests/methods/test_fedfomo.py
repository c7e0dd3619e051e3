"""FedFomo by hand."""

import math

import pytest
import torch

from idiolect.core.method import Sent
from idiolect.methods import FedFomo
from idiolect.methods.fedfomo import FomoServer, FomoState, OfferedModels, Weighed
from methods.tiny import HIGH, Line, client, close, line, pair, plus, refuses, setup, slope


def offer(*models, real=None):
    stacked = {n: torch.stack([line(model)[n] for model in models]) for n in "wb"}
    real = [1.0] * len(models) if real is None else real
    return Sent(own=OfferedModels(stacked, torch.tensor(real, dtype=torch.float64)))


@pytest.mark.parametrize("norm", ["l2", "l1"])
def test_models_weigh_by_what_they_save_on_the_way(norm):
    """θ = (0, 0) has loss ln 2 on (2, 1). HIGH has −ln 0.9 at a way of ln 9 · (0.4, 0.2).

    −HIGH is worse and weighs nothing. The own model ln 3 · (0.4, 0.2) has −ln 0.75. With gains per
    way g and h the client moves to (g HIGH + h own) / (g + h).
    """
    length = (lambda x, y: math.hypot(x, y)) if norm == "l2" else (lambda x, y: abs(x) + abs(y))
    own = (0.4 * math.log(3), 0.2 * math.log(3))
    g = (math.log(2) + math.log(0.9)) / length(*HIGH)
    h = (math.log(2) + math.log(0.75)) / length(*own)
    method = FedFomo(norm=norm)
    personal = FomoState(line((0, 0)), line(own))
    sent = offer(HIGH, (-HIGH[0], -HIGH[1]))
    moved = plus(plus((0.0, 0.0), g / (g + h), HIGH), h / (g + h), own)
    assert pair(method.deploy(sent, personal, client())) == close(moved)


@pytest.mark.parametrize(
    ("norm", "ways"), [("l2", (0.3, math.hypot(0.2, 0.2))), ("l1", (0.3, 0.4))]
)
def test_the_longer_way_to_the_same_loss_weighs_less(norm, ways):
    """(0.3, 0) and (0.2, 0.2) both say z = 0.6 of x = 2: their weights are as 1/way."""
    total = 1 / ways[0] + 1 / ways[1]
    personal = FomoState(line((0, 0)), line((0.2, 0.2)))
    _, weights, _ = FedFomo(norm=norm)._moved(offer((0.3, 0.0)).own, personal, client())
    assert weights.tolist() == close([1 / ways[0] / total, 1 / ways[1] / total])


@pytest.mark.parametrize("norm", ["l2", "l1"])
def test_a_way_may_be_short(norm):
    """Models a thousandth away: what they save counts by the way all the same."""
    sent, own = offer((0.003, 0.0), (0.3, 0.0)), FomoState(line((0, 0)), line((0, 0)))
    _, weights, _ = FedFomo(norm=norm)._moved(sent.own, own, client())
    assert weights[0] > weights[1]  # the loss flattens on the way


@pytest.mark.parametrize("stacked", [False, True])
def test_a_round_moves_trains_and_reports(stacked):
    """Only HIGH is worth anything, so training starts there; then that is the way's start."""
    method = FedFomo(lr=0.5, credit="clipped")
    personal = FomoState(line((0, 0)), line((0, 0)))
    sent = offer((-1.0, 0.0), HIGH)
    report, kept = method.client_step(sent, personal, client(stacked=stacked))
    end = plus(HIGH, -0.5, slope(HIGH, [(2.0, 1)]))
    assert pair(kept.before) == close(HIGH) and pair(kept.after) == close(end)
    assert pair(report.params) == close(end)
    assert report.weights.tolist() == close([0.0, 1.0])


@pytest.mark.parametrize("case", ["unreal", "no validation data", "all worse"])
def test_otherwise_a_client_goes_on_with_its_own(case):
    method, own = FedFomo(), (-0.1, 0.0)
    sent = offer(HIGH, real=[0.0]) if case == "unreal" else offer(HIGH)
    if case == "all worse":
        sent = offer((-HIGH[0], -HIGH[1]))
    local = client(val=[]) if case == "no validation data" else client()
    assert pair(method.deploy(sent, FomoState(line((0, 0)), line(own)), local)) == close(own)


def test_a_newcomer_moves_and_then_trains():
    """All of the weight is on HIGH, where p = 9/10: a step at lr 0.1 goes by 0.01 · (2, 1)."""
    fresh = FomoState(line((0, 0)), line((0, 0)))
    own = FedFomo(lr=0.1).adapt(offer(HIGH, (-1.0, 0.0)), fresh, client())
    assert pair(own) == close((HIGH[0] + 0.02, HIGH[1] + 0.01))


def test_little_that_is_saved_is_shared_out_whole():
    """Both models save a twentieth or less for each step of the way; the weights add up to one."""
    sent, local = offer((0.5, 0.0), (0.5, 0.0)), client(val=[(0.1, 1)])
    moved, weights, _ = FedFomo()._moved(sent.own, FomoState(line((0, 0)), line((0, 0))), local)
    assert pair(moved) == close((0.5, 0.0)) and weights.tolist() == close([0.5, 0.5, 0.0])
    assert list(FedFomo().models(sent, moved)) == ["personal"] and not FedFomo().models(sent, ())


def test_what_is_worse_counts_against_a_model():
    """(−1, 0) says z = −2 of (2, 1), a loss of ln(1 + e²) at a way of 1; HIGH saves ln 1.8.

    P gets Eq. 3's weights as they are, or over the size of their sum (the own model is at no way
    and adds nothing), or those of Eq. 4, in which nothing is below zero.
    """
    bad, good = math.log(2) - math.log(1 + math.exp(2)), math.log(1.8) / math.hypot(*HIGH)
    total = abs(bad + good)
    for credit, expected in (
        ("printed", [bad, good]),
        ("normalised", [bad / total, good / total]),
        ("clipped", [0.0, 1.0]),
    ):
        method = FedFomo(credit=credit)
        personal = FomoState(line((0, 0)), line((0, 0)))
        report, _ = method.client_step(offer((-1.0, 0.0), HIGH), personal, client())
        assert report.weights.tolist() == close(expected, 1e-9)


def test_a_harmful_model_is_not_sent_again_before_one_that_was_never_tried():
    worth = [[0, -0.5, 0, 2], [0] * 4, [0] * 4, [0] * 4]
    chosen, real = FedFomo(most=3)._chosen(shelf(worth, [1.0] * 4))
    assert sorted(chosen[0].tolist()) == [2, 3] and real[0].tolist() == [1, 1]


def test_the_way_to_a_model_is_of_parameters_alone():
    """A running mean that is a thousand away makes no model farther."""
    way = {"w": torch.tensor(3.0), "b": torch.tensor(4.0), "bn.running_var": torch.tensor(1000.0)}
    assert float(FedFomo()._length(way)) == 5 and float(FedFomo(norm="l1")._length(way)) == 7


def shelf(worth, heard, round=100):
    count = len(heard)
    models = {n: torch.arange(count).double() for n in "wb"}
    return FomoServer(
        models,
        torch.tensor(heard).double(),
        torch.tensor(worth).double(),
        torch.tensor(round),
        torch.tensor(0),
    )


def test_the_server_offers_what_was_worth_most():
    """Late, without exploring: for each the two best of the others that have reported."""
    worth = [[9, 1, 2, 3], [5, 9, 0, 4], [1, 2, 9, 3], [1, 3, 2, 9]]
    method = FedFomo(most=3)
    chosen, real = method._chosen(shelf(worth, [1.0] * 4))
    assert [sorted(row) for row in chosen.tolist()] == [[2, 3], [0, 3], [1, 3], [1, 2]]
    assert bool((real == 1).all())
    chosen, real = method._chosen(shelf(worth, [1.0, 0.0, 1.0, 0.0]))
    told = [
        {c for c, r in zip(*row, strict=True) if r}
        for row in zip(chosen.tolist(), real.tolist(), strict=True)
    ]
    assert told == [{2}, {0, 2}, {0}, {0, 2}]


def test_early_on_it_explores_and_nobody_is_offered_itself():
    worth = [[0.0] * 6 for _ in range(6)]
    worth[0][1] = 50.0
    method = FedFomo(most=2, explore=1.0, explore_less=0.0)
    seen = {int(method._chosen(shelf(worth, [1.0] * 6, round))[0][0]) for round in range(40)}
    assert seen == {1, 2, 3, 4, 5}
    method = FedFomo(most=2, explore=0.3, explore_less=0.3)
    later = {int(method._chosen(shelf(worth, [1.0] * 6, round))[0][0]) for round in range(1, 40)}
    assert later == {1}


def test_what_was_used_is_remembered():
    """Client 2 was offered the best of its row and used 0.7 and 0.3 of them."""
    worth = [[0, 0, 0, 0], [0, 0, 0, 0], [0, 2, 0, 4], [0, 0, 0, 0]]
    method = FedFomo(most=3)
    state = shelf(worth, [1.0, 1.0, 0.0, 1.0])
    report = Weighed(
        {n: torch.tensor([7.0]).double() for n in "wb"},
        torch.tensor([1.0]).double(),
        torch.tensor([[0.7, 0.3]], dtype=torch.float64),
    )
    new = method.server_step(state, torch.tensor([2]), report)
    assert new.worth[2].tolist() == close([0, 2.3, 0, 4.7])
    assert new.heard.tolist() == [1.0] * 4 and int(new.round) == 101
    assert new.models["w"].tolist() == [0.0, 1.0, 7.0, 3.0]


def test_a_newcomer_is_offered_what_was_worth_most_to_all():
    """Worth 7, 12, 2 and 6 in all, but the second has not reported: the first and the fourth."""
    worth = [[0, 9, 1, 1], [5, 0, 0, 4], [1, 2, 0, 1], [1, 1, 1, 0]]
    sent = FedFomo(most=3).welcome(shelf(worth, [1.0, 0.0, 1.0, 1.0]), torch.arange(2))
    assert sent.own.models["w"].tolist() == [[0.0, 3.0]] * 2
    assert sent.own.real.tolist() == [[1.0, 1.0]] * 2
    alone = FedFomo(most=3).welcome(shelf(worth, [0.0, 0.0, 1.0, 0.0]), torch.arange(1))
    assert alone.own.real.tolist() == [[1.0, 0.0]] and float(alone.own.models["w"][0, 0]) == 2.0


def test_the_preset_is_what_the_code_does():
    code = FedFomo(**FedFomo.presets["code"])
    assert (code.norm, code.lr, code.schedule, code.decay) == ("l1", 0.1, "exponential", 0.99)
    assert (code.batch, code.epochs, code.weight_decay) == (50, 5, 1e-4)
    assert code.credit == "normalised"


def test_every_model_that_is_downloaded_is_sent():
    """Two clients get four models each of six: that is what crosses the network."""
    method = FedFomo(most=5)
    state = method.init_server(setup(Line(), sizes=(1.0,) * 6))
    sent = method.send(state, torch.tensor([1, 4]))
    assert sent.own.models["w"].shape == (2, 4) and sent.own.real.shape == (2, 4)


def test_settings_out_of_range_are_refused():
    refuses(FedFomo, "most", 1, "at least 2")
    refuses(FedFomo, "norm", "l3", "one of 'l2', 'l1'")
