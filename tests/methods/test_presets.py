"""Presets: each makes a method, and what PFLlib has too can be run as it is there."""

import pytest

from idiolect.methods import METHODS

IN_PFLLIB = (
    "local", "fedavg", "fedprox", "scaffold", "feddyn", "moon", "fedper", "fedrep", "fedbabu",
    "lg-fedavg", "fedbn", "fedala", "fedproto", "fedrod", "feddbe", "fedcp", "gpfl", "fedpac",
    "pfedme", "per-fedavg", "fml", "fedamp", "fedfomo", "ditto", "apfl",
    "feddistill", "apple", "fedphp", "fedgen",
)  # fmt: skip

GIVEN = [(name, preset) for name, kind in METHODS.items() for preset in kind.presets]


@pytest.mark.parametrize(("name", "preset"), GIVEN)
def test_a_preset_makes_the_method(name, preset):
    values = METHODS[name].presets[preset]
    method = METHODS[name](**values)
    assert all(getattr(method, key) == value for key, value in values.items())


@pytest.mark.parametrize("name", METHODS)
def test_pfllibs_defaults_are_a_preset_of_what_it_has(name):
    """Rate 0.005 and batches of ten; papers by its author give those, and are called so."""
    presets = METHODS[name].presets
    found = presets.get("pfllib") or (presets.get("paper", {}) if name in IN_PFLLIB else {})
    if name in IN_PFLLIB:
        assert (found["lr"], found["batch"]) == (0.005, 10)
    else:
        assert "pfllib" not in presets
