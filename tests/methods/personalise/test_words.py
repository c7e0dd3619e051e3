"""The parts where every word has a label: next-word networks, their mixtures and their Fisher."""

import dataclasses

import numpy as np
import pytest
import torch

import worlds
from idiolect.core.client import Batch
from idiolect.core.method import Sent
from idiolect.methods import FedAvg
from idiolect.methods.personalise import TABLE_2, Combined, spoken
from idiolect.methods.personalise.local_training import fisher, ground

FAST = {"tune_epochs": 1, "tune_lr": 0.5, "expert_epochs": 1, "expert_lr": 0.5}


@pytest.mark.parametrize("gate", ["scalar", "outputs"])
def test_the_thirteen_agree_on_both_backends(gate, float64):
    method = Combined(FedAvg(batch=4, lr=0.5), gate=gate, gate_epochs=2, **FAST)
    found = []
    for kind in ("vectorised", "sequential"):
        simulation = worlds.simulation(
            method, worlds.next_word_federation(), build=worlds.next_word_network, kind=kind
        )
        simulation.advance()
        (verdict,) = simulation.evaluate([worlds.next_word_federation().test_data])
        found.append(verdict.scores)
    for one in TABLE_2:
        left, right = (scores[spoken(one)] for scores in found)
        for metric in ("loss", "accuracy", "perplexity"):
            np.testing.assert_allclose(left[metric], right[metric], 1e-9)
        assert np.isfinite(left["loss"]).all()


def test_the_fisher_of_sequences_is_a_loop_weighed_by_words(float64):
    """Each sequence's mean loss, its gradient squared, averaged by how many words it has."""
    held = worlds.next_word_federation()
    labels = held.dataset.y.copy()
    labels[held.train[0][0], 1:] = -1  # one sequence of a single word
    held = dataclasses.replace(held, dataset=dataclasses.replace(held.dataset, y=labels))
    local = worlds.local(held, 0, build=worlds.next_word_network)
    torch.manual_seed(1)
    params = {
        name: value.detach().clone()
        for name, value in worlds.next_word_network().named_parameters()
    }
    at = ground(FedAvg(), Sent(params), params)
    got = fisher(FedAvg(), at, params.__contains__, local)
    rows = torch.from_numpy(held.train[0])
    x = torch.from_numpy(np.asarray(held.dataset.x))[rows]
    y = torch.from_numpy(held.dataset.y)[rows]
    total = {name: torch.zeros_like(value) for name, value in params.items()}
    words = (y >= 0).sum().item()
    for one in range(len(rows)):
        weight = (y[one : one + 1] >= 0).double()
        batch = Batch(x[one : one + 1], y[one : one + 1].clamp(min=0), weight, rows[one : one + 1])
        for name, slope in local.gradient(local.loss, params, batch).items():
            total[name] += slope.square() * weight.sum() / words
    assert not worlds.differing(got, total, 1e-9)
    assert len({int((row >= 0).sum()) for row in y}) > 1
