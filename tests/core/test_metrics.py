"""Metrics equal those of scikit-learn and lifelines, with ties and padding."""

import numpy as np
import pytest

from idiolect.core import metrics
from idiolect.core.metrics import METRICS, answers, metric
from idiolect.errors import ConfigError

sk = pytest.importorskip("sklearn.metrics")


def rounded(draw, *shape):
    """Outputs with many ties, exact in binary."""
    return np.round(4 * draw.normal(size=shape)) / 4


def value(name, own):
    return METRICS[name](own)


@pytest.mark.parametrize("seed", range(20))
def test_two_classes_as_scikit_learn(seed):
    draw = np.random.default_rng(seed)
    rows = int(draw.integers(5, 80))
    y = draw.integers(0, 2, rows)
    y[:2] = 0, 1
    said = rounded(draw, rows, 2) + np.stack([-0.5 * y, 0.5 * y], 1)
    own = answers("classes", said, y)
    p = own.shares[:, 1]
    hard = (said[:, 1] > said[:, 0]).astype(int)
    assert value("accuracy", own) == pytest.approx(sk.accuracy_score(y, hard))
    assert value("balanced_accuracy", own) == pytest.approx(sk.balanced_accuracy_score(y, hard))
    assert value("auroc", own) == pytest.approx(sk.roc_auc_score(y, p))
    assert value("auprc", own) == pytest.approx(sk.average_precision_score(y, p))
    assert value("f1", own) == pytest.approx(sk.f1_score(y, hard, zero_division=0))
    assert value("log_loss", own) == pytest.approx(sk.log_loss(y, own.shares, labels=[0, 1]))
    assert value("brier", own) == pytest.approx(sk.brier_score_loss(y, p))
    assert (metrics.confusion(own) == sk.confusion_matrix(y, hard, labels=[0, 1])).all()
    for least in (0.5, 0.8):
        precision, recall, _ = sk.precision_recall_curve(y, p)
        best = recall[:-1][precision[:-1] >= least].max(initial=0)
        found = metric("recall_at_precision", "classes", least)(own)
        assert found == pytest.approx(best)


@pytest.mark.parametrize("seed", range(10))
def test_several_classes_as_scikit_learn(seed):
    draw = np.random.default_rng(seed)
    rows, width = int(draw.integers(20, 80)), int(draw.integers(3, 6))
    y = draw.integers(0, width, rows)
    y[:width] = np.arange(width)
    said = rounded(draw, rows, width)
    own = answers("classes", said, y)
    hard = said.argmax(1)
    assert value("auroc", own) == pytest.approx(
        sk.roc_auc_score(y, own.shares, multi_class="ovr", average="macro")
    )
    assert value("auprc", own) == pytest.approx(
        sk.average_precision_score(np.eye(width)[y], own.shares, average="macro")
    )
    assert value("f1", own) == pytest.approx(sk.f1_score(y, hard, average="macro"))
    assert value("balanced_accuracy", own) == pytest.approx(sk.balanced_accuracy_score(y, hard))
    assert value("log_loss", own) == pytest.approx(sk.log_loss(y, own.shares))
    assert value("brier", own) == pytest.approx(sk.brier_score_loss(y, own.shares))
    assert (metrics.confusion(own) == sk.confusion_matrix(y, hard)).all()


@pytest.mark.parametrize("seed", range(5))
def test_labels_as_scikit_learn(seed):
    draw = np.random.default_rng(seed)
    y = draw.integers(0, 2, (60, 3))
    said = rounded(draw, 60, 3)
    own = answers("labels", said, y.astype(np.float32))
    hard = (said > 0).astype(int)
    assert value("accuracy", own) == pytest.approx((y == hard).mean())
    assert value("auroc", own) == pytest.approx(sk.roc_auc_score(y, own.shares))
    assert value("auprc", own) == pytest.approx(sk.average_precision_score(y, own.shares))
    assert value("f1", own) == pytest.approx(sk.f1_score(y, hard, average="macro"))
    each = [sk.balanced_accuracy_score(y[:, n], hard[:, n]) for n in range(3)]
    assert value("balanced_accuracy", own) == pytest.approx(np.mean(each))
    losses = [sk.log_loss(y[:, n], own.shares[:, n]) for n in range(3)]
    assert value("log_loss", own) == pytest.approx(np.mean(losses))
    assert (metrics.confusion(own) == sk.multilabel_confusion_matrix(y, hard)).all()


