"""The linear model beside Combinations' reviews: what parts and copies of the rows are worth."""

import json
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


def test_a_whole_file_takes_the_place_of_amazons_part(monkeypatch, tmp_path) -> None:
    """In the figures and in the folder for networks; others' rows stay, tests are a fifth."""
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parents[2] / "scripts"), *sys.path])
    import review_baseline

    (tmp_path / "data" / "cross_sector").mkdir(parents=True)
    part = pandas.DataFrame({"text": "few", "label": [0, 1], "client": ["amazon", "yelp"]})
    for name in ("train", "test"):
        part.to_parquet(tmp_path / "data" / "cross_sector" / f"{name}.parquet")
    words = {"reviews.text": [f"good {n % 5}" for n in range(100)] + [None]}
    rating = [4.0, 5.0] * 50 + [1.0]
    whole = tmp_path / "whole.csv"
    pandas.DataFrame({**words, "reviews.rating": rating}).to_csv(whole)
    kept = tmp_path / "reviews.json"
    kept.write_text(json.dumps({"cross_sector": {"clients": {"amazon": 1, "yelp": 2}}}))
    monkeypatch.setattr(review_baseline, "RESULTS", kept)
    given = [str(tmp_path / "data"), "--amazon", str(whole), "--write", str(tmp_path / "to")]
    monkeypatch.setattr(sys, "argv", ["review_baseline.py", *given])
    review_baseline.main()
    found = json.loads(kept.read_text())
    assert found["cross_sector"]["clients"] == {"amazon": 1, "yelp": 2}
    clients = found[review_baseline.WHOLE]["clients"]
    assert clients["yelp"] == 2 and clients["amazon"]["majority"] == 0.5
    for name, rows in (("train", 80), ("test", 20)):
        written = pandas.read_parquet(tmp_path / "to" / "cross_sector" / f"{name}.parquet")
        assert written.client.value_counts().to_dict() == {"amazon": rows, "yelp": 1}
        assert set(written.label[written.client == "amazon"]) == {3, 4}
