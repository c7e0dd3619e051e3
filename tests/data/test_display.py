"""Short texts and safe pictures of datasets and federations."""

import re
from html.parser import HTMLParser

import numpy as np
import pytest

import idiolect
from idiolect.data import Dataset, Federation
from idiolect.methods import METHODS


class Cells(HTMLParser):
    """Reads a table: its rows of texts, and every tag that occurs."""

    def __init__(self, text):
        super().__init__()
        self.rows, self.tags, self._in = [], set(), False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        if tag == "tr":
            self.rows.append([])
        self._in = tag in ("td", "th")

    def handle_data(self, data):
        if self._in:
            self.rows[-1].append(data)
            self._in = False


def federation(clients=3, classes=("a", "b"), names=(), each=10):
    rows = clients * each
    dataset = Dataset(
        "visits",
        np.zeros((rows, 4), np.float32),
        np.arange(rows) % len(classes),
        tuple(classes),
    )
    cut = [np.arange(n * each, (n + 1) * each) for n in range(clients)]
    return Federation(
        dataset,
        tuple(own[:6] for own in cut),
        tuple(own[6:8] for own in cut),
        tuple(own[8:] for own in cut),
        tuple(names),
    )


def test_a_federation_is_told_in_a_few_lines():
    text = repr(federation())
    assert "3 clients: 30 rows of 4 features" in text
    assert "2 classes: a, b" in text
    assert "train 18, val 6, test 6; 10 a client" in text


@pytest.mark.parametrize("clients", [1, 10, 3000])
def test_texts_stay_short_whatever_the_size_and_the_names(clients):
    names = [f"{'long ' * 1000}{n}" for n in range(clients)]
    classes = [f"{'wide' * 300}{n}" for n in range(50)]
    held = federation(clients, classes, names)
    for thing in (held, held.dataset, held.train_data, held.test_data):
        assert len(repr(thing)) < 500 and repr(thing).count("\n") < 5
    assert len(held._repr_html_()) < 150_000


def test_methods_are_told_by_what_differs_from_their_defaults():
    assert repr(METHODS["fedavg"](lr=0.5, epochs=2)) == "FedAvg(epochs=2, lr=0.5)"
    assert all(repr(method()).endswith("()") for method in METHODS.values())
    from idiolect.methods.personalise.fine_tuning import Tuned

    tuned = Tuned(METHODS["fedavg"](lr=0.5), tune_epochs=3)
    assert repr(tuned) == "Tuned(base=FedAvg(lr=0.5), tune_epochs=3)"


def test_the_heat_map_holds_the_counts():
    held = idiolect.federation("embedded", "persfl-ds1", seed=0)
    rows = Cells(held._repr_html_()).rows
    assert rows[0] == ["client", *held.dataset.classes, "all"]
    for name, counts, row in zip(held.names, held.counts(), rows[1:], strict=True):
        assert row == [name, *map(str, counts), str(counts.sum())]


def test_many_clients_and_classes_are_summed_up():
    held = federation(100, [str(n) for n in range(40)], each=80)
    rows = Cells(held._repr_html_()).rows
    assert len(rows) == 31 and rows[-1][0] == "71 more"
    assert rows[0][-2] == "17 more"
    assert sum(int(row[-1].replace(",", "")) for row in rows[1:]) == 8000


def test_names_are_text_and_never_markup():
    evil = ["<script>alert(1)</script>", '"><img src=x onerror=y>', "a\x1b[31m\nb"]
    held = federation(3, ["<b>", "&amp;"], evil)
    for thing in (held, held.dataset):
        found = Cells(thing._repr_html_()).tags
        assert found <= {"div", "table", "caption", "thead", "tbody", "tr", "th", "td"}
    assert not re.search(r"[\x00-\x09\x0b-\x1f]", repr(held) + held._repr_html_())
