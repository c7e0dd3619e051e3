"""The notebook runs top to bottom in a real kernel, and is kept without outputs."""

import json
import os
import warnings
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).resolve().parent.parent / "examples" / "tour.ipynb"


def test_the_notebook_is_kept_without_outputs() -> None:
    for cell in json.loads(NOTEBOOK.read_text())["cells"]:
        assert not cell.get("outputs") and cell.get("execution_count") is None


def test_the_notebook_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    left_out = "the notebook is not run: needs nbclient and ipykernel"
    pytest.importorskip("ipykernel", reason=left_out)
    nbclient = pytest.importorskip("nbclient", reason=left_out)
    import nbformat

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    book = nbformat.read(NOTEBOOK, as_version=4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the kernel's machinery, not of ours
        done = nbclient.NotebookClient(book, timeout=120, kernel_name="python3").execute()
    texts = ["".join(o.get("text", "") for o in c.get("outputs", ())) for c in done.cells]
    together = next(text for text in texts if text.startswith("local"))
    scores = {line.split()[0]: float(line.split()[1].rstrip("%")) for line in together.splitlines()}
    assert scores["fedavg-ft"] > scores["fedavg"]  # what the tour tells
