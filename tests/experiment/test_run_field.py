"""The outside tables within a time: the figures of lines, cut or whole, and what is kept."""

import argparse
import json
import re
import sys
import time
from pathlib import Path

import pytest

from idiolect.experiment.load import load_experiment
from idiolect.experiment.run import run_experiment

ROOT = Path(__file__).parents[2]
SMALL = [
    "data.source=embedded",
    "model.name=dnn",
    "model.hidden=4",
    "methods.FedAvg + FT.tune_epochs=1",
]


@pytest.fixture
def field(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "path", [str(ROOT / "scripts"), *sys.path])
    import field_lines
    import run_field
    import train_field

    monkeypatch.setattr(train_field, "EVERY", 1)
    return argparse.Namespace(lines=field_lines, train=train_field, run=run_field)


def asked(folder: Path, **more: object) -> argparse.Namespace:
    own = {"runs": folder, "end": time.time() + 600, "workers": 1, "precision": "fp32", "only": []}
    return argparse.Namespace(**{**own, "rounds": 0, "set": SMALL, **more})


def trained(field, line, folder: Path, seconds: float = 600, **more: object) -> dict:
    field.train.train_line(
        line, asked(folder, end=time.time() + seconds, **more), field.train.Cache()
    )
    return {one["run"]: one["methods"] for one in read(folder / f"{line.name}.json")}


def read(path: Path):
    return json.loads(path.read_text())


@pytest.mark.parametrize("kind", ["dir", "pat"])
def test_figures_are_those_of_a_run(field, kind: str, tmp_path: Path) -> None:
    """Last round, best test round and its number, of each of the splits that are trained together.

    FedAvg's rounds are those of FedAvg + FT.
    """
    run, table = f"pfllib-fmnist-{kind}", "pfllib-fmnist"
    found = trained(field, field.lines.Line(table, "FedAvg", 3), tmp_path)[run]
    found |= trained(field, field.lines.Line(table, "FedPer", 3), tmp_path)[run]
    assert (tmp_path / "pfllib-fmnist--FedPer.settled").exists()
    changes = ["rounds=3", "seeds=[0]", "evaluate.every=1", "evaluate.personal=auto", *SMALL]
    labels = ["FedAvg", "FedAvg + FT", "FedPer"]
    content, _ = run_experiment(field.lines.loaded(run, changes), tmp_path / "run", only=labels)
    from reproduce_field import summary

    for label, model in zip(labels, ("global", "personal", "personal"), strict=True):
        whole, own = summary(content["methods"][label]), found[label]
        assert own["rounds"] == 3
        for name in (model, f"{model}, best test round"):
            for key, values in whole["models"][name].items():
                assert own["models"][name][key] == pytest.approx(values, abs=2e-5)
    assert "personal" not in found["FedAvg"]["models"]
    curve = found["FedPer"]["curve"]["personal"]
    assert curve["round"] == [1, 2, 3] and len(curve["mean"]) == 3
    assert max(curve["weighted_mean"]) == found["FedPer"]["models"][name]["mean"][0]


def test_a_line_ends_with_the_time(field, tmp_path):
    found = trained(field, field.lines.Line("pfllib-fmnist", "Local", 50), tmp_path, seconds=-1)
    for own in found.values():
        assert own["Local"]["rounds"] == 1 and own["Local"]["first"] > 0
        assert own["Local"]["ended"] == "time"


def test_a_line_ends_when_all_its_splits_are_flat_or_have_the_figure(field, tmp_path, monkeypatch):
    monkeypatch.setattr(field.train, "FLAT_FROM", 3)
    monkeypatch.setattr(field.train, "FLAT", 1.0)
    line = field.lines.Line("pfllib-fmnist", "FedPer", 50)
    found = trained(field, line, tmp_path)
    assert {(own["FedPer"]["rounds"], own["FedPer"]["ended"]) for own in found.values()} == {
        (3, "flat")
    }
    figure = field.train.Goal("personal", 0.1)
    monkeypatch.setattr(
        field.train, "goals", lambda line: [figure, field.train.Goal("personal", None)]
    )
    found = trained(field, line, tmp_path)
    assert found["pfllib-fmnist-pat"]["FedPer"]["ended"] == "has the table's figure"
    assert found["pfllib-fmnist-dir"]["FedPer"]["ended"] == "flat"


