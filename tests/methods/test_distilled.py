"""What the methods that exchange predictions share, by hand."""

import math

import pytest
import torch

import worlds
from idiolect.core.method import Sent
from idiolect.core.network import Network
from idiolect.errors import ConfigError
from idiolect.methods import FedAvg, KTpFL, LocalOnly
from methods.tiny import HIGH, Line, client, close, line, pair, plus, setup, sigmoid, slope

PUBLIC = [(2.0, 0), (-1.0, 1)]
TEACHER = torch.tensor([[0.1, 0.9], [0.3, 0.7]], dtype=torch.float64)


def kt(**settings):
    return KTpFL(**{"sample": 2, "public_batch": 2, "lr": 0.5, "temperature": 3.0, **settings})


def towards(at, factor, temperature=3.0):
    """∇ of factor · KL(teacher ‖ p_T) = factor / T · mean of (p_T − q) · (x, 1)."""
    total = (0.0, 0.0)
    for (x, _), (_, q) in zip(PUBLIC, TEACHER.tolist(), strict=True):
        error = sigmoid((at[0] * x + at[1]) / temperature) - q
        total = plus(total, factor / temperature / len(PUBLIC) * error, (x, 1.0))
    return total


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize(("gain", "factor"), [("hinton", 9.0), ("paper", 1.0), ("code", 0.5)])
def test_a_round_distils_trains_and_predicts(stacked, gain, factor):
    """From (0.3, −0.2), T = 3: a step to the teacher, a step on (2, 1), then soft predictions."""
    start = (0.3, -0.2)
    distilled = plus(start, -0.5, towards(start, factor))
    trained = plus(distilled, -0.5, slope(distilled, [(2.0, 1)]))
    local = client(public=PUBLIC, stacked=stacked, round=1)
    report, kept = kt(gain=gain).client_step(Sent(own=TEACHER), line(start), local)
    assert pair(kept) == close(trained)
    seen = [sigmoid((trained[0] * x + trained[1]) / 3.0) for x, _ in PUBLIC]
    assert report.prediction[:, 1].tolist() == close(seen)
    assert report.prediction.sum(1).tolist() == close([1.0, 1.0])
    assert float(report.size) == 1
    assert set(report._fields) == {"prediction", "size"}


def test_who_is_taught_what_it_said_itself_learns_nothing(float64):
    """The examples are those of the round before; a teacher of others would teach something."""
    world, method = worlds.with_public(), KTpFL(sample=3, public_batch=2, lr=0.5, temperature=3.0)
    params = Network(worlds.Normed()).params
    said = method.predictions(params, worlds.local(world, 0, round=4))
    for round, learns in ((5, False), (6, True)):
        taught = method.distil(said, params, worlds.local(world, 0, round=round))
        assert bool(worlds.differing(params, taught, 1e-12)) is learns


def test_before_anyone_has_predicted_nothing_is_distilled():
    """Not even decay moves the weights: the step is not taken at all."""
    method = kt(weight_decay=0.1)
    local = client(public=PUBLIC)
    _, kept = method.client_step(Sent(own=torch.zeros_like(TEACHER)), line(HIGH), local)
    _, alone = method.client_step(
        Sent(own=torch.zeros_like(TEACHER)), line(HIGH), client(public=[(9.0, 0), (9.0, 0)])
    )
    assert pair(kept) == pair(alone)
    trained = plus(plus(HIGH, -0.5, slope(HIGH, [(2.0, 1)])), -0.05, HIGH)
    assert pair(kept) == close(trained)


def test_public_labels_are_learned_only_when_asked():
    """Beside the teacher's gradient stands that of the labels (0 and 1), at temperature 1."""
    start = (0.3, -0.2)
    both = plus(towards(start, 1.0), 1.0, slope(start, PUBLIC))
    method = kt(gain="paper", labelled=True)
    local = client(public=PUBLIC)
    assert pair(method.distil(TEACHER, line(start), local)) == close(plus(start, -0.5, both))


def test_distillation_has_a_rate_and_passes_of_its_own():
    start = at = (0.3, -0.2)
    for _ in range(3):
        at = plus(at, -0.1, towards(at, 1.0))
    method = kt(gain="paper", distil_lr=0.1, distil_epochs=3)
    assert pair(method.distil(TEACHER, line(start), client(public=PUBLIC))) == close(at)


def test_settling_distils_once_more():
    start, local = (0.3, -0.2), client(public=PUBLIC)
    sent = Sent(own=TEACHER)
    assert pair(kt().deploy(sent, line(start), local)) == start
    settled = kt(settle=True).deploy(sent, line(start), local)
    assert list(kt().models(sent, settled)) == ["personal"] and not kt().models(sent, ())
    assert pair(settled) == close(plus(start, -0.5, towards(start, 9.0)))


def test_a_confident_prediction_of_another_class_is_no_infinite_loss():
    """At T = 1 and z = 500 a probability underflows to zero, as does a teacher's."""
    method = kt(temperature=1.0)
    teacher = torch.tensor([[1.0, 0.0], [0.0, 1.0]]).double()
    learned = method.distil(teacher, line((250.0, 0.0)), client(public=PUBLIC))
    assert all(math.isfinite(value) for value in pair(learned))


def test_what_the_data_cannot_give_is_refused():
    with pytest.raises(ConfigError, match=r"needs 2 public examples and data.public is missing"):
        kt().init_server(setup(Line()))
    with pytest.raises(ConfigError, match=r"needs 2 public examples and data.public has 1; name"):
        kt().init_server(setup(Line(), public=1))
    with pytest.raises(ConfigError, match="other classes than the private ones"):
        kt(labelled=True).init_server(setup(Line(), public=9))
    assert kt(labelled=True).init_server(setup(Line(), public=9, public_labels=True))
    whole = kt(sample=0).init_server(setup(Line(), public=9))
    assert whole.teachers.shape == (2, 9, 2)


def test_a_newcomer_trains_as_long_as_it_would_alone():
    """Not one round: it starts from the initial network, as a newcomer of Local does."""
    world = worlds.with_public()
    (start,) = worlds.simulation(FedAvg(), world).states
    here = {"lr": 0.1, "batch": 3}
    mine = KTpFL(sample=5, **here).adapt(Sent(), start, worlds.local(world, 0))
    theirs = LocalOnly(**here).adapt(Sent(), start, worlds.local(world, 0))
    assert not worlds.differing(mine, theirs)
    assert worlds.differing(mine, KTpFL(sample=5, **here).fit(worlds.local(world, 0), start))


@pytest.mark.parametrize("stacked", [False, True])
def test_local_epochs_grow_by_one_a_round(stacked):
    """Of two batches an epoch: one epoch first, then from two on up to three of them."""
    examples = [(2.0, 1), (-1.0, 0), (0.5, 1)]
    for round, epochs in ((0, 1), (1, 2), (2, 3), (3, 3)):
        kept = []
        for method in (kt(first_epochs=2, epochs=3, batch=2), kt(epochs=epochs, batch=2)):
            local = client(examples, public=PUBLIC, stacked=stacked, round=round)
            kept.append(pair(method.train(line(HIGH), local)))
        assert kept[0] == close(kept[1])


def test_a_round_is_counted_in_epochs_or_in_steps():
    with pytest.raises(ConfigError, match="first_epochs is 2 and steps is 5"):
        kt(first_epochs=2, steps=5).init_server(setup(Line(), public=9))
