"""Nodes with text of their own number words alike, and nobody shows a word to another."""

import csv

import federations as fed
import numpy as np
import pytest
from typer.testing import CliRunner

from idiolect.cli import app
from idiolect.data import read
from idiolect.data.text import SPECIAL, encoded_as, hashed_words
from idiolect.deploy.limits import UNLIMITED
from idiolect.deploy.node import Node
from idiolect.deploy.node_process import InProcess
from idiolect.deploy.personal_models import load_personal_model
from idiolect.deploy.site import NodeSettings
from idiolect.errors import ConfigError, DataError, DeployError
from idiolect.experiment.adapt import adapt
from idiolect.experiment.stored_models import make_model

TOML = """
name = "letters"
seeds = [1]
rounds = 2
[data]
source = "{source}"
{data}
[data.text]
{text}
[model]
{model}
[training]
batch = 4
lr = 0.5
[backend]
kind = "sequential"
[[methods]]
name = "fedper"
"""
LABELLED = {
    "data": 'classes = ["bad", "good"]',
    "text": "words = {words}\nlength = 6",
    "model": 'name = "kim-cnn"\nembedding = 4\nfilters = 2\ndropout = 0.0',
}
NEXT = {
    "data": "split = [0.6, 0.2, 0.2]",
    "text": "words = {words}\nlength = 4\nnext_word = true",
    "model": 'name = "next-word-lstm"\nunits = 6\nlayers = 1\ndropout = 0.0',
}
SECRET = ("smith", "jones", "brown")  # a word that each writer alone uses


def letters(writer, count):
    """Letters of one writer: words that all use, and one of its own."""
    draw, own = np.random.default_rng(writer), SECRET[writer]
    said = {"good": ["fine", "day", "sun"], "bad": ["rain", "day", "cold"]}
    for n in range(count):
        label = ("good", "bad")[n % 2]
        yield " ".join([*draw.choice(said[label], 4), own]), label


@pytest.fixture
def writers(tmp_path):
    """Three writers' files, the same letters in one file, and a list of words that is public."""
    held = [list(letters(writer, 20 + 4 * writer)) for writer in range(3)]
    files = []
    for writer, rows in enumerate(held):
        files.append(tmp_path / f"{writer}.csv")
        with files[-1].open("w", newline="") as file:
            csv.writer(file).writerows([("text", "label"), *rows])
    with (tmp_path / "all.csv").open("w", newline="") as file:
        table = [(*row, f"writer {n}") for n, rows in enumerate(held) for row in rows]
        csv.writer(file).writerows([("text", "label", "client"), *table])
    (tmp_path / "words.txt").write_text("day\nsun\nrain\nfine\n")
    return files, tmp_path / "all.csv"


def experiment(source, kind, words):
    parts = {**kind, "text": kind["text"].format(words=words)}
    return fed.experiment(toml=TOML.format(source=source, **parts))


class Overheard(InProcess):
    """Nodes, of whom every answer is kept."""

    said = b""

    def call(self, site, blob, seconds):
        answer = super().call(site, blob, seconds)
        self.said += answer
        return answer


def nodes(tmp_path, files):
    sites = [
        NodeSettings(f"writer {n}", "test", tmp_path / str(n), str(f), policy=UNLIMITED)
        for n, f in enumerate(files)
    ]
    return Overheard({site.name: Node(site) for site in sites})


