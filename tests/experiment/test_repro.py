"""The reproduction index: statuses by rule, figures as measured, files that are there."""

import importlib
import json
import math
import os
import re
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from idiolect.cli import app
from idiolect.errors import ConfigError
from idiolect.experiment.load import load_experiment
from idiolect.experiment.repro.index import find_item, items, papers
from idiolect.experiment.repro.items import RULES, Cell, Claim, Item
from idiolect.experiment.repro.runs import estimated, experiments_folder, name_of
from idiolect.experiment.repro.seed_figures import (
    Figure,
    figure_of,
    figures_of_result,
    shipped_figures,
)
from idiolect.experiment.repro.stored import disagreements, stored_seconds, written

ROOT = Path(__file__).resolve().parents[2]
# Means 80 and 78; paired differences 1.9, 2.1, 2.0: p = 0.0008. Half a width of 95 % is 0.39.
OURS, THEIRS = Figure((79.77, 80.23, 80.0)), Figure((77.87, 78.13, 78.0))
MEASURED = {"run": {"ours": {"personal": OURS}, "theirs": {"personal": THEIRS}}}


def item(paper: float, above: str = "ours", below: str = "theirs", **more: str) -> Item:
    claim = Claim("it is above", ("run",), above, (below,))
    cells = (Cell("w", "run", "ours", "personal", paper),)
    return Item("a", "A", cells=cells, claims=(claim,), **more)


@pytest.mark.parametrize(
    ("paper", "status"),
    [
        (79.5, "reproduced"),
        (80.5, "reproduced"),  # 80 − 0.39 is not more than a point below
        (80.7, "close"),  # but it is here
        (79.3, "close"),  # nor may it be above by more, to be equivalent
        (70.0, "close"),  # however far above
        (82.5, "close"),
        (82.7, "not decided"),  # perhaps more than three points below
        (83.3, "not decided"),
        (83.5, "differs"),  # surely more
    ],
)
def test_a_status_compares_with_the_spread(paper: float, status: str) -> None:
    assert item(paper).status(MEASURED) == status


def test_bounds_are_students() -> None:
    """Deviation 0.23, three seeds: ± 2.92 · 0.23 / √3; a single seed has no upper doubt."""
    assert OURS.bounds == pytest.approx((80 - 0.3877, 80 + 0.3877), abs=1e-3)
    assert Figure((70.0,)).bounds == (-math.inf, 70.0)


@pytest.mark.parametrize(("paper", "status"), [(80.0, "not decided"), (83.1, "differs")])
def test_a_single_seed_can_only_differ(paper: float, status: str) -> None:
    alone = {
        "run": {"ours": {"personal": Figure((80.0,))}, "theirs": {"personal": Figure((70.0,))}}
    }
    assert item(paper).status(alone) == status


def test_an_order_that_is_turned_round_makes_a_difference() -> None:
    turned = item(78.0, above="theirs", below="ours")
    assert turned.status(MEASURED) == "differs"
    (told,) = turned.failed(MEASURED)
    assert told.startswith("turned round: it is above (run: ours 80.0, theirs 78.0, p = 0.0008")


def test_an_order_within_the_noise_is_not_decided() -> None:
    """Differences 3, −1 and 1: mean 1, p = 0.48."""
    noisy = {"run": {**MEASURED["run"], "theirs": {"personal": Figure((76.77, 81.23, 79.0))}}}
    assert item(80.0).status(noisy) == "not decided"
    (told,) = item(80.0).failed(noisy)
    assert told.startswith("within noise") and "p = 0.48" in told
    assert item(80.0, below="ours").status(MEASURED) == "not decided"  # equal is not above


def test_an_order_is_compared_over_the_seeds_that_both_have() -> None:
    """The other's two seeds behind them, far above ours, are not compared."""
    more = Figure((*MEASURED["run"]["theirs"]["personal"].seeds, 99.0, 99.0))
    runs = {"run": {**MEASURED["run"], "theirs": {"personal": more}}}
    assert item(80.0).status(runs) == item(80.0).status(MEASURED) == "reproduced"
    turned = item(78.0, above="theirs", below="ours")
    (told,) = turned.failed(runs)
    assert told == next(iter(turned.failed(MEASURED)))


