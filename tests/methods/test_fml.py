"""FML by hand."""

import pytest
import torch

from idiolect.core.method import Sent
from idiolect.methods import FML, FedAvg, LocalOnly
from methods.tiny import (
    HIGH,
    LN9,
    Chain,
    Line,
    alike,
    client,
    close,
    line,
    mutual,
    pair,
    plus,
    refuses,
    setup,
    sigmoid,
    slope,
)

TWO = [(2.0, 1), (-1.0, 0)]


@pytest.mark.usefixtures("passes")
@pytest.mark.parametrize("stacked", [False, True])
def test_one_step_by_hand(stacked: bool) -> None:
    """Shared (0, 0), private HIGH, the example (2, 1), lr = 1, α = 1/4 (private), β = 3/4 (shared).

    p = 1/2 for the shared model and 9/10 for the private one. Along (2, 1):
      shared:  β (1/2 − 1) + (1 − β)(1/2 − 9/10) = −0.375 − 0.1 = −0.475
      private: α (9/10 − 1) + (1 − α)(9/10 − 1/2) = −0.025 + 0.3 = 0.275
    """
    method = FML(lr=1.0, private_share=0.25, shared_share=0.75)
    report, private = method.client_step(Sent(line((0, 0))), line(HIGH), client(stacked=stacked))
    assert pair(report.params) == close((0.95, 0.475))
    assert pair(private) == close(plus(HIGH, -0.275, (2.0, 1.0)))
    assert float(report.size) == 1


@pytest.mark.usefixtures("passes")
def test_a_round_with_momentum_against_plain_python() -> None:
    """Both step from the same old values on each batch; each has a velocity of its own."""
    shared, private = (0.3, -0.2), (-0.5, 0.4)
    speed_s = speed_p = (0.0, 0.0)
    for example in TWO * 2:
        batch = [example]
        down_s = plus(mutual(shared, private, batch), 0.0, shared)
        down_p = mutual(private, shared, batch)
        down_s = plus(plus((0.0, 0.0), 0.7, slope(shared, batch)), 0.3, down_s)
        down_p = plus(plus((0.0, 0.0), 0.2, slope(private, batch)), 0.8, down_p)
        speed_s, speed_p = plus(down_s, 0.9, speed_s), plus(down_p, 0.9, speed_p)
        shared, private = plus(shared, -0.1, speed_s), plus(private, -0.1, speed_p)
    method = FML(lr=0.1, momentum=0.9, private_share=0.2, shared_share=0.7, batch=1, epochs=2)
    report, kept = method.client_step(Sent(line((0.3, -0.2))), line((-0.5, 0.4)), client(TWO))
    assert pair(report.params) == close(shared)
    assert pair(kept) == close(private)


def test_labels_alone_make_it_fedavg_beside_local_training() -> None:
    settings = {"lr": 0.3, "batch": 1, "epochs": 2, "momentum": 0.5}
    method = FML(private_share=1.0, shared_share=1.0, **settings)
    sent = Sent(line((0.3, -0.2)))
    report, private = method.client_step(sent, line(HIGH), client(TWO))
    plain, _ = FedAvg(**settings).client_step(sent, (), client(TWO))
    _, alone = LocalOnly(**settings).client_step(Sent(), line(HIGH), client(TWO))
    assert pair(report.params) == close(pair(plain.params))
    assert pair(private) == close(pair(alone))


def test_peers_are_in_evaluation_mode() -> None:
    """With KL alone the shared model, z = 0, sees the private one at 9/10, not at σ(3 ln 9).

    Its step is 3 · 0.4 · lr along (2, 1); the private learner's own p is σ(3 ln 9).
    """
    method = FML(lr=0.1, private_share=0.0, shared_share=0.0)
    local = client(main=Line(boost=3.0))
    report, private = method.client_step(Sent(line((0, 0))), line(HIGH), local)
    assert pair(report.params) == close((0.24, 0.12))
    error = sigmoid(3 * LN9) - 0.5
    assert pair(private) == close(plus(HIGH, -0.3 * error, (2.0, 1.0)))


def test_the_private_model_never_leaves_and_has_its_own_architecture() -> None:
    """A chain beside the global line: the report has the line's names only."""
    main, auxiliary = Line(), Chain(1.0, LN9 / 2)
    method = FML(lr=0.1)
    private = method.init_personal(setup(main, auxiliary))
    local = client(main=main, auxiliary=auxiliary)
    sent = Sent(method.init_server(setup(main, auxiliary)))
    report, kept = method.client_step(sent, private, local)
    assert list(report.params) == ["w", "b"]
    assert list(kept) == ["a.w", "b.w"]
    # As one step by hand, with α = β = 1/2: errors −0.45 and 0.15; dz/da = ln 9, dz/db = 2.
    assert pair(report.params) == close((0.09, 0.045))
    assert (float(kept["a.w"]), float(kept["b.w"])) == close((1 - 0.015 * LN9, LN9 / 2 - 0.03))


def test_each_model_predicts_with_its_own_network() -> None:
    main, auxiliary = Line(), Chain(1.0, 1.0)
    local, x = client(main=main, auxiliary=auxiliary), torch.tensor([2.0]).double()
    method, sent = FML(), Sent(line((7.0, 1.0)))
    private = {"a.w": torch.tensor(2.0).double(), "b.w": torch.tensor(5.0).double()}
    models = method.models(sent, method.deploy(sent, private, local))
    scored = {name: float(method.predict(m, x, local)[0, 1]) for name, m in models.items()}
    assert scored == {"personal": 20.0, "global": 15.0}
    assert list(method.models(sent, ())) == ["global"]


def test_a_newcomer_learns_for_as_many_epochs_as_are_set() -> None:
    """Twenty, as Local's, unless told otherwise, whatever a round's are."""
    assert FML().newcomer_epochs == LocalOnly().newcomer_epochs == 20
    method, sent = FML(lr=0.3, newcomer_epochs=3, steps=1), Sent(line((0.3, -0.2)))
    _, private = FML(lr=0.3, epochs=3).client_step(sent, line(HIGH), client(TWO))
    assert alike(method.adapt(sent, line(HIGH), client(TWO)).params, private)


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [("private_share", 1.5, "at most 1"), ("shared_share", -0.5, "at least 0")],
)
def test_settings_out_of_range_are_refused(field: str, value: object, rule: str) -> None:
    refuses(FML, field, value, rule)
