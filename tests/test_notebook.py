"""The notebooks run top to bottom in a real kernel, and are kept without outputs."""

import json
import os
import warnings
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_kept_without_outputs(path: Path) -> None:
    for cell in json.loads(path.read_text())["cells"]:
        assert not cell.get("outputs") and cell.get("execution_count") is None


def run(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict]:
    """Run a notebook; return its cells."""
    left_out = "the notebook is not run: needs nbclient and ipykernel"
    pytest.importorskip("ipykernel", reason=left_out)
    nbclient = pytest.importorskip("nbclient", reason=left_out)
    import nbformat

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    book = nbformat.read(EXAMPLES / name, as_version=4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the kernel's machinery, not of ours
        where = {"metadata": {"path": str(folder)}}
        made = nbclient.NotebookClient(book, timeout=120, kernel_name="python3", resources=where)
        return list(made.execute().cells)


def said(cell: dict) -> str:
    return "".join(output.get("text", "") for output in cell.get("outputs", ()))


def shown(cell: dict, kind: str) -> list[str]:
    return [output["data"].get(kind, "") for output in cell["outputs"] if "data" in output]


def test_the_tour_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cells = run("tour.ipynb", tmp_path, monkeypatch)
    together = next(text for text in map(said, cells) if text.startswith("local"))
    scores = {line.split()[0]: float(line.split()[1].rstrip("%")) for line in together.splitlines()}
    assert scores["fedavg-ft"] > scores["fedavg"]  # what the tour tells


def test_a_data_frame_becomes_predictions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pandas", reason="the notebook is not run: needs pandas")
    pytest.importorskip("scipy", reason="the notebook is not run: needs scipy")
    cells = [c for c in run("hospitals.ipynb", tmp_path, monkeypatch) if c["cell_type"] == "code"]
    _, federation, fitted, compared, _, predicted, saved = cells
    assert "Federation of 4 clients: 480 rows" in shown(federation, "text/plain")[0]
    assert "Zürich" in shown(federation, "text/html")[0]
    bar, result = shown(fitted, "text/plain")
    assert bar.startswith("done in ") and result.startswith("FedAvg + FT: 4 clients")
    assert all("<svg" in shown(cell, "text/html")[1] for cell in (fitted, compared))
    rows = [line.split() for line in said(predicted).splitlines() if line.strip()[0] in "12"]
    assert [row[1] for row in rows] == ["yes", "no"]
    assert said(saved).strip() == "hospitals.svg" and (tmp_path / "hospitals.svg").is_file()


def test_a_folder_of_texts_becomes_adapters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for library in ("tokenizers", "transformers", "peft"):
        pytest.importorskip(library, reason=f"the notebook is not run: needs {library}")
    monkeypatch.setenv("IDIOLECT_NOTEBOOK_ROUNDS", "1")
    cells = [c for c in run("adapters.ipynb", tmp_path, monkeypatch) if c["cell_type"] == "code"]
    *_, fitted, sizes, exported, loaded = map(said, cells)
    assert [line.split()[0] for line in fitted.splitlines()] == ["alone", "shared", "shared"]
    assert sizes.startswith("32,768 of 955,520 numbers")
    assert "adapter_config.json" in exported and "adapter_model.safetensors" in exported
    nats = [float(line.split()[1]) for line in loaded.splitlines() if "nats" in line]
    assert nats[0] < nats[1]  # ben's words under ben's adapter, and under anna's
