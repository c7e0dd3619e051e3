"""The parts one by one: each is the plain thing where its weight is zero, and right where not."""

import dataclasses
import math

import pytest
import torch
from torch import nn

import worlds
from idiolect.aggregation import Private
from idiolect.aggregation.aggregator import Aggregated
from idiolect.core import tree
from idiolect.core.capabilities import FinalExchange, has
from idiolect.core.client import Batch
from idiolect.core.method import Sent, Setup
from idiolect.engine import final_exchange
from idiolect.errors import ConfigError, MethodError
from idiolect.methods import METHODS, FedAvg, FedPer, LocalOnly
from idiolect.methods.personalise import TABLE_2, Combined, Mixture, Tuned, local_training, spoken
from idiolect.methods.personalise.local_training import (
    LossTerms,
    StartingPoint,
    adapted,
    fisher,
    ground,
)
from idiolect.methods.personalise.mixture import LocalExpert, Mixed, blend, mixed

BASE = FedAvg(batch=3, lr=0.1)
FAST = {"tune_epochs": 2, "tune_lr": 0.1}
EXPERT = {"expert_epochs": 2, "expert_lr": 0.1}


def sent_to(seed=3):
    torch.manual_seed(seed)
    model = worlds.Normed()
    return Sent({name: value.detach().clone() for name, value in model.named_parameters()})


def client(number=0, **options):
    return worlds.local(worlds.federation(), number, initial=sent_to(9).shared, **options)


def deployed(method, number=0):
    sent, local = sent_to(), client(number)
    return method.models(sent, method.deploy(sent, (), local))


def same(left, right):
    assert left.keys() == right.keys()
    return all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("trains", ["all", "head"])
def test_without_weights_the_terms_are_exactly_absent(trains, float64):
    plain = deployed(Tuned(BASE, trains=trains, **FAST))["personal"]
    for zero in ({"kd_weight": 0.0}, {"ewc_weight": 0.0}):
        assert same(plain, deployed(Tuned(BASE, trains=trains, **zero, **FAST))["personal"])
    part = {"all": "ft", "head": "fb"}[trains]
    for term, name in (("kd", "kd_weight"), ("ewc", "ewc_weight")):
        # In a stack the terms are computed and weigh nothing: no digit may differ either.
        found = deployed(
            Combined(BASE, combinations=((part,), (part, term)), **{name: 0.0}, **FAST)
        )
        assert same(found[spoken((part,))], found[spoken((part, term))])
        assert not worlds.differing(plain, found[spoken((part,))], 1e-12)
        held = deployed(Tuned(BASE, trains=trains, **{name: 0.7}, **FAST))["personal"]
        assert worlds.differing(plain, held, 1e-3)


def test_a_mixture_of_weight_one_is_exactly_the_plain_model(float64):
    sent, local = sent_to(), client()
    plain, whole = Tuned(BASE, **FAST), Mixture(Tuned(BASE, **FAST), moe_weights=(1.0,), **EXPERT)
    x = torch.randn(7, worlds.FEATURES)
    left = plain.predict(deployed(plain)["personal"], x, local)
    mixed = whole.models(sent, whole.deploy(sent, (), local))
    assert torch.equal(left, whole.predict(mixed["personal"], x, local))
    alone = Mixture(Tuned(BASE, **FAST), moe_weights=(0.0,), **EXPERT)
    models = alone.models(sent, alone.deploy(sent, (), client()))
    expert = local.logits(models["local"].params, x)
    torch.testing.assert_close(
        alone.predict(models["personal"], x, local).softmax(-1), expert.softmax(-1)
    )


def test_fine_tuning_is_plain_training_from_the_federated_model(float64):
    local = client()
    rule = BASE.local_optimiser(local, 0.1)
    by_hand = local.fit(local.loss, sent_to().shared, rule, batch=3, epochs=2)
    assert same(by_hand, deployed(Tuned(BASE, **FAST))["personal"])