def test_what_ends_a_split(field) -> None:
    def curve(*values: float):
        return [(10 * n, {"personal": (value, 0.0)}) for n, value in enumerate(values, 1)]

    goal = field.train.Goal("personal", 90.0)
    rising, level = curve(0.1, 0.2, 0.3, 0.4), curve(0.1, 0.3, 0.3002, 0.3005)
    assert goal.met(rising, 40) == "" and goal.met(level, 40) == "flat"
    assert goal.met(level, 41) == ""  # too early to say
    assert goal.met(curve(0.1, 0.9, 0.3), 31) == "has the table's figure"
    hidden = [(n, {"global": own["personal"]}) for n, own in curve(0.9, 0.99, 0.99, 0.99)]
    assert goal.met(hidden, 40) == "flat" and goal.met(hidden, 41) == ""  # no personal figure yet


def test_of_a_table_of_the_final_round_only_that_is_scored(field, tmp_path):
    """Splits of all its grey images are trained together, and half of the clients take part."""
    line = field.lines.Line("pfedkdh-grey", "FedPer", 3)
    found = trained(field, line, tmp_path, set=SMALL[:3])
    runs = [f"pfedkdh-{one}-{a}" for one in ("fmnist", "mnist") for a in ("0.05", "0.1", "0.5")]
    assert sorted(found) == runs
    alone = field.lines.loaded("pfedkdh-mnist-0.1", ["rounds=3", "seeds=[0]", *SMALL[:3]])
    content, _ = run_experiment(alone, tmp_path / "run", only=["FedPer"])
    (figure,) = found["pfedkdh-mnist-0.1"]["FedPer"]["models"]["personal"]["mean"]
    own = content["methods"]["FedPer"]["seeds"][0]["models"]["personal"]["mean"]
    assert figure == pytest.approx(own, abs=2e-5)
    assert found["pfedkdh-mnist-0.1"]["FedPer"]["curve"] == {}
    with pytest.raises(TimeoutError, match="do not fit"):
        args = asked(tmp_path, end=time.time(), set=SMALL[:3])
        field.train.train_line(
            field.lines.Line("pfedkdh-grey", "FedPer", 50), args, field.train.Cache()
        )


def test_milestones_and_thinned_curves(field, monkeypatch):
    line = [0.1, 0.2, 0.8, 0.4, 0.6]
    monkeypatch.setattr(field.train, "POINTS", 3)
    monkeypatch.setattr(field.train, "MILESTONES", (4, 6, 11))
    scored = argparse.Namespace(scores={"personal": {"accuracy": field.train.np.array([0.6, 0.0])}})
    assert field.train.figures_of(scored, [3, 1])["personal"] == pytest.approx((0.45, 0.3))
    points = [(2 * n, {"personal": (0.75 * v, v / 2)}) for n, v in enumerate(line, 1)]
    found = field.train.summary(points)
    assert found["models"]["personal"] == {"mean": [0.3], "weighted_mean": [0.45]}
    assert found["models"]["personal, best test round"] == {"mean": [0.6], "round": [6]}
    curve = found["curve"]["personal"]
    assert curve["round"] == [2, 6, 10] and curve["weighted_mean"] == [0.075, 0.6, 0.45]
    assert curve["best_by"] == {"4": [0.15], "6": [0.6]}


def test_workers_share_the_lines(field, tmp_path, monkeypatch):
    """Each takes what nobody has; a failure costs a line and not the others."""
    whole = field.lines.Line("pfedkdh-grey", "x", 50)  # does not fit, and is left
    lines = [whole, *(field.lines.Line(table, "x", 9) for table in "abc")]
    monkeypatch.setattr(field.run, "plan", lambda only: lines)
    monkeypatch.setattr(field.lines, "FIRST", 100)
    monkeypatch.setattr(field.lines, "PACES", {"": 8})
    told = []

    def train_line(line, args, shelf):
        told.append(line.table)
        if line.table == "b":
            raise ValueError("no")
        (tmp_path / f"{line.name}.json").write_text(
            json.dumps([{"methods": {"x": {"ended": "time" if line.table == "c" else "flat"}}}])
        )

    monkeypatch.setattr(field.run, "train_line", train_line)
    (tmp_path / "a--x.taken").touch()
    args = asked(tmp_path, end=time.time() + 400)
    field.run.work(args)
    assert told == ["b", "c"]
    field.run.merge(tmp_path, tmp_path)
    kept = json.loads((tmp_path / "tables.json").read_text())
    assert kept["failed"] == {"b--x": "ValueError: no"} and len(kept["lines"]) == 1
    field.run.work(args)
    assert told == ["b", "c"]  # all are taken
    (tmp_path / "tables.json").unlink()
    field.run.begin_again(tmp_path)  # the next call
    field.run.work(args)
    assert told == ["b", "c", "a", "b", "c"]  # what had not come to its end
    field.run.begin_again(tmp_path)
    assert (tmp_path / "a--x.taken").exists() and not (tmp_path / "c--x.taken").exists()