def test_p_values_of_a_row_are_corrected_together() -> None:
    """Two comparisons of p = 0.03 and one of 0.0008: by Holm's rule 0.06, 0.06 and 0.0024."""
    weak = Figure((79.0, 79.83, 79.4))  # differences 0.77, 0.4, 0.6
    runs = {"run": {**MEASURED["run"], "b": {"personal": weak}, "c": {"personal": weak}}}
    one, all_ = (
        Item("a", "A", claims=(Claim("it is above", ("run",), "ours", below),))
        for below in (("b",), ("b", "c", "theirs"))
    )
    assert one.status(runs) == "close"  # a picture without figures
    assert all_.status(runs) == "not decided"
    (told,) = all_.failed(runs)
    assert "b 79.4" in told and "c 79.4" in told and "theirs" not in told


def test_a_part_that_is_missing_keeps_a_row_from_being_reproduced() -> None:
    assert item(80.0, missing="a panel").status(MEASURED) == "not measured yet"
    assert item(90.0, missing="a panel").status(MEASURED) == "differs"


def test_what_was_not_run_is_not_judged() -> None:
    assert item(80.0).status({}) == "not measured yet"


def test_a_single_seed_has_no_deviation_to_tell() -> None:
    assert written(Figure((80.0,))) == "80.0 (one seed)"
    assert written(Figure((80.0, 80.0))) == "80.0 ± 0.0"


def test_what_was_run_differs_whatever_was_not() -> None:
    """A cell, or a comparison of a claim, is missing; another is surely below, or turned round."""
    lacking = Cell("v", "run", "nobody", "personal", 80.0)
    for paper, status in ((80.0, "not measured yet"), (84.0, "differs")):
        half = replace(item(paper), cells=(*item(paper).cells, lacking))
        assert half.status(MEASURED) == status
    claim = Claim("it is above", ("run",), "theirs", ("nobody", "ours"))
    assert Item("a", "A", claims=(claim,)).status(MEASURED) == "differs"


def test_a_claim_about_what_was_not_run_is_not_judged() -> None:
    half = item(80.0, below="nobody")
    assert half.status(MEASURED) == "not measured yet"
    assert not list(half.failed(MEASURED))


def test_the_headline_is_the_cell_that_falls_shortest() -> None:
    cells = tuple(Cell(str(p), "run", "ours", "personal", p) for p in (70.0, 90.0, 85.0))
    found = Item("a", "A", cells=cells).headline(MEASURED)
    assert found is not None and found.what == "90.0"


def test_a_figure_is_the_mean_and_sample_deviation_in_percent() -> None:
    """Shares 0.5 and 0.7: mean 60 %, deviation sqrt(((-10)² + 10²) / 1) = 14.142."""
    both = figure_of([0.5, 0.7])
    assert (both.mean, both.deviation) == pytest.approx((60.0, 14.1421356))
    assert (figure_of([0.5]).mean, figure_of([0.5]).deviation) == (50.0, 0.0)


def test_every_table_and_figure_of_the_papers_is_listed() -> None:
    """Counted in the papers."""
    counts = {"persfl": (7, 8), "ktpfl": (6, 3), "combinations": (4, 2), "pfml": (6, 4)}
    for key, (tables, figures) in counts.items():
        expected = {f"{key}-table{n}" for n in range(1, tables + 1)}
        expected |= {f"{key}-figure{n}" for n in range(1, figures + 1)}
        assert {one.id for one in papers()[key].items} == expected


def test_statuses_are_known_and_those_set_by_hand_are_explained() -> None:
    for name, (_, one) in items().items():
        assert one.status(shipped_figures()) in RULES, name
        by_itself = one.given in ("", "not measured yet", "not possible here", "nothing to measure")
        assert by_itself or one.note.startswith("By hand"), name
        assert not one.given or one.note or one.given == "not measured yet", name
        assert one.given or one.cells or one.claims, name


def test_measured_rows_have_files_that_load_under_the_names_their_cells_use() -> None:
    for name, (_, one) in items().items():
        if one.status(shipped_figures()) == "not measured yet":
            continue
        runs = set()
        for runnable in one.experiments:
            experiment = load_experiment(experiments_folder() / runnable.file, runnable.set)
            runs.add(name_of(runnable))
            if not runnable.name:
                assert name_of(runnable) == experiment.name
        used = {cell.run for cell in one.cells} | {run for c in one.claims for run in c.runs}
        assert used <= runs, name


def test_files_that_are_named_exist_once_their_folder_does() -> None:
    for name, (_, one) in items().items():
        for runnable in one.experiments:
            path = experiments_folder() / runnable.file
            assert path.exists() or not path.parent.exists(), f"{name}: {runnable.file}"