def test_freeze_base_trains_the_chosen_layers_and_nothing_else(float64):
    start = sent_to().shared
    for options, moved in (
        ({"fb_layers": 1}, {"fc2.weight", "fc2.bias"}),
        ({"fb_layers": 2}, {"fc2.weight", "fc2.bias", "norm.weight", "norm.bias"}),
        ({"fb_names": ("norm.*", "*.bias")}, {"norm.weight", "norm.bias", "fc1.bias", "fc2.bias"}),
    ):
        method = Tuned(
            dataclasses.replace(BASE, weight_decay=0.1), trains="head", **options, **FAST
        )
        found = deployed(method)["personal"]
        assert {name for name in start if not torch.equal(start[name], found[name])} == moved
    with pytest.raises(ConfigError, match=r"fb_names: 'fc9.\*' fits no parameter; there are fc1"):
        deployed(Tuned(BASE, trains="head", fb_names=("fc9.*",), **FAST))
    with pytest.raises(ConfigError, match="9 last layers asked for, but the network has 3"):
        deployed(Tuned(BASE, trains="head", fb_layers=9, **FAST))


class Line(nn.Module):
    """Two logits, 0 and w·x of one feature: small enough to differentiate by hand."""

    def __init__(self, w=1.0):
        super().__init__()
        self.w = nn.Parameter(torch.tensor(float(w)))

    def forward(self, x):
        return torch.stack([torch.zeros_like(x[:, 0]), self.w * x[:, 0]], -1)


def line_client(x, y):
    world = worlds.federation((len(x),), (0,))
    data = world.dataset
    values = data.x.copy()
    values[world.train[0], 0] = x
    labels = data.y.copy()
    labels[world.train[0]] = y
    data = dataclasses.replace(data, x=values, y=labels)
    world = dataclasses.replace(world, dataset=data)
    return worlds.local(world, 0, build=Line)


def test_the_terms_by_hand(float64):
    """One example x = 2, y = 1, student and teacher w = 0.5 and G = 1.5, all weights distinct.

    With s(z) = 1/(1+e^-z): CE = -log s(2w), slope -x(1 - s(2w)) = -2(1 - s(1)).
    KL at temperature T of (0, 3) against (0, 1): slope (x/T)(s(1/T) - s(3/T)) in w, times T².
    Fisher at G is the squared slope there, (x(1 - s(3)))² = 4(1 - s(3))²; EWC's slope λF(w - G).
    """
    weight, temperature, hold, rate = 0.3, 4.0, 7.0, 0.25

    def s(z):
        return torch.sigmoid(torch.tensor(z)).item()

    hard = -2 * (1 - s(1.0))
    soft = temperature**2 * (2 / temperature) * (s(1 / temperature) - s(3 / temperature))
    information = 4 * (1 - s(3.0)) ** 2
    slope = (1 - weight) * hard + weight * soft + hold * information * (0.5 - 1.5)

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Apart(FedAvg):
        """Deploys w = 0.5 beside a global model of 1.5."""

        def deploy(self, sent, personal, local):
            return {"w": torch.tensor(0.5)}

    method = Tuned(
        Apart(batch=1),
        tune_epochs=1,
        tune_lr=rate,
        kd_weight=weight,
        kd_temperature=temperature,
        ewc_weight=hold,
    )
    sent = Sent({"w": torch.tensor(1.5)})
    tuned = method.deploy(sent, (), line_client([2.0], [1]))
    assert method.models(sent, tuned)["personal"]["w"].item() == pytest.approx(0.5 - rate * slope)


def test_elastic_weights_hold_what_matters_to_all(float64):
    """Two clients at w = G = 1.5: x = 2 and x = 1, both of class 1; λ = 7, three steps of 0.25.

    Their Fisher informations are F₁ = (2(1 − s(3)))² and F₂ = (1 − s(1.5))². Each trains on its own
    example, and both are held by (F₁ + F₂)/2; by its own, where that is asked for.
    """
    hold, rate = 7.0, 0.25

    def s(z):
        return 1 / (1 + math.exp(-z))

    own = {2.0: (2 * (1 - s(3.0))) ** 2, 1.0: (1 - s(1.5)) ** 2}

    def by_hand(x, information):
        w = 1.5
        for _ in range(3):
            w -= rate * (-x * (1 - s(x * w)) + hold * information * (w - 1.5))
        return w

    sent = Sent({"w": torch.tensor(1.5)})
    settings = {"tune_epochs": 3, "tune_lr": rate, "ewc_weight": hold}
    method = Tuned(FedAvg(batch=1), **settings)
    assert has(method, FinalExchange) and not has(
        Tuned(FedAvg(), ewc_fisher="client", **settings), FinalExchange
    )
    locals_ = {x: line_client([x], [1]) for x in own}
    alone = {x: method.deploy(sent, (), local) for x, local in locals_.items()}
    told = {x: method.tell(alone[x], locals_[x]) for x in own}
    for x, other in ((2.0, 1.0), (1.0, 2.0)):
        assert alone[x].model["w"].item() == pytest.approx(by_hand(x, own[x]))
        assert told[x].importance["w"].item() == pytest.approx(own[x])
        heard = method.hear(alone[x], told[other], locals_[x])
        mean = sum(own.values()) / 2
        assert method.models(sent, heard)["personal"]["w"].item() == pytest.approx(by_hand(x, mean))
    nobody = tree.zeros_like(told[1.0])
    assert method.hear(alone[2.0], nobody, locals_[2.0]).model["w"].item() == pytest.approx(
        by_hand(2.0, own[2.0])
    )


