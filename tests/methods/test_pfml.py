"""PFML by hand."""

from itertools import pairwise

import pytest
import torch

from idiolect.core import tree
from idiolect.core.method import Report, Sent, mean_report
from idiolect.engine.architecture import Architecture
from idiolect.errors import MethodError
from idiolect.methods import PFML, FedAvg
from idiolect.methods.pfml import PfmlState
from methods.tiny import (
    HIGH,
    LN9,
    ONE,
    Chain,
    Examples,
    Line,
    Ordered,
    Pair,
    alike,
    client,
    close,
    line,
    minus,
    mutual,
    pair,
    plus,
    refuses,
    setup,
    sigmoid,
    simulation,
    slope,
)

TWO = [(2.0, 1), (-1.0, 0)]


def own(auxiliary: Pair, started: float = 1.0) -> PfmlState:
    """A client whose auxiliary model stands somewhere; θ* is elsewhere, and must not matter."""
    return PfmlState(line(auxiliary), line((5.0, 5.0)), torch.tensor(started).double())


def by_hand(method: PFML, w: Pair, m: Pair, batches: list[Examples]) -> tuple[Pair, Pair, Pair]:
    """Algorithm 1's client update in plain Python: w, m and θ* after the batches."""

    def gradient(mine: Pair, peer: Pair, batch: Examples) -> Pair:
        total = plus(slope(mine, batch), method.share, mutual(mine, peer, batch))
        return plus(total, method.weight_decay, mine)

    received, before, theta = w, m, m
    for batch in batches:
        theta, hat = m, w
        if method.home == "batch":
            received, before = w, m
        for _ in range(method.inner_steps):
            down_m = plus(gradient(theta, hat, batch), method.pull, minus(theta, before))
            down_w = plus(gradient(hat, theta, batch), method.pull, minus(hat, received))
            theta, hat = (
                plus(theta, -method.inner_lr, down_m),
                plus(hat, -method.inner_lr, down_w),
            )
        down_m = plus(gradient(m, w, batch), method.pull, minus(m, theta))
        down_w = plus(gradient(w, m, batch), method.pull, minus(w, hat))
        m, w = plus(m, -method.lr, down_m), plus(w, -method.lr, down_w)
    return w, m, theta


@pytest.mark.usefixtures("passes")
@pytest.mark.parametrize("stacked", [False, True])
def test_one_step_by_hand(stacked: bool) -> None:
    """w^t = (0, 0), m_prev = HIGH, the example (2, 1), K = 1, α = 0.1, η = 0.5, λ = 2, share = 1.

    p_w = 1/2 and p_m = 9/10. All gradients lie along (2, 1); only the factor is written:
      auxiliary: (p_m − y) + (p_m − p_w) = −0.1 + 0.4 = 0.3   from KL(p_w ‖ p_m)
      local:     (p_w − y) + (p_w − p_m) = −0.5 − 0.4 = −0.9  from KL(p_m ‖ p_w)
    The personalisation steps start at home, where the pulls are nil:
      θ* = m − 0.1 · 0.3 = HIGH − 0.03,   ŵ = 0 + 0.1 · 0.9 = 0.09.
    The outer updates, −η∇L − ηλ(model − target) with ηλ = 1:
      m ← HIGH − 0.5 · 0.3 − (HIGH − θ*) = HIGH − 0.15 − 0.03 = HIGH − 0.18,
      w ← 0 + 0.5 · 0.9 − (0 − ŵ) = 0.45 + 0.09 = 0.54.
    """
    method = PFML(lr=0.5, inner_lr=0.1, inner_steps=1, pull=2.0)
    report, kept = method.client_step(Sent(line((0, 0))), own(HIGH), client(stacked=stacked))
    assert pair(kept.personal) == close(plus(HIGH, -0.03, (2.0, 1.0)))
    assert pair(kept.auxiliary) == close(plus(HIGH, -0.18, (2.0, 1.0)))
    assert pair(report.params) == close((1.08, 0.54))
    assert float(report.size) == 1
    assert float(kept.started) == 1


