"""Portfolio: alone each candidate is the method it is named after; together none is below local."""

import dataclasses

import numpy as np
import pytest
import torch

import worlds
from idiolect.core import tree
from idiolect.core.method import Sent
from idiolect.errors import ConfigError
from idiolect.methods import FedAvg, FedAvgFT, LocalOnly, PersFL, Portfolio
from idiolect.methods.persfl import Teacher
from idiolect.methods.personalise import Tuned
from idiolect.methods.portfolio import KINDS, PortfolioState
from methods.tiny import LN9, client, line, pair, refuses

ROUNDS = {"batch": 3, "lr": 0.1, "momentum": 0.5}
TUNING = {"tune_epochs": 2, "tune_lr": 0.1}
EWC = {"ewc_weight": 5.0, "ewc_fisher": "client"}
UPWARD = [(2.0, 1), (-1.0, 0), (1.0, 1), (-2.0, 0)]
DOWNWARD = [(x, 1 - y) for x, y in UPWARD]
INF, NAN = float("inf"), float("nan")


def ended(method, world=None, rounds=3, **options):
    """Do some rounds with everyone; return the simulation and its verdict."""
    world = world or worlds.federation()
    simulation = worlds.simulation(method, world, **options)
    for _ in range(rounds):
        simulation.advance()
    return simulation, simulation.evaluate([world.test_data], keep=True)[0]


def deployed(verdict):
    return verdict.deployed[0][1]


def only(verdict):
    """The parameters of mixtures of one member, [client, ...]."""
    blend = deployed(verdict)
    assert (blend.weights == 1).all()
    return tree.map(lambda leaf: leaf[:, 0], blend.members)


# A single candidate is the method it is named after; elastic weights by the client's own Fisher.

SINGLES = {
    "local": LocalOnly(**ROUNDS),
    "global": FedAvg(**ROUNDS),
    "ft": FedAvgFT(**ROUNDS, **TUNING),
    "ft+kd": Tuned(FedAvg(**ROUNDS), kd_weight=0.5, **TUNING),
    "ft+ewc": Tuned(FedAvg(**ROUNDS), **EWC, **TUNING),
    "fb": Tuned(FedAvg(**ROUNDS), trains="head", **TUNING),
    "fb+kd": Tuned(FedAvg(**ROUNDS), trains="head", kd_weight=0.5, **TUNING),
    "fb+ewc": Tuned(FedAvg(**ROUNDS), trains="head", **EWC, **TUNING),
}


@pytest.mark.parametrize("kind", SINGLES)
def test_one_candidate_is_that_method(kind, float64):
    """At every client, the empty one and the one without validation data too."""
    method = Portfolio(**ROUNDS, **TUNING, candidates=(kind,), paces=(1.0,))
    _, found = ended(method)
    _, plain = ended(SINGLES[kind])
    assert not worlds.differing(only(found), deployed(plain), 1e-9)


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_one_cell_is_persfl(share, float64):
    """λ = 1 leaves the teacher as it is, which is a candidate of its own."""
    grid = {"shares": (share,), "temperatures": (5.0,)}
    kind = "teacher" if share == 1 else "persfl"
    given = {} if share == 1 else grid
    method = Portfolio(**ROUNDS, **TUNING, candidates=(kind,), **given)
    _, found = ended(method)
    _, plain = ended(PersFL(**ROUNDS, distil_epochs=2, distil_lr=0.1, **grid))
    assert not worlds.differing(only(found), deployed(plain), 1e-9)


def test_a_faster_pace_is_a_higher_rate(float64):
    method = Portfolio(**ROUNDS, **TUNING, candidates=("ft",), paces=(3.0,))
    faster = FedAvgFT(**ROUNDS, tune_epochs=2, tune_lr=0.3)
    assert method.names == ["ft ×3"]
    assert not worlds.differing(only(ended(method)[1]), deployed(ended(faster)[1]), 1e-9)


