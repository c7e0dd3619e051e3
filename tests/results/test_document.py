"""What a result and its table of metrics say of an outcome made by hand."""

from dataclasses import replace

import numpy as np
import pytest
from pyarrow import parquet

from idiolect.engine.outcome import Members, Outcome, Speed, Wire
from idiolect.results import document


@pytest.fixture
def outcome():
    """Two clients, one seed, three evaluated rounds; validation is best in the second."""
    accuracy = np.array([[[0.2, 0.4]], [[0.8, 0.6]], [[0.5, 0.5]]])
    final = {"accuracy": 0.9, "loss": 0.3, "val_accuracy": 0.7, "val_loss": 0.6}
    return Outcome(
        label="One",
        about={},
        members=(Members(0, ("a", "b"), (3, 4), (1, 1), ""),),
        rounds=30,
        evaluated=(10, 20, 30),
        curves={"val/personal/accuracy": accuracy, "val/personal/loss": 1 - accuracy},
        final={f"personal/{name}": np.full((1, 2), value) for name, value in final.items()},
        watched=(),
        scored=(),
        facts={},
        reasons=(),
        wire=(Wire(),),
        speed=Speed(),
        notices=(),
        left_out=(),
    )


def test_the_best_validation_round_has_the_highest_accuracy(outcome):
    found = document.build_document({}, [outcome], complete=True)["methods"]["One"]
    assert found["best_validation_round"]["personal"] == {
        "round": 20,
        "val_accuracy": pytest.approx(0.7),
    }


def test_the_best_test_round_is_weighed_by_test_rows_and_used_for_nothing(outcome):
    """Test rows 1 and 3: the plain mean is highest in round 10, the weighted one in round 20.

    Round 10: (0.9 + 3 · 0.1) / 4 = 0.3; 20: (0.2 + 3 · 0.6) / 4 = 0.5; 30: 0.4; final: 0.45.
    """
    curve = np.array([[[0.9, 0.1]], [[0.2, 0.6]], [[0.4, 0.4]]])
    members = (replace(outcome.members[0], test=(1, 3)),)
    final = {**outcome.final, "personal/accuracy": np.full((1, 2), 0.45)}
    curves = {**outcome.curves, "test_curve/personal/accuracy": curve}
    watched = replace(outcome, members=members, curves=curves, final=final)
    found = document.build_document({}, [watched], complete=True)["methods"]["One"]
    assert found["best_test_round"] == {
        "personal": {"round": [20], "weighted_mean": [pytest.approx(0.5)]}
    }
    unwatched = replace(watched, curves=outcome.curves)
    plain = document.build_document({}, [unwatched], complete=True)["methods"]["One"]
    late = found.pop("last_test_rounds")["personal"]
    assert late == {  # rounds 10, 20 and the last, of which the final score counts
        "from_round": [10],
        "mean": [pytest.approx((0.5 + 0.4 + 0.45) / 3)],
        "weighted_mean": [pytest.approx((0.3 + 0.5 + 0.45) / 3)],
    }
    chosen = found.pop("test_at_best_validation_round")["personal"]
    assert chosen == {"round": [20], "mean": [0.4], "weighted_mean": [pytest.approx(0.5)]}
    assert found.pop("best_test_round") and found == plain
    last = replace(watched, final={**final, "personal/accuracy": np.full((1, 2), 0.9)})
    found = document.build_document({}, [last], complete=True)["methods"]["One"]
    assert found["best_test_round"]["personal"]["round"] == [30]
    low = replace(
        watched, watched=(np.array([0]),), curves={"test_curve/personal/accuracy": curve[..., :1]}
    )
    found = document.build_document({}, [low], complete=True)["methods"]["One"]
    assert found["best_test_round"]["personal"] == {"round": [10], "weighted_mean": [0.9]}


def test_the_mean_of_the_last_test_rounds_is_of_ten_scored_ones(outcome):
    """Twelve are scored, 0.01 to 0.12, the last of them again at the end: 0.03 to 0.11, and 0.5."""
    curve = np.arange(1, 13).reshape(12, 1, 1).repeat(2, axis=2) / 100
    final = {**outcome.final, "personal/accuracy": np.full((1, 2), 0.5)}
    curves = {**outcome.curves, "test_curve/personal/accuracy": curve}
    watched = replace(outcome, curves=curves, final=final, evaluated=[*range(2, 26, 2)], rounds=24)
    found = document.build_document({}, [watched], complete=True)["methods"]["One"]
    late = found["last_test_rounds"]["personal"]
    assert late["from_round"] == [6]
    assert late["mean"] == late["weighted_mean"] == [pytest.approx((0.63 + 0.5) / 10)]


def test_metrics_are_written_as_they_are_without_pandas(outcome, tmp_path, monkeypatch):
    """Texts of any length, and numbers; pyarrow.array would import pandas where it is installed."""
    named = replace(outcome.members[0], names=["", "Zürich 東京"])
    outcome = replace(outcome, members=[named], label="Ümlaut")
    monkeypatch.setattr("pyarrow.array", None)
    document.write_metrics(tmp_path, [outcome])
    table = parquet.read_table(tmp_path / document.METRICS_FILE)
    assert table.num_rows and table.column("value").type == "double"
    rows = table.to_pylist()
    assert [row["client"] for row in rows] == ["", "Zürich 東京"] * (len(rows) // 2)
    assert {row["method"] for row in rows} == {"Ümlaut"}
    assert {row["seed"] for row in rows} == {named.seed}
    validated = [row for row in rows if (row["metric"], row["split"]) == ("accuracy", "val")]
    first = [(row["round"], row["value"]) for row in validated if row["round"] < 30]
    assert first == [(10, 0.2), (10, 0.4), (20, 0.8), (20, 0.6)]


def test_final_scores_on_validation_data_are_not_written_as_test_scores(outcome, tmp_path):
    document.write_metrics(tmp_path, [outcome])
    rows = parquet.read_table(tmp_path / document.METRICS_FILE).to_pylist()
    last = {(r["split"], r["metric"], r["value"]) for r in rows if r["round"] == 30}
    assert {one for one in last if one[0] == "test"} == {
        ("test", "accuracy", 0.9),
        ("test", "loss", 0.3),
    }
    assert {("val", "accuracy", 0.7), ("val", "loss", 0.6)} <= last
