"""Text by a tokeniser: JSON lines, marks, padding, weights of tokens, and what is refused."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from idiolect import federation
from idiolect.core import losses
from idiolect.data import federate, read
from idiolect.data.preprocessing import Preprocessing
from idiolect.data.text import Chat, UserText, dealt, sentences, streams
from idiolect.data.tokenisers import Tokeniser, embedded_base, train_tokeniser
from idiolect.errors import ConfigError, DataError

pytest.importorskip("tokenizers", reason="needs tokenizers")
TOKENS = Tokeniser.load("embedded")
BOS, EOS, PAD = 2, 3, 0


def lines(path: Path, *rows: dict | str) -> Path:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return path


def test_rows_of_tokens_and_their_labels_by_hand():
    """Two texts of 2 and 3 tokens, in rows of 4 and one to come; no <bos> is a label.

    <bos> a b <eos> <bos> | c d e <eos> and one of padding: x and y are
    <bos> a b <eos> -> a b <eos> -, and c d e <eos> -> d e <eos> -.
    """
    held = dict(zip("abcde", TOKENS.encode(["1", "2", "3", "4", "5"]), strict=True))
    a, b, c, d, e = (held[one][0] for one in "abcde")
    made = streams("s", [UserText("u", ["12", "345"])], 4, 99, tokeniser=TOKENS)
    assert made.x.tolist() == [[BOS, a, b, EOS], [c, d, e, EOS]]
    assert made.y.tolist() == [[a, b, EOS, -1], [d, e, EOS, -1]]
    assert made.vocabulary == 0 and made.words == TOKENS.words and len(made.words) == 1024


def test_a_token_that_is_padding_too_is_still_a_label():
    """GPT-2's tokeniser fills up with the mark of the end; the real one is learnt all the same."""
    gpt = Tokeniser(TOKENS.json.replace("<eos>", "<|endoftext|>").replace("<pad>", "<none>"))
    assert gpt.pad == gpt.end == EOS
    made = streams("s", [UserText("u", ["12"])], 5, 99, tokeniser=gpt)
    assert made.x[0, 3:].tolist() == [EOS, EOS] and made.y[0].tolist()[2:] == [EOS, -1, -1]


def test_the_loss_weighs_tokens_alike_whatever_rows_they_are_in():
    """A row of three labels and one of one: the mean is over four tokens, not over two rows."""
    logits = torch.zeros(2, 3, 5)
    logits[1, 0, 2] = 4.0
    y = torch.tensor([[1, 2, 3], [2, 0, 0]])
    weight = torch.tensor([[1.0, 1, 1], [1, 0, 0]])
    known = torch.log(torch.tensor(5.0))
    last = torch.log(torch.exp(torch.tensor(4.0)) + 4) - 4
    assert torch.allclose(losses.cross_entropy(logits, y, weight), (3 * known + last) / 4)


def test_of_a_conversation_only_the_chosen_part_is_learnt(tmp_path: Path):
    said = [{"role": "user", "content": "12"}, {"role": "assistant", "content": "34"}]
    path = lines(tmp_path / "chats.jsonl", {"client": "anna", "messages": said})
    made = read(path, tokeniser="embedded", length=40, learn="assistant")
    learnt = made.y[0][made.y[0] >= 0]
    assert TOKENS.decode(learnt[:-1]) == "34\n" and learnt[-1] == EOS
    whole = read(path, tokeniser="embedded", length=40)
    assert TOKENS.decode(whole.y[0][whole.y[0] >= 0][:-1]) == "user: 12\nassistant: 34\n"
    x = TOKENS.decode(whole.x[0][whole.x[0] != PAD])
    assert "user: 12\nassistant: 34\n" in x


def test_labels_make_texts_of_classes(tmp_path: Path):
    path = lines(
        tmp_path / "r.jsonl",
        {"client": "a", "text": "good " * 50, "label": "yes", "split": "test"},
        {"client": "b", "text": "bad", "label": "no"},
        {"client": "b", "text": "well", "label": "yes"},
    )
    made = read(path, tokeniser="embedded", length=8)
    assert made.classes == ("no", "yes") and made.y.tolist() == [1, 0, 1]
    assert made.client_names == ("a", "b") and made.origin.tolist() == [1, 0, 0]
    assert made.x[0, 0] == BOS and made.x[0, -1] == EOS  # a long text is cut before its end
    assert PAD not in made.x[0] and made.x[1, -1] == PAD


def test_a_folder_is_a_file_for_each_client(tmp_path: Path):
    for name in ("anna", "ben"):
        lines(tmp_path / f"{name}.jsonl", {"text": f"I am {name}"}, {"text": "yes"})
    made = read(tmp_path, tokeniser="embedded", length=16)
    assert made.client_names == ("anna", "ben") and made.sequential
    words = read(tmp_path)  # without a tokeniser, words
    assert words.tokeniser is None and "anna" in words.words


