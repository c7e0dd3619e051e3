"""FedGen by hand."""

import pytest
import torch
from torch import nn

from idiolect.core.client import Batch
from idiolect.core.method import Sent
from idiolect.methods import FedAvg, FedGen
from idiolect.methods.fedgen import Counted, Taught, generated
from methods.tiny import Split, alike, client, close, refuses, setup, sigmoid

START = setup(Split(0.7, -0.4))._replace(features=(1,))


def tensor(values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def always(method: FedGen, feature: float) -> Taught:
    """A generator that makes one feature whatever it is given."""
    group = method.init_group(START)
    made = {**group.generator, "outside.bias": tensor([feature])}
    made["outside.weight"] = torch.zeros_like(made["outside.weight"])
    return group._replace(generator=made)


@pytest.mark.parametrize("stacked", [False, True])
def test_a_client_step(stacked: bool) -> None:
    """Data (2, 1): the feature is 0.7 · 2, its slope (p − 1) b · 2 in a and (p − 1) · 1.4 in b.

    Generated features are 3, of class 1 alone: (p' − 1) · 3 more in b, with p' = σ(−0.4 · 3), half
    as much with a pull of ½; a is not before the head.
    """
    method = FedGen(pull=0.5, lr=0.1, hidden=2, noise=1)
    sent = Sent(tensor([0.0, 1.0]), (), always(method, 3.0))
    local = client(main=Split(0, 0), stacked=stacked)
    report, kept = method.client_step(sent, (), local)
    wrong, taught = sigmoid(-0.4 * 1.4) - 1, sigmoid(-0.4 * 3) - 1
    assert float(report.params["a.w"]) == close(0.7 - 0.1 * wrong * -0.4 * 2)
    assert float(report.params["b.w"]) == close(-0.4 - 0.1 * (wrong * 1.4 + 0.5 * taught * 3))
    assert report.classes.tolist() == [0, 1] and kept == ()


def test_without_a_pull_it_is_fedavg() -> None:
    method = FedGen(pull=0, lr=0.3, epochs=2, batch=1)
    examples = [(2.0, 1), (-1.0, 0), (0.5, 1)]
    sent = Sent(tensor([0.5, 0.5]), (), method.init_group(START))
    report, _ = method.client_step(sent, (), client(examples, main=Split(0, 0)))
    fedavg = FedAvg(lr=0.3, epochs=2, batch=1)
    plain, _ = fedavg.client_step(Sent(START.params), (), client(examples, main=Split(0, 0)))
    for name, leaf in plain.params.items():
        assert float(report.params[name]) == close(float(leaf))


def test_the_server_averages_by_examples_and_counts_labels() -> None:
    method = FedGen(hidden=2, noise=1)
    group = method.init_group(START)
    reports = Counted(
        {"w": tensor([1.0, 5.0])}, tensor([1.0, 3.0]), tensor([[1.0, 0.0], [1.0, 2.0]])
    )
    assert method.group_step(group, reports).params["w"].item() == close(4.0)
    read = torch.stack(
        [method.read(Counted({}, tensor(1.0), row), client()) for row in reports.classes]
    )
    assert method.server_step(tensor([0.9, 0.1]), torch.arange(2), read).tolist() == close(
        [0.5, 0.5]
    )
    nobody = method.server_step(tensor([0.9, 0.1]), torch.arange(2), torch.zeros(2, 2))
    assert nobody.tolist() == close([0.9, 0.1])


def test_the_generator_learns_what_the_head_recognises() -> None:
    """Of class 1 alone, b = −0.4 says less the larger the feature: its slope is (p − 1) b > 0.

    Adam's first step is its rate, whatever the slope's size.
    """
    method = FedGen(hidden=2, noise=1, generator_steps=1, generator_lr=0.01)
    group = always(method, 3.0)
    new = method.fuse(group, tensor([0.0, 1.0]), client(main=Split(0, 0)))
    assert float(new.generator["outside.bias"]) == close(3.0 - 0.01, 1e-6)
    assert alike(new.params, group.params) and float(new.memory.taken) == 1
    more = FedGen(hidden=2, noise=1, generator_steps=300, generator_lr=0.05)
    both = more.fuse(more.init_group(START), tensor([0.5, 0.5]), client(main=Split(0, 0)))
    batch = more._drawn(tensor([0.5, 0.5]), client())
    logits = -0.4 * generated(both.generator, batch, 2).squeeze(1)
    assert ((logits > 0).long() == batch.y).all()


def test_the_generator_is_a_layer_with_normalisation_and_another() -> None:
    method = FedGen(hidden=4, noise=3)
    made = method.init_group(START).generator
    torch.manual_seed(0)
    made = {name: torch.randn_like(leaf) for name, leaf in made.items()}
    plain = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 1)).double()
    plain.load_state_dict(
        dict(zip(dict(plain.named_parameters()), made.values(), strict=True)), False
    )
    noise, classes = torch.randn(6, 3, dtype=torch.float64), torch.tensor([0, 1, 1, 0, 1, 1])
    found = generated(made, Batch(noise, classes, noise[:, 0], classes), 2)
    wanted = torch.cat([noise, nn.functional.one_hot(classes, 2)], 1)
    assert found.flatten().tolist() == close(plain(wanted).flatten().tolist())


def test_classes_are_drawn_by_their_shares() -> None:
    drawn = FedGen(generated=4000, noise=1)._drawn(tensor([0.2, 0.0, 0.5, 0.3]), client())
    shares = torch.bincount(drawn.y, minlength=4) / 4000
    assert shares.tolist() == pytest.approx([0.2, 0, 0.5, 0.3], abs=0.03) and shares[1] == 0
    assert abs(float(drawn.x.mean())) < 0.06 and float(drawn.x.std()) == pytest.approx(1, abs=0.05)


def test_what_it_begins_with() -> None:
    method = FedGen()
    assert method.init_server(START).tolist() == [0.5, 0.5]
    one, other = method.init_group(START), method.init_group(START._replace(seed=1))
    assert not alike(one.generator, other.generator) and alike(one.params, START.params)
    assert method.models(Sent((), (), one), one.params).keys() == {"personal", "global"}


def test_settings_out_of_range_are_refused() -> None:
    refuses(FedGen, "pull", -0.1, "at least 0")
    refuses(FedGen, "generated", 1, "at least 2")
