"""kNN-Per by hand."""

import math
from typing import Any

import pytest
import torch

from idiolect.core.client import Batch
from idiolect.core.method import Sent
from idiolect.core.tree import Params
from idiolect.methods import FedAvg, FlexLoRA, KNNPer
from idiolect.methods.knnper import Memory
from methods.tiny import Examples, Split, alike, client, close, refuses

LN3 = math.log(3)
OWN: Examples = [(1.0, 0), (3.0, 1), (8.0, 1)]


def tensor(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def params(a: float, b: float) -> Params:
    return {"a.w": tensor(a), "b.w": tensor(b)}


def memory(share: float, b: float = 0.0) -> Memory:
    there = tensor([1.0, 1.0, 1.0, 0.0])
    features = tensor([[1.0], [3.0], [8.0], [0.0]])
    return Memory(params(1.0, b), features, torch.tensor([0, 1, 1, 0]), there, tensor(share))


def test_the_vote_by_hand() -> None:
    """Feature 2 is 1 from a 0 and 1 from a 1; feature 4 is 3 from the 0 and 1 from the 1.

    At scale 2 / ln 3 the votes of 4 are as e^{−3 ln 3 / 2} to e^{−ln 3 / 2}, 1 to 3. A third
    neighbour, the 1 at 8, adds 1 / √3 to the latter. The row without an example never votes, though
    it is nearest to 0: there the vote is 3 to 1 for class 0.
    """
    local = client(main=Split(1.0, 0.0))
    method = KNNPer(neighbours=2, scale=2 / LN3)
    found = method.predict(memory(1.0), tensor([2.0, 4.0, 0.0]), local).exp()
    assert found.tolist() == [close([0.5, 0.5]), close([0.25, 0.75]), close([0.75, 0.25])]
    total = 4 + 1 / math.sqrt(3)
    three = KNNPer(neighbours=3, scale=2 / LN3).predict(memory(1.0), tensor([4.0]), local).exp()
    assert three.tolist() == [close([1 / total, 1 - 1 / total])]
    assert KNNPer(neighbours=9).predict(memory(1.0), tensor([4.0]), local).shape == (1, 2)


def test_the_vote_is_mixed_with_the_global_model() -> None:
    """At 4 with b = ln 3 / 4 the model says 1/4 and 3/4, the only neighbour 0 and 1."""
    local, method = client(main=Split(1.0, 0.0)), KNNPer(neighbours=1)
    found = method.predict(memory(0.4, LN3 / 4), tensor([4.0]), local).exp()
    assert found.tolist() == [close([0.6 * 0.25, 0.4 + 0.6 * 0.75])]
    plain = method.predict(params(1.0, LN3 / 4), tensor([4.0]), local)
    assert plain.tolist() == [close([0.0, LN3])]


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize(("label", "share"), [(1, 0.0), (0, 0.5)])
def test_the_share_is_the_least_of_the_best_on_validation_data(
    label: int, share: float, stacked: bool
) -> None:
    """The model calls 1.5 a 1 with chance 3/4, its neighbour at 1 a 0: half and half says 0."""
    local = client(OWN, val=[(1.5, label)], main=Split(1.0, 0.0), stacked=stacked)
    method = KNNPer(neighbours=1, shares=(1.0, 0.5, 0.3, 0.0), store=4)
    deployed = method.deploy(Sent(params(1.0, LN3 / 1.5)), (), local)
    assert float(deployed.share) == share
    assert deployed.features.tolist() == [[1.0], [3.0], [8.0], [0.0]]
    assert deployed.labels.tolist() == [0, 1, 1, 0]
    assert deployed.there.tolist() == [1, 1, 1, 0]
    facts = method.facts(deployed)
    assert float(facts["examples"]) == 3
    words = f"{share:.0%} its own nearest examples, the rest the global model"
    assert method.reason(facts) == words


def test_without_validation_data_and_without_examples() -> None:
    sent = Sent(params(1.0, 1.0))
    alone = KNNPer(share=0.7).deploy(sent, (), client(OWN, val=[], main=Split(1.0, 0.0)))
    assert float(alone.share) == close(0.7)
    empty = KNNPer().deploy(sent, (), client([], val=[(1.0, 0)], main=Split(1.0, 0.0)))
    assert float(empty.share) == 0


def test_at_most_so_many_rows_are_remembered() -> None:
    local = client(OWN, main=Split(1.0, 0.0))

    def rows(batch: Batch) -> Any:
        return batch.x, batch.weight

    for most in (2, 3, 5):
        x, weight = local.own_rows(rows, most, batch=2)
        assert x.tolist() == [1.0, 3.0, 8.0, 0.0, 0.0][:most]
        assert weight.tolist() == [1, 1, 1, 0, 0][:most]


def test_the_rounds_are_fedavgs() -> None:
    given = {"lr": 0.3, "epochs": 2}
    assert KNNPer(**given).training() == FedAvg(**given).training()
    plain, _ = FedAvg(**given).client_step(Sent(params(0.7, 0.2)), (), client(main=Split(0, 0)))
    mine, _ = KNNPer(**given).client_step(Sent(params(0.7, 0.2)), (), client(main=Split(0, 0)))
    assert alike(plain, mine)


def test_settings_out_of_range_are_refused() -> None:
    refuses(KNNPer, "neighbours", 0, "at least 1")
    refuses(KNNPer, "shares", (0.0, 1.5), "at most 1")
    refuses(KNNPer, "shares", 0.5, "a tuple of values")
    refuses(KNNPer, "shares", (0.5, "1"), "a number in each place")
    refuses(KNNPer, "shares", (0.5, True), "a number in each place")
    refuses(FlexLoRA, "ranks", (2, 1.5), "a whole number in each place")
