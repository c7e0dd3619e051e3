"""The examples run, and say what they promise."""

import os
import subprocess
import sys
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
def test_an_example_runs(path: Path, tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-W", "error", str(path)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert run.returncode == 0, run.stderr
    assert SAYS[path.name] in run.stdout
