"""FedAvg with fine-tuning, by hand."""

import pytest

from idiolect.core import capabilities
from idiolect.core.method import Sent
from idiolect.methods import FedAvg, FedAvgFT
from methods.tiny import (
    HIGH,
    LN9,
    ONE,
    Ordered,
    alike,
    client,
    close,
    line,
    pair,
    plus,
    refuses,
    slope,
)


@pytest.mark.parametrize("stacked", [False, True])
def test_fine_tuning_by_hand(stacked: bool) -> None:
    """Two passes from (0, 0) over (2, 1) at tune_lr = 0.4 ln 9: HIGH, then 1.2 HIGH.

    The numbers are those of FedAvg's own test; `lr` and `epochs` of the rounds play no part.
    """
    method = FedAvgFT(tune_lr=0.4 * LN9, tune_epochs=2, lr=5.0, epochs=9)
    tuned = method.deploy(Sent(line((0, 0))), (), client(stacked=stacked))
    assert pair(tuned) == close((1.2 * HIGH[0], 1.2 * HIGH[1]))


@pytest.mark.parametrize("nesterov", [False, True])
def test_fine_tuning_keeps_momentum_and_weight_decay(nesterov: bool) -> None:
    """With velocity u: g = ∇f + decay · w, u = 0.9 u + g; the step is along u, or g + 0.9 u."""
    at, velocity = (0.3, -0.2), (0.0, 0.0)
    for _ in range(3):
        gradient = plus(slope(at, ONE), 0.1, at)
        velocity = plus(gradient, 0.9, velocity)
        at = plus(at, -0.5, plus(gradient, 0.9, velocity) if nesterov else velocity)
    method = FedAvgFT(tune_lr=0.5, tune_epochs=3, momentum=0.9, weight_decay=0.1, nesterov=nesterov)
    assert pair(method.deploy(Sent(line((0.3, -0.2))), (), client())) == close(at)


def test_only_training_data_is_used() -> None:
    plans = Ordered({"train": ONE})
    FedAvgFT().deploy(Sent(line((0, 0))), (), client(plans=plans))
    assert plans.asked == ["train"]


def test_rounds_are_fedavgs() -> None:
    """Equal settings make an equal key, whatever the fine-tuning; a round reports the same."""
    plain, tuned = FedAvg(lr=0.3, epochs=2), FedAvgFT(lr=0.3, epochs=2, tune_lr=9.0, tune_epochs=4)
    assert plain.training() == tuned.training()
    assert hash(plain.training()) == hash(tuned.training())
    assert FedAvgFT(lr=0.4).training() != FedAvg(lr=0.3).training()
    assert FedAvgFT(server_lr=0.5).training() != FedAvg().training()
    sent = Sent(line((0.3, -0.2)))
    assert alike(plain.client_step(sent, (), client()), tuned.client_step(sent, (), client()))


def test_a_newcomer_is_tuned_alike() -> None:
    method, sent = FedAvgFT(tune_lr=0.2), Sent(line((0.3, -0.2)))
    assert alike(capabilities.adapt(method, sent, (), client()), method.deploy(sent, (), client()))
    assert set(method.models(sent, sent.shared)) == {"personal", "global"}


@pytest.mark.parametrize(
    ("field", "value", "rule"), [("tune_epochs", 0, "at least 1"), ("tune_lr", 0.0, "above 0")]
)
def test_settings_out_of_range_are_refused(field: str, value: object, rule: str) -> None:
    refuses(FedAvgFT, field, value, rule)