def test_the_second_personalisation_step_by_hand() -> None:
    """K = 2 without KL, w^t = (0, 0), m_prev = HIGH, (2, 1), α = 0.4 ln 9, λ = 0.5.

    Local: ŵ₁ = α (1, 1/2) = HIGH, where p = 9/10; the gradient there is (−0.2, −0.1) plus the pull
    0.5 (HIGH − w^t), so in units of (1, 1/2): ŵ₂ = α − α(−0.2 + 0.5 α) = α (1.2 − 0.5 α).
    Outer with η = 0.2: w ← 0.2 · (1, 1/2) + 0.2 · 0.5 · ŵ₂ = (0.2 + 0.1 α (1.2 − 0.5 α)) (1, 1/2).
    Auxiliary: θ₁ = HIGH + α (0.2, 0.1) = 1.2 α (1, 1/2); z = 1.2 ln 9, p = σ(1.2 ln 9), the pull
    0.5 (θ₁ − m_prev) = 0.1 α (1, 1/2): θ₂ = α (1.2 − 2(p − 1) − 0.1 α) (1, 1/2).
    """
    a = 0.4 * LN9
    method = PFML(lr=0.2, inner_lr=a, inner_steps=2, pull=0.5, share=0.0)
    report, kept = method.client_step(Sent(line((0, 0))), own(HIGH), client())
    unit = (1.0, 0.5)
    local = 0.2 + 0.1 * a * (1.2 - 0.5 * a)
    assert pair(report.params) == close(plus((0.0, 0.0), local, unit))
    theta = a * (1.2 - 2 * (sigmoid(1.2 * LN9) - 1) - 0.1 * a)
    assert pair(kept.personal) == close(plus((0.0, 0.0), theta, unit))


@pytest.mark.usefixtures("passes")
@pytest.mark.parametrize("steps", [1, 2, 3])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("weight_decay", [0.0, 0.05])
@pytest.mark.parametrize("home", ["round", "batch"])
def test_a_round_against_plain_python(
    steps: int, share: float, weight_decay: float, home: str
) -> None:
    """Two passes over two batches: the pulls stay at home, m and w go on."""
    method = PFML(
        home=home,
        lr=0.1,
        inner_lr=0.2,
        inner_steps=steps,
        pull=1.5,
        share=share,
        weight_decay=weight_decay,
        batch=1,
        epochs=2,
    )
    w, m, theta = by_hand(method, (0.3, -0.2), (-0.5, 0.4), [[TWO[0]], [TWO[1]]] * 2)
    report, kept = method.client_step(Sent(line((0.3, -0.2))), own((-0.5, 0.4)), client(TWO))
    assert pair(report.params) == close(w)
    assert pair(kept.auxiliary) == close(m)
    assert pair(kept.personal) == close(theta)


def test_a_peer_draws_towards_itself() -> None:
    """KL alone moves each model's prediction towards the other's.

    With y absent (λ = 0, and the difference to share = 0): at p_w = 1/2, p_m = 9/10 the local model
    gains η · 0.4 and the auxiliary loses it, along (2, 1).
    """
    ends = []
    for share in (0.0, 1.0):
        method = PFML(lr=0.5, pull=0.0, share=share)
        report, kept = method.client_step(Sent(line((0, 0))), own(HIGH), client())
        ends.append((pair(report.params), pair(kept.auxiliary)))
    (w0, m0), (w1, m1) = ends
    assert minus(w1, w0) == close((0.4, 0.2))
    assert minus(m1, m0) == close((-0.4, -0.2))


def test_the_pulls_hold_the_personal_model_at_home() -> None:
    """The stronger the pull, the nearer θ* stays to m_prev, and never beyond it."""
    far = []
    for pull in (0.0, 2.0, 8.0):
        method = PFML(inner_lr=0.1, inner_steps=20, pull=pull)
        _, kept = method.client_step(Sent(line((0, 0))), own((-1.0, 0.0)), client())
        far.append(pair(kept.personal)[0] + 1.0)
    assert far[0] > far[1] > far[2] > 0


def test_peers_are_in_evaluation_mode_and_learners_in_training_mode() -> None:
    """A network that triples z in training: p = σ(3z) for the learner, σ(z) for its peer.

    At w = 0: p_w = 1/2 in both modes. At m = HIGH: σ(3 ln 9) as learner, 9/10 as peer. dz/dw has a
    factor 3 too. λ = 0, η = 0.1: w gains 0.1 · 3 · (0.5 + 0.4), m loses 0.1 · 3 · (2σ − 1 − 1/2).
    """
    method = PFML(lr=0.1, pull=0.0)
    report, kept = method.client_step(Sent(line((0, 0))), own(HIGH), client(main=Line(boost=3.0)))
    assert pair(report.params) == close((0.54, 0.27))
    error = 2 * sigmoid(3 * LN9) - 1.5
    assert pair(kept.auxiliary) == close(plus(HIGH, -0.3 * error, (2.0, 1.0)))