@pytest.mark.parametrize("seed", range(5))
def test_numbers_as_scikit_learn(seed):
    draw = np.random.default_rng(seed)
    y, said = draw.normal(3, 5, 40), draw.normal(3, 5, (40, 1))
    own = answers("number", said, y.astype(np.float32))
    y = own.y
    assert value("mae", own) == pytest.approx(sk.mean_absolute_error(y, said[:, 0]))
    assert value("rmse", own) == pytest.approx(sk.root_mean_squared_error(y, said[:, 0]))
    assert value("r2", own) == pytest.approx(sk.r2_score(y, said[:, 0]))
    assert value("explained_variance", own) == pytest.approx(
        sk.explained_variance_score(y, said[:, 0])
    )


@pytest.mark.parametrize("seed", range(20))
def test_concordance_as_lifelines(seed):
    utils = pytest.importorskip("lifelines.utils")
    draw = np.random.default_rng(seed)
    rows = int(draw.integers(4, 60))
    times = draw.integers(1, 12 if seed % 2 else 500, rows).astype(float)
    events = (draw.random(rows) < 0.6).astype(float)
    events[0] = 1
    times[0] = 0
    risk = rounded(draw, rows)
    own = answers("survival", risk[:, None], np.stack([times, events], 1))
    assert value("concordance", own) == pytest.approx(utils.concordance_index(times, -risk, events))
    # Discrete times: a hazard that is higher at every time is a higher risk.
    hazards = answers("survival", np.stack([risk, risk - 1, risk], 1), np.stack([times, events], 1))
    assert value("concordance", hazards) == pytest.approx(value("concordance", own))


def test_calibration_by_hand_and_as_scikit_learn():
    calibration = pytest.importorskip("sklearn.calibration")
    draw = np.random.default_rng(0)
    p = draw.random(300)
    y = (draw.random(300) < p**2).astype(int)
    own = answers("classes", np.stack([np.log(1 - p), np.log(p)], 1), y)
    table = metrics.reliability(own)
    true, mean = calibration.calibration_curve(y, p, n_bins=10)
    assert table[:, 2] / table[:, 0] == pytest.approx(true)
    assert table[:, 1] / table[:, 0] == pytest.approx(mean)
    assert value("calibration_error", own) == pytest.approx(
        (table[:, 0] / 300 * np.abs(true - mean)).sum()
    )
    # Two rows at 0.8, one of them positive: 0.3 off.
    two = answers("classes", np.log([[0.2, 0.8], [0.2, 0.8]]), np.array([0, 1]))
    assert value("calibration_error", two) == pytest.approx(0.3)


@pytest.mark.parametrize("name", METRICS)
def test_the_order_of_rows_does_not_matter(name):
    draw = np.random.default_rng(1)
    own = METRICS[name]
    for kind in own.kinds:
        outputs = rounded(draw, 30, {"classes": 3, "labels": 2}.get(kind, 1))
        y = {
            "classes": draw.integers(0, 3, 30),
            "labels": draw.integers(0, 2, (30, 2)),
            "number": draw.normal(size=30),
            "survival": np.stack([draw.integers(1, 9, 30), draw.integers(0, 2, 30)], 1),
        }[kind]
        plain = own(answers(kind, outputs, y))
        order = draw.permutation(30)
        assert own(answers(kind, outputs[order], y[order])) == pytest.approx(plain)
        assert np.isnan(own(answers(kind, outputs[:0], y[:0])))


