"""A verdict by any metric: the better method is found whichever way is better, seldom wrongly."""

from types import SimpleNamespace

import numpy as np
import planted_outputs
import pytest

from idiolect.analysis import compare, fixed_clients
from idiolect.analysis.report.figures import chart, section, table
from idiolect.analysis.report.metric_sections import reworded
from idiolect.analysis.report.page import _facts
from idiolect.analysis.report.report_data import ReportData
from idiolect.analysis.report.result_sections import results
from idiolect.analysis.verdict import overall
from idiolect.core.metrics import METRICS
from idiolect.results.statistics import over_seeds


def result(values, name, guess=None, without=True):
    """Lay values [method, seed, client] of a metric out as a result.json has them."""
    own = METRICS[name]
    draw = np.random.default_rng(0)
    methods = {}
    for place, rows in enumerate(values):
        seeds = []
        for number, row in enumerate(rows):
            clients = []
            for client, value in enumerate(row):
                found = {name: float(value), "loss": 1.0}
                if without:
                    near = value + draw.normal(0, 1e-4, 30)
                    found |= {"without_group": " ".join(map(repr, near.tolist()))}
                    found |= {"effective_rows": 30.0}
                clients.append({"client": f"c{client}", "train": 90, "test": 30, "personal": found})
            traffic = {"bytes_down": 1, "bytes_up": 1}
            models = {"personal": {"weighted_mean": 0.5, "metrics": {name: float(row.mean())}}}
            seeds.append({"seed": number, "clients": clients, "traffic": traffic, "models": models})
        curve = [[[2.0 - place / 10] * len(rows)], [[1.0 + place] * len(rows)]]
        methods["ABC"[place]] = {
            "method": "local" if place else "fedavg",
            "headline": {"personal": over_seeds(rows)},
            "seeds": seeds,
            "rounds": 10,
            "speed": {"seconds": 1.0, "train_seconds": 1.0},
            "curves": {
                "rounds": [5, 10],
                "val": {"personal": {name: [point[0] for point in curve]}},
            },
        }
    kinds = {"name": name, "title": own.title, "higher": own.higher, "percent": own.percent}
    content = {"name": "r", "methods": methods, "metric": kinds, "task": own.kinds[0]}
    content |= {"seeds": list(range(len(values[0]))), "data": {"same_clients": True}}
    if guess is not None:
        seeds = [{"metrics": {name: guess}}] * len(values[0])
        content["baseline"] = {"name": "mean", "seeds": seeds, "headline": {}}
    return content


def values(first, second):
    """Four clients under five seeds, with a little noise."""
    noise = np.random.default_rng(1).normal(0, 0.002, (2, 5, 4))
    return np.array([first, second])[:, None, None] + noise


@pytest.mark.parametrize(
    ("name", "first", "second", "best"),
    [
        ("rmse", 3.0, 4.0, "A"),
        ("rmse", 4.0, 3.0, "B"),
        ("auroc", 0.9, 0.7, "A"),
        ("r2", 0.1, 0.5, "B"),
    ],
)
def test_the_better_method_is_best_whichever_way_is_better(name, first, second, best):
    found = compare(result(values(first, second), name))
    assert found.replication == "examples"
    assert found.verdict.best == best and found.verdict.found
    assert next(iter(found.methods)) == best == next(iter(found.ranks.average))
    pair = found.pairs[0]
    assert pair.better == best and pair.difference == pytest.approx(abs(first - second), abs=0.01)
    assert pair.interval[0] > 0 and pair.wins == 4
    assert METRICS[name].title in found.verdict.sentence
    # B is `local`: all of A's clients are below it, or none.
    assert found.methods["A"].below_local == (0.0 if best == "A" else 1.0)
    worst = found.methods["A"].worst_decile
    assert worst > first if name == "rmse" else worst < first + 1e-9


def test_rounds_to_reach_go_down_where_less_is_better():
    found = compare(result(values(3.0, 4.0), "rmse"), target=1.5)
    assert found.reach["A"].round == 10 and found.reach["B"].round is None