# What is sent.


def test_without_pulls_and_mutual_learning_it_sends_what_fedavg_sends() -> None:
    sent, settings = Sent(line((0.3, -0.2))), {"lr": 0.3, "batch": 1, "epochs": 3}
    plain, _ = FedAvg(**settings).client_step(sent, (), client(TWO))
    for steps in (1, 3):
        method = PFML(pull=0.0, share=0.0, inner_steps=steps, **settings)
        report, _ = method.client_step(sent, own(HIGH), client(TWO))
        assert alike(report, plain)


def test_the_servers_rate() -> None:
    """β = 1 is the plain average of clients, each alike: (2.5, 0.5). From (1, 1), β = 2: (4, 0)."""
    reports = Report(
        tree.stack([line((1.0, 2.0)), line((4.0, -1.0))]), torch.tensor([1.0, 3.0]).double()
    )
    cohort, state = torch.tensor([0, 1]), line((1.0, 1.0))
    average = PFML(server_lr=1.0).server_step(state, cohort, reports)
    assert alike(average, mean_report(reports, uniform=True))
    assert pair(average) == close((2.5, 0.5))
    assert pair(PFML(server_lr=2.0).server_step(state, cohort, reports)) == close((4.0, 0.0))
    by_size = PFML(server_lr=1.0, uniform=False).server_step(state, cohort, reports)
    assert pair(by_size) == close((3.25, -0.25))


# The auxiliary model between rounds.


def test_a_client_that_sits_out_keeps_its_auxiliary_model() -> None:
    """Two clients, one of them drawn in each round: the other's state does not move by a bit."""
    method = PFML(lr=0.1, inner_lr=0.1, pull=1.0)
    world = simulation(method, [[(2.0, 1)], [(-1.0, 1)]], Architecture(Line), cohort=1)
    sat_out = set()
    for _ in range(8):
        (present,) = world.cohort(0)
        before = world.tree["personal"][0]
        world.advance()
        after = world.tree["personal"][0]
        absent = 1 - int(present)
        assert alike(*(tree.take(state, torch.tensor(absent)) for state in (before, after)))
        assert not alike(*(tree.take(state, torch.tensor(present)) for state in (before, after)))
        sat_out.add(absent)
    assert sat_out == {0, 1}


def test_the_first_time_the_auxiliary_starts_at_the_global_model() -> None:
    """Alike architectures: m_0 = m_prev = w^t, whatever the initial parameters were."""
    method = PFML(lr=0.1, inner_lr=0.2, pull=1.5)
    fresh = method.init_personal(setup(Line(9.0, 9.0)))
    assert float(fresh.started) == 0
    report, kept = method.client_step(Sent(line((0.3, -0.2))), fresh, client())
    w, m, theta = by_hand(method, (0.3, -0.2), (0.3, -0.2), [ONE])
    assert (pair(report.params), pair(kept.auxiliary)) == (close(w), close(m))
    assert pair(kept.personal) == close(theta)
    assert float(kept.started) == 1
    adapted = method.adapt(Sent(line((0.3, -0.2))), fresh, client())
    assert alike(adapted, kept)


def test_persist_goes_on_from_the_last_round_and_reset_does_not() -> None:
    sent = Sent(line((0.3, -0.2)))
    for aux_init, start in (("persist", (-0.5, 0.4)), ("reset", (0.3, -0.2))):
        method = PFML(lr=0.1, inner_lr=0.2, pull=1.5, aux_init=aux_init)
        report, kept = method.client_step(sent, own((-0.5, 0.4)), client())
        w, m, theta = by_hand(method, (0.3, -0.2), start, [ONE])
        assert (pair(report.params), pair(kept.auxiliary)) == (close(w), close(m))
        assert pair(kept.personal) == close(theta)


# Unequal architectures.


