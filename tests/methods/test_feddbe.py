"""FedDBE by hand."""

import math
from typing import Any

import pytest
import torch

from idiolect.core.method import Report, Sent
from idiolect.core.tree import Params
from idiolect.methods import FedDBE
from idiolect.methods.feddbe import MEAN, Debiased, Held, Shifted
from methods.tiny import Split, alike, client, close, refuses, setup, sigmoid

LN3 = math.log(3)


def tensor(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def params(a: float, b: float) -> Params:
    return {"a.w": tensor(a), "b.w": tensor(b)}


def held(a: float, b: float, mean: float, known: float = 1.0) -> Sent:
    return Sent(Held(params(a, b), tensor([mean]), tensor(known)))


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("known", [0.0, 1.0])
def test_one_step_by_hand(known: float, stacked: bool) -> None:
    """A = 1, b = ln 3 / 3, vector 1, example (2, 1), global mean 1, κ = 2, lr 0.1.

    The feature is 2 and with the vector 3, so z = ln 3 and the error is −1/4: ∂/∂b = −3/4,
    ∂/∂vector = −1/4 · ln 3 / 3, ∂/∂a twice that. The feature's mean is 1 too large: the pull adds
    κ · 1 · ∂(2a)/∂a = 4 to ∂/∂a, if the mean is known; then that of the client is not reported.
    """
    local, b = client(main=Split(1.0, 0.0), stacked=stacked), LN3 / 3
    report, own = FedDBE(lr=0.1, pull=2.0).client_step(
        held(1.0, b, 1.0, known), Debiased(tensor([1.0]), tensor([7.0])), local
    )
    network = report.params["network"]
    assert float(network["a.w"]) == close(1 + 0.1 * (b / 2 - 4 * known))
    assert float(network["b.w"]) == close(b + 0.075)
    assert sorted(network) == ["a.w", "b.w"]
    assert report.params[MEAN].tolist() == [1.0 if known else 7.0] and own.mean.tolist() == [7.0]
    assert own.bias.tolist() == close([1 + 0.1 * b / 4])


def test_a_running_mean_against_plain_python() -> None:
    """At μ = 1/2 the mean is half the last, which counts as a constant, and half the batch's."""
    a, b, bias, running = 1.0, 0.4, 0.3, 0.0
    for _ in range(2):
        mean = (running + 2 * a) / 2
        error = sigmoid(b * (2 * a + bias)) - 1
        step = error * 2 * b + 3.0 * (mean - 0.5) * 1.0
        a, b, bias = a - 0.1 * step, b - 0.1 * error * (2 * a + bias), bias - 0.1 * error * b
        running = mean
    method = FedDBE(lr=0.1, pull=3.0, batch_share=0.5, epochs=2)
    report, own = method.client_step(
        held(1.0, 0.4, 0.5), Debiased(tensor([0.3]), tensor([0.0])), client(main=Split(1.0, 0.0))
    )
    network = report.params["network"]
    assert (float(network["a.w"]), float(network["b.w"])) == close((a, b))
    assert own.bias.tolist() == close([bias])


def test_before_its_first_round_a_client_trains_and_takes_its_mean() -> None:
    """As FedAvg would: b = 0 gives p = 1/2 and leaves a = 1 alone; features 1 and 3 have mean 2."""
    local = client([(1.0, 1), (3.0, 0)], main=Split(1.0, 0.0))
    start = Debiased(tensor([0.5]), tensor([0.0]))
    kept = FedDBE(lr=0.1).prepare(held(1.0, 0.0, 9.0), start, local)
    assert kept.mean.tolist() == close([2.0]) and kept.bias.tolist() == [0.5]


def test_the_mean_is_that_of_the_first_round() -> None:
    """Clients of 1 and 3 examples report 2 and 6: 5, unless a mean is known."""
    reports = Report(
        {"network": {"w": tensor([0.0, 4.0])}, MEAN: tensor([[2.0], [6.0]])}, tensor([1.0, 3.0])
    )
    for known, mean in ((0.0, 5.0), (1.0, 9.0)):
        state = Held({"w": tensor(1.0)}, tensor([9.0]), tensor(known))
        new = FedDBE().server_step(state, torch.arange(2), reports)
        assert (float(new.params["w"]), new.mean.tolist(), float(new.known)) == (3.0, [mean], 1.0)
        assert alike(FedDBE().reference(state, torch.arange(1))[MEAN], tensor([9.0]))


def test_the_vector_is_added_in_the_personal_model_only() -> None:
    local, method = client(main=Split(1.0, 1.0)), FedDBE()
    deployed = method.deploy(held(1.0, 2.0, 0.0), Debiased(tensor([5.0]), tensor([0.0])), local)
    models = method.models(held(1.0, 2.0, 0.0), deployed)
    found = {name: method.predict(m, tensor([3.0]), local).tolist() for name, m in models.items()}
    assert found == {"personal": [[0, 16]], "global": [[0, 6]]}


def test_a_newcomer_trains_the_vector_alone() -> None:
    """Feature 2 under b = 1 with a vector of −2: z = 0, so the vector grows by 0.1 · 1/2 · 1."""
    method = FedDBE(lr=0.1, newcomer_epochs=1)
    fresh = Debiased(tensor([-2.0]), tensor([0.0]))
    found = method.adapt(held(1.0, 1.0, 0.0), fresh, client(main=Split(1.0, 1.0)))
    assert isinstance(found, Shifted) and found.bias.tolist() == close([-1.95])
    assert alike(found.params, params(1.0, 1.0))


def test_it_starts_with_nothing_known() -> None:
    start = setup(Split(1.0, 0.0))._replace(features=(3,))
    state, own = FedDBE().init_server(start), FedDBE().init_personal(start)
    assert (state.mean.tolist(), float(state.known), own.bias.tolist()) == ([0] * 3, 0, [0] * 3)


def test_settings_out_of_range_are_refused() -> None:
    refuses(FedDBE, "batch_share", 0.0, "above 0")
    refuses(FedDBE, "pull", -1.0, "at least 0")
