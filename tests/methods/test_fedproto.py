"""FedProto by hand."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import worlds
from idiolect.core.method import Report, Sent
from idiolect.core.tree import Params
from idiolect.engine.architecture import Architecture
from idiolect.errors import MethodError
from idiolect.methods import FedProto
from idiolect.methods.fedproto import Classifier, Gathered, Prototypes
from methods.tiny import Split, alike, client, close, refuses, setup

LN3 = math.log(3)


def tensor(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def params(a: float, b: float) -> Params:
    return {"a.w": tensor(a), "b.w": tensor(b)}


@pytest.mark.parametrize("stacked", [False, True])
def test_one_round_by_hand(stacked: bool) -> None:
    """A = 1, b = ln 3 / 2, example (2, 1), prototype 1 of class 1 alone, λ = 1/2, lr = 0.1.

    The feature is 2 and z = ln 3, so p = 3/4; cross-entropy has ∂/∂b = −1/4 · 2 = −1/2 and
    ∂/∂a = −1/4 · (ln 3 / 2) · 2 = −ln 3 / 4. Of λ (a · 2 − 1)², ∂/∂a = 1/2 · 2 · (2 − 1) · 2 = 2.
    So a = 1 + 0.1 (ln 3 / 4 − 2) and b = ln 3 / 2 + 0.05. Reported is the feature under the new
    model, 2 a, as the sum over class 1, whose share of the client's examples is 1. No parameter is.
    """
    known = Prototypes(tensor([[7.0], [1.0]]), tensor([0.0, 1.0]))
    local = client(main=Split(1.0, LN3 / 2), stacked=stacked)
    report, kept = FedProto(lr=0.1, pull=0.5).client_step(Sent(known), params(1.0, LN3 / 2), local)
    a = 1 + 0.1 * (LN3 / 4 - 2)
    assert float(kept["a.w"]) == close(a)
    assert float(kept["b.w"]) == close(LN3 / 2 + 0.05)
    assert report.params["features"].tolist() == [[0.0], [close(2 * a)]]
    assert report.params["classes"].tolist() == [0.0, 1.0]
    assert sorted(report.params) == ["classes", "features"]
    assert float(report.size) == 1


def test_a_class_without_a_prototype_is_never_predicted() -> None:
    """The feature 0 is 1,000 off the known prototype and on the zero of the unknown one."""
    known = Prototypes(tensor([[0.0], [1000.0]]), tensor([0.0, 1.0]))
    local = client(main=Split(1.0, 0.0))
    for x in (0.0, 990.0):
        found = FedProto().predict(Classifier(params(1.0, 0.0), known), tensor([x]), local)
        assert int(found.argmax(-1)) == 1 and float(found[0, 1]) == -((1000 - x) ** 2)


def test_a_class_without_a_prototype_pulls_at_nothing() -> None:
    """Before the first round it is local training, whatever the zeros in place of prototypes."""
    unknown = Prototypes(tensor([[0.0], [0.0]]), tensor([0.0, 0.0]))
    near, far = (
        FedProto(lr=0.1, pull=pull).client_step(
            Sent(unknown), params(1.0, 0.3), client(main=Split(1.0, 0.3))
        )[1]
        for pull in (0.0, 5.0)
    )
    assert alike(near, far)


def test_prototypes_are_means_over_a_classs_examples() -> None:
    """A tiny rate leaves a = 3: class 0 has x = 1 and 2, class 1 has x = 4."""
    examples = [(1.0, 0), (4.0, 1), (2.0, 0)]
    unknown = Prototypes(tensor([[0.0], [0.0]]), tensor([0.0, 0.0]))
    local = client(examples, main=Split(3.0, 0.0))
    report, _ = FedProto(lr=1e-37).client_step(Sent(unknown), params(3.0, 0.0), local)
    sums, shares = report.params["features"], report.params["classes"]
    assert sums.flatten().tolist() == close([9 / 3, 12 / 3])
    assert shares.tolist() == close([2 / 3, 1 / 3])
    assert (sums.flatten() / shares).tolist() == close([3 * 1.5, 3 * 4.0])


def test_the_server_weighs_prototypes_by_examples_and_keeps_those_nobody_reported() -> None:
    """Client 1 has one example of class 0 at 2 and three of class 1 at 4; client 2 one at 8.

    Class 0: 2. Class 1: (3 · 4 + 1 · 8) / 4 = 5; alike it would be 6, and as Eq. 6 is printed 2.5.
    Class 2 was reported before, by someone who is absent; class 3 never was.
    """
    method = FedProto()
    features = tensor([[0.0], [0.0], [9.0], [0.0]])
    state = Gathered(features, tensor([0.0, 0.0, 0.3, 0.0]))
    reports = Report(
        {
            "features": tensor([[[2 / 4], [12 / 4], [0], [0]], [[0], [8.0], [0], [0]]]),
            "classes": tensor([[1 / 4, 3 / 4, 0, 0], [0, 1.0, 0, 0]]),
        },
        tensor([4.0, 1.0]),
    )
    new = method.server_step(state, torch.tensor([0, 1]), reports)
    assert new.features.flatten().tolist() == close([2, 5, 9, 0])
    assert method.send(new, torch.arange(3)).shared.known.tolist() == [1, 1, 1, 0]
    # The mean of the reports tells the server as much as the reports do.
    mean = Report(
        {name: (4 * leaf[:1] + leaf[1:]) / 5 for name, leaf in reports.params.items()},
        tensor([5.0]),
    )
    summed = method.server_step(state, torch.tensor([0, 1]), mean)
    assert summed.features.flatten().tolist() == close([2, 5, 9, 0])


@pytest.mark.parametrize(("keep", "wanted"), [(0.0, 8), (0.5, 20 / 3), (0.75, 44 / 7)])
def test_rounds_before_may_count(keep: float, wanted: float) -> None:
    """Reported is prototype 8 of half of all examples; before it was 4, of a half as well.

    With keep = 1/2, 1/4 is left of it: (4 / 4 + 8 / 2) / (1/4 + 1/2) = 20/3. With 3/4, 3/8:
    (4 · 3/8 + 8 / 2) / (3/8 + 1/2) = 44/7.
    """
    state = Gathered(tensor([[4.0]]), tensor([0.5]))
    report = Report({"features": tensor([[[4.0]]]), "classes": tensor([[0.5]])}, tensor([3.0]))
    new = FedProto(keep=keep).server_step(state, torch.tensor([0]), report)
    assert new.features.tolist() == [[close(wanted)]]
    assert new.classes.tolist() == [close(0.5 * keep + 0.5)]


def test_the_nearest_known_prototype_is_predicted_or_the_head() -> None:
    """Feature 3 is 1 from class 0's prototype 2 and 2 from class 1's 5; the head says class 1."""
    local = client(main=Split(1.0, 1.0))
    model = Classifier(params(1.0, 1.0), Prototypes(tensor([[2.0], [5.0]]), tensor([1.0, 1.0])))
    x = tensor([3.0])
    assert FedProto().predict(model, x, local).tolist() == [close([-1.0, -4.0])]
    assert FedProto(predict_by="head").predict(model, x, local).tolist() == [close([0.0, 3.0])]
    half = model._replace(prototypes=model.prototypes._replace(known=tensor([0.0, 1.0])))
    assert FedProto().predict(half, x, local).argmax(-1).tolist() == [1]


def test_a_newcomer_trains_its_own_network_towards_the_prototypes() -> None:
    """Two epochs are two steps as in a round."""
    known = Prototypes(tensor([[7.0], [1.0]]), tensor([0.0, 1.0]))
    method = FedProto(lr=0.1, epochs=2, newcomer_epochs=2)
    local, start = client(main=Split(1.0, 0.5)), params(1.0, 0.5)
    adapted = method.adapt(Sent(known), start, local)
    _, kept = method.client_step(Sent(known), start, client(main=Split(1.0, 0.5)))
    assert alike(adapted.params, kept)
    assert alike(adapted.prototypes, known)


def test_the_state_has_a_row_for_each_class_and_no_client_has_a_row() -> None:
    state = FedProto().init_server(setup(Split(1.0, 1.0))._replace(features=(3,)))
    assert (state.features.shape, state.classes.shape) == ((2, 3), (2,))
    assert FedProto().models(FedProto().send(state, torch.arange(2)), ()) == {}


class Wide(nn.Module):
    """Another network than the worlds' own, with as many features, or fewer."""

    def __init__(self, features: int = 6) -> None:
        super().__init__()
        self.first = nn.Linear(worlds.FEATURES, 9)
        self.second = nn.Linear(9, features)
        self.out = nn.Linear(features, worlds.CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.second(self.first(x).relu()).relu())


