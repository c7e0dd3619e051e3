"""What a run tells those who watch it."""

import numpy as np

import idiolect
from idiolect.engine.outcome import Several, Silent


class Heard(Silent):
    def __init__(self):
        self.later = []

    def scored(self, outcome):
        self.later.append(outcome)  # asked for only once all is over


def test_scores_can_be_asked_for_long_after_their_round():
    """Evaluated after rounds 2, 4 and 5; then once more with the final scores."""
    one, other = Heard(), Heard()
    held = idiolect.federation("embedded", "iid", clients=3, per_client=20)
    result = idiolect.fit(
        "fedavg", held, model="mlr", rounds=5, every=2, watch=Several([one, other])
    )
    told = [make() for make in one.later]
    assert [outcome.evaluated for outcome in told] == [(2,), (2, 4), (2, 4, 5), (2, 4, 5)]
    assert [bool(outcome.final) for outcome in told] == [False, False, False, True]
    assert [outcome.rounds for outcome in told] == [2, 4, 5, 5]
    for outcome in told:
        for key, curve in outcome.curves.items():
            assert np.array_equal(curve, result.outcome.curves[key][: len(curve)])
    assert len(other.later) == len(one.later)