# What crosses the network.


def test_the_rounds_and_their_bytes_are_fedavgs(float64):
    simulations = []
    for method in (Portfolio(**ROUNDS), FedAvg(**ROUNDS)):
        simulation = worlds.simulation(method, worlds.federation(), cohort=3)
        traffic = [simulation.advance().traffic for _ in range(3)]
        simulations.append((simulation.states, traffic))
    (ours, sent), (plain, counted) = simulations
    assert not worlds.differing(ours, plain, 1e-9)
    assert sent == counted


def test_clients_keep_only_what_candidates_need():
    for candidates, teacher, alone in (
        (KINDS, True, True),
        (("ft", "fb"), False, False),
        (("local", "ft"), False, True),
        (("persfl",), True, False),
    ):
        simulation = worlds.simulation(Portfolio(candidates=candidates), worlds.federation())
        (kept,) = simulation.tree["personal"]
        assert (bool(kept.teacher), bool(kept.alone)) == (teacher, alone), candidates


# The promise.


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("margin", [0.0, 1.5])
def test_no_client_is_below_its_local_model_on_validation_data(seed, margin):
    """Worlds in which a federation rarely helps: a handful of examples, three rounds."""
    world = worlds.federation((7, 4, 5, 9, 3, 0), (9, 5, 7, 6, 0, 4), seed=seed)
    method = Portfolio(**ROUNDS, tune_epochs=3, tune_lr=0.3, margin=margin, caution=1.0)
    _, verdict = ended(method, world)
    own = verdict.scores["personal"]["val_accuracy"]
    alone = verdict.scores["local"]["val_accuracy"]
    seen = ~np.isnan(alone)
    assert seen.sum() == 5 and (own[seen] >= alone[seen] - 1e-6).all()
    told = verdict.facts["validation_accuracy"]
    np.testing.assert_allclose(told[seen], own[seen], atol=1e-6)


def kept_by(at, alone=(0.0, 0.0)):
    """A client whose best teacher is at one place and its own model at another."""
    nothing = torch.tensor(INF).double()
    return PortfolioState(Teacher(line(at), nothing, nothing * 0), line(alone))


def settled(train, val, at, alone, **settings):
    """What a client makes of a global model and its own."""
    method = Portfolio(
        **{"candidates": ("local", "ft"), "paces": (1.0,), "tune_lr": 0.5} | settings
    )
    kept = kept_by(at, alone)
    kept = kept._replace(teacher=kept.teacher if method.taught else ())
    return method, method.deploy(Sent(line(at)), kept, client(train, val))


def test_a_client_stays_alone_where_the_federation_misleads():
    """Its own model is right on all four; the global one, trained on wrong labels, on none."""
    method, found = settled(DOWNWARD, UPWARD, (-3.0, 0.0), (3.0, 0.0))
    assert found.weights.tolist() == [1.0, 0.0]
    assert found.accuracies.tolist() == [1.0, 0.0] and float(found.accuracy) == 1.0
    told = method.reason({k: v.numpy() for k, v in method.facts(found).items()})
    assert told == "local model: 100.0 %; nothing else was surely better"


def test_a_client_leaves_where_the_federation_helps():
    """The other way round. Prior and 4 examples: w of FT → (4 + c/2) / (4 + c) = 7/8 for c = 4/3.

    Local is so wrong (w = −50) that it explains no example at all.
    """
    method, found = settled(UPWARD, UPWARD, (3.0, 0.0), (-50.0, 0.0), caution=4 / 3)
    assert found.weights.tolist() == pytest.approx([1 / 8, 7 / 8], abs=1e-6)
    assert float(found.accuracy) == 1.0
    told = method.reason({k: v.numpy() for k, v in method.facts(found).items()})
    assert told == "MoE of fine-tuned model, weight 0.88: 100.0 % against 0.0 % local"