def test_the_line_of_a_process_that_was_ended_is_there_to_be_taken_again(field, tmp_path) -> None:
    for name, worker in (("a", 7), ("b", 7), ("c", 8)):
        (tmp_path / f"{name}.taken").write_text(str(worker))
    (tmp_path / "b.failed").write_text("CUDA error")
    field.run.give_back(tmp_path, 7)
    assert sorted(path.name for path in tmp_path.glob("*.taken")) == ["b.taken", "c.taken"]


def test_lines_that_results_has_are_left_out(field, monkeypatch) -> None:
    """Unless with fewer rounds; all lines of the file are of methods of their tables."""
    held: dict[str, dict] = {}
    monkeypatch.setattr(field.lines, "figures", lambda key: held)
    everything = field.lines.plan()
    assert len({line.name for line in everything}) == len(everything) > 10
    for line in everything:
        labels = {one.label_or_name for one in field.lines.loaded(line.runs[0], []).methods}
        assert line.label in labels and line.seconds(2) > line.seconds(1) > field.lines.FIRST
    line = next(one for one in everything if one.table == "pfllib-fmnist")
    for run in line.runs:
        held[run] = {"methods": {line.label: {"rounds": line.rounds - 1, "curve": {}}}}
    assert field.lines.plan([line.name]) == [line]
    held[line.runs[1]]["methods"][line.label]["rounds"] += 1
    assert field.lines.plan([line.name]) == [line]
    held[line.runs[0]]["methods"][line.label]["rounds"] += 1
    assert line not in field.lines.plan()


def test_the_longer_of_two_runs_is_kept(field):
    from reproduce_field import joined

    kept = {"a": {"rounds": 30}, "b": {"rounds": 30}}
    new = {"a": {"rounds": 29}, "b": {"rounds": 30, "new": 1}, "c": {"rounds": 2}}
    assert joined(kept, new) == {"a": {"rounds": 30}, "b": {"rounds": 30, "new": 1}}


def test_the_page_counts_cells_and_wins_of_all_tables(field, tmp_path, monkeypatch) -> None:
    """Half a point below the table everywhere: all cells are near, and all wins are found."""
    import reproduce_field as page

    def kept(line, run: str, goal) -> dict:
        value = ((goal.paper or 50.0) - 0.5) / 100
        rounds = range(5, 55, 5) if field.lines.FINAL not in run else [50]
        found = field.train.summary([(n, {goal.model: (value, value)}) for n in rounds])
        how = {"device": "x", "precision": "tf32", "workers": 3, "pace": 0.1, "first": 4.0}
        own = {**found, **how, "rounds": 50, "seconds": 9.0, "ended": "flat"}
        head = {"run": run, "federation": "", "seeds": [0], "versions": {"torch": "2"}}
        return {**head, "methods": {line.label: own}}

    lines = [
        kept(line, run, goal)
        for table, (run, *_) in field.lines.SPLITS.items()
        for method in field.lines.loaded(run, []).methods
        if method.label_or_name != "FedAvg + FT"
        for line in [field.lines.Line(table, method.label_or_name, 50)]
        for run, goal in zip(line.runs, field.train.goals(line), strict=True)
    ]
    for cells in (one["methods"] for one in lines if one["run"] == "fedala-cifar10"):
        if "FedAvg" in cells:  # FedAvg-C is trained with it
            models = {name: cells["FedAvg"]["models"][name.replace("personal", "global")]
                      for name in ("personal", "personal, best test round")}  # fmt: skip
            cells["FedAvg + FT"] = {**cells["FedAvg"], "models": models, "curve": {}}
    for one in [one for one in lines if one["run"].startswith(field.lines.FINAL)]:
        slow = "FedPer" in one["methods"] and "-mnist" in one["run"]
        plain = json.loads(json.dumps({**one, "run": page.plain_run(one["run"])}))
        for model in [m for own in plain["methods"].values() for m in own["models"].values()]:
            model["mean"] = [value - 0.01 * slow for value in model["mean"]]
        lines.append(plain)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "tables.json").write_text(json.dumps({"lines": lines, "failed": {}}))
    written = tmp_path / "field.md"
    written.write_text(page.PAGE.read_text())
    monkeypatch.setattr(page, "PAGE", written)
    monkeypatch.setattr(page, "FIGURES", tmp_path)
    page.keep(argparse.Namespace(out=tmp_path / "out"))
    page.page(argparse.Namespace())
    text = written.read_text()
    assert "| `pfllib-fmnist` | 40 | 0 | 0 |" in text and "| `pfedkdh` | 72 | 0 | 0 |" in text
    assert "| `fedala-cifar10` | 11 | 1 | 0 |" in text  # FedAvg-C has FedAvg's figure here
    assert "That is 99 % of the 124 cells that ours have." in text
    assert "| pfllib-fmnist, all | 378 | 378 | 378 | 378 |" in text
    assert "| pfedkdh, all | 252 | 252 | 252 | the same |" in text
    assert "| FedProto, by head (not in the table) | 98.50 | 97.48 |" in text
    (plain,) = re.findall(r"<!-- pfedkdh plain -->(.*?)<!-- end -->", text, re.DOTALL)
    assert "| FedPer | 97.61 | 97.11 |" in plain and "| 6; 9 of 9 |" in plain
    assert "Of these 90 cells" in plain and " 87 are within" in plain and "90 as chosen" in plain
    assert "FedAvg-C -31.7 after 50 rounds" in text and "3 lines at a time" in text


