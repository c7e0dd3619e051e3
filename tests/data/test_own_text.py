"""Own text: tables, LEAF's JSON and a file for each user, and what is said of mistakes."""

import json

import pytest

from idiolect.data import federate, read
from idiolect.errors import DataError

CSV = """text,label,client
"Good, really good",pos,anna
bad,neg,ben
good enough,pos,ben
"""


def words_of(data, row):
    return [data.words[code] for code in data.x[row] if code]


def test_a_table_with_text_labels_and_clients(tmp_path):
    (tmp_path / "r.csv").write_text(CSV)
    data = read(tmp_path / "r.csv", length=3)
    assert words_of(data, 0) == ["good", ",", "really"] and words_of(data, 1) == ["bad"]
    assert data.classes == ("neg", "pos") and data.y.tolist() == [1, 0, 1]
    assert data.client_names == ("anna", "ben") and data.vocabulary == 50_000
    assert not federate(data, "natural", split=(1.0, 0.0, 0.0)).dataset.vocabulary


def test_the_text_column_can_have_another_name(tmp_path):
    (tmp_path / "r.csv").write_text(CSV.replace("text,", "review,"))
    rows = [f"text number {n} of many,{n % 2}\n" for n in range(30)]
    (tmp_path / "long.csv").write_text("review,label\n" + "".join(rows))
    with pytest.raises(DataError, match=r"review: it is free text.*name it with the option text"):
        read(tmp_path / "long.csv")
    assert len(read(tmp_path / "r.csv", text="review")) == 3
    with pytest.raises(DataError, match="no column 'words' of text; it has review, label, client"):
        read(tmp_path / "r.csv", text="words")


def test_missing_text_and_labels_are_told(tmp_path):
    (tmp_path / "r.csv").write_text("text,label\n,1\nb,0\n")
    with pytest.raises(DataError, match="column 'text' is empty in line 2"):
        read(tmp_path / "r.csv")
    (tmp_path / "r.csv").write_text("text,client\na,1\nb,0\n")
    with pytest.raises(DataError, match="no column 'label'"):
        read(tmp_path / "r.csv")


def test_a_table_for_the_next_word_needs_no_label(tmp_path):
    (tmp_path / "r.csv").write_text(CSV)
    data = read(tmp_path / "r.csv", next_word=True, length=4)
    assert data.sequential and data.client_names == ("anna", "ben")
    assert [words_of(data, row) for row in range(len(data))] == [
        ["<bos>", "good", ",", "really"],
        ["<bos>", "bad", "<eos>", "<bos>"],
        ["enough", "<eos>"],
    ]
    assert [data.words[code] for code in data.y[1]] == ["bad", "<eos>", "<bos>", "good"]


def leaf(path, users):
    data = {user: {"x": x, "y": y} for user, (x, y) in users.items()}
    sizes = [len(x) for x, _ in users.values()]
    path.write_text(json.dumps({"users": list(users), "num_samples": sizes, "user_data": data}))
    return path


def test_leafs_json_with_text(tmp_path):
    path = leaf(tmp_path / "a.json", {"u": (["a b", "c"], ["x", "y"]), "v": (["a"], ["x"])})
    data = read(path)
    assert data.classes == ("x", "y") and data.clients.tolist() == [0, 0, 1]
    assert data.words[4:] == ("a", "b", "c")


def test_reddit_as_leaf_lays_it_out(tmp_path):
    """Comments as lists of chunks of words; what LEAF put in for its own sake is taken out."""
    comment = [["<BOS>", "Hello", "there"], ["you", "<EOS>", "<PAD>"]]
    about = {"target_tokens": [], "subreddit": "x"}
    path = leaf(tmp_path / "a.json", {"u": ([comment, [["bye"]]], [about, about])})
    data = read(path, next_word=True, length=7)
    assert words_of(data, 0) == ["<bos>", "hello", "there", "you", "<eos>", "<bos>", "bye"]
    numbers = leaf(tmp_path / "b.json", {"u": ([[1.0]], [0])})
    with pytest.raises(DataError, match="user 'u' has no text"):
        read(numbers, next_word=True)


def test_a_file_for_each_user(tmp_path):
    posts = [{"body": "second", "created_utc": 20}, {"body": "first", "created_utc": 3}]
    (tmp_path / "zoe.jsonl").write_text("\n".join(map(json.dumps, posts)))
    (tmp_path / "abe.csv").write_text("text,score\nfrom a table,1\n")
    (tmp_path / "max.txt").write_text("one line\n\ntwo\n")
    data = read(tmp_path, next_word=True, length=6)
    assert data.client_names == ("abe", "max", "zoe")
    found = {data.client_names[data.clients[row]]: words_of(data, row) for row in range(3)}
    assert found["zoe"] == ["<bos>", "first", "<eos>", "<bos>", "second", "<eos>"]
    assert found["max"][:4] == ["<bos>", "one", "line", "<eos>"]
    (tmp_path / "bad.jsonl").write_text('{"title": "no"}\n')
    with pytest.raises(DataError, match=r"bad.jsonl:1 has neither 'text' nor 'mess"):
        read(tmp_path, next_word=True)
    (tmp_path / "bad.jsonl").write_text("{")
    with pytest.raises(DataError, match=r"bad\.jsonl:1 is no JSON"):
        read(tmp_path, next_word=True)