@pytest.mark.usefixtures("passes")
def test_unequal_architectures_by_hand() -> None:
    """Global `Line`, auxiliary z = b · a · x: gradients by the chain rule, (p − ...) times dz.

    The line stands at (0, 0) (p_w = 1/2), the chain at a = 1, b = ln 9 / 2 (x = 2: z = ln 9,
    p_m = 9/10). λ = 0, η = 0.1: w ← 0.1 · 0.9 · (2, 1); for the chain the error is 0.3, and
    dz/da = b x = ln 9, dz/db = a x = 2.
    """
    main, auxiliary = Line(), Chain(1.0, LN9 / 2)
    method = PFML(lr=0.1, pull=0.0)
    fresh = method.init_personal(setup(main, auxiliary))
    local = client(main=main, auxiliary=auxiliary)
    report, kept = method.client_step(Sent(line((0, 0))), fresh, local)
    assert pair(report.params) == close((0.18, 0.09))
    chain = {name: float(value) for name, value in kept.auxiliary.items()}
    assert chain == close({"a.w": 1 - 0.03 * LN9, "b.w": LN9 / 2 - 0.06})


def test_unequal_architectures_never_mix() -> None:
    """MLR for all, a DNN at each client: names and shapes stay apart over rounds and in traffic."""
    mlr = lambda: torch.nn.Linear(1, 2)  # noqa: E731
    dnn = lambda: torch.nn.Sequential(  # noqa: E731
        torch.nn.Linear(1, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2)
    )
    shapes = {name: (2, *leaf.shape) for name, leaf in setup(dnn()).params.items()}
    world = simulation(PFML(lr=0.1, inner_lr=0.05), [TWO, [(1.0, 0)]], Architecture(mlr, dnn))
    seen = [world.tree["personal"][0]]
    for _ in range(2):
        (traffic,) = world.advance().traffic
        # Two clients, four parameters of four bytes each way, and each one's size on the way up.
        assert (traffic.bytes_down, traffic.bytes_up) == (2 * 16, 2 * (16 + 4))
        assert {n: tuple(p.shape) for n, p in world.states[0].items()} == {
            "weight": (2, 1),
            "bias": (2,),
        }
        kept = world.tree["personal"][0]
        for model in (kept.auxiliary, kept.personal):
            assert {name: tuple(leaf.shape) for name, leaf in model.items()} == shapes
        seen.append(kept)
    for before, after in pairwise(seen):
        assert not torch.equal(before.auxiliary["0.weight"], after.auxiliary["0.weight"])
    (verdict,) = world.evaluate()
    assert set(verdict.scores) == {"personal", "auxiliary", "global"}


def test_reset_needs_alike_architectures() -> None:
    with pytest.raises(MethodError, match=r"aux_init = 'reset'.*use aux_init = 'persist'"):
        PFML(aux_init="reset").init_personal(setup(Line(), Chain(1.0, 2.0)))
    PFML(aux_init="reset").init_personal(setup(Line(), Line()))


# What is scored.


def test_the_models_are_theta_m_and_w() -> None:
    """θ* is `personal`, m is `auxiliary`, both on the client's network; w is `global` itself."""
    main, auxiliary = Line(), Chain(1.0, 1.0)
    chain = lambda a, b: {"a.w": torch.tensor(a).double(), "b.w": torch.tensor(b).double()}  # noqa: E731
    kept = PfmlState(chain(1.0, 3.0), chain(2.0, 5.0), torch.tensor(1.0))
    method, sent = PFML(), Sent(line((7.0, 1.0)))
    local, x = client(main=main, auxiliary=auxiliary), torch.tensor([2.0]).double()
    models = method.models(sent, method.deploy(sent, kept, local))
    scored = {name: float(method.predict(m, x, local)[0, 1]) for name, m in models.items()}
    assert scored == {"personal": 20.0, "auxiliary": 6.0, "global": 15.0}
    assert list(method.models(sent, ())) == ["global"]


def test_only_training_data_are_asked_for() -> None:
    plans = Ordered({"train": ONE})
    PFML().client_step(Sent(line((0, 0))), own(HIGH), client(plans=plans))
    assert plans.asked == ["train"]


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("lr", 0.0, "above 0"),
        ("inner_lr", -0.1, "above 0"),
        ("inner_steps", 0, "at least 1"),
        ("pull", -1.0, "at least 0"),
        ("share", -1.0, "at least 0"),
        ("server_lr", 0.0, "above 0"),
        ("aux_init", "keep", "one of 'persist', 'reset'"),
    ],
)
def test_settings_out_of_range_are_refused(field: str, value: object, rule: str) -> None:
    refuses(PFML, field, value, rule)
