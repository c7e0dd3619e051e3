"""The examples run, and say what they promise."""

import runpy
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).resolve().parent.parent / "examples").glob("*.py"))
SAYS = {
    "quickstart.py": "alone ",
    "own_data.py": "'south'",
    "own_method.py": "FedAvgM: ",
    "own_model.py": "client 3 says",
    "heterogeneous.py": "KT-pFL: mlr ",
    "compare_and_report.py": "kB: report.html",
    "newcomer.py": "west: own model ",
}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_runs(
    path: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In this process, where torch is there already; warnings are errors here too."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", [str(path)])
    monkeypatch.syspath_prepend(path.parent)
    runpy.run_path(str(path), run_name="__main__")
    assert SAYS[path.name] in capsys.readouterr().out