def test_nothing_is_told_past_a_private_rule_or_without_a_federated_model(float64):
    settings = {"ewc_weight": 5.0, "tune_epochs": 1}
    private = Aggregated(FedAvg(), Private(clip=1.0, noise=1.0))
    assert not has(Tuned(private, **settings), FinalExchange)
    assert not has(Combined(private, combinations=(("ft", "ewc"),)), FinalExchange)
    assert has(Combined(FedAvg(), combinations=(("ft", "ewc"), ("ft",))), FinalExchange)
    assert not has(Combined(FedAvg(), combinations=(("ft", "kd"), ("ft",))), FinalExchange)
    local, method = line_client([2.0], [1]), Tuned(LocalOnly(batch=1), **settings)
    deployed = method.deploy(Sent(), {"w": torch.tensor(1.5)}, local)
    assert float(method.tell(deployed, local).voices) == 0


@pytest.mark.parametrize("combined", [False, True])
def test_in_a_simulation_all_are_held_by_the_mean_of_their_informations(
    combined, monkeypatch, float64
):
    """Whether what was deployed is kept between telling and hearing, or made again."""
    base = FedAvg(batch=3, lr=0.1)
    settings = {"tune_epochs": 2, "tune_lr": 0.1, "ewc_weight": 50.0}
    method = Tuned(base, **settings)
    if combined:
        method = Combined(base, combinations=(("ft", "ewc"),), **settings)
    world = worlds.federation()
    found = []
    for room in (final_exchange._ROOM, 0):
        monkeypatch.setattr(final_exchange, "_ROOM", room)
        simulation = worlds.simulation(method, world)
        simulation.advance()
        (verdict,) = simulation.evaluate([world.test_data], keep=True)
        found.append(verdict.deployed[0][1])
    assert not worlds.differing(*found, 1e-12)
    sent = Sent(simulation.states[0])
    at = ground(base, sent, sent.shared)
    every = sent.shared.__contains__
    locals_ = [worlds.local(world, client, round=1) for client in range(5)]
    each = [fisher(base, at, every, local) for local in locals_]
    mean = tree.map(lambda *leaves: sum(leaf.clamp(max=1) for leaf in leaves) / 5, *each)
    long = (method.tune_lr, method.tune_epochs)
    expected = adapted(base, at, every, LossTerms(ewc=50.0), mean, locals_[3], *long)
    assert not worlds.differing(tree.map(lambda leaf: leaf[3], found[0]), expected, 1e-9)


def test_the_fisher_information_is_a_loop_over_examples(float64):
    """Each example's gradient squared, then averaged: not the square of the average."""
    world, sent = worlds.federation(), sent_to()
    local = worlds.local(world, 3)
    at = ground(BASE, sent, sent.shared)
    got = fisher(BASE, at, lambda name: name != "fc1.bias", local)
    rows = torch.from_numpy(world.train[3])
    x = torch.from_numpy(world.dataset.x).double()[rows]
    y = torch.from_numpy(world.dataset.y)[rows]
    total = {name: torch.zeros_like(value) for name, value in sent.shared.items()}
    for one in range(len(rows)):
        batch = Batch(x[one : one + 1], y[one : one + 1], torch.ones(1), rows[one : one + 1])
        for name, slope in local.gradient(local.loss, sent.shared, batch).items():
            total[name] += slope.square() / len(rows)
    assert set(got) == set(total) - {"fc1.bias"}
    del total["fc1.bias"]
    assert not worlds.differing(got, total, 1e-10)
    whole = local.gradient(local.loss, sent.shared, Batch(x, y, torch.ones(len(rows)), rows))
    assert worlds.differing(got, {n: whole[n].square() for n in got}, 0.5)


