"""FedAvg by hand."""

import math

import pytest
import torch

from idiolect.core import capabilities, tree
from idiolect.core.method import Report, Sent, mean_report
from idiolect.errors import ConfigError
from idiolect.methods import METHODS, FedAvg
from methods.tiny import (
    HIGH,
    LN9,
    ONE,
    Line,
    alike,
    client,
    close,
    line,
    pair,
    plus,
    refuses,
    setup,
    slope,
)

TWO = Report(  # what two clients of one and three examples report
    tree.stack([line((1.0, 2.0)), line((4.0, -1.0))]), torch.tensor([1.0, 3.0]).double()
)
COHORT = torch.tensor([0, 1])


@pytest.mark.parametrize("stacked", [False, True])
def test_two_steps_by_hand(stacked: bool) -> None:
    """From (0, 0) with the example (2, 1) and lr = 0.4 ln 9, twice.

    Step 1: z = 0, p = 1/2, gradient (p − 1)(2, 1) = (−1, −1/2); the model becomes
    0.4 ln 9 · (1, 1/2) = HIGH. Step 2: z = 2 · 0.4 ln 9 + 0.2 ln 9 = ln 9, p = 9/10, gradient
    (−0.2, −0.1): the model becomes HIGH + 0.4 ln 9 · (0.2, 0.1) = 1.2 HIGH. The size is 1.
    """
    method = FedAvg(lr=0.4 * LN9, epochs=2)
    report, personal = method.client_step(Sent(line((0, 0))), (), client(stacked=stacked))
    assert pair(report.params) == close((1.2 * HIGH[0], 1.2 * HIGH[1]))
    assert float(report.size) == 1
    assert personal == ()


def test_examples_of_a_batch_are_averaged() -> None:
    """(2, 1) and (−1, 0) at (0, 0): the mean of (−1, −1/2) and (−1/2, 1/2) is (−3/4, 0)."""
    local = client([(2.0, 1), (-1.0, 0)])
    report, _ = FedAvg(lr=1.0, batch=2).client_step(Sent(line((0, 0))), (), local)
    assert pair(report.params) == close((0.75, 0.0))
    assert float(report.size) == 2


def test_batches_are_taken_in_turn_and_steps_override_epochs() -> None:
    """Three steps on two batches of one: the first, the second, the first again."""
    examples = [(2.0, 1), (-1.0, 0)]
    at = (0.3, -0.2)
    for example in (0, 1, 0):
        at = plus(at, -0.5, slope(at, [examples[example]]))
    method = FedAvg(lr=0.5, batch=1, steps=3, epochs=7)
    report, _ = method.client_step(Sent(line((0.3, -0.2))), (), client(examples))
    assert pair(report.params) == close(at)


def test_momentum_weight_decay_and_clip_by_hand() -> None:
    """With velocity u: g = ∇f + decay · w, u = momentum · u + g, w = w − lr · u; twice.

    Clipping to norm 0.1 scales the first gradient (−1, −1/2), whose norm is √1.25, by 0.1 / √1.25
    (torch's small constant apart).
    """
    at, velocity = (0.3, -0.2), (0.0, 0.0)
    for _ in range(2):
        velocity = plus(plus(slope(at, ONE), 0.1, at), 0.9, velocity)
        at = plus(at, -0.5, velocity)
    method = FedAvg(lr=0.5, epochs=2, momentum=0.9, weight_decay=0.1)
    report, _ = method.client_step(Sent(line((0.3, -0.2))), (), client())
    assert pair(report.params) == close(at)

    clipped, _ = FedAvg(lr=1.0, clip=0.1).client_step(Sent(line((0, 0))), (), client())
    assert pair(clipped.params) == close((0.1 / 1.25**0.5, 0.05 / 1.25**0.5), 1e-5)


@pytest.mark.parametrize(
    ("schedule", "factor"),
    [("constant", 1.0), ("exponential", 0.25), ("step", 0.5), ("cosine", 0.5)],
)
def test_schedules_scale_the_rate(schedule: str, factor: float) -> None:
    """After 2 rounds: 0.5², 0.5^⌊2/2⌋, and (1 + cos(π · 2/4)) / 2 = 1/2 times lr."""
    rounds = 4 if schedule == "cosine" else 2
    method = FedAvg(lr=1.0, schedule=schedule, decay=0.5, decay_rounds=rounds)
    report, _ = method.client_step(Sent(line((0, 0))), (), client(round=2))
    assert pair(report.params) == close((factor, factor / 2), 1e-7)