@pytest.mark.parametrize("kind", [LABELLED, NEXT], ids=["labelled", "next word"])
@pytest.mark.parametrize("words", ["list", 12])
def test_texts_apart_learn_as_one_corpus_and_no_word_leaves(kind, words, writers, tmp_path):
    """As the simulator on all letters, by a list of words or by their hashes."""
    files, together = writers
    given = f'"{tmp_path / "words.txt"}"' if words == "list" else words
    wanted = experiment(together, kind, given)
    content = fed.simulated(wanted, tmp_path / "simulated")
    transport = nodes(tmp_path, files)
    found = fed.served(wanted, transport, tmp_path / "served")
    (mine,), (theirs,) = (fed.scores(one, "FedPer") for one in (found, content))
    assert mine["clients"] == theirs["clients"] and mine["models"] == theirs["models"]
    states = [fed.server_state(tmp_path / k, "FedPer") for k in ("simulated", "served")]
    assert all(states[0][leaf].equal(states[1][leaf]) for leaf in states[0])
    assert not any(word.encode() in transport.said for word in (*SECRET, "cold"))
    own = load_personal_model(tmp_path / "1")
    assert len(own.form.words) == (12 if words == 12 else 8)
    score = make_model(own).predict(files[1])
    if kind is LABELLED:
        said = [label for _, label in letters(1, 24)]
        assert score.accuracy == np.mean(
            [a == b for a, b in zip(score.predicted, said, strict=True)]
        )
    else:  # after each row a word of the vocabulary; how often it was right, over all places
        assert set(score.predicted) <= set(own.form.words) and 0 < score.accuracy < 1
    newcomer = adapt(tmp_path / "served", files[2], out=tmp_path / "adapted")
    assert newcomer["newcomers"][0]["train"] > 0


def test_unlabelled_text_is_predicted_too(writers, tmp_path):
    files, together = writers
    wanted = experiment(together, LABELLED, 32)
    fed.served(wanted, nodes(tmp_path, files), tmp_path / "served")
    (tmp_path / "new.csv").write_text('text\nfine sun fine sun\n"rain, cold rain"\n')
    words = ["predict", str(tmp_path / "0"), "--data", f"{tmp_path}/new.csv"]
    found = CliRunner().invoke(app, words)
    assert found.exit_code == 0 and len(found.stdout.splitlines()) == 3, found.output
    with pytest.raises(DataError, match="holds no text, and the model reads text"):
        np.savez(tmp_path / "x.npz", x=np.zeros((2, 6)))
        make_model(load_personal_model(tmp_path / "0")).predict(tmp_path / "x.npz")


def test_text_without_an_agreement_is_refused(writers, tmp_path):
    files, together = writers
    toml = TOML.format(source=together, **LABELLED).replace("[data.text]\n", "")
    wanted = fed.experiment(toml=toml.replace("words = {words}\nlength = 6", ""))
    with pytest.raises(DeployError, match=r"writer 0: its data is text, .* no \[data.text\]"):
        fed.served(wanted, nodes(tmp_path, files), tmp_path / "served")


def test_hashes_number_words_by_their_letters_alone(writers):
    """sha256 of the word, modulo the entries beside the four special ones."""
    import hashlib

    files, _ = writers
    size = 50
    for file in files:
        data = read(file)
        coded = encoded_as(data, hashed_words(size))
        place = {w: n for n, w in enumerate(data.words)}
        digest = hashlib.sha256(b"day").digest()
        expected = 4 + int.from_bytes(digest[:8], "big") % (size - 4)
        assert set(coded.x[data.x == place["day"]]) == {expected}
        assert set(coded.x[data.x == 0]) == {0}
    assert hashed_words(size)[:4] == SPECIAL and len(hashed_words(size)) == size


def test_a_list_of_words_from_a_public_corpus(writers, tmp_path):
    _, together = writers
    out = tmp_path / "made.txt"
    words = ["data", "words", str(together), "--out", str(out), "--size", "3"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0 and "3 words" in done.output, done.output
    assert "day" in out.read_text().split() and len(out.read_text().split()) == 3
    out.write_text("day\nsun\nday\n")
    with pytest.raises(DataError, match="has 'day' twice"):
        experiment(together, LABELLED, f'"{out}"')
    with pytest.raises(ConfigError, match=r"data.text.words: 3 is too few numbers"):
        experiment(together, LABELLED, 3)