def test_the_fisher_is_the_same_however_many_examples_fit(monkeypatch, float64):
    """Of 29 examples one, three (a ragged last chunk) or all at a time."""
    world, sent = worlds.federation((29,), (1,)), sent_to()
    at = ground(BASE, sent, sent.shared)
    weight = 8 * sum(leaf.numel() for leaf in sent.shared.values())
    found, chunks = [], []
    for room in (1, 3 * weight, 1000 * weight):
        monkeypatch.setattr(local_training, "_FISHER_BYTES", room)
        chunks.append(local_training.side_by_side(sent.shared, 1))
        found.append(fisher(BASE, at, sent.shared.__contains__, worlds.local(world, 0)))
    assert chunks == [1, 3, 64]
    assert not worlds.differing(found[0], found[1], 1e-10)
    assert not worlds.differing(found[0], found[2], 1e-10)


def test_clients_of_a_block_share_the_memory_for_the_fisher(monkeypatch):
    """Room for 60 gradients: one client alone takes 60 examples, each of 20 takes three."""
    part = {"w": torch.zeros(10)}
    monkeypatch.setattr(local_training, "_FISHER_BYTES", 60 * 10 * 4)
    assert [local_training.side_by_side(part, clients) for clients in (1, 20, 100)] == [60, 3, 1]
    seen = []
    monkeypatch.setattr(local_training, "side_by_side", lambda part, n: seen.append(n) or 2)
    method = Tuned(BASE, ewc_weight=1.0, tune_epochs=1)
    for kind in ("vectorised", "sequential"):
        worlds.simulation(method, worlds.federation(), kind=kind, width=4).evaluate()
    assert max(seen) > 1 and set(seen[-6:]) == {1}


def test_the_fisher_of_a_network_that_vmap_cannot_map_is_the_same(float64):
    """One that decides by a value: torch refuses it under vmap, so examples go one by one."""

    class Deciding(worlds.Normed):
        def forward(self, x):
            return super().forward(x) if bool((x < 1e9).all()) else x

    sent = sent_to()
    at = StartingPoint(sent.shared, sent.shared, sent.shared)
    found = [
        fisher(BASE, at, sent.shared.__contains__, worlds.local(worlds.federation(), 3, build=b))
        for b in (worlds.Normed, Deciding)
    ]
    assert not worlds.differing(*found, 1e-10)


def test_what_models_share_is_run_once_and_says_the_same(float64):
    """Nine networks for sixteen models: six trained, the federated, the expert, the chosen one."""
    method = Combined(BASE, **FAST, **EXPERT)
    sent, local = sent_to(), client(3)
    models = method.models(sent, method.deploy(sent, (), local))
    x, runs, logits = torch.randn(3, 4), [], local.logits
    local.logits = lambda *given, **options: runs.append(1) or logits(*given, **options)
    together = method.predict_all(models, x, local)
    assert len(runs) == 9 and len(models) == 16
    apart = {name: method.predict(model, x, local) for name, model in models.items()}
    assert all(torch.equal(together[name], apart[name]) for name in models)


def test_blending_is_in_probabilities():
    """Softmaxes (1/4, 3/4) and (1/2, 1/2) at α = 0.2 give (0.45, 0.55)."""
    first, other = torch.tensor([1.0, 3.0]).log(), torch.tensor([5.0, 5.0])
    weight = torch.tensor(0.2)
    got = blend(first, other, weight.log(), (1 - weight).log())
    torch.testing.assert_close(got.exp(), torch.tensor([0.45, 0.55]))