def test_the_rate_falls_after_the_rounds_that_are_named() -> None:
    """Past rounds 1 and 2, and not yet round 5: 0.5² times lr."""
    method = FedAvg(lr=1.0, schedule="step", decay=0.5, decay_at=(1, 2, 5))
    report, _ = method.client_step(Sent(line((0, 0))), (), client(round=2))
    assert pair(report.params) == close((0.25, 0.125), 1e-7)
    with pytest.raises(ConfigError, match=r"decay_at is \(3,\) and schedule is 'constant'; set"):
        FedAvg(decay_at=(3,))


def test_adam_moves_by_its_rate_first() -> None:
    """Adam's first step is lr · sign(−gradient), but for its ε."""
    report, _ = FedAvg(lr=0.1, optimiser="adam").client_step(Sent(line((0, 0))), (), client())
    assert pair(report.params) == close((0.1, 0.1), 1e-6)


def test_the_average_weighs_by_examples_or_alike() -> None:
    """(1 · (1, 2) + 3 · (4, −1)) / 4 = (3.25, −0.25); alike ((1, 2) + (4, −1)) / 2 = (2.5, 0.5)."""
    state = line((1.0, 1.0))
    assert pair(FedAvg().server_step(state, COHORT, TWO)) == close((3.25, -0.25))
    assert pair(FedAvg(uniform=True).server_step(state, COHORT, TWO)) == close((2.5, 0.5))
    assert pair(mean_report(TWO)) == close((3.25, -0.25))


def test_the_server_rate_is_the_way_it_goes() -> None:
    """From (1, 1) to (3.25, −0.25): half the way is (2.125, 0.375), twice the way (5.5, −1.5)."""
    state = line((1.0, 1.0))
    assert pair(FedAvg(server_lr=0.5).server_step(state, COHORT, TWO)) == close((2.125, 0.375))
    assert pair(FedAvg(server_lr=2.0).server_step(state, COHORT, TWO)) == close((5.5, -1.5))
    whole = FedAvg(server_lr=1.0).server_step(line((9.0, 9.0)), COHORT, TWO)
    assert alike(whole, mean_report(TWO))


def test_everyone_gets_and_uses_the_same_model() -> None:
    method, state = FedAvg(), line((1.0, 1.0))
    sent = method.send(state, COHORT)
    assert sent.shared is state
    assert sent.own == ()
    assert method.deploy(sent, (), client()) is state
    assert capabilities.adapt(method, sent, (), client()) is state
    assert set(method.models(sent, state)) == {"personal", "global"}
    assert alike(method.init_server(setup(Line(0.5, 0.25))), line((0.5, 0.25)))
    assert method.init_personal(setup(Line())) == ()


def test_prediction_is_the_networks() -> None:
    """At HIGH and x = 2, −1: z = ln 9 and −0.2 ln 9."""
    logits = FedAvg().predict(line(HIGH), torch.tensor([2.0, -1.0]).double(), client())
    assert logits.tolist() == [close([0.0, LN9]), close([0.0, -0.2 * LN9])]


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("server_lr", 0.0, "above 0"),
        ("lr", -0.1, "above 0"),
        ("lr", float("nan"), "above 0"),
        ("batch", 0, "at least 1"),
        ("epochs", 0, "at least 1"),
        ("steps", -1, "at least 0"),
        ("momentum", 1.5, "at most 1"),
        ("momentum", -0.5, "at least 0"),
        ("weight_decay", -1.0, "at least 0"),
        ("clip", -1.0, "at least 0"),
        ("decay", 1.5, "at most 1"),
        ("decay_rounds", 0, "at least 1"),
        ("epochs", 1.5, "a whole number"),
        ("epochs", True, "a whole number"),
        ("lr", "0.1", "a number"),
        ("lr", math.inf, "a finite number"),
        ("lr", math.nan, "above 0"),
        ("epochs", 2**40, "at most 2147483647"),
        ("lr", True, "a number"),
        ("uniform", "yes", "true or false"),
        ("schedule", 3, "a word"),
        ("optimiser", "lbfgs", "one of 'sgd', 'adam'"),
        ("schedule", "linear", "one of 'constant', 'exponential', 'step', 'cosine'"),
    ],
)
def test_settings_out_of_range_are_refused(field: str, value: object, rule: str) -> None:
    refuses(FedAvg, field, value, rule)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("fedavg", 3.0), ("fedper", 3.0), ("ditto", 2.0), ("pfedme", 2.0), ("per-fedavg", 2.0)],
)
def test_clients_weigh_as_the_paper_prints_it(name, expected):
    """0 and 4 with one and three examples: 3 by examples, 2 by clients."""
    reports = Report({"w": torch.tensor([0.0, 4.0])}, torch.tensor([1.0, 3.0]))
    new = METHODS[name]().server_step({"w": torch.zeros(())}, torch.arange(2), reports)
    assert float(new["w"]) == expected
    assert METHODS["fedrep"]().uniform and not METHODS["fedprox"]().uniform