def test_a_misspelt_name_is_told_its_neighbour() -> None:
    with pytest.raises(ConfigError, match="did you mean persfl-table3"):
        find_item("persfl-tabel3")
    with pytest.raises(ConfigError, match="'zzz'; `idiolect repro` lists all"):
        find_item("zzz")


def test_the_index_is_up_to_date(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(ROOT / "scripts"), *sys.path])
    import reproduction_index

    assert reproduction_index.KEPT.read_text() == reproduction_index.measured(), "run `make docs`"
    assert reproduction_index.PAGE.read_text() == reproduction_index.page(), "run `make docs`"


def test_every_status_follows_from_the_kept_results(tmp_path: Path) -> None:
    """What CI runs; a page, or a package, that says otherwise is told row by row."""
    done = repro("check")
    assert done.exit_code == 0, done.output
    results, page = ROOT / "results", tmp_path / "page.md"
    text = (ROOT / "docs" / "reproduction" / "README.md").read_text()
    lines = [line for line in text.splitlines() if "`ktpfl-table5`" not in line]
    wrong = next(n for n, line in enumerate(lines) if "`" in line and "| **differs** | " in line)
    name, ours = lines[wrong].split("`")[1], lines[wrong].split(" | ")[3]
    lines[wrong] = lines[wrong].replace("**differs**", "**close**")
    page.write_text("\n".join(lines))
    told = disagreements(results, page)
    assert f"{name}: the page says close ({ours}), the results differs ({ours})" in told
    assert len(told) == 2 and any(one.startswith("ktpfl-table5: not on the page") for one in told)
    for path in results.glob("*.json"):
        (tmp_path / path.name).write_text(path.read_text())
    kept = json.loads((tmp_path / "ktpfl.json").read_text())
    kept["fmnist-public-own"]["methods"]["KT-pFL"]["accuracy"] = [80.0, 80.1, 80.2]
    (tmp_path / "ktpfl.json").write_text(json.dumps(kept))
    told = disagreements(tmp_path, ROOT / "docs" / "reproduction" / "README.md")
    assert told[0].endswith(": ktpfl-fmnist-public-own") and "ktpfl-table5" in told[1]
    with pytest.raises(ConfigError, match="clone idiolect"):
        disagreements(tmp_path / "nowhere", page)


def test_kept_runs_have_seeds_and_versions() -> None:
    for path in (ROOT / "results").glob("*.json"):
        assert path.stat().st_size < 500_000, path
        for run, content in json.loads(path.read_text()).items():
            assert content.get("seeds"), (path.name, run)
            assert content.get("versions") or path.name == "flamby.json", (path.name, run)


def test_the_field_s_page_is_up_to_date(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(ROOT / "scripts"), *sys.path])
    import reproduce_field

    written = tmp_path / "field.md"
    written.write_text(reproduce_field.PAGE.read_text())
    before = written.read_text()
    monkeypatch.setattr(reproduce_field, "PAGE", written)
    reproduce_field.page(None)
    assert written.read_text() == before, "run `python scripts/reproduce_field.py page`"


@pytest.mark.parametrize("name", ["persfl", "ktpfl", "combinations", "pfml", "portfolio"])
def test_a_page_follows_from_the_kept_results(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [str(ROOT / "scripts"), *sys.path])
    script = importlib.import_module(f"reproduce_{name}")
    written = tmp_path / "page.md"
    before = script.PAGE.read_text()
    written.write_text(before)
    monkeypatch.setattr(script, "PAGE", written)
    script.write()
    assert written.read_text() == before, f"run `python scripts/reproduce_{name}.py write`"