def test_the_better_model_is_better_by_every_metric():
    """Fails if `higher` or a sign is wrong."""
    draw = np.random.default_rng(2)
    truth = {
        "classes": draw.integers(0, 2, 200),
        "labels": draw.integers(0, 2, (200, 2)),
        "number": draw.normal(size=200),
        "survival": np.stack([draw.random(200), draw.integers(0, 2, 200)], 1),
    }
    signal = {
        "classes": np.stack([-truth["classes"], truth["classes"]], 1) * 2.0 + [1, -1],
        "labels": truth["labels"] * 4.0 - 2,
        "number": truth["number"][:, None],
        "survival": -truth["survival"][:, :1],
    }
    for own in METRICS.values():
        for kind in own.kinds:
            noise = draw.normal(size=signal[kind].shape)
            good = own(answers(kind, signal[kind] + 0.3 * noise, truth[kind]))
            bad = own(answers(kind, 0.3 * signal[kind] + 2 * noise, truth[kind]))
            assert own.sign * good > own.sign * bad, (own.name, kind)


def test_one_class_is_not_defined():
    one = answers("classes", np.array([[0.0, 1.0], [1.0, 0.0]]), np.array([1, 1]))
    for name in ("auroc", "auprc", "f1", "balanced_accuracy", "recall_at_precision"):
        assert np.isnan(value(name, one)), name
    assert value("accuracy", one) == 0.5
    assert metrics.undefined(one, "auroc") == "not defined: one class"
    alive = answers("survival", np.zeros((3, 1)), np.array([[1, 0], [2, 0], [3, 0]]))
    assert np.isnan(value("concordance", alive))
    flat = answers("number", np.zeros((3, 1)), np.ones(3))
    assert np.isnan(value("r2", flat)) and value("mae", flat) == 1


def test_a_broken_model_is_wrong_and_has_no_curve():
    broken = answers("classes", np.array([[np.nan, 0.0], [0.0, 1.0]]), np.array([0, 1]))
    assert value("accuracy", broken) == 0.5
    assert np.isnan(value("auroc", broken))
    assert np.isnan(value("log_loss", broken))


@pytest.mark.parametrize("name", ["accuracy", "balanced_accuracy", "f1"])
def test_the_threshold_is_the_best_of_all(name):
    draw = np.random.default_rng(3)
    for _ in range(20):
        y = (draw.random(40) < 0.2).astype(int)
        y[:2] = 0, 1
        outputs = rounded(draw, 40, 2)
        outputs[:, 1] += y - 2
        own = answers("classes", outputs, y)
        chosen = metrics.best_threshold(own, name)
        found = value(name, answers("classes", outputs, y, threshold=chosen))
        tried = [
            value(name, answers("classes", outputs, y, threshold=t))
            for t in np.concatenate([own.shares[:, 1] - 1e-9, own.shares[:, 1] + 1e-9])
        ]
        assert found == pytest.approx(np.nanmax(tried))
    assert metrics.best_threshold(answers("classes", outputs, np.ones(40)), name) == 0.5


def test_names_are_checked_against_the_task():
    assert metric("", "classes").name == "accuracy" and metric("", "number").name == "rmse"
    with pytest.raises(ConfigError, match="auroc"):
        metric("auroc ", "classes")
    with pytest.raises(ConfigError, match=r"not for the task number; expected one of mae, rmse"):
        metric("auroc", "number")


def test_leaving_out_groups_gives_the_variance_of_a_mean():
    """The jackknife of a mean is its usual standard error; of AUROC near DeLong's."""
    draw = np.random.default_rng(4)
    y = draw.integers(0, 2, 50)
    own = answers("classes", draw.normal(size=(50, 2)), y)
    left = metrics.without_groups(own, METRICS["brier"], 64)
    assert np.isnan(left[50:]).all()
    left = left[:50]
    jack = 49 / 50 * np.square(left - left.mean()).sum()
    rows = METRICS["brier"].rows(own)
    assert jack == pytest.approx(rows.var(ddof=1) / 50)
    one = metrics.without_groups(own, METRICS["auroc"], 64)[0]
    assert one == value("auroc", own.take(np.arange(50) != 0))
