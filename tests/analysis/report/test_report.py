"""Reports of a real run: the figures shown are the run's."""

import json
import shutil
import tomllib
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from typer.testing import CliRunner

import idiolect
from idiolect.analysis import compare
from idiolect.analysis.report import report, report_data
from idiolect.analysis.report.figures import Chart, Table
from idiolect.analysis.report.page import page_content, page_html, page_update, sections
from idiolect.analysis.report.report_data import ReportData, curves_of, read_run
from idiolect.cli import app
from idiolect.errors import DataError, MissingExtra
from idiolect.results import document, run_files


def charts(folder):
    found = sections(read_run(folder))
    return {b.id: b for s in found for b in s.blocks if isinstance(b, Chart)}


def test_the_curves_of_the_file_are_those_of_the_outcomes(tmp_path):
    """What a finished run and a run going on are drawn from agrees, point by point."""
    held = idiolect.federation("embedded", "iid", seed=0, clients=4, per_client=20)
    result = idiolect.fit("fedavg", held, model="mlr", rounds=3)
    from idiolect.results import document

    document.write_results(tmp_path, {}, [result.outcome], complete=True)
    document.write_metrics(tmp_path, [result.outcome])
    read = read_run(tmp_path).curves
    live = curves_of(result.outcome)
    assert [(c.model, c.split, c.rounds) for c in read] == [
        (c.model, c.split, c.rounds) for c in live
    ]
    for one, other in zip(read, live, strict=True):
        assert np.allclose(one.seeds, other.seeds, atol=1e-7)
    assert [c.model for c in read] == ["global", "personal"]


def test_figures_show_what_the_result_says(finished):
    content = document.read_document(finished)
    drawn = charts(finished)
    dots = {mark.method: mark.x for mark in drawn["by-client"].marks if mark.kind == "dots"}
    for label, method in content["methods"].items():
        by_seed = [[c["personal"]["accuracy"] for c in s["clients"]] for s in method["seeds"]]
        assert dots[label] == pytest.approx(np.mean(by_seed, axis=0).tolist())
    bars = {mark.method: mark.x[0] for mark in drawn["fairness"].marks}
    assert bars == {k: pytest.approx(v["std"]) for k, v in content["fairness"]["methods"].items()}
    bands = [mark for mark in drawn["curves"].marks if mark.kind == "band"]
    assert bands
    for band in bands:
        line = next(
            m
            for m in drawn["curves"].marks
            if (m.kind, m.method, m.panel) == ("line", band.method, band.panel)
        )
        width = np.subtract(band.high, line.y)
        assert np.allclose(width, np.subtract(line.y, band.low)) and (width >= 0).all()


def test_methods_that_share_their_rounds_share_a_band(finished):
    """PersFL's global model is FedAvg's: one band for both, and hovering names both."""
    marks = charts(finished)["curves"].marks
    shared = [m for m in marks if m.panel == 1]
    assert [m.method for m in shared if m.kind == "band"] == ["FedAvg"]
    lines = {m.method: m for m in shared if m.kind == "line"}
    assert set(lines) == {"FedAvg", "PersFL <b>"}
    assert all(m.text[0].startswith("FedAvg, PersFL <b>, round 1") for m in lines.values())


def test_the_grid_has_a_panel_for_each_client_and_a_line_for_each_temperature(finished):
    """λ = 0 and λ = 1 have one student for all temperatures: every line has all five shares."""
    grid = charts(finished)["grid-0"]
    assert len(grid.panels) == 6 and len(grid.marks) == 12
    assert all(list(mark.x) == [0, 0.25, 0.5, 0.75, 1] for mark in grid.marks)
    method = document.read_document(finished)["methods"]["PersFL <b>"]
    scores = [s["clients"][2]["λ=0.5 T=5"]["accuracy"] for s in method["seeds"]]
    line = next(m for m in grid.marks if m.panel == 2 and m.name == "T = 5")
    assert line.y[2] == pytest.approx(np.mean(scores))