@pytest.mark.parametrize("select", ["loss", "accuracy", "posterior"])
def test_the_weight_is_the_best_on_validation_data(select, float64):
    """Against a loop over the grid with this client's own validation rows.

    The posterior weighs α by Π p(label), which is exp(-9 · loss) for nine labels.
    """
    method = Mixture(BASE, moe_select=select, expert_epochs=6, expert_lr=0.3)
    world = worlds.federation((7, 4, 5, 9, 3, 0), (9, 3, 2, 1, 0, 2))
    local = worlds.local(world, 0, initial=sent_to(9).shared)
    sent = sent_to()
    _, mixed = method.deploy(sent, (), local)
    rows = torch.from_numpy(world.val[0])
    x = torch.from_numpy(world.dataset.x).double()[rows]
    y = torch.from_numpy(world.dataset.y)[rows]
    marks = []
    for weight in method.moe_weights:
        logits = method.predict(mixed._replace(weight=torch.tensor(weight)), x, local)
        if select != "accuracy":
            marks.append(nn.functional.cross_entropy(logits, y).item())
        else:
            marks.append(-(logits.argmax(-1) == y).double().mean().item())
    assert len(set(marks)) > 1
    if select == "posterior":
        odds = [math.exp(-9 * mark) for mark in marks]
        mean = sum(o * a for o, a in zip(odds, method.moe_weights, strict=True)) / sum(odds)
        assert mixed.weight.item() == pytest.approx(mean) and 0.1 < mean < 0.9
    else:
        assert mixed.weight.item() == method.moe_weights[marks.index(min(marks))]


@pytest.mark.parametrize(
    ("labels", "weight"), [([1, 0, 1], 1.0), ([0, 0, 1], 0.5811), ([1, 0, 1, 0], 0.6974)]
)
def test_a_mixture_classifies_no_fewer_validation_rows_than_its_part(labels, weight, float64):
    """p(1) is 0.55 with the federated model and 0.01 with the expert, 0.55α + 0.01(1 - α) mixed.

    It says 1 above α = 0.907. With labels (1, 0, 1) the mean Σ p²(1-p)α / Σ p²(1-p) over the grid
    is 0.7411: one right, where α = 1 has two, so 1 it is. With (0, 0, 1) it is 0.5811: two right,
    and α = 1 has one. With (1, 0, 1, 0) it is Σ p²(1-p)²α / Σ p²(1-p)² = 0.6974: two right, as
    many as α = 1 has, so there is no reason to leave it.
    """
    world = worlds.federation((1,), (len(labels),))
    values, given = world.dataset.x.copy(), world.dataset.y.copy()
    values[:, 0], given[:] = 1.0, 0
    given[world.val[0]] = labels
    data = dataclasses.replace(world.dataset, x=values, y=given)
    world = dataclasses.replace(world, dataset=data)
    sent, expert = (
        {"w": torch.tensor(math.log(p / (1 - p)), dtype=torch.float64)} for p in (0.55, 0.01)
    )
    local = worlds.local(world, 0, build=Line, initial=expert)
    method = Mixture(FedAvg(batch=3), expert_epochs=1, expert_lr=1e-12)
    _, mixed = method.deploy(Sent(sent), (), local)
    assert mixed.weight.item() == pytest.approx(weight, abs=1e-4)


def test_without_validation_data_the_federated_model_serves(float64):
    _, mixed = Mixture(BASE, **EXPERT).deploy(sent_to(), (), client(4))
    assert mixed.weight.item() == 1.0


def test_a_gate_sees_the_example(float64):
    """The federated model is right where x > 0 and the expert where x < 0: a scalar cannot win.

    With logits (0, 8x) and (0, -8x) and all labels 1, the gate must open on the right and shut on
    the left; its loss falls far below log 2, the best that any single weight can reach.
    """
    x, y = torch.tensor([3.0, -3.0, 2.0, -2.0]).tolist(), [1, 1, 1, 1]
    world = worlds.federation((4,), (4,))
    values, labels = world.dataset.x.copy(), world.dataset.y.copy()
    for rows in (world.train[0], world.val[0]):
        values[rows], labels[rows] = 0, y
        values[rows, 0] = x
    data = dataclasses.replace(world.dataset, x=values, y=labels)
    world = dataclasses.replace(world, dataset=data)
    expert = {"w": torch.tensor(-8.0)}
    local = worlds.local(world, 0, build=Line, initial=expert)
    sent = Sent({"w": torch.tensor(8.0)})
    points = torch.tensor([[4.0, 0, 0, 0], [-4.0, 0, 0, 0]])
    for gate in ("inputs", "outputs"):
        method = Mixture(
            FedAvg(batch=4), gate=gate, gate_epochs=200, gate_lr=0.1, expert_epochs=1,
            expert_lr=1e-9,
        )  # fmt: skip
        models = method.models(sent, method.deploy(sent, (), local))
        right = method.predict(models["personal"], points, local).softmax(-1)[:, 1]
        assert right.min() > 0.9, gate
        assert isinstance(models["personal"], Mixed) and isinstance(models["local"], LocalExpert)
    scalar = Mixture(FedAvg(batch=4), expert_epochs=1, expert_lr=1e-9)
    models = scalar.models(sent, scalar.deploy(sent, (), local))
    assert scalar.predict(models["personal"], points, local).softmax(-1)[:, 1].min() < 0.6


