"""Results in a notebook: short texts, pictures, comparisons made in Python."""

import re
import xml.etree.ElementTree as ET

import numpy as np
import pytest

import idiolect
from idiolect.errors import ConfigError, IdiolectError
from idiolect.methods import METHODS


@pytest.fixture(scope="module")
def held():
    return idiolect.federation("embedded", "classes", clients=4, classes_per_client=3, seed=0)


@pytest.fixture(scope="module")
def result(held):
    return idiolect.fit("fedavg-ft", held, "mlr", rounds=3, tune_epochs=1, lr=0.05)


@pytest.fixture(scope="module")
def compared(held):
    methods = {"alone": "local", "<b>all</b>": METHODS["fedavg"](lr=0.05)}
    return idiolect.compare(methods, held, "mlr", rounds=2, seeds=(0, 1))


def test_a_result_is_told_in_a_few_lines(result):
    text = repr(result)
    assert len(text) < 500
    assert "FedAvg + FT: 4 clients, 3 rounds, seed 0" in text
    assert f"personal   {result.mean:.1%}, worst client {result.accuracy.min():.1%}" in text


def test_a_picture_holds_every_client_and_every_round(result, tmp_path):
    picture = result.plot()
    clients, curve = picture.charts
    assert clients.rows == [
        ("FedAvg + FT", name, pytest.approx(score))
        for name, score in zip(result.outcome.members[0].names, result.accuracy, strict=True)
    ]
    assert [row[2] for row in curve.rows] == [1, 2, 3]
    assert curve.rows[-1][3] == pytest.approx(result.curve()[3])
    path = picture.save(tmp_path / "new" / "r.svg")
    root = ET.parse(path).getroot()
    assert root.tag.endswith("svg") and len(root) == 2
    assert "<!doctype html>" in picture.save(tmp_path / "r.html").read_text()
    with pytest.raises(ConfigError, match=r"expected \.svg or \.html"):
        picture.save(tmp_path / "r.png")


def test_a_bar_is_as_long_as_its_score(result):
    """Axes are linear from 0: lengths of bars are proportional to scores."""
    drawn = result.plot()._repr_html_()
    blue = re.findall(r'width="([\d.]+)" height="[\d.]+" fill="#0067a5"', drawn)
    lengths = np.array([float(one) for one in blue])
    assert np.allclose(lengths / lengths.max(), result.accuracy / result.accuracy.max(), atol=2e-3)


def test_a_comparison_in_python_has_a_verdict_and_is_the_methods_alone(held, compared):
    assert list(compared.results) == ["alone", "<b>all</b>"]
    for label, method, settings in (("alone", "local", {}), ("<b>all</b>", "fedavg", {"lr": 0.05})):
        alone = idiolect.fit(method, held, "mlr", rounds=2, **settings)
        assert np.array_equal(compared[label].accuracy, alone.accuracy)
    assert (
        compared.verdict and compared.verdict[:40] in repr(compared) and len(repr(compared)) < 500
    )
    assert {row["seed"] for row in compared.table()} == {0, 1}
    html = compared._repr_html_()
    assert "<b>all" not in html and "&lt;b&gt;all" in html
    assert idiolect.fit("local", held, "mlr", rounds=2).compare(
        idiolect.fit("fedavg", held, "mlr", rounds=2, lr=0.05)
    ).comparison.seeds == (0,)


def test_many_clients_are_drawn_in_order():
    held = idiolect.federation("embedded", "iid", clients=50, per_client=20)
    drawn = idiolect.fit("fedavg", held, "mlr", rounds=1).plot().charts[0]
    values = drawn.marks[0].y
    assert len(values) == 50 and values == sorted(values)


@pytest.mark.parametrize("task", ["number", "survival", "labels"])
def test_other_tasks_are_told_by_their_own_metric(task):
    draws = np.random.default_rng(1)
    frame = {f"x{n}": draws.normal(size=80).tolist() for n in range(3)}
    frame |= {"site": ["a", "b"] * 40, "y": draws.exponential(size=80).tolist()}
    frame |= {"event": draws.integers(0, 2, 80).tolist(), "other": [0, 1, 1, 0] * 20}
    label = {"number": "y", "survival": ["y", "event"], "labels": ["event", "other"]}[task]
    frame = {k: v for k, v in frame.items() if k[0] == "x" or k == "site" or k in label}
    held = idiolect.Federation.from_frame(frame, client="site", label=label, task=task)
    result = idiolect.fit("fedavg", held, "mlr", rounds=2)
    title = {"number": "RMSE", "survival": "concordance", "labels": "AUROC"}[task]
    assert title in repr(result) and title in result._repr_html_()
    assert result.scores.shape == (2,) and len(repr(held)) < 500
    assert held._repr_html_() and held.dataset._repr_html_()


@pytest.mark.parametrize(
    ("what", "words"),
    [
        (lambda held: idiolect.compare("nowhere.toml"), "nowhere.toml"),
        (lambda held: idiolect.compare(["fedavg", "local"]), "the federation is missing"),
        (lambda held: idiolect.compare(["fedavg"], held, "mlr", rounds=1), "needs two or more"),
        (lambda held: idiolect.compare(["local", "local"], held), "two methods are called 'Local'"),
        (lambda held: idiolect.compare(["local", "nope"], held), "unknown method 'nope'"),
        (lambda held: idiolect.compare(5, held), "expected a list such as"),
        (lambda held: idiolect.compare(["local", "fedavg"], held, lrr=1), "did you mean 'lr'"),
        (lambda held: idiolect.fit("fedavg", held, "mlr", metric="rmse"), "metric rmse is not for"),
    ],
)
def test_a_comparison_refuses_in_one_line(held, what, words):
    with pytest.raises(IdiolectError, match=words) as found:
        what(held)
    assert "\n" not in str(found.value)
