"""Pages made from the code are as the code says, and links between pages lead somewhere."""

import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from idiolect.experiment.repro.seed_figures import shipped_figures
from idiolect.methods import METHODS

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
LOADED = r"""<(?:script|img|iframe|link rel=.stylesheet.)[^>]+(?:src|href)=["'](http[^"']+)"""


def test_the_page_of_methods_is_up_to_date(monkeypatch) -> None:
    monkeypatch.setattr(sys, "path", [str(ROOT / "scripts"), *sys.path])
    import method_table

    assert method_table.PAGE.read_text() == method_table.page(), "run `make docs`"
    kept = {path.stem: path.read_text() for path in method_table.PAGES.glob("*.md")}
    assert kept == method_table.pages(), "run `make docs`"


def test_the_figures_of_performance_are_the_kept_ones(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(sys, "path", [str(ROOT / "scripts"), *sys.path])
    import performance_tables

    text = performance_tables.PAGE.read_text()
    assert performance_tables.page(text) == text, "run `make docs`"
    row = {"name": "a", "smallest": 5, "largest": 9, "one_block": 0.4, "one_run": 0.05}
    kept = {"padding": [{**row, "five_runs": 0.061}]}
    (tmp_path / "cpu.json").write_text(json.dumps(kept))
    monkeypatch.setattr(performance_tables, "RESULTS", tmp_path)
    again = performance_tables.page(text)
    assert "| a | 5 | 9 | 40.0% | 5.0% | 6.1% |" in again
    assert performance_tables.page(again) == again


def test_the_board_is_made_of_the_stored_results(monkeypatch) -> None:
    monkeypatch.setattr(sys, "path", [str(ROOT / "scripts"), *sys.path])
    import board

    assert board.PAGE.read_text() == board.page(), "run `make docs`"


def test_every_method_has_its_maths(monkeypatch) -> None:
    monkeypatch.setattr(sys, "path", [str(ROOT / "scripts"), *sys.path])
    import method_table

    assert set(method_table.MATHS) == set(METHODS), "write it in scripts/maths.toml"


def test_the_start_page_shows_the_example_as_it_is() -> None:
    example = (ROOT / "examples" / "visits.toml").read_text()
    blocks = re.findall(r"```toml\n(.*?)```", (ROOT / "docs" / "index.md").read_text(), re.DOTALL)
    assert any(textwrap.dedent(block) == example for block in blocks)


def test_the_commands_of_the_readme_have_the_options_they_are_given() -> None:
    from typer.main import get_command

    from idiolect.cli import app

    blocks = re.findall(r"```sh\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    lines = [line.split("#")[0].split() for block in blocks for line in block.splitlines()]
    commands = [words[1:] for words in lines if words[:1] == ["idiolect"]]
    assert len(commands) >= 8
    for words in commands:
        found = get_command(app)
        while hasattr(found, "commands"):
            found = found.commands[words.pop(0)]
        known = {option for one in found.params for option in one.opts}
        assert {word for word in words if word.startswith("--")} <= known, (found.name, words)


def test_figures_of_the_readme_are_the_measured_ones() -> None:
    """The rows of PersFL and PFML, read from the README and compared with the kept figures."""
    measured, text = shipped_figures(), (ROOT / "README.md").read_text()
    rows = {
        "PersFL, CIFAR-10 DS-1 / DS-2 / DS-3": [f"persfl-cifar10-ds{n}" for n in (1, 2, 3)],
        "PersFL, MNIST DS-1 / DS-2 / DS-3": [f"persfl-mnist-ds{n}" for n in (1, 2, 3)],
        "PFML, MNIST MLR / DNN": ["pfml-mnist-mlr", "pfml-mnist-dnn"],
        "PFML, Synthetic MLR / DNN": ["pfml-synthetic-mlr", "pfml-synthetic-dnn"],
    }
    for row, runs in rows.items():
        means = [measured[run][row.partition(",")[0]]["personal"].mean for run in runs]
        assert f"| {row} | {' / '.join(f'{mean:.1f}' for mean in means)} |" in text


def test_the_site_builds_and_asks_no_other_host(tmp_path: Path) -> None:
    """Strict: a link or an anchor that leads nowhere is an error."""
    pytest.importorskip("mkdocstrings", reason="the site is not built: needs mkdocs-material")
    pytest.importorskip("material", reason="the site is not built: needs mkdocs-material")
    command = [sys.executable, "-W", "ignore", "-m", "mkdocs", "build", "--strict", "-q", "-d"]
    built = subprocess.run(
        [*command, str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    for name in METHODS:
        assert (tmp_path / "methods" / f"{name}.html").exists()
    assert "client_step" in (tmp_path / "api" / "contract.html").read_text()
    for page in tmp_path.rglob("*.html"):
        loaded = re.findall(LOADED, page.read_text())
        assert not loaded, page.name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_of_tests_that_pages_name_exist(page: Path) -> None:
    for name in re.findall(r"`((?:[\w]+/)*test_\w+\.py)`", page.read_text(encoding="utf-8")):
        assert list(ROOT.glob(name)) or list((ROOT / "tests").rglob(name)), f"{page.name}: {name}"


def test_every_threat_is_stopped_by_a_test_that_exists_or_is_said_to_be_open():
    """Each row of threats.md names tests of ours, or says "not protected"."""
    text = (ROOT / "docs" / "threats.md").read_text(encoding="utf-8")
    known = {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    }
    rows = [line for line in text.splitlines() if line.startswith("| ") and "| ---" not in line]
    rows = [row for row in rows if not row.startswith("| who |")]
    assert len(rows) > 30
    for row in rows:
        named = re.findall(r"`(test_\w+)`", row)
        assert set(named) <= known, set(named) - known
        assert named or "not protected" in row, row
