"""`idiolect new`: a file for data of any kind that runs as it is; `data inspect` says the same."""

import json

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from idiolect.cli import app
from idiolect.errors import DataError
from idiolect.experiment.load import load_experiment
from idiolect.experiment.run import run
from idiolect.experiment.starter import guess_options, starter

DRAW = np.random.default_rng(0)


def table(path, columns, rows=120, delimiter=","):
    """Write a table; a column is a function of the row's number."""
    lines = [delimiter.join(columns)]
    lines += [delimiter.join(str(make(n)) for make in columns.values()) for n in range(rows)]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def numbers(n):
    return f"{DRAW.normal():.3f}"


def patients(path):
    return table(
        path,
        {
            "record_id": lambda n: f"P{n:04d}",
            "hospital": lambda n: ("north", "south", "east")[n % 3],
            "age": lambda n: 20 + n % 60,
            "bmi": lambda n: "" if n % 4 == 0 else numbers(n),
            "smoking": lambda n: ("never", "former", "now")[n % 3 - n % 2],
            "stroke": lambda n: "yes" if n % 13 == 0 else "no",
        },
        delimiter=";",
    )


def written(folder, data, **given):
    made = starter(str(data), given.pop("options", {}), given.pop("task", None), None, folder)
    path = folder / "e.toml"
    path.write_text(made.text)
    return path, made


def test_a_table_from_file_to_result(tmp_path):
    path, made = written(tmp_path, patients(tmp_path / "p.csv"))
    loaded = load_experiment(path)
    assert loaded.data.options == {"label": "stroke", "client": "hospital"}
    assert loaded.data.class_weights == "balanced" and loaded.evaluate.metric == "auroc"
    assert 'source = "p.csv"' in made.text and '# record_id = "ignore"' in made.text
    assert '# bmi = "number"' in made.text and "25% missing" in made.text
    assert "label: stroke, guessed (by its name)" in made.said
    found = run(path, ["rounds=1"], out=tmp_path / "out")
    assert set(found["methods"]) == {"Local", "FedAvg", "FedAvg + FT", "Ditto"}


@pytest.mark.parametrize(
    ("columns", "label", "task"),
    [
        ({"a": numbers, "days": lambda n: 1 + n % 50, "event": lambda n: n % 2}, ["days", "event"],
         "survival"),
        ({"a": numbers, "sale_price": lambda n: 1000.5 + n}, "sale_price", "number"),
        ({"Class": lambda n: "ab"[n % 2], "a": numbers, "b": numbers}, "Class", "classes"),
        ({"a": numbers, "b": numbers, "odd name": lambda n: n % 2}, "odd name", "classes"),
        ({"a": numbers, "label": lambda n: "xyz"[n % 3]}, None, "classes"),
    ],
)  # fmt: skip
def test_labels_and_tasks_are_guessed_and_said(tmp_path, columns, label, task):
    data = table(tmp_path / "t.csv", columns)
    found = guess_options(data)
    assert found.options.get("label") == label and (label is None or "label" in found.said)
    path, made = written(tmp_path, data)
    assert f'task = "{task}"' in made.text
    # Without a client the file divides the rows, and says so.
    assert load_experiment(path).data.partition is not None and "made-up clients" in made.text


def test_what_is_given_is_not_guessed(tmp_path):
    data = patients(tmp_path / "p.csv")
    path, made = written(tmp_path, data, options={"label": "age"}, task="number")
    assert load_experiment(path).data.options["label"] == "age"
    assert not [one for one in made.said if one.startswith("label")]
    with pytest.raises(DataError, match="no column 'nosuch'"):
        starter(str(data), {"label": "nosuch"}, None, None, tmp_path)


def test_comments_cannot_be_ended_by_what_the_data_holds(tmp_path):
    data = tmp_path / "t.csv"
    rows = [f'{n},"x\nrounds = 999\n",{n % 2}' for n in range(60)]
    data.write_text('a,"na\nme",label\n' + "\n".join(rows))
    path, _ = written(tmp_path, data, options={})
    assert load_experiment(path).rounds == 20


def test_photographs_are_made_smaller_and_the_digits_need_no_data(tmp_path):
    for site in ("a", "b"):
        for kind in ("cat", "dog"):
            folder = tmp_path / "photos" / site / kind
            folder.mkdir(parents=True)
            for n in range(6):
                pixels = DRAW.integers(0, 255, (150, 300, 3)).astype(np.uint8)
                Image.fromarray(pixels).save(folder / f"{n}.jpg")
    path, made = written(tmp_path, tmp_path / "photos")
    assert load_experiment(path).data.options == {"size": (64, 32)}
    assert 'name = "lenet5"' in made.text and "2 clients: a, b" in made.text
    text = starter(None, {}, None, None, tmp_path).text
    assert 'source = "embedded"' in text and "[data.columns]" not in text


def test_the_commands(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    patients(tmp_path / "p.csv")
    call = CliRunner().invoke
    made = call(app, ["new", "p.csv"])
    assert made.exit_code == 0, made.output
    assert "Written: experiment.toml" in made.output and "client: hospital" in made.output
    assert call(app, ["new", "p.csv"]).exit_code == 2  # it is there
    shown = call(app, ["data", "inspect", "p.csv"])
    assert shown.exit_code == 0, shown.output
    assert "guessed: label is stroke" in shown.output and "one-hot, 3 places" in shown.output
    assert 'write metric = "auroc" in [evaluate]' in shown.output
    again = call(app, ["data", "inspect", "experiment.toml", "--json"])
    found = json.loads(again.output)["result"]
    assert {one["name"]: one["kind"] for one in found["columns"]}["bmi"] == "number"
    assert len(found["clients"]) == 3 and found["trouble"] == ""


def test_inspect_shows_columns_even_where_a_run_would_be_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    table(tmp_path / "one.csv", {"a": numbers, "label": lambda n: "same"})
    shown = CliRunner().invoke(app, ["data", "inspect", "one.csv"])
    assert shown.exit_code == 3 and "label  " in shown.output
    assert "all 120 labels are 'same'" in shown.output + shown.stderr


def test_what_clients_said_becomes_an_experiment_on_adapters(tmp_path):
    pytest.importorskip("tokenizers", reason="needs tokenizers")
    lines = [
        f'{{"client": "{who}", "text": "{who} says it was fine {n}"}}'
        for who in "ab"
        for n in range(40)
    ]
    (tmp_path / "chats.jsonl").write_text("\n".join(lines))
    path, made = written(tmp_path, tmp_path / "chats.jsonl")
    wanted = load_experiment(path)
    assert wanted.adapter.name == "lora" and wanted.evaluate.metric == "perplexity"
    assert wanted.data.options == {"tokeniser": "embedded", "length": 16}
    assert "tokeniser: embedded, guessed" in made.said[0]
    labelled = [f'{line[:-1]}, "label": {n % 2}}}' for n, line in enumerate(lines)]
    (tmp_path / "chats.jsonl").write_text("\n".join(labelled))
    wanted = load_experiment(written(tmp_path, tmp_path / "chats.jsonl")[0])
    assert wanted.evaluate.metric is None and wanted.adapter.name == "lora"