def architectures(features: int) -> dict[str, Architecture]:
    return {
        "plain": Architecture(worlds.Normed, clients=(0, 1, 2)),
        "wide": Architecture(lambda: Wide(features), clients=(3, 4, 5)),
    }


@pytest.mark.parametrize("cohort", [None, 3])
def test_networks_may_differ_and_both_backends_agree(cohort: int | None, float64: None) -> None:
    ends = []
    for kind in ("sequential", "vectorised"):
        simulation = worlds.simulation(
            FedProto(batch=4, lr=0.3), worlds.federation(), kind=kind, cohort=cohort,
            architectures=architectures(6),
        )  # fmt: skip
        for _ in range(4):
            simulation.advance()
        ends.append(simulation.tree)
    assert not worlds.differing(*ends, 1e-9)
    assert bool(simulation.states[0].features.any())


def test_features_of_another_size_are_refused() -> None:
    with pytest.raises(
        MethodError, match=r"shares 'features' .* 'wide' .*: \(3, 5\), not \(3, 6\)"
    ):
        worlds.simulation(FedProto(), worlds.federation(), architectures=architectures(5))


def test_settings_out_of_range_are_refused() -> None:
    refuses(FedProto, "pull", -1.0, "at least 0")
    refuses(FedProto, "keep", 1.0, "below 1")
    refuses(FedProto, "predict_by", "chance", "one of 'prototype', 'head'")
