"""Text from a user's file to a run, its vocabulary, and newcomers who write other words."""

import json
import shutil

import numpy as np
import pytest

import idiolect
from idiolect.cli.model_commands import _print_newcomers
from idiolect.engine.row_metrics import ClientOutputs, sequence_baseline
from idiolect.errors import ConfigError, DataError, ModelError
from idiolect.experiment.adapt import adapt
from idiolect.experiment.run import run

HEAD = """
name = "text"
seeds = [0, 1]
rounds = 2
[backend]
width = 4
[training]
batch = 4
lr = 0.5
[[methods]]
name = "fedper"
"""


def reviews(path, users="abc", mark=""):
    lines = ["text,label,client"]
    for place, user in enumerate(users):
        for n in range(12):
            word = ("good", "bad")[n % 2]
            lines.append(f"{word} thing {mark}{place}{n} {word} indeed,{n % 2},{user}")
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="module")
def labelled(tmp_path_factory):
    folder = tmp_path_factory.mktemp("labelled")
    reviews(folder / "own.csv")
    (folder / "e.toml").write_text(
        HEAD
        + """
[data]
source = "own.csv"
options = { length = 6, vocabulary = 24 }
[model]
name = "kim-cnn"
embedding = 4
filters = 2
"""
    )
    return folder, run(folder / "e.toml", out=folder / "out")


def vocabulary(folder, seed):
    return (folder / "out" / "vocabulary" / f"seed-{seed}.txt").read_text().splitlines()


def test_own_reviews_are_learnt_from_a_file(labelled):
    folder, found = labelled
    assert found["complete"] and found["data"]["classes"] == ["0", "1"]
    words = [vocabulary(folder, seed) for seed in (0, 1)]
    assert words[0][:4] == ["<pad>", "<unk>", "<bos>", "<eos>"]
    assert set(words[0][4:8]) == {"bad", "good", "thing", "indeed"} and len(words[0]) == 24
    assert words[0] != words[1]  # each seed has training rows of its own


def test_a_finished_run_is_known_again(labelled):
    folder, found = labelled
    again = run(folder / "e.toml", out=folder / "out", resume=True)
    assert again["methods"]["FedPer"]["seeds"] == found["methods"]["FedPer"]["seeds"]


def test_newcomers_are_read_with_the_runs_words(labelled):
    """Their new words are unknown, so only the words of the run can tell their texts apart."""
    folder, _ = labelled
    new = reviews(folder / "new.csv", "z", "never")
    found = adapt(folder / "out", new, seed=1)
    (client,) = found["newcomers"]
    assert client["client"] == "z" and client["test"]
    assert 0 <= client["models"]["personal"]["accuracy"] <= 1
    with pytest.raises(DataError, match=r"have shape \(9,\) and the run's \(6,\)"):
        adapt(folder / "out", new, options={"length": 9})
    with pytest.raises(DataError, match="is next word text and the run was on labelled text"):
        adapt(folder / "out", new, options={"next_word": True})


def test_a_run_without_its_words_says_so(labelled, tmp_path):
    folder, _ = labelled
    shutil.copytree(folder / "out", tmp_path / "out")
    (tmp_path / "out" / "vocabulary" / "seed-1.txt").unlink()
    with pytest.raises(DataError, match=r"seed-1\.txt, the words that the run knows, cannot be"):
        adapt(tmp_path / "out", reviews(tmp_path / "new.csv", "z"), seed=1)


def test_the_next_word_is_learnt_from_files_of_users(tmp_path, capsys):
    (tmp_path / "users").mkdir()
    for user in "abcd":
        posts = [{"body": f"hello {user} {user} world", "created_utc": n} for n in range(12)]
        text = "\n".join(map(json.dumps, posts))
        (tmp_path / "users" / f"{user}.jsonl").write_text(text)
    (tmp_path / "e.toml").write_text(
        HEAD
        + """
[data]
source = "users"
options = { next_word = true, length = 5, vocabulary = 50 }
split = [0.7, 0.1, 0.2]
ordered = true
[model]
name = "next-word-lstm"
units = 4
[evaluate]
metric = "perplexity"
"""
    )
    found = run(tmp_path / "e.toml", out=tmp_path / "out")
    method = found["methods"]["FedPer"]
    client = method["seeds"][0]["clients"][0]
    assert found["data"]["classes"] == ["words"]
    assert np.isclose(np.exp(client["personal"]["loss"]), client["personal"]["perplexity"])
    assert found["metric"]["name"] == "perplexity"
    guess = found["baseline"]["seeds"][0]["clients"][0]
    assert found["baseline"]["name"] == "share of each word"
    assert np.isclose(np.exp(guess["loss"]), guess["perplexity"]) and 3 < guess["perplexity"] < 30
    told = adapt(tmp_path / "out", tmp_path / "users")
    assert [one["client"] for one in told["newcomers"]] == list("abcd")
    _print_newcomers(told, "")
    said = capsys.readouterr().out
    first = told["newcomers"][0]["models"]["personal"]["perplexity"]
    assert "seed 0: perplexity" in said and f"{first:.4g}" in said


def test_perplexity_is_of_next_words(labelled):
    folder, _ = labelled
    with pytest.raises(ConfigError, match="perplexity, which is of next words, and own has a lab"):
        run(folder / "e.toml", out=folder / "no", overrides=("evaluate.metric=perplexity",))


def test_a_guess_of_words_by_hand():
    """Training words 1, 1, 2 of three: chances 1/6, 3/6, 2/6; told 1, 2 and one place of none."""
    y = np.array([[1, 1], [2, -1]]), np.array([[1, 2, -1]])
    own = ClientOutputs(None, {}, {}, y[1], y[1], y[0])
    found = sequence_baseline(own, 3)
    loss = -(np.log(3 / 6) + np.log(2 / 6)) / 2
    assert np.isclose(found["loss"], loss) and np.isclose(found["perplexity"], np.sqrt(6))
    assert found["accuracy"] == 0.5


def test_words_need_a_network_that_reads_them(tmp_path):
    held = idiolect.federation(reviews(tmp_path / "own.csv"), options={"length": 6})
    with pytest.raises(ModelError, match="KimCNN reads words, and the data holds none"):
        idiolect.fit("fedavg", idiolect.federation(), "kim-cnn", rounds=1)
    with pytest.raises(ModelError, match=r"fails on examples of shape \(6,\)"):
        idiolect.fit("fedavg", held, "dnn", rounds=1)