def test_holdings_are_the_federations(finished):
    experiment = idiolect.load_experiment(finished / "experiment.toml")
    from idiolect.experiment.build import build_federations

    for kept, federation in zip(
        run_files.read_holdings(finished), build_federations(experiment), strict=True
    ):
        assert kept.names == federation.names and kept.classes == federation.dataset.classes
        for place, part in enumerate(run_files.DATA_PARTS):
            assert (kept.counts[place] == federation.counts(part)).all()


def test_what_crosses_the_network_is_what_was_counted(finished):
    """The leaves named in the result weigh exactly the bytes that were counted, 4 a number."""
    for method in document.read_document(finished)["methods"].values():
        crossing = method["crossing"]
        for seed in method["seeds"]:
            turns = seed["traffic"]["participations"]
            for way in ("up", "down"):
                numbers = sum(int(np.prod(shape)) for shape in crossing[way].values())
                assert 4 * numbers * turns == seed["traffic"][f"bytes_{way}"], (
                    method["title"],
                    way,
                )
    methods = document.read_document(finished)["methods"]
    assert set(methods["FedPer"]["crossing"]["stays"]).isdisjoint(
        name.removeprefix("params.") for name in methods["FedPer"]["crossing"]["up"]
    )


def test_files_beside_the_page(finished, tmp_path):
    written = report(finished, tmp_path / "a.html", files=tmp_path / "files")
    assert written[0] == tmp_path / "a.html" and all(path.is_file() for path in written)
    names = {path.name for path in written}
    for chart in charts(finished):
        assert {f"{chart}.svg", f"{chart}.csv"} <= names
    assert {"headline.md", "headline.tex", "headline.csv"} <= names
    for path in (tmp_path / "files" / "figures").glob("*.svg"):
        ElementTree.fromstring(path.read_text())


def test_several_runs_share_a_page(finished, tmp_path):
    text = report([finished, finished], tmp_path / "two.html")[0].read_text()
    assert 'id="overview-table"' in text
    assert 'id="plot-r0-curves"' in text and 'id="plot-r1-curves"' in text
    assert text.count('data-switch="FedAvg"') == 1


def test_whatever_a_name_holds_stays_text(finished, tmp_path):
    """A client's name may come from anywhere; in the page it is never markup or script."""
    nasty = "</script><img src=x onerror=alert(1)><!--"
    read = read_run(finished)
    text = json.dumps(read.content).replace("client 0", nasty.replace('"', '\\"'))
    hostile = ReportData(json.loads(text), read.curves, read.holdings, nasty, nasty)
    html = page_html(page_content([hostile], nasty, nasty))
    inside = html.split('id="content">', 1)[1].split("</script>", 1)[0]
    assert json.loads(inside)["title"] == nasty
    assert "<img" not in html.replace(inside, "")
    assert "<img src=x" not in html.split("<script", 1)[0]


