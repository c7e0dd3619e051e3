"""The page of the studies of adapters: tables by hand from few figures, and the page as kept."""

import argparse
import json
import os
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from idiolect.experiment.adapt import adapt

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(sys, "path", [str(ROOT / "scripts"), *sys.path])
    import study_adapters

    return study_adapters


@pytest.fixture
def pages(script: ModuleType) -> ModuleType:
    import adapter_pages

    return adapter_pages


def method(*rows: list[float], clip: float = 0.0, validated: float = 0.0) -> dict[str, Any]:
    """Build a method of some seeds: each client's score, and what its one trial had."""
    chosen = [{"seed": 0, "settings": {"lr": 0.2}}]
    trials = [{"settings": {"lr": 0.2}, "validation": [{"seed": 0, "score": validated}]}]
    whole = {
        "scores": rows,
        "mean": sum(map(sum, rows)) / sum(map(len, rows)),
        "numbers_sent": 4096,
    }
    return {
        **whole,
        "chosen": chosen,
        "trials": trials,
        "privacy": {"epsilon": 8} if clip else None,
    }


def test_the_best_of_each_column_is_bold_and_gaps_are_said(pages: ModuleType):
    """Roles are better lower, reviews higher; 70 and 72 have a deviation of 1.4 over seeds."""
    roles = {"FedAvg": method([69.0, 71.0], [71.0, 73.0]), "Local": method([98.0, 98.0])}
    reviews = {"FedAvg": method([0.5, 0.6]), "Local": method([0.7, 0.6])}
    new = {"clients": 3, "verdict": "Level.", "methods": {"FedAvg": method([80.0])}}
    found = {
        "roles": {"base": {"parameters": 12, "vocabulary": 4, "seconds": 30, "tokens_read": 2e6,
                           "held_back_loss": {"plays": 4.3}}, "device": "GPU", "clients": 2,
                  "baseline": 988, "verdict": "A.", "methods": roles,
                  "newcomers": new},
        "reviews": {"clients": 2, "baseline": 0.597, "verdict": "B.", "methods": reviews},
    }  # fmt: skip
    lines = pages.study_tables(found)["studies"]
    row = {line.split(" | ")[0]: line for line in lines}
    assert (
        "| **71.0 ± 1.4** | **80.0** | 55.0 % | not measured |"
        in row["| " + pages.METHODS["FedAvg"]]
    )
    assert "| 98.0 | not measured | **65.0 %** |" in row["| " + pages.METHODS["Local"]]
    assert "| 988 |  | 59.7 % |  |" in lines[2] and "3 newcomers" in lines[0]


def test_the_clip_is_taken_by_validation_not_by_test_rows(pages: ModuleType):
    hidden = {
        "ε = 8, clip 0.3": method([40.0], clip=0.3, validated=50.0),
        "ε = 8, clip 1": method([45.0], clip=1.0, validated=49.0),
    }
    lines = pages.private_table({"lora": {"methods": hidden}})
    assert lines[2].endswith("| 4,096 | not measured | not measured | 45.0 | 1, 0.2 |")
    assert "not measured" in lines[3]


def test_the_pages_have_the_kept_figures(pages: ModuleType, tmp_path: Path):
    kept = ROOT / "results" / "adapters.json"
    if not kept.exists():
        pytest.skip("the studies were not run")
    for folder in ("docs", "results"):
        (tmp_path / folder).mkdir()
    names = ("adapters-studies.md", "adapters.md")
    for page in names:
        shutil.copy(ROOT / "docs" / page, tmp_path / "docs")
    pages.write(argparse.Namespace(figures=kept, into=tmp_path))
    assert json.loads((tmp_path / "results" / "adapters.json").read_text())
    for page in names:
        assert (tmp_path / "docs" / page).read_text() == (ROOT / "docs" / page).read_text(), (
            "run `python scripts/study_adapters.py write results/adapters.json`"
        )


def test_rates_of_before_are_taken_but_not_where_trials_chose_nothing(script: ModuleType):
    known = {
        "roles": {"methods": {"FedAvg": method([1.0]), "FedAvg + FT": method([1.0])}},
        "reviews": {"methods": {"FedAvg": method([1.0])}},
    }
    assert script.chosen_before(known, "roles", "FedAvg") == {"lr": 0.2}
    assert script.chosen_before(known, "roles", "Portfolio") == {"lr": 0.2}, "those of FedAvg + FT"
    assert script.chosen_before(known, "roles", "pFedLoRA") == {}
    assert script.chosen_before(known, "reviews", "FedAvg") == {}


def test_what_was_not_run_again_stays_and_is_named(pages: ModuleType):
    roles = {"methods": {"a": 1, "b": 2}, "newcomers": 3}
    old = {"roles": roles, "lora": {"methods": {}}}
    new = {"roles": {"methods": {"b": 6}}}
    whole = pages.merged(old, new)
    assert whole["roles"] == {"methods": {"a": 1, "b": 6}, "newcomers": 3, "earlier": ["a"]}
    assert whole["lora"] == {"methods": {}}
    assert pages.merged(whole, whole) == whole


def test_what_words_need_is_counted_by_client(pages: ModuleType):
    """Perplexities of two clients, means over two seeds: 10 and 30 against 20 and 20."""
    methods = {"FedAvg": method([9.0, 30.0], [11.0, 30.0]), "Local": method([20.0, 20.0])}
    lines = pages.to_be_said({"verdict": "Level.", "methods": methods}, "roles")
    assert lines[:3] == [
        "roles, clients: Level.",
        "  FedAvg 20 (10 30): 1 of 2 ahead of Local",
        "  Local 20 (20 20): 1 of 2 ahead of FedAvg",
    ]
    assert "roles, newcomers: not measured" in lines
    assert "  roles, FedAvg with lr 0.2: 0 on validation rows, chosen" in lines


FEW = {"lr": 0.002, "candidates": ("global", "ft"), "tune_epochs": 1}


def test_newcomers_of_all_seeds_at_once_have_what_adapt_gives_each(
    script: ModuleType, tmp_path: Path
):
    """The portfolio needs most of a run: the global model, and what clients told."""
    shared = Path(os.environ.get("IDIOLECT_DATA") or ROOT.parent / "shared" / "data")
    if not (shared / "cross_product").is_dir():
        pytest.skip(f"no real datasets in {shared}: what is left out is newcomers of a study")
    data = script.small_data(shared, tmp_path)
    small = [one for one in script.SMALL["reviews"] if "length" not in one]
    sets = [*small, "rounds=1", "data.options.length=4", "backend.device=cpu", "backend.width=8"]
    experiment = script.load_experiment(ROOT / "experiments/adapters/reviews.toml", sets)
    own, _ = script.of_method(experiment, "Portfolio", FEW)
    script.SplitComparison(own, None, tmp_path / "run", data, {}).run(script.Silent())
    strangers = script.newcomers("reviews", experiment.data.options, data, 2)
    found = script.newcomers_of(tmp_path / "run", "Portfolio", strangers)
    told = adapt(tmp_path / "run", strangers, "Portfolio", 1, split="file", out=tmp_path / "late")
    assert len(told["newcomers"]) > 1
    for one, alone in zip(found["seeds"]["1"], told["newcomers"], strict=True):
        assert one["client"] == alone["client"]
        told_of = alone["models"]["personal"]
        assert {k: one["personal"][k] for k in told_of} == pytest.approx(told_of, rel=1e-4)
        assert 0 < one["baseline"]["accuracy"] < 1, "guessing is a row of the table"