def test_a_mixture_below_local_on_validation_is_refused():
    """One of four is misjudged by the more likely mixture: likelihood alone would take it.

    Local says 1/2 + ε of every label and is right; FT is sure of three and of one it is wrong.
    """
    val = [(2.0, 1), (-2.0, 0), (2.0, 1), (0.1, 0), (-2.0, 0), (2.0, 1)]
    own = (0.02, -0.01)  # right about all six, hardly more than a half sure
    sure = settled([(2.0, 1)], val, (3.0, 0.2), own, tune_lr=1e-9, margin=0.0)[1]
    assert sure.accuracies.tolist() == pytest.approx([1.0, 5 / 6])
    assert sure.weights.tolist() == [1.0, 0.0] and float(sure.accuracy) == 1.0
    free = settled([(2.0, 1)], val, (3.0, 0.2), own, tune_lr=1e-9, candidates=("ft",))[1]
    assert free.weights.tolist() == [1.0]


def test_not_even_one_of_many_may_be_lost():
    """The same with 29 more that both judge rightly: 35 of 35 against 34."""
    val = [(2.0, 1), (-2.0, 0), (2.0, 1), (0.1, 0), (-2.0, 0), (2.0, 1), *[(2.0, 1)] * 29]
    found = settled([(2.0, 1)], val, (3.0, 0.2), (0.02, -0.01), tune_lr=1e-9, margin=0.0)[1]
    assert found.accuracies.tolist() == pytest.approx([1.0, 34 / 35])
    assert found.weights.tolist() == [1.0, 0.0]


@pytest.mark.parametrize(
    ("right", "settings", "leaves"),
    [
        (8, {}, False),  # 1.41 standard errors
        (9, {}, True),  # 1.68
        (8, {"margin": 1.0}, True),
        (6, {"margin": 1.0}, False),  # 0.87
        (9, {"margin": 2.0}, False),
    ],
)
def test_a_client_leaves_beyond_one_and_a_half_standard_errors(right, settings, leaves):
    """The global model is right about all but one of n examples, its own about that one alone.

    Its own says 1/2 of everything, the other 9/10 of what is true, and 1/10 once. So the gains are
    ln 9/5, and ln 1/5 once: ln 9 less. Their mean is ln 9/5 − ln 9 / n, their variance
    (ln 9)² / n, and the standard error ln 9 / n. The mean is n · ln 9/5 / ln 9 − 1 = 0.2675 n − 1
    standard errors.
    """
    val = [*[(1.0, 1)] * right, (1.0, 0)]
    tuning = {"members": 1, "tune_lr": 1e-9}
    _, found = settled(UPWARD, val, (LN9, 0.0), (0.0, 0.0), **tuning, **settings)
    n = right + 1
    assert found.accuracies.tolist() == pytest.approx([1 / n, right / n])
    assert found.weights.tolist() == ([0.0, 1.0] if leaves else [1.0, 0.0])
    assert float(found.accuracy) == pytest.approx(right / n if leaves else 1 / n)


@pytest.mark.parametrize("val", [[], [(2.0, 1)]])
def test_no_evidence_is_no_reason_to_leave(val):
    """No validation example, or one, on which the global model is right and its own wrong."""
    _, found = settled(UPWARD, val, (3.0, 0.0), (-3.0, 0.0))
    assert found.weights.tolist() == [1.0, 0.0]
    assert pair({k: v[0] for k, v in found.personal.members.items()}) == (-3.0, 0.0)


def test_a_local_model_that_diverged_is_left():
    _, found = settled(UPWARD, UPWARD, (3.0, 0.0), (NAN, 0.0))
    assert found.weights.tolist() == [0.0, 1.0] and float(found.accuracy) == 1.0


def test_one_member_is_the_best_on_validation_data():
    method, found = settled(UPWARD, UPWARD, (0.5, 0.0), (-3.0, 0.0), members=1)
    assert found.weights.tolist() == [0.0, 1.0]
    told = method.reason({k: v.numpy() for k, v in method.facts(found).items()})
    assert told == "fine-tuned model: 100.0 % against 0.0 % local"
    assert found.personal.weights.shape == (1,)


