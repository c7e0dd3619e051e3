"""What a result and its table of metrics say of an outcome made by hand."""

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


def test_final_scores_on_validation_data_are_not_written_as_test_scores(outcome, tmp_path):
    document.write_metrics(tmp_path, [outcome])
    rows = parquet.read_table(tmp_path / document.METRICS_FILE).to_pylist()
    last = {(r["split"], r["metric"], r["value"]) for r in rows if r["round"] == 30}
    assert {one for one in last if one[0] == "test"} == {
        ("test", "accuracy", 0.9),
        ("test", "loss", 0.3),
    }
    assert {("val", "accuracy", 0.7), ("val", "loss", 0.6)} <= last