def test_the_page_says_which_command_made_it(finished, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["idiolect", "report", str(finished), "--out", "x y.html"])
    done = CliRunner().invoke(app, ["report", str(finished), "--out", "x y.html", "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["result"] == {"page": "x y.html", "files": []}
    html = Path("x y.html").read_text()
    assert f"idiolect report {finished} --out &#39;x y.html&#39;" in html
    shown = html.split("<pre>")[1].split("</pre>")[0].replace("&#34;", '"').replace("&amp;", "&")
    assert tomllib.loads(shown)["name"] == "six & friends"


@pytest.mark.parametrize(
    ("given", "words"),
    [(["absent"], "absent does not exist"), (["."], "holds no result.json")],
)
def test_a_folder_without_a_result_is_one_line(tmp_path, monkeypatch, given, words):
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["report", *given])
    assert done.exit_code == 3 and words in done.stderr and done.stderr.count("\n") == 1


def test_a_run_without_a_finished_method_is_told(finished, tmp_path):
    content = document.read_document(finished) | {"methods": {}}
    document.write_json(tmp_path / document.FILE, content)
    with pytest.raises(DataError, match="no finished method"):
        report(tmp_path)


def tables(folder):
    found = sections(read_run(folder))
    return {b.id: b for s in found for b in s.blocks if isinstance(b, Table)}


def test_the_statistics_are_those_of_compare(finished):
    told = compare(document.read_document(finished))
    shown = tables(finished)
    assert [row[:2] for row in shown["pairs"].rows] == [(p.better, p.worse) for p in told.pairs]
    assert [row[7] for row in shown["pairs"].rows] == [p.p_holm for p in told.pairs]
    for row in shown["headline"].rows:
        assert row[2] == told.methods[row[0]].interval
        assert row[4] == told.methods[row[0]].worst_decile
    for row in shown["fairness-table"].rows:
        own = told.methods[row[0]]
        assert row[1:] == (own.variance, own.jain, own.worst_decile, own.below_local)
    ranks = charts(finished)["ranks"]
    dots = {m.method: m.x[0] for m in ranks.marks if m.kind == "dots"}
    assert dots == told.ranks.average
    bars = [(m.low[0], m.high[0]) for m in ranks.marks if m.kind == "span"]
    assert bars == [
        (min(dots[label] for label in group), max(dots[label] for label in group))
        for group in told.ranks.cliques
    ]
    head = page_content([read_run(finished)], "")["runs"][0]
    assert head["verdict"] == told.verdict.sentence


def test_what_it_took_to_reach_an_accuracy(finished):
    told = compare(document.read_document(finished))
    shown = {row[0]: row[1:] for row in tables(finished)["reach"].rows}
    assert shown == {k: (r.model, r.round, r.bytes, r.seconds) for k, r in told.reach.items()}


def test_without_scipy_the_page_says_what_is_missing(finished, monkeypatch):
    def absent(content):
        raise MissingExtra("the statistics of a comparison need scipy", "stats")

    monkeypatch.setattr(report_data, "compare", absent)
    html = page_html(page_content([read_run(finished)], ""))
    assert "pip install &#39;idiolect[stats]&#39;" in html
    assert 'id="headline"' in html and 'id="pairs"' not in html


def test_a_promise_of_privacy_is_shown_in_words_and_figures(finished):
    content = document.read_document(finished)
    without = page_html(page_content([ReportData(content)], ""))
    assert "No method of this run was trained with differential privacy." in without
    promise = {"epsilon": 3.14159, "delta": 1e-5, "draw": "poisson", "statement": "Odds & ends."}
    content["methods"]["FedAvg"]["privacy"] = promise
    html = page_html(page_content([ReportData(content)], ""))
    assert "<b>FedAvg.</b> Odds &amp; ends." in html and "3.142" in html
    assert "No method of this run" not in html


def test_the_splits_of_a_comparison_are_runs_on_one_page(finished, tmp_path):
    for name in ("one", "two"):
        shutil.copytree(finished, tmp_path / name)
    splits = [{"name": name, "folder": name} for name in ("one", "two")]
    together = {"sentence": "A & B are level on 2 of 2 splits."}
    (tmp_path / "comparison.json").write_text(json.dumps({"splits": splits, "overall": together}))
    html = report(tmp_path)[0].read_text()
    assert 'id="plot-r1-curves"' in html and (tmp_path / "report.html").is_file()
    assert '<p class="verdict">A &amp; B are level on 2 of 2 splits.</p>' in html
    (tmp_path / "comparison.json").write_text("{}")
    with pytest.raises(DataError, match="is damaged"):
        report(tmp_path)


def test_what_was_tuned_is_told(finished):
    content = document.read_document(finished)
    content["methods"]["FedAvg"]["tuned"] = {
        "search": "grid",
        "budget": 4,
        "metric": "validation accuracy",
        "trials": [{}, {}],
        "chosen": [
            {"seed": 0, "settings": {"lr": 0.1}},
            {"seed": 1, "settings": {"lr": 0.1}},
        ],
    }
    found = sections(ReportData(content))[-1].blocks
    (table,) = [block for block in found if isinstance(block, Table) and block.id == "tuned"]
    assert table.rows == [("FedAvg", 2, "lr = 0.1 (seed 0, 1)")]


def test_a_methods_label_is_never_markup(finished):
    nasty = "<i onclick=alert(1)>"
    read = read_run(finished)
    text = json.dumps(read.content).replace('"FedAvg"', json.dumps(nasty))
    shown = page_content([ReportData(json.loads(text), [], read.holdings, "", "")], "", "")
    switches = page_update(shown)["switches"]
    assert "<i " not in switches and "&lt;i onclick" in switches