def test_of_one_member_accuracy_decides_not_likelihood():
    """The local model is right about two of three, the other about one, of which it is sure.

    w = 0.1: z = 0.2, 0.2, 0.2 for labels 1, 1, 0. At (0.1, −9) all is class 0, the last surely.
    """
    val = [(2.0, 1), (2.0, 1), (2.0, 0)]
    one = settled(UPWARD, val, (0.1, -9.0), (0.1, 0.0), members=1, tune_lr=1e-9, margin=0.0)[1]
    assert one.accuracies.tolist() == pytest.approx([2 / 3, 1 / 3])
    assert one.votes.weights.tolist() == [1.0, 0.0]
    two = settled(UPWARD, val, (0.1, -9.0), (0.1, 0.0), members=2, tune_lr=1e-9, margin=0.0)[1]
    assert 0 < float(two.votes.weights[1]) < 1


# Newcomers.


def test_a_newcomer_trains_its_local_model_as_local_does():
    """Ten passes from (0, 0), then the same choice; its teacher is what it met."""
    method = Portfolio(newcomer_epochs=10, lr=0.5, candidates=("local", "ft"), tune_lr=0.5)
    sent, fresh = Sent(line((LN9, 0.0))), kept_by((7.0, 0.0))._replace(teacher=())
    found = method.adapt(sent, fresh, client(UPWARD, UPWARD))
    alone = LocalOnly(newcomer_epochs=10, lr=0.5).adapt(Sent(), line((0, 0)), client(UPWARD))
    assert pair({k: v[0] for k, v in found.candidates.items()}) == pytest.approx(pair(alone))


# Words and names.


def test_reasons_name_members_and_figures():
    method = Portfolio()
    weights = np.zeros(len(method.names))
    for name, weight in {"λ=0.25 T=5": 0.5, "local": 0.3, "fb ×5": 0.2}.items():
        weights[method.names.index(name)] = weight
    facts = {"weights": weights, "validation_accuracy": 0.862}
    facts["validation_accuracy_of_candidates"] = np.full(len(weights), 0.81)
    assert method.reason(facts) == (
        "mixture of PersFL student (λ 0.25, T 5) 0.50, local model 0.30, fine-tuned head at 5 "
        "times the rate 0.20: 86.2 % against 81.0 % local"
    )
    moe = weights * 0
    moe[[method.names.index("fb"), 0]] = 0.7, 0.3
    told = method.reason({**facts, "weights": moe})
    assert told == "MoE of fine-tuned head, weight 0.70: 86.2 % against 81.0 % local"
    unseen = method.reason({**facts, "validation_accuracy": NAN})
    assert unseen.endswith("there was no validation data to choose by")
    # A client that was not scored has no facts but NaN.
    assert method.reason({key: value * NAN for key, value in facts.items()}) == ""


def test_candidates_have_an_order_of_their_own():
    method = Portfolio(candidates=("fb", "persfl", "local"), shares=(0.0, 0.5, 1.0))
    assert method.names == ["local", "λ=0 T=5", "λ=0.5 T=5", "fb", "fb ×5"]
    whole = dataclasses.replace(method, **Portfolio.presets["whole-grid"])
    assert whole.names[1:5] == ["λ=0 T=1", "λ=0.5 T=1", "λ=0.5 T=5", "λ=0.5 T=25"]
    assert dataclasses.replace(method, members=2).models_held == 5 + 2  # what takes room
    _, verdict = ended(Portfolio(**ROUNDS, keep_candidates=True), rounds=1)
    assert set(verdict.scores) == {"personal", "global", *Portfolio().names}
    _, verdict = ended(Portfolio(**ROUNDS), rounds=1)
    assert set(verdict.scores) == {"personal", "global", "local"}


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("shares", (0.5, 1.5), "at most 1"),
        ("paces", (1.0, 0.0), "above 0"),
        ("members", 0, "at least 1"),
        ("caution", 0.0, "above 0"),
        ("margin", -1.0, "at least 0"),
    ],
)
def test_settings_out_of_range_are_refused(field, value, rule):
    refuses(Portfolio, field, value, rule)


