"""`idiolect describe`: text of 80 columns, JSON, a page; names from files are only shown."""

import json
import re

import numpy as np
import pytest
from typer.testing import CliRunner

from idiolect.analysis.description_page import description_html
from idiolect.cli import app

EVIL = "<script>alert(1)</script>"


@pytest.fixture
def table(tmp_path):
    draw = np.random.default_rng(0)
    lines = ["age,glucose,client,label"]
    for site, by in (("A", 1), ("B", 1), ("C", 18), ("D", 1)):
        for _ in range(60):
            glucose = draw.normal(105, 20)
            ill = "ill" if glucose > 115 else f"{EVIL}\x1b[31m"
            lines.append(f"{draw.integers(30, 85)},{glucose / by:.2f},{site},{ill}")
    path = tmp_path / "patients.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


def called(*words):
    found = CliRunner().invoke(app, ["describe", *map(str, words)])
    assert found.exit_code == 0, found.output
    return found.output


def test_hostile_names_are_text_on_the_page_and_on_the_screen(table, tmp_path):
    page = tmp_path / "data.html"
    text = called(table, "--out", page)
    assert "\x1b" not in text and "glucose: the mean of C is" in text
    shown = page.read_text()
    assert EVIL not in shown and "&lt;script&gt;alert(1)" in shown
    assert "the mean of C is" in shown


def test_json_has_the_figures_of_each_site_and_of_all(table):
    content = json.loads(called(table, "--json"))["result"]
    assert content["pooled"]["rows"] == 240 and content["part"] == "all"
    values = [float(line.split(",")[0]) for line in table.read_text().splitlines()[1:]]
    assert content["pooled"]["columns"]["age"]["mean"] == pytest.approx(np.mean(values))
    assert [one["site"] for one in content["sites"]] == list("ABCD")
    assert [one["site"] for one in content["warnings"]] == ["C"]


def test_tables_fit_80_columns(table, monkeypatch):
    monkeypatch.setattr("idiolect.cli.screen.PlainConsole.is_terminal", True)
    monkeypatch.setenv("COLUMNS", "80")
    text = re.sub(r"\x1b\[[0-9;]*m", "", called(table))
    lines = [line for line in text.splitlines() if not line.startswith("warning")]
    assert max(map(len, lines)) <= 80 and "glucose" in text


def test_wrong_parts_are_one_line(table):
    for words in (["--part", "some"], ["--part", "test", "--on", "local"]):
        found = CliRunner().invoke(app, ["describe", str(table), *words])
        assert found.exit_code == 2 and "--part" in found.output


def test_a_page_of_hidden_and_silent_sites_is_written():
    site = {"site": "A", "tells": "pooled", "why": "", "rows": {"train": 9, "val": 1, "test": 1}}
    site |= {"min_cell": 5, "epsilon": 1.0, "columns": {}}
    quiet = site | {"site": "B", "tells": "none", "why": "it did not answer in time"}
    content = {"title": "t", "part": "train", "columns": [], "sites": [site, quiet]}
    content |= {"pooled": {"sites": [], "rows": 0, "columns": {}}, "warnings": []}
    shown = description_html(content, "idiolect describe")
    assert "it did not answer in time" in shown and "ε = 1" in shown
