"""Text: words, streams, and a vocabulary that knows nothing of validation and test rows."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from idiolect.data import federate, load
from idiolect.data.text import (
    BOS,
    EOS,
    PAD,
    SPECIAL,
    UNK,
    UserText,
    encoded,
    encoded_as,
    sentences,
    streams,
    tokenise,
)
from idiolect.errors import ConfigError, DataError


def test_words_are_lower_case_with_apostrophes_inside_and_marks_apart():
    assert tokenise("I DON’T know_it: 'twas 5-star!! <br/>") == [
        *("i", "don't", "know", "it", ":", "twas", "5", "star", "!", "!", "br")
    ]
    assert tokenise("naïve Élan 20€") == ["naïve", "élan", "20"]
    assert tokenise(" \n") == []


def test_sentences_are_cut_and_filled_up():
    x, words, *_ = sentences(["a b c d", "b", ""], 3, 9)
    assert words == (*SPECIAL, "a", "b", "c", "d")
    assert x.tolist() == [[4, 5, 6], [5, PAD, PAD], [PAD] * 3]


def test_a_stream_is_cut_without_overlap_and_predicts_the_next_word():
    """Eight tokens: <bos> a b <eos> <bos> c d <eos>, in rows of three words and one to come."""
    data = streams("s", [UserText("u", ["a b", "c d"])], 3, 99)
    a, b, c, d = (data.words.index(word) for word in "abcd")
    assert data.x.tolist() == [[BOS, a, b], [BOS, c, d]]
    assert data.y.tolist() == [[a, b, EOS], [c, d, EOS]]
    assert data.classes == data.words and data.client_names == ("u",)


def test_a_last_row_is_filled_up_and_one_without_a_label_is_dropped():
    data = streams(
        "s", [UserText("u", ["a"]), UserText("empty", []), UserText("v", ["a b c"])], 3, 99
    )
    a, b, c = (data.words.index(word) for word in "abc")
    # <bos> a <eos> is short of a row; <bos> a b c <eos> leaves <eos> alone in a second one.
    assert data.x.tolist() == [[BOS, a, EOS], [BOS, a, b]]
    assert data.y.tolist() == [[a, EOS, -1], [a, b, c]]
    assert data.client_names == ("u", "v")


@given(
    st.lists(st.lists(st.sampled_from("abcde"), max_size=9), min_size=1, max_size=5),
    st.integers(1, 7),
)
def test_no_word_of_a_stream_is_lost_or_doubled(texts, length):
    texts = [["z"], *texts]
    data = streams("s", [UserText("u", texts)], length, 99)
    rows = np.concatenate([data.x[:, :1], data.y], 1)
    laid = [data.words[code] for code in rows.reshape(-1) if code > 0]
    whole = [word for text in texts for word in ("<bos>", *text, "<eos>")]
    # Only a single last word may be missing: alone in a row it has nothing to predict.
    assert laid == whole[: len(laid)] and len(laid) >= len(whole) - (len(whole) % (length + 1) == 1)


def test_the_vocabulary_is_of_training_words_by_frequency_then_alphabet():
    x, words, *_ = sentences(["b a a", "c b", "d d d d"], 4, 7)
    data = dataclasses.replace(
        load("embedded"), x=x, y=np.zeros(3, np.int64), words=words, vocabulary=7
    )
    coded = encoded(data, [np.array([0, 1])])
    assert coded.words == (*SPECIAL, "a", "b", "c") and coded.vocabulary == 0
    assert coded.x.tolist() == [[5, 4, 4, 0], [6, 5, 0, 0], [UNK] * 4]  # d is in no training row
    small = encoded(dataclasses.replace(data, vocabulary=5), [np.array([0, 1])])
    assert small.words == (*SPECIAL, "a")
    few = encoded(data, [np.array([2])])
    assert few.words == (*SPECIAL, "d", "<unused 0>", "<unused 1>")  # of one size whatever the rows


def test_test_rows_have_no_say_in_the_vocabulary():
    """Exchange all words of validation and test rows: the training rows are coded as before."""
    texts = [f"common w{n} w{n % 3}" for n in range(40)]
    made = [streams("s", [UserText(u, texts) for u in "abcd"], 5, 30) for _ in range(2)]
    whole = federate(made[0], "natural", 3, split=(0.5, 0.2, 0.3))
    other = made[1]
    hidden = np.concatenate([*whole.val, *whole.test])
    strange = other.words.index("w0")
    x, y = other.x.copy(), other.y.copy()
    x[hidden], y[hidden] = strange, strange
    spoilt = federate(dataclasses.replace(other, x=x, y=y), "natural", 3, split=(0.5, 0.2, 0.3))
    rows = np.concatenate(whole.train)
    assert spoilt.dataset.words == whole.dataset.words
    assert (spoilt.dataset.x[rows] == whole.dataset.x[rows]).all()
    assert (whole.dataset.x[hidden] == UNK).any()  # words that only they have


def test_other_text_is_coded_by_a_given_vocabulary():
    data = streams("s", [UserText("u", ["new a"])], 3, 99)
    coded = encoded_as(data, (*SPECIAL, "z", "a"))
    assert coded.x.tolist() == [[BOS, UNK, 5]] and coded.y.tolist() == [[UNK, 5, EOS]]
    assert coded.classes == coded.words
    with pytest.raises(DataError, match="begins with <pad>"):
        encoded_as(data, ("a",))


def test_rows_are_split_in_their_order():
    data = streams("s", [UserText("u", [" ".join("abcdefghij" * 5)])], 4, 99)
    held = federate(data, "natural", 0, split=(0.8, 0.0, 0.2), ordered=True)
    assert held.train[0].tolist() == list(range(8)) and held.test[0].tolist() == [8, 9, 10]
    assert "in order" in held.description
    assert held.columns == ("words",) and held.counts().tolist() == [[(data.y >= 0).sum()]]
    with pytest.raises(ConfigError, match="both"):
        federate(load("embedded"), "iid", ordered=True, stratify=True)


def test_words_cannot_be_dealt_by_label():
    data = streams("s", [UserText("u", ["a b"] * 9)], 2, 99)
    for options in ({"partition": "dirichlet"}, {"partition": "iid", "stratify": True}):
        with pytest.raises(ConfigError, match="a label for each word"):
            federate(data, clients=2, **options)
    assert federate(data, "iid", clients=2).clients == 2
    with pytest.raises(ConfigError, match=r"leave data\.public out"):
        federate(data, "iid", clients=2, public=data)


def test_silly_sizes_are_refused():
    with pytest.raises(ConfigError, match="length is 0"):
        streams("s", [], 0, 99)
    with pytest.raises(ConfigError, match="vocabulary is 4, expected more"):
        streams("s", [], 3, 4)
    with pytest.raises(DataError, match="no text"):
        streams("s", [UserText("u", [""])], 3, 9)


@pytest.mark.parametrize(
    ("name", "clients"),
    [
        ("cross_sector", ["amazon", "hotel", "yelp"]),
        ("cross_product", ["alexa", "amazon", "food", "headphones", "phones"]),
    ],
)
def test_reviews_are_read_by_their_sources(shared_data, name, clients, shared_cache):
    data = load(name, shared_data, shared_cache)
    again = load(name, shared_data, shared_cache)
    assert list(data.client_names) == clients and data.x.shape[1] == 200
    assert len(data.classes) == 5 and data.vocabulary == 20_000
    assert again.words == data.words and (again.x == data.x).all()
    held = federate(data, "natural", 0, "file")
    assert held.dataset.x.max() == 19_999 and len(held.dataset.words) == 20_000
    assert {"the", "great", "."} <= set(held.dataset.words[:100])


def test_a_product_can_be_kept_or_left_out(shared_data, shared_cache):
    data = load("cross_product", shared_data, shared_cache, leave_out=(), length=4)
    assert "phones_in" in data.client_names and data.x.shape[1] == 4
    with pytest.raises(ConfigError, match="leave_out names 'shoes', and cross_product has"):
        load("cross_product", shared_data, shared_cache, leave_out=("shoes",))


def test_roles_are_chosen_by_a_known_word(shared_data, shared_cache):
    with pytest.raises(ConfigError, match="users"):
        load("shakespeare", shared_data, shared_cache, users="studied")


def test_shakespeares_roles_are_clients(shared_data, shared_cache):
    data = load("shakespeare", shared_data, shared_cache)
    assert len(data.client_names) == 145 and data.sequential
    held = federate(data, "natural", 0, (0.9, 0.0, 0.1), ordered=True, min_size=10, drop=True)
    assert held.clients < 145 and all(
        t.max() < o.min() for t, o in zip(held.train, held.test, strict=True)
    )