def test_what_cannot_be_trained_on_is_told():
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Odd(FedAvg):
        def models(self, sent, deployed):
            return {"personal": torch.zeros(3)}

    with pytest.raises(MethodError, match=r"no set of parameters, so it cannot be trained on"):
        deployed(Tuned(Odd(), **FAST))


@pytest.mark.parametrize(
    ("combination", "words"),
    [
        (("ft", "fb"), "expected one of ft and fb, or moe"),
        (("kd",), "changes the loss of a training that is not there"),
        (("ewc", "moe"), "changes the loss"),
        (("ft", "mtl"), "unknown part 'mtl'; expected ft, fb, kd, ewc, moe"),
        (("ft", "ft"), "names a part twice"),
        ((), "expected one of ft and fb"),
    ],
)
def test_impossible_combinations_are_refused(combination, words):
    with pytest.raises(ConfigError, match=words):
        Combined(BASE, combinations=(combination,))


def test_the_thirteen_of_table_2_are_all_there_are():
    """(FT or FB) × (nothing, KD or EWC) × (MoE or not), and MoE alone: 2·3·2 + 1."""
    assert len({frozenset(one) for one in TABLE_2}) == 13
    Combined(BASE)
    with pytest.raises(ConfigError, match="lists a combination twice"):
        Combined(BASE, combinations=(("ft", "kd"), ("kd", "ft")))


def test_settings_of_the_inner_method_are_set_there():
    method = Mixture(Tuned(FedPer(lr=0.5, batch=7)))
    assert (method.lr, method.batch, method.title) == (0.5, 7, "FedPer + FT + MoE")
    with pytest.raises(ConfigError, match=r"lr is 0.2, but training is that of FedPer; set it"):
        Tuned(FedPer(lr=0.5), lr=0.2)
    assert Tuned(FedAvg()).training() == FedAvg().training() == METHODS["fedavg"]().training()
    small = {"fc1.weight": torch.ones(1), "fc2.weight": torch.ones(1)}
    setup = Setup(small, small, torch.ones(2), 3)
    assert method.init_personal(setup) == FedPer().init_personal(setup)


@pytest.mark.parametrize("gate", ["inputs", "outputs"])
def test_a_gate_is_fitted_on_validation_data_alone(gate, float64):
    """Other labels of training rows leave it as it is; other labels of validation rows do not."""
    world = worlds.federation((4,), (4,))
    sent, own = sent_to(), sent_to(9).shared

    def fitted(*changed):
        labels = world.dataset.y.copy()
        for rows in changed:
            labels[rows] = (labels[rows] + 1) % worlds.CLASSES
        data = dataclasses.replace(world.dataset, y=labels)
        local = worlds.local(dataclasses.replace(world, dataset=data), 0)
        settings = Mixture(BASE, gate=gate, gate_epochs=3, gate_lr=0.1)
        return mixed(BASE, sent.shared, own, settings, local).gate

    assert not worlds.differing(fitted(), fitted(world.train[0]))
    assert worlds.differing(fitted(), fitted(world.val[0]), 1e-3)


class Dropping(worlds.Normed):
    """Drops what enters its last layer: in training mode half of it is gone."""

    def forward(self, x):
        return self.fc2(
            nn.functional.dropout(self.norm(self.fc1(x)).tanh(), training=self.training)
        )


def test_a_frozen_base_runs_in_evaluation_mode(float64):
    """Frozen layers stay as they are in every respect, so dropout among them drops nothing."""
    sent, world = sent_to(), worlds.federation()
    method = Tuned(BASE, trains="head", **FAST)
    plain, dropping = (
        method.deploy(sent, (), worlds.local(world, 0, build=build)).model
        for build in (worlds.Normed, Dropping)
    )
    assert not worlds.differing(plain, dropping)
    assert worlds.differing(plain, sent.shared, 1e-3)
