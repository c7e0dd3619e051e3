"""Examples with a label for each place: losses, means and every method take them as labels."""

import math

import numpy as np
import pytest
import torch
from torch import nn

import worlds
from idiolect.core import losses, tree
from idiolect.data import Federation
from idiolect.data.text import SPECIAL, UNK
from idiolect.methods import METHODS


class Normed(nn.Module):
    """The same with a normalisation layer, so that FedBN has something to keep."""

    def __init__(self):
        super().__init__()
        self.words, self.norm = worlds.next_word_network(), nn.LayerNorm(8 + len(SPECIAL))

    def forward(self, x):
        return self.norm(self.words(x))


def settings(name):
    kind = METHODS[name]
    known = {"batch": 4, "lr": 0.1, "distil_epochs": 1, "tune_epochs": 1}
    fields = kind.__dataclass_fields__
    return kind(**{key: value for key, value in known.items() if key in fields})


def test_a_mean_is_over_labels_not_over_sequences():
    """Two rows of one and three labels, losses 1 and 2: the mean is (1 + 3 · 2) / 4 = 1.75."""
    values = torch.tensor([[1.0, 9, 9], [2, 2, 2]])
    weight = torch.tensor([[1.0, 0, 0], [1, 1, 1]])
    assert losses.weighted_mean(values, weight) == 1.75
    logits, labels = torch.randn(2, 3, 5), torch.randint(0, 5, (2, 3))
    flat = torch.nn.functional.cross_entropy(
        logits.reshape(-1, 5), torch.where(weight > 0, labels, -100).reshape(-1)
    )
    assert torch.allclose(losses.cross_entropy(logits, labels, weight), flat)
    right = (logits.argmax(-1) == labels)[weight > 0].float().mean()
    assert torch.allclose(losses.accuracy(logits, labels, weight), right)


@pytest.mark.parametrize("batch", [1, 2, 7])
def test_a_clients_mean_does_not_depend_on_its_batches(batch):
    """The last row of a client has fewer labels, so batches weigh by labels."""
    held = worlds.next_word_federation()
    local = worlds.local(held, 0, build=worlds.next_word_network)
    params = dict(worlds.next_word_network().named_parameters())
    seen = local.mean(lambda now: local.loss(params, now), "train", batch=batch)
    rows = held.train[0]
    x = torch.from_numpy(held.dataset.x[rows])
    y = torch.from_numpy(held.dataset.y[rows]).long()
    wanted = torch.nn.functional.cross_entropy(
        local.logits(params, x).flatten(0, 1), y.flatten(), ignore_index=-1
    )
    assert torch.allclose(seen, wanted)


def test_a_batch_weighs_each_label_and_padding_nothing():
    held = worlds.next_word_federation()
    local = worlds.local(held, 3, build=worlds.next_word_network)
    seen = []

    def look(carry, batch):
        assert batch.weight.shape == batch.y.shape == (5, worlds.LENGTH) and batch.y.min() >= 0
        seen.append(batch.weight.sum())
        return carry

    local.scan(look, torch.zeros(()), batch=5)
    assert sum(seen) == (held.dataset.y[held.train[3]] >= 0).sum()


# Those that exchange predictions on public examples know one label for each, and say so; HeteroFL
# does not cut recurrent layers, and says so; of LoRA this network has none.
ALONE = [
    name
    for name, kind in METHODS.items()
    if "sample" not in kind.__dataclass_fields__ and name != "heterofl"
    if worlds.network_of(kind()) is worlds.Normed
]


@pytest.mark.parametrize("name", ALONE)
def test_every_method_predicts_words_alike_vectorised_and_in_turn(name, float64):
    ends = []
    for kind in ("vectorised", "sequential"):
        simulation = worlds.simulation(
            settings(name), worlds.next_word_federation(), build=Normed, kind=kind
        )
        simulation.advance()
        (verdict,) = simulation.evaluate([worlds.next_word_federation().test_data])
        ends.append((simulation.tree, verdict.scores))
    assert not worlds.differing(ends[0][0], ends[1][0], 1e-9)
    for model, metrics in ends[0][1].items():
        for metric, values in metrics.items():
            assert np.allclose(values, ends[1][1][model][metric], equal_nan=True), (model, metric)


def test_scores_tell_perplexity_and_what_unk_hides():
    """A network that always says <unk>: right where the label is <unk>, and never counted so."""
    held = worlds.next_word_federation()
    y = held.dataset.y.copy()
    y[y == 5] = UNK
    held = Federation(
        type(held.dataset)(**{**vars(held.dataset), "y": y}), held.train, held.val, held.test
    )
    simulation = worlds.simulation(settings("fedavg"), held, build=worlds.next_word_network)
    state = tree.map(torch.zeros_like, simulation.states[0])
    state["decoder.bias"][UNK] = 1.0
    simulation.states = [state]
    scores = simulation.evaluate([held.test_data], only_global=True)[0].scores["global"]
    for client, rows in enumerate(held.test):
        labels = y[rows][y[rows] >= 0]
        assert math.isclose(scores["accuracy"][client], (labels == UNK).mean(), rel_tol=1e-6)
        assert scores["accuracy_unk_wrong"][client] == 0
        loss = math.log(11 + math.e) - (labels == UNK).mean()
        assert math.isclose(scores["loss"][client], loss, rel_tol=1e-5)
        assert math.isclose(scores["perplexity"][client], math.exp(loss), rel_tol=1e-5)
        assert "val_perplexity" in scores