def test_candidates_are_named_once_and_known():
    with pytest.raises(ConfigError, match="candidates are ft, ft, expected each once"):
        Portfolio(candidates=("ft", "ft"))
    with pytest.raises(ConfigError, match="candidates is 'fastest', expected one of 'local'"):
        Portfolio(candidates=("fastest",))


def test_what_is_settled_later_leaves_the_rounds_alike():
    assert Portfolio(members=1, caution=3.0).training() == Portfolio().training()
    assert Portfolio(candidates=("ft",)).training() != Portfolio().training()


# Trained once more, on validation rows too.


@pytest.mark.parametrize("kind", SINGLES)
def test_one_candidate_trained_again_is_that_method_on_both_parts(kind, float64):
    """Equal parts of validation rows, since the server weighs reports by training rows."""
    world = worlds.federation((6, 4, 10, 2), (3, 2, 5, 1))
    settings = {"candidates": (kind,), "paces": (1.0,), "refits": True}
    _, found = ended(Portfolio(**ROUNDS, **TUNING, **settings), world)
    _, plain = ended(SINGLES[kind], world.refitted)
    assert not worlds.differing(only(found), deployed(plain), 1e-9)


def test_a_teacher_is_not_trained_again(float64):
    """Another training's model of the same round may be good for other clients."""
    first, second = (
        ended(Portfolio(**ROUNDS, candidates=("teacher",), refits=way))[1] for way in (False, True)
    )
    assert not worlds.differing(only(first), only(second), 1e-9)


def test_what_is_trained_again_has_no_say_in_the_choice():
    """The same weights, told numbers and validation accuracies as without a second training."""
    world = worlds.federation((7, 4, 5, 9, 3, 0), (9, 5, 7, 6, 0, 4))
    found = [
        ended(Portfolio(**ROUNDS, **TUNING, margin=0.5, refits=way), world)[1]
        for way in (False, True)
    ]
    for name, before in found[0].facts.items():
        np.testing.assert_allclose(found[1].facts[name], before, atol=1e-6, err_msg=name)
    once, twice = (verdict.exchange_sums for verdict in found)
    assert not worlds.differing(dict(once), dict(twice), 1e-6)
    assert worlds.differing(deployed(found[0]).members, deployed(found[1]).members, 1e-3)
    # No score on rows that were trained on.
    assert np.isnan(found[1].scores["personal"]["val_accuracy"]).all()
    assert not np.isnan(found[0].scores["personal"]["val_accuracy"]).all()


def test_a_second_training_sends_both_models_and_leaves_the_first_alone(float64):
    ends = []
    for way in (False, True):
        simulation = worlds.simulation(Portfolio(**ROUNDS, refits=way), worlds.federation())
        (traffic,) = simulation.advance().traffic
        ends.append((simulation.states[0], traffic.bytes_up, traffic.bytes_down))
    once, twice = ends
    assert not worlds.differing(twice[0].chosen_by, once[0], 1e-9)
    assert twice[2] == 2 * once[2] and once[1] < twice[1] < 2 * once[1]  # one size for both


def test_a_second_training_that_diverges_is_not_used():
    """Its candidates are no numbers; the mixture that was chosen stays."""
    method, before = settled(UPWARD, UPWARD, (0.3, 0.0), (1.0, 0.0))
    broken = tree.map(lambda leaf: leaf * NAN, before.candidates)
    after = method.choose(before.candidates, client(UPWARD, UPWARD), again=broken)
    assert not worlds.differing(after.personal, before.personal, 1e-12)
