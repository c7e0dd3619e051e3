"""The hospitals that come with idiolect, and two more tables from a data directory."""

import numpy as np
import pytest

from idiolect.data import federate, load
from idiolect.errors import ConfigError, DataError


def test_heart_has_four_hospitals_with_their_gaps():
    dataset = load("heart")
    assert dataset.client_names == ("Budapest", "Cleveland", "Long Beach", "Switzerland")
    assert np.bincount(dataset.clients).tolist() == [294, 303, 200, 123]
    assert dataset.classes == ("no", "yes")
    assert dataset.counts().tolist() == [411, 509]
    columns = dataset.table.columns
    assert "target" not in columns and "flamby" not in columns  # the answer is no feature
    gaps = {name: int(column.absent.sum()) for name, column in columns.items()}
    assert gaps["chol"] == 30 + 172  # gaps of the file, and zeros, which nobody has
    assert gaps["age"] == 0


def test_heart_is_encoded_by_training_rows():
    federation = federate(load("heart"), "natural", 0)
    x = federation.dataset.decoded(np.concatenate(federation.train))
    age = federation.dataset.features.index("age")
    assert abs(x[:, age].mean()) < 1e-5
    assert abs(x[:, age].std() - 1) < 1e-5
    assert np.isfinite(x).all()


def test_flambys_folds_and_features():
    dataset = load("heart", folds="flamby", features="flamby")
    assert dataset.x.shape == (740, 13)
    counts = np.zeros((4, 2), np.int64)
    np.add.at(counts, (dataset.clients, dataset.origin), 1)
    assert dict(zip(dataset.client_names, counts.tolist(), strict=True)) == {
        "Cleveland": [199, 104],
        "Budapest": [172, 89],
        "Switzerland": [30, 16],
        "Long Beach": [85, 45],
    }
    federation = federate(dataset, "natural", 0, "file", val=0.0)
    for train in federation.train:  # each hospital is scaled by its own
        x = federation.dataset.decoded(train)
        np.testing.assert_allclose(x.mean(0), 0, atol=1e-5)
        varies = x.std(0) > 0
        np.testing.assert_allclose(x[:, varies].std(0, ddof=1), 1, atol=1e-4)


def test_hospitals_may_be_scaled_together():
    dataset = load("heart", folds="flamby", features="flamby", scaling="joint")
    federation = federate(dataset, "natural", 0, "file", val=0.0)
    x = federation.dataset.decoded(np.concatenate(federation.train))
    np.testing.assert_allclose(x.mean(0), 0, atol=1e-5)
    np.testing.assert_allclose(x.std(0, ddof=1), 1, atol=1e-4)


def test_flambys_features_need_its_folds():
    with pytest.raises(ConfigError, match='add folds = "flamby"'):
        load("heart", features="flamby")
    with pytest.raises(ConfigError, match="folds 'mine' is unknown"):
        load("heart", folds="mine")


def test_survival_and_scores_of_a_data_directory(shared_data):
    brca = load("tcga_brca", data_dir=shared_data)
    assert brca.task.kind == "survival"
    assert np.bincount(brca.origin).tolist() == [866, 222]
    assert set(np.unique(brca.y[:, 1])) == {0, 1}
    school = load("school", data_dir=shared_data)
    assert school.task.kind == "number"
    assert len(school.client_names) == 139
    assert (school.y.min(), school.y.max()) == (1, 70)


def test_a_damaged_table_is_refused(tmp_path):
    (tmp_path / "tcga_brca").mkdir()
    (tmp_path / "tcga_brca" / "all.csv").write_text("a,b\n1\n")
    with pytest.raises(DataError, match="damaged"):
        load("tcga_brca", data_dir=tmp_path)