def test_portfolio_s_rows_are_beside_what_saw_the_same_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A method's refit is beside Portfolio's; figures of another division go when new ones come."""
    monkeypatch.setattr(sys, "path", [str(ROOT / "scripts"), *sys.path])
    import reproduce_portfolio as script

    def method(accuracy: float, name: str = "fedrep") -> dict[str, Any]:
        facts = {"weights": [1.0], "validation_accuracy_of_candidates": [0.5]}
        score = {"accuracy": accuracy}
        client = {"test": 2, "personal": score, "local": score, "facts": facts}
        seeds = [{"models": ["personal", "local"], "clients": [client]}] * 2
        settings = {"candidates": ["local"]} if name == "portfolio" else {}
        own = {"method": name, "rounds": 3, "settings": settings, "device": "cpu", "seeds": seeds}
        return {**own, "speed": {"seconds": 1.0}}

    def ran(rows: str, **methods: dict[str, Any]) -> str:
        (folder := tmp_path / rows.replace("=", "-")).mkdir(exist_ok=True)
        named = {name.replace("_", ", "): own for name, own in methods.items()}
        content = {"name": "portfolio-mnist-ds1", "seeds": [0, 1], "versions": {}}
        content |= {"data": {"federations": [rows]}, "methods": named}
        (folder / "result.json").write_text(json.dumps(content))
        return str(folder)

    monkeypatch.setattr(script, "OTHERS", tmp_path)
    monkeypatch.setattr(script, "FIGURES", tmp_path / "portfolio.json")
    script.collect([ran("old", FedRep=method(0.9), Portfolio=method(0.8, "portfolio"))])
    script.collect([ran("kind=new", Portfolio=method(0.7, "portfolio"))])
    both = {"Portfolio_refit": method(0.75, "portfolio"), "FedPer_refit": method(0.85)}
    script.collect([ran("kind=new", **both, Ditto=method(0.6))])
    (kept,) = json.loads((tmp_path / "portfolio.json").read_text()).values()
    assert script.Setting("mnist-ds1", kept).singles() == {
        "Local": {0: 70.0, 1: 70.0},
        "Ditto": {0: 60.0, 1: 60.0},
    }
    again = script.Setting("mnist-ds1", kept, refit=True)
    assert again.singles() == {"Local": {0: 75.0, 1: 75.0}, "FedPer": {0: 85.0, 1: 85.0}}
    assert again.title == "MNIST DS-1"


def test_links_into_pages_meet_a_heading() -> None:
    slugify = pytest.importorskip("markdown.extensions.toc").slugify  # as the site does
    for paper in papers().values():
        page = ROOT / "docs" / "reproduction" / paper.page
        if not page.exists():
            continue
        headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
        anchors = {slugify(heading, "-") for heading in headings}
        for one in paper.items:
            if one.link:
                assert one.link.partition("#")[2] in anchors, one.id


def repro(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["repro", *arguments])


def test_the_list_tells_all_rows_to_programs() -> None:
    told = json.loads(repro("--json").stdout)["result"]
    assert list(told) == list(items())
    row = told["persfl-table3"]
    assert row["figures"][0]["paper"] == 98.6
    assert row["means"] == RULES[row["status"]]


def test_a_row_runs(tmp_path: Path) -> None:
    """Figure 6 is made of one file; here it is run on the embedded digits."""
    short = ("seeds=[0]", "rounds=1", "methods.FedAvg.rounds=1", "backend.width=10")
    short = (*short, "data.source=embedded")
    changes = [word for one in short for word in ("--set", one)]
    done = repro("persfl-figure6", "--method", "FedAvg", "--out", str(tmp_path), "--json", *changes)
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["result"]["status"] == "close"
    result = json.loads((tmp_path / "persfl-mnist-ds1" / "result.json").read_text())
    assert list(result["methods"]) == ["FedAvg"]
    assert len(result["methods"]["FedAvg"]["seeds"]) == 1


def test_a_table_of_the_field_is_scored_both_ways(tmp_path: Path) -> None:
    """Of the four runs, the two that have the method are run."""
    short = ("seeds=[0]", "rounds=2", "evaluate.every=1", "data.source=embedded")
    network = ("model.name=dnn", "model.hidden=4", "training.batch=200", "training.lr=1.0")
    changes = [word for one in (*short, *network) for word in ("--set", one)]
    asked = ["pfllib-fmnist", "--method", "FedAvg", "--out", str(tmp_path), *changes]
    done = repro(*asked, "--json")
    assert done.exit_code == 0, done.output
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "pfllib-fmnist-dir",
        "pfllib-fmnist-pat",
    ]
    cells = {one["what"]: one for one in json.loads(done.stdout)["result"]["figures"]}
    for kind in ("pat", "dir"):
        result = json.loads((tmp_path / f"pfllib-fmnist-{kind}" / "result.json").read_text())
        best = result["methods"]["FedAvg"]["best_test_round"]["global"]
        last = result["methods"]["FedAvg"]["seeds"][0]["models"]["global"]
        assert cells[f"{kind}, FedAvg"]["this_run"] == 100 * best["weighted_mean"][0]
        assert best["weighted_mean"][0] >= last["weighted_mean"]
        late = result["methods"]["FedAvg"]["last_test_rounds"]["global"]
        shown = CliRunner().invoke(app, ["show", str(tmp_path / f"pfllib-fmnist-{kind}")]).output
        figures = [best["weighted_mean"], late["weighted_mean"], late["mean"]]
        wanted = {f"{100 * own[0]:.1f}" for own in figures}
        assert any(wanted <= {*row.split()} for row in shown.splitlines())
    assert cells["pat, FedALA"]["this_run"] is None
    unknown = repro("pfllib-fmnist", "--method", "FedAlas", "--out", str(tmp_path))
    assert (
        unknown.exit_code == 2
        and "no method of pfllib-fmnist is called 'FedAlas'" in unknown.output
    )


def test_seeds_and_runs_of_one_simulation_are_not_counted_one_after_the_other() -> None:
    """Both splits of PFLlib's table, 255 rounds of one seed, took FedAvg 63.4 s together."""
    timed = stored_seconds(ROOT / "results")
    assert timed["pfllib-fmnist-pat"]["FedAvg"] == pytest.approx(63.4 / 2 / 255, rel=1e-3)
    found = estimated(find_item("pfllib-fmnist")[1])
    assert found.most == pytest.approx(3 * found.least)  # one seed was timed, three are asked for
    shown = " ".join(repro("pfllib-fmnist", "--show").output.split())
    assert f"{found.least:.0f} to {found.most:.0f} minutes (an estimate; seeds are trained" in shown