def test_guessing_stands_beside_the_methods():
    worse = compare(result(values(3.0, 4.0), "rmse", guess=2.5))
    assert worse.baseline == 2.5
    assert worse.baseline_line.startswith("No method is better than guessing the mean")
    assert compare(result(values(3.0, 4.0), "rmse", guess=3.5)).baseline_line == ""


def test_without_what_single_rows_say_a_verdict_is_over_clients():
    found = compare(result(values(0.9, 0.7), "auroc", without=False))
    assert found.replication == "clients" and not found.verdict.found


def test_a_report_writes_numbers_where_the_metric_is_no_share():
    content = result(values(3.0, 4.0), "rmse")
    held = ReportData(content, comparison=compare(content))
    sheet = reworded(results(held), held.metric).blocks[0]
    assert sheet.title == "Test RMSE of each client's own model"
    assert sheet.columns[1].head == "RMSE" and sheet.columns[1].best == "low"
    assert sheet.markdown().splitlines()[2].startswith("| A | 3 ±")
    assert " 3" in sheet.csv().splitlines()[1].replace(",", " ")


def test_a_report_turns_its_words_where_less_is_better():
    """Shares stay per cent; Jain's index is best where it is high, whatever the metric is."""
    rows = [("A", 4e6, 0.84, 2000.0, 0.0), ("B", 9e6, 0.82, 3000.0, 0.2)]
    reach = [("A", "personal", 2, 900.0, 1.0), ("B", "personal", None, None, None)]
    blocks = [
        table("fairness-table", rows),
        table("reach", reach, target="3"),
        chart("traffic", [], [], []),
    ]
    fair, reached, traffic = reworded(section("fairness", blocks), METRICS["rmse"]).blocks
    assert [(c.head, c.best) for c in fair.columns[1:]] == [
        ("variance", "low"),
        ("Jain's index", "high"),
        ("worst tenth", "low"),
        ("worse than Local, %", "low"),
    ]
    assert fair.markdown().splitlines()[3] == "| B | 9,000,000 | 0.8200 | 3,000 | 20.0 |"
    assert "RMSE is that low" in reached.caption and "the highest curve" in reached.caption
    assert "| A | personal | 2 | < 0.1 |" in reached.markdown()
    assert "Down and to the left" in traffic.caption
    fair, _, traffic = reworded(section("fairness", blocks), METRICS["auroc"]).blocks
    assert fair.columns[3].best == "high" and fair.columns[4].head == "below Local, %"
    assert "Up and to the left" in traffic.caption


def test_a_report_counts_classes_where_there_are_some():
    content = result(values(3.0, 4.0), "rmse")
    content["data"] |= {"classes": ["rows"], "clients": 4}
    assert _facts(ReportData(content)) == ["4 clients", "5 seeds", "10 rounds"]
    content |= {"task": "classes", "data": {"classes": ["a", "b"]}}
    assert _facts(ReportData(content)) == ["2 classes", "5 seeds", "10 rounds"]


@pytest.mark.parametrize("name", ["auroc", "rmse"])
def test_equal_methods_are_seldom_called_different_and_better_ones_are_found(name):
    """Four clients of 60 rows, five seeds; longer runs are in docs/statistics.md."""
    equal = better = 0
    for trial in range(30):
        draw = np.random.default_rng((trial, 11))
        held = planted_outputs.planted(draw, name, redrawn=bool(trial % 2), rows=40)
        equal += fixed_clients.difference(held, "A", "B").p < 0.05
        if trial < 5:
            held = planted_outputs.planted(draw, name, gain=1.0, rows=40)
            found = fixed_clients.difference(held, "A", "B")
            better += found.p < 0.05 and found.mean > 0
    assert equal <= 4 and better >= 4


def test_ranks_over_splits_turn_where_less_is_better():
    """Accuracy on one split, RMSE on the other: A is the better on both."""

    def split(a, b, higher):
        methods = {"A": SimpleNamespace(mean=a), "B": SimpleNamespace(mean=b)}
        found = SimpleNamespace(beats=[], level=["B"], best="A")
        return SimpleNamespace(methods=methods, verdict=found, higher=higher)

    found = overall({"one": split(0.9, 0.8, True), "two": split(1.0, 2.0, False)})
    assert found is not None and found.ranks.average == {"A": 1.0, "B": 2.0}