def test_what_a_text_leaves_open_is_chosen_by_validation_rows(field, tmp_path, monkeypatch) -> None:
    """By the mean over the data sets of rounds 6 to 10; nothing of test rows is kept."""
    import reproduce_field as page

    changes = ["model.name=dnn", "model.hidden=4", "rounds=10", "data.partition.alpha=5.0"]
    file = ROOT / "experiments" / "field" / "pfedkdh-open.toml"
    experiment = load_experiment(file, ["data.source=embedded", *changes, "data.min_size=5"])
    content, _ = run_experiment(experiment, tmp_path / "run", only=["FedAvg", "FedAvg, momentum"])
    monkeypatch.setattr(page, "FIGURES", tmp_path)
    page.keep_choice(argparse.Namespace(runs=[tmp_path / "run"]))
    kept = read(tmp_path / "pfedkdh-choice.json")["embedded"]["methods"]
    clients = content["methods"]["FedAvg"]["seeds"][0]["clients"]
    last = [one["global"]["val_accuracy"] for one in clients]
    assert kept["FedAvg"][-1] == pytest.approx(sum(last) / len(last), abs=1e-4)
    line = [0.9] * 5 + [0.1, 0.2, 0.3, 0.4, 0.5]
    held = {"a": {"FedAvg": line, "FedAvg, momentum": [0.31] * 10},
            "b": {"FedAvg": line, "FedAvg, momentum": [0.1] * 10}}  # fmt: skip
    monkeypatch.setattr(page, "figures", lambda key: {k: {"methods": v} for k, v in held.items()})
    assert page.choice()[2:] == [
        "| neither | 30.00 | 30.00 | 30.00, chosen |",
        "| momentum | 31.00 | 10.00 | 20.50 |",
    ]


def test_the_file_for_another_table_runs(tmp_path: Path) -> None:
    """On the page, and in small: the preset's values, and those after it."""
    from idiolect.experiment.load import parse_experiment

    page = (ROOT / "docs" / "reproduction" / "field.md").read_text()
    text, _table = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    changes = ["data.source=embedded", "model.name=dnn", "model.hidden=4", "seeds=[0]"]
    experiment = parse_experiment(text, [*changes, "rounds=1"])
    content, _ = run_experiment(experiment, tmp_path / "run")
    rates = {label: own["settings"]["lr"] for label, own in content["methods"].items()}
    assert rates == {"FedRep": 0.005, "Ditto": 0.01} and not experiment.notes
    assert all(own["best_test_round"] for own in content["methods"].values())


def test_methods_are_compared_after_as_many_rounds_as_both_have(field) -> None:
    """By the best test round so far, or the last point; what the second half brought is told."""
    import reproduce_field as page

    best = page.BEST_TEST_ROUND

    def kept(rounds: list[int], line: list[float], even: list[float]) -> dict:
        models = {"personal": {"mean": even[-1:]}, "personal" + best: {"mean": [max(line)]}}
        curve = {"personal": {"round": rounds, "weighted_mean": line, "mean": even}}
        return {"models": models, "curve": curve, "rounds": rounds[-1]}

    long = kept([5, 10, 20], [0.7, 0.6, 0.9], [0.3, 0.4, 0.8])
    held = {"a": {"methods": {"x": long, "Local": kept([5, 10], [0.65, 0.6], [0.5, 0.35])}}}
    x = page.Cell("x", "a", "x", "personal" + best, 90.0)
    assert [page.figure(held, x, by, 10) for by in (True, False)] == [0.7, 0.4]
    assert [page.figure(held, x, by, 20) for by in (True, False)] == [0.9, 0.8]
    assert page._rise(long, "personal").endswith("brought 20.0")
    (told,) = page._beside_local(held, [x], "a")
    assert "1 of 1 personal methods by best test round and 1 of 1 by the last" in told