def test_a_row_tells_how_long_it_takes() -> None:
    """Of Figure 6 the kept run is of the file's seeds and rounds, so its seconds add up to it."""
    kept = json.loads((ROOT / "results" / "persfl.json").read_text())["mnist-ds1"]["methods"]
    found = estimated(find_item("persfl-figure6")[1])
    spent = sum(own["seconds"] for own in kept.values()) / 60
    assert found.least == found.most == pytest.approx(spent, rel=0.01)
    assert found.known == found.asked == len(kept)
    whole = "one H200, one method after the other, by kept seconds: 2 minutes (an estimate)."
    assert whole in " ".join(repro("persfl-figure6", "--show").output.split())
    assert "Without 4 of 6 methods" in repro("pfml-table2", "--show").output
    for _, (paper, one) in items().items():  # no row that can be run is silent
        assert not one.experiments or estimated(one).known or paper.time, one.id
    told = json.loads(repro("pfml-table3", "--json", "--show").stdout)["result"]["time"]
    assert told == papers()["pfml"].time


def test_seconds_are_of_a_seed_and_round_on_that_chip(tmp_path: Path) -> None:
    """60 seconds of two seeds and three rounds; the other run was on a CPU."""
    own = {"rounds": 3, "seconds": 60.0, "accuracy": [1.0, 1.0], "device": "NVIDIA H200"}
    methods = {"A": own, "B": {**own, "device": "cpu"}}
    (tmp_path / "ktpfl.json").write_text(json.dumps({"one": {"seeds": [0, 1], "methods": methods}}))
    assert stored_seconds(tmp_path) == {"ktpfl-one": {"A": 10.0}}


def own_table(folder: Path) -> Path:
    """Write the experiment and the table that the page shows, with an unseen client."""
    page = (ROOT / "docs" / "reproduction" / "field.md").read_text()
    experiment, table = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    (folder / "mnist-pathological.toml").write_text(experiment)
    (folder / "fedfoo.toml").write_text(table)
    return folder / "fedfoo.toml"


