"""MR-MTL by hand."""

import pytest
import torch

from idiolect.core.method import Report, Sent
from idiolect.methods import MRMTL, LocalOnly
from methods.tiny import HIGH, LN9, alike, client, close, line, minus, pair, plus, refuses, slope

TWO = [(2.0, 1), (-1.0, 0)]


@pytest.mark.parametrize("stacked", [False, True])
def test_one_step_by_hand(stacked: bool) -> None:
    """Mean (0, 0), own model HIGH = (0.4, 0.2) ln 9, example (2, 1), lr 0.1, pull 3.

    There p = 9/10, so the gradient is (−0.2, −0.1) + 3 · HIGH; what is kept is what is reported.
    """
    method = MRMTL(lr=0.1, pull=3.0)
    report, own = method.client_step(Sent(line((0, 0))), line(HIGH), client(stacked=stacked))
    assert pair(own) == close((0.28 * LN9 + 0.02, 0.14 * LN9 + 0.01))
    assert alike(report.params, own)
    assert alike(method.deploy(Sent(line((0, 0))), own, client()), own)


def test_a_round_against_plain_python() -> None:
    mean, own = (0.3, -0.2), (-0.5, 0.4)
    for example in TWO * 2:
        own = plus(own, -0.1, plus(slope(own, [example]), 2.0, minus(own, mean)))
    method = MRMTL(lr=0.1, pull=2.0, batch=1, epochs=2)
    _, kept = method.client_step(Sent(line(mean)), line((-0.5, 0.4)), client(TWO))
    assert pair(kept) == close(own)
    newcomer = method.adapt(Sent(line(mean)), line((9, 9)), client(TWO))
    own = mean
    for example in TWO * 2:
        own = plus(own, -0.1, plus(slope(own, [example]), 2.0, minus(own, mean)))
    assert pair(newcomer) == close(own)


def test_without_a_pull_it_is_local() -> None:
    given = {"lr": 0.3, "batch": 1, "epochs": 2, "momentum": 0.5}
    _, own = MRMTL(pull=0.0, **given).client_step(Sent(line(HIGH)), line((0.3, -0.2)), client(TWO))
    _, alone = LocalOnly(**given).client_step(Sent(), line((0.3, -0.2)), client(TWO))
    assert alike(own, alone)


def test_the_mean_weighs_clients_alike() -> None:
    reports = Report(line((0, 0)), torch.tensor([1.0, 3.0]))
    reports = reports._replace(params={n: torch.tensor([0.0, 4.0]) for n in "wb"})
    new = MRMTL().server_step(line((0, 0)), torch.tensor([0, 1]), reports)
    assert pair(new) == close((2.0, 2.0))


def test_settings_out_of_range_are_refused() -> None:
    refuses(MRMTL, "pull", -1.0, "at least 0")
