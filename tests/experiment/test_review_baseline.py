"""The linear model beside Combinations' reviews: what parts and copies of the rows are worth."""

import sys
from pathlib import Path

import numpy
import pytest

pandas = pytest.importorskip("pandas")
pytest.importorskip("sklearn")


def test_copies_of_test_rows_are_told_from_more_reviews(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of reviews without meaning only the copies can be known."""
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parents[2] / "scripts"), *sys.path])
    import review_baseline

    draw = numpy.random.default_rng(0)
    text = [" ".join(f"w{word}" for word in draw.integers(60, size=12)) for _ in range(400)]
    rows = pandas.DataFrame({"text": text, "label": draw.integers(2, size=400)})
    monkeypatch.setattr(review_baseline, "STRENGTHS", (100.0,))
    found = review_baseline.client(rows[:280], rows[280:], seed=0)
    assert found["strength"] == 100.0
    assert all(0.35 < found["parts"][part] < 0.65 for part in found["parts"])
    assert found["copies"]["0.5"] > 0.65
