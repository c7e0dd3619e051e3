"""The queue of runs that the papers' pages lack, and how later seeds join the kept ones."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from idiolect.experiment.build import refuse_unknown_labels
from idiolect.experiment.load import load_experiment

ROOT = Path(__file__).parents[2]


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(ROOT / "scripts"), *sys.path])


def test_every_line_is_an_experiment_with_these_methods(scripts: None) -> None:
    import run_papers

    lines = run_papers.lines()
    assert len({line.name for line in lines}) == len(lines)
    for line in lines:
        experiment = load_experiment(ROOT / line.file, line.changes)
        refuse_unknown_labels(experiment, line.methods)
        assert not line.run or (ROOT / "scripts" / f"reproduce_{line.page}.py").exists()


def result(folder: Path, label: str, seeds: list[int], scores: list[float]) -> str:
    """Write the result of one method, whose score of seed s is given."""
    folder.mkdir()
    own = {"seeds": [{"score": score} for score in scores]}
    about = {"seeds": seeds, "versions": {}, "data": {"federations": ["digits"]}}
    (folder / "result.json").write_text(json.dumps({**about, "methods": {label: own}}))
    return str(folder)


def test_seeds_join_behind_the_kept_ones(scripts: None, tmp_path: Path) -> None:
    from reproduction import keep

    def method(own: dict[str, Any]) -> dict[str, Any]:
        return {"rounds": 7, "models": {"personal": [seed["score"] for seed in own["seeds"]]}}

    kept = tmp_path / "kept.json"
    for label in ("a", "b"):
        keep(kept, [result(tmp_path / label, label, [0, 1], [0.5, 0.6]) + "=run"], method)
    more = [
        result(tmp_path / f"{label}{seed}", label, [seed], [seed / 10]) + "=run+"
        for label in ("a", "b")
        for seed in (7, 8)
    ]
    all_ = {"rounds": 7, "models": {"personal": [0.5, 0.6, 0.7, 0.8]}}
    keep(kept, more[:3], method)  # b has no seed 8 yet
    found = json.loads(kept.read_text())["run"]
    less = {"rounds": 7, "models": {"personal": [0.5, 0.6, 0.7]}}
    assert found["seeds"] == [0, 1, 7]
    assert found["methods"] == {"a": {**all_, "seeds": [0, 1, 7, 8]}, "b": less}
    for _ in range(2):  # a second time nothing is added
        keep(kept, more, method)
        found = json.loads(kept.read_text())["run"]
        assert found["seeds"] == [0, 1, 7, 8]
        assert found["methods"] == {"a": all_, "b": all_}
    other = result(tmp_path / "other", "a", [3], [0.1])
    with pytest.raises(SystemExit, match="other seeds than kept, and not b"):
        keep(kept, [f"{other}=run"], method)
    apart = [
        result(tmp_path / f"{label} apart", label, [seed], [0.9]) + "=run+"
        for label, seed in (("a", 9), ("b", 10))
    ]
    with pytest.raises(SystemExit, match="of which none has all"):
        keep(kept, apart, method)


def test_more_seeds_join_only_when_their_line_is_done(
    scripts: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line that was cut has some of its methods: their seeds would not be the others'."""
    import run_papers

    made = [
        run_papers.Line("cpu", 1, name, "pfml", "run+", "x.toml") for name in ("cut", "whole")
    ] + [run_papers.Line("gpu", 1, "first", "pfml", "other", "x.toml")]
    monkeypatch.setattr(run_papers, "lines", lambda: made)
    runs, out = tmp_path / "runs", tmp_path / "out"
    for line in made:
        (runs / line.name).mkdir(parents=True)
        (runs / line.name / "result.json").write_text("{}")
    (runs / "whole" / "done").touch()
    out.mkdir()
    run_papers.pack(runs, out)
    ran: list[list[str]] = []

    def record(command: list[str], check: bool) -> Any:
        ran.append([Path(word).name for word in command[2:]])
        return type("Done", (), {"returncode": 0})

    monkeypatch.setattr(run_papers.subprocess, "run", record)
    run_papers.keep(out)
    assert ran == [["collect", "first=other"], ["collect", "whole=run+"], ["write"], []]


def test_scores_along_the_way_weigh_clients_by_their_test_rows(
    scripts: None, tmp_path: Path
) -> None:
    import pandas
    from reproduce_pfml import _global_on_test

    clients = [{"client": "a", "test": 1}, {"client": "b", "test": 3}, {"client": "c", "test": 0}]
    seeds = [{"seed": seed, "clients": clients} for seed in (4, 5)]
    (tmp_path / "result.json").write_text(json.dumps({"methods": {"PFML": {"seeds": seeds}}}))
    scores = [
        (seed, 7, name, v + seed / 100) for seed in (4, 5) for name, v in (("a", 0), ("b", 0.4))
    ]
    rows = pandas.DataFrame(scores, columns=["seed", "round", "client", "value"])
    rows = rows.assign(method="PFML", model="global", metric="accuracy", split="test_curve")
    pandas.concat([rows, rows.assign(split="val", value=1.0)]).to_parquet(
        tmp_path / "metrics.parquet"
    )

    assert _global_on_test(tmp_path) == {"PFML": {"7": [0.34, 0.35]}}
