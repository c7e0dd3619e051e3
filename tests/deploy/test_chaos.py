"""A random fault every few seconds: the run ends, its attendance is true. `make test-faults`."""

import importlib.util

import pytest
from chaos import NODES, Chaos, judged

pytestmark = [
    pytest.mark.faults,
    pytest.mark.skipif(
        importlib.util.find_spec("nvflare") is None, reason="nvflare is not installed (extra flare)"
    ),
]


def test_a_run_of_40_rounds_ends_whatever_dies_and_says_who_was_missing(tmp_path):
    rounds = 40
    chaos = Chaos(tmp_path, rounds, seed=1)
    try:
        found = judged(chaos, chaos.run(every=4.0, limit=1500.0))
    finally:
        if chaos.watch is not None:
            chaos.watch.kill()
            chaos.watch.wait()
        chaos.federation.close()
    assert found["rounds"] == found["recorded"] == rounds and found["faults"] >= 3
    assert found["reported"] == found["participations"] == NODES * rounds - found["missed"]
    assert not found["unexplained"] and not found["unnoticed"], found
