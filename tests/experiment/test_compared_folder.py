"""A folder of `compare`: the same figures under the same names on the screen and in the report."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from idiolect.analysis.report.client_sections import coefficients, fairness
from idiolect.analysis.report.report_data import read_run
from idiolect.analysis.report.result_sections import communication, results
from idiolect.cli import app
from idiolect.results import document, trace

TOML = """
name = "four"
seeds = {seeds}
rounds = 3
[data]
source = "own.csv"
[model]
name = "mlr"
[training]
batch = 8
lr = 0.1
[evaluate]
every = 1
[[methods]]
name = "ktpfl-weights"
[[methods]]
name = "local"
"""
LABEL = "KT-pFL weights"


def invoke(*arguments):
    done = CliRunner(env={"COLUMNS": "220"}).invoke(app, [str(one) for one in arguments])
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Four hospitals; two seeds are compared first, a third is added later as a part of its own."""
    home = tmp_path_factory.mktemp("four")
    draw = np.random.default_rng(0)
    lines = ["a,b,label,client"]
    for row in range(160):
        x, y = draw.normal(size=2)
        lines.append(f"{x},{y},{int(x + 0.3 * draw.normal() > 0)},hospital {row % 4}")
    (home / "own.csv").write_text("\n".join(lines) + "\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("IDIOLECT_CACHE", str(home / "cache"))
        for seeds in ("[0, 1]", "[0, 1, 2]"):
            (home / "e.toml").write_text(TOML.format(seeds=seeds))
            invoke("compare", home / "e.toml", "--out", home / "out")
    return home / "out"


def test_the_matrix_is_there_after_a_comparison(folder):
    (label,) = trace.traced_labels(folder)
    found = trace.read_trace(folder, label)
    assert found.seeds == (0, 1, 2) and found.rounds == (1, 2, 3)
    _, course = found.matrix()
    assert course.shape == (3, 4, 4)
    parts = [
        trace.read_trace(part.parent.parent, label) for part in folder.rglob("parts/**/traces/*")
    ]
    assert sorted(len(one.seeds) for one in parts) == [1, 2]
    for one in parts:
        for seed in one.seeds:
            assert np.array_equal(one.matrix(seed)[1], found.matrix(seed)[1])
    assert "hospital 3" in invoke("trace", folder)
    assert coefficients(read_run(folder)) is not None


def test_the_spread_over_clients_is_one_figure_everywhere(folder):
    """Deviation over a seed's clients, averaged over seeds; by hand, then wherever it is shown."""
    content = document.read_document(folder)
    told = json.loads((folder / "comparison.json").read_text())["splits"][0]["comparison"]
    rows = {row["method"]: row for row in document.summary(content) if row["model"] == "personal"}
    held = read_run(folder)
    (sheet,) = results(held).blocks
    place = [column.head for column in sheet.columns].index("± clients")
    shown = {row[0]: row[place] for row in sheet.rows}
    bars = {mark.method: mark.x[0] for mark in fairness(held).blocks[0].marks}
    for label, method in content["methods"].items():
        each = [[c["personal"]["accuracy"] for c in seed["clients"]] for seed in method["seeds"]]
        expected = pytest.approx(np.mean([np.std(row, ddof=1) for row in each]))
        assert told["methods"][label]["std_clients"] == expected
        assert rows[label]["std_clients"] == expected
        assert content["fairness"]["methods"][label]["std"] == expected
        assert method["headline"]["personal"]["clients"]["std"] == expected
        assert shown[label] == expected and bars[label] == expected


def test_costs_have_the_same_names_and_figures_on_the_screen_and_in_the_report(folder):
    screen = invoke("compare", folder)
    told = json.loads(invoke("compare", folder, "--json"))["result"]["splits"][0]["comparison"]
    held = read_run(folder)
    (sheet,) = results(held).blocks
    heads = [column.head for column in sheet.columns]
    for name, key in (("rounds", "rounds"), ("MB in all", "bytes"), ("seconds in all", "seconds")):
        assert name in screen
        shown = {row[0]: row[heads.index(name)] for row in sheet.rows}
        assert shown == {label: pytest.approx(own[key]) for label, own in told["costs"].items()}
    reach = next(block for block in communication(held).blocks if block.id == "reach")
    target = f"{100 * told['target']:.1f}%"
    places = {column.head: place for place, column in enumerate(reach.columns)}
    for word, key in (("rounds", "round"), ("MB", "bytes"), ("seconds", "seconds")):
        name = f"{word} to {target}"
        assert name in screen
        shown = {row[0]: row[places[name]] for row in reach.rows}
        assert shown == {label: pytest.approx(own[key]) for label, own in told["reach"].items()}


def test_a_report_says_what_the_comparison_was_asked_for(folder):
    """Target and unit of `comparison.json` are those of the page."""
    path = folder / "comparison.json"
    before = path.read_text()
    try:
        content = json.loads(before)
        content["asked"] = {"alpha": 0.1, "target": 0.6, "unit": "clients"}
        path.write_text(json.dumps(content))
        held = read_run(folder)
        assert held.comparison.target == 0.6 and held.comparison.replication == "clients"
        (sheet,) = results(held).blocks
        assert "90% interval" in [column.head for column in sheet.columns]
    finally:
        path.write_text(before)


def test_the_verdict_says_whom_it_is_about_and_can_be_asked_otherwise(folder):
    assert "of these 4 clients, over their test rows and 3 seeds" in invoke("compare", folder)
    over = invoke("compare", folder, "--unit", "clients")
    assert "of clients like these 4, over clients and 3 seeds" in over
    wrong = CliRunner().invoke(app, ["compare", str(folder), "--unit", "rows"])
    assert wrong.exit_code != 0 and "expected clients or examples" in wrong.output