def test_a_table_of_ones_own_is_laid_beside_ours(tmp_path: Path) -> None:
    """What the page shows, in small; each kind of figure is that of result.json."""
    table = own_table(tmp_path)
    cell = '{ what = "WHAT", run = "mnist-dir", label = "Ditto", '
    cell += 'model = "personal, WHAT", paper = 99 },'
    kinds = ("newcomers", "took part", "best validation round")
    more = "".join(cell.replace("WHAT", kind) + "\n" for kind in kinds)
    table.write_text(table.read_text().replace("]\nclaims", more + "]\nclaims"))
    short = ("rounds=2", "data.source=embedded", "model={name='mlr'}", "evaluate.every=1")
    network = (
        "unseen=1",
        "data.split=[0.6, 0.15, 0.25]",
        "methods.Ditto.batch=200",
        "methods.FedRep.batch=200",
        "seeds=[0]",
    )
    changes = [word for one in (*short, *network) for word in ("--set", one)]
    none = repro(str(table), "--show", "--out", str(tmp_path / "runs"))
    assert none.exit_code == 0 and "not measured yet" in none.output, none.output
    done = repro(str(table), "--out", str(tmp_path / "runs"), *changes)
    assert done.exit_code == 0, done.output
    again = repro(str(table), "--show", "--out", str(tmp_path / "runs"), "--json")
    told = json.loads(again.stdout)["result"]["fedfoo"]
    held = {
        run: json.loads((tmp_path / "runs" / run / "result.json").read_text())["methods"]
        for run in ("mnist-pathological", "mnist-dir")
    }
    rep, ditto = held["mnist-dir"]["FedRep"], held["mnist-dir"]["Ditto"]
    parts = ditto["seeds"][0]["participation"]["accuracy"]["personal"]
    expected = [
        held["mnist-pathological"]["FedRep"]["seeds"][0]["models"]["personal"]["mean"],
        rep["best_test_round"]["personal"]["weighted_mean"][0],
        ditto["last_test_rounds"]["personal"]["mean"][0],
        parts["never"],
        parts["took_part"],
        ditto["test_at_best_validation_round"]["personal"]["mean"][0],
    ]
    assert [one["ours"] / 100 for one in told["figures"]] == pytest.approx(expected)
    gaps = [one["ours"] - one["paper"] for one in told["figures"]]
    near = sum(gap >= -1 for gap in gaps)
    assert told["counts"] == {"near": near, "below": 6 - near, "not_measured": 0}
    assert f"{near} of 6 cells are within one point" in done.output
    assert f"{gaps[0]:+.1f}" in done.output
    wrong = table.read_text().replace('"personal"', '"global"')
    table.write_text(wrong)
    unknown = repro(str(table), "--show", "--out", str(tmp_path / "runs"))
    assert unknown.exit_code == 2 and "FedRep has no model 'global'" in unknown.output


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ('label = "Ditto"', 'label = "Dito"', "no method of mnist-dir is called 'Dito'; did you"),
        ('run = "mnist-dir"', 'run = "mnist"', "no experiment is called 'mnist'; did you mean"),
        ("paper = 97.9", 'paper = "97.9"', "items[0].cells[2].paper is '97.9', expected a valid"),
        ('figure = "mean"', 'figure = "best"', "figure is 'best', expected 'mean', "),
        ("cells =", "cell =", "unknown key items[0].cell: 'cell'; did you mean 'cells'?"),
        ('name = "mnist-dir", ', "", "two runs called 'mnist-pathological'; give each a name"),
        (
            '"mnist-pathological.toml",',
            '"mnits.toml",',
            "needs mnits.toml, which is neither beside",
        ),
        ("experiments =", "runs =", "unknown key items[0].runs"),
        (
            'below = ["Ditto"]',
            'below = ["Dito"]',
            "claim 'FedRep is above Ditto': no method of mnist-dir",
        ),
        (
            "title =",
            'status = "closed"\ntitle =',
            "status: unknown status 'closed'; did you mean 'close'",
        ),
        ("test_curve = true", "", "needs test scores along the way, and mnist-dir has none"),
        ('name = "FedFoo"', "name = FedFoo", "fedfoo.toml:1:8: not valid TOML"),
    ],
)
def test_a_wrong_table_is_told_before_anything_runs(
    old: str, new: str, told: str, tmp_path: Path
) -> None:
    table = own_table(tmp_path)
    path = tmp_path / "mnist-pathological.toml" if "test_curve" in old else table
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    done = repro(str(table), "--out", str(tmp_path / "runs"))
    assert done.exit_code == 2 and told in done.output, done.output
    assert not (tmp_path / "runs").exists()


def test_a_figure_that_is_no_share_is_not_compared() -> None:
    result = {"name": "school", "metric": {"name": "rmse"}, "methods": {}}
    with pytest.raises(ConfigError, match="school is scored by"):
        figures_of_result(result, "mean")


def test_what_has_nothing_to_run_says_so() -> None:
    done = repro("persfl-table1")
    assert done.exit_code == 2
    assert "persfl-table1 has nothing to run" in done.output


def test_an_installed_package_brings_the_experiments(tmp_path: Path) -> None:
    """Build the wheel for real, unpack it, and ask from a folder that is no checkout."""
    pytest.importorskip("hatchling")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, capture_output=True, check=True)
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        wheel.extractall(tmp_path / "site")
    home = "from idiolect.experiment.repro.runs import experiments_folder as f"
    code = f"{home}; print(f() / 'demo.toml')"
    told = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "site")},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    assert told.startswith(str(tmp_path)) and Path(told).exists()