def test_text_of_no_one_is_dealt(tmp_path: Path):
    path = lines(tmp_path / "t.jsonl", *({"text": f"one two three {n}"} for n in range(9)))
    made = read(path, tokeniser="embedded", length=8)
    assert made.clients is None and federate(made, "iid", clients=2).clients == 2


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (['{"client": "a", "text": "x"}', "{"], r"t\.jsonl:2 is no JSON"),
        (["[1]"], r":1 is no object"),
        ([{"client": "a", "text": "x"}, {"text": "y"}], r":2 has no client \('client'\)"),
        ([{"client": "a", "text": "x", "label": 1}, {"client": "a", "text": "y"}], ":2 has no lab"),
        ([{"client": "a", "text": " "}], r":1: text is ' '; expected some words"),
        ([{"client": "a"}], r":1 has neither 'text' nor 'messages'; it has client"),
        ([{"client": "a", "messages": []}], r":1: messages is \[\]"),
        ([{"client": "a", "messages": [{"role": "user"}]}], r":1: messages\[0\] is"),
        ([{"client": "a", "messages": [{"role": "u", "content": " "}]}], ":1: no message has a wo"),
        ([{"client": ["a"], "text": "x"}], r":1: client is \['a'\]; expected a name"),
        ([{"client": "a", "text": "x", "split": "dev"}], r":1: split is 'dev'; expected train or"),
        ([{"text": "x", "created_utc": "today"}], r":1: created_utc is 'today'"),
        ([""], r"t\.jsonl has no line"),
        ([{"client": "a", "text": "cut \ud83d"}], r":1 has half of a character \(\\ud83d\)"),
        ([{"client": "a", "messages": [{"role": "u", "content": "\ud83d"}]}], ":1 has half of"),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, rows: list, said: str):
    with pytest.raises(DataError, match=said):
        read(lines(tmp_path / "t.jsonl", *rows), tokeniser="embedded")


def test_marks_of_encoding_and_whole_characters_are_read(tmp_path: Path):
    """As Windows writes files, and as JSON may write an emoji: in two halves."""
    path = tmp_path / "t.jsonl"
    path.write_text('\ufeff{"client": "a", "text": "so \\ud83d\\ude00 漢"}\r\n', "utf-8")
    made = read(path, tokeniser="embedded", length=32)
    told = made.y[0][made.y[0] >= 0]
    assert TOKENS.decode(told[:-1]) == "so 😀 漢"


def test_an_unknown_option_is_named(tmp_path: Path):
    path = lines(tmp_path / "t.jsonl", {"client": "a", "text": "some words of a client"})
    with pytest.raises(ConfigError, match="unknown option 'lenght'; did you mean 'length'"):
        federation(path, options={"lenght": 8})


def test_a_run_reads_newcomers_by_its_own_tokeniser(tmp_path: Path):
    path = lines(tmp_path / "t.jsonl", {"client": "a", "text": "some words of a client"})
    form = Preprocessing.of(read(path, tokeniser="embedded", length=8))
    again = Preprocessing.from_json(json.loads(json.dumps(form.to_json())), "here")
    assert np.array_equal(
        again.matched(read(path, **again.reading)).x, read(path, **form.reading).x
    )
    other = train_tokeniser(["other text"], 300)
    with pytest.raises(DataError, match=r"coded by the tokeniser with sha256 .* and the run has"):
        form.matched(read(path, tokeniser=other, length=8))
    with pytest.raises(DataError, match="coded by a list of words and the run has the tokeniser"):
        form.matched(read(path, next_word=True, length=8))
    damaged = {**form.to_json(), "tokeniser": "{}"}
    with pytest.raises(DataError, match="no preprocessing of idiolect"):
        Preprocessing.from_json(damaged, "here")


def test_what_is_no_tokeniser_is_refused(tmp_path: Path):
    with pytest.raises(DataError, match=r"tokenizer\.json does not exist; expected a tokenizer"):
        Tokeniser.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match="is no tokeniser of the tokenizers library"):
        Tokeniser.load(tmp_path)


def test_a_digest_is_of_what_a_tokeniser_does():
    held = json.loads(TOKENS.json)
    spread = Tokeniser(json.dumps({**held, "truncation": None, "padding": None}, indent=3))
    assert spread.digest == TOKENS.digest
    held["model"]["merges"] = held["model"]["merges"][::-1]
    assert Tokeniser(json.dumps(held)).digest != TOKENS.digest


def test_any_text_has_tokens_and_comes_back():
    said = "Zürich — ПРИВЕТ 🎭\n\tfoo  bar"
    assert TOKENS.decode(TOKENS.encode([said])[0]) == said
    coded = sentences([Chat((("a: ", False), ("b", True)))], 8, 9, TOKENS)
    assert TOKENS.decode(coded.x[0]) == "a: b"


def test_no_role_of_a_study_was_read_in_pretraining():
    """Half of the names are dealt to bases; a study takes the others."""
    names = [f"role {n}" for n in range(1000)]
    parts = [dealt(name) for name in names]
    assert 450 < parts.count("pretraining") < 550 and 330 < parts.count("study") < 420
    assert set(parts) == {"pretraining", "study", "newcomers"}
    record = json.loads((embedded_base() / "pretraining.json").read_text())
    assert record["tokeniser"] == TOKENS.digest and "roles" in record["text"]
