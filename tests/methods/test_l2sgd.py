"""L2SGD by hand."""

import pytest

from idiolect.core.method import Sent
from idiolect.methods import L2SGD, LocalOnly
from methods.tiny import HIGH, alike, client, close, line, minus, pair, plus, refuses, slope

TWO = [(2.0, 1), (-1.0, 0)]


@pytest.mark.parametrize("stacked", [False, True])
def test_one_round_by_hand(stacked: bool) -> None:
    """Own model 2 · HIGH, mean (0, 0), a step at lr 0.1, pull 5: the way is 5 · 0.1 · 1 = 1/2.

    So the step starts at HIGH, where p = 9/10 and the gradient is −0.1 · (2, 1).
    """
    method, own = L2SGD(lr=0.1, pull=5.0), (2 * HIGH[0], 2 * HIGH[1])
    report, kept = method.client_step(Sent(line((0, 0))), line(own), client(stacked=stacked))
    assert pair(kept) == close((HIGH[0] + 0.02, HIGH[1] + 0.01))
    assert alike(report.params, kept)
    assert alike(method.deploy(Sent(line((0, 0))), kept, client()), kept)


@pytest.mark.parametrize(
    ("given", "taken"), [({"batch": 1, "epochs": 2}, 4), ({"batch": 2}, 1), ({"steps": 3}, 3)]
)
def test_more_local_steps_make_a_longer_step_to_the_mean(given: dict[str, int], taken: int) -> None:
    mean, own = (0.3, -0.2), (-0.5, 0.4)
    now = plus(own, -0.5 * 0.1 * taken, minus(own, mean))
    batches = [[one] for one in TWO] if given.get("batch") == 1 else [TWO]
    for step in range(taken):
        now = plus(now, -0.1, slope(now, batches[step % len(batches)]))
    method = L2SGD(lr=0.1, pull=0.5, **given)
    _, kept = method.client_step(Sent(line(mean)), line(own), client(TWO))
    assert pair(kept) == close(now)


def test_the_step_ends_at_the_mean_however_strong_the_pull() -> None:
    method = L2SGD(lr=0.1, pull=1e6)
    _, near = method.client_step(Sent(line((0.3, -0.2))), line((5, 5)), client())
    newcomer = method.adapt(Sent(line((0.3, -0.2))), line((9, 9)), client())
    assert pair(near) == close(pair(newcomer))


def test_a_newcomer_takes_its_steps_from_the_mean_whatever_it_holds() -> None:
    """At HIGH p = 9/10, so a step at lr 0.1 goes by 0.1 · 0.1 · (2, 1), however weak the pull."""
    newcomer = L2SGD(lr=0.1, pull=0.0).adapt(Sent(line(HIGH)), line((9, 9)), client())
    assert pair(newcomer) == close((HIGH[0] + 0.02, HIGH[1] + 0.01))


def test_without_a_pull_it_is_local() -> None:
    given = {"lr": 0.3, "batch": 1, "epochs": 2, "weight_decay": 0.1}
    _, own = L2SGD(pull=0.0, **given).client_step(Sent(line(HIGH)), line((0.3, -0.2)), client(TWO))
    _, alone = LocalOnly(**given).client_step(Sent(), line((0.3, -0.2)), client(TWO))
    assert alike(own, alone)


def test_settings_out_of_range_are_refused() -> None:
    refuses(L2SGD, "pull", -1.0, "at least 0")
