"""KT-pFL's matrix: its gradient, its rows, its limits, and what it finds."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import worlds
from idiolect.core.tree import onto_simplex
from idiolect.data import Federation, load
from idiolect.engine.architecture import Architecture
from idiolect.methods import FedMD, KTpFL, SimPFL, TopKPFL
from idiolect.methods.distilled import SoftReport, TeacherState
from idiolect.models import MODELS
from methods.tiny import Line, close, refuses, setup

SIZES = (3.0, 1.0, 2.0)


def soft(clients=3, examples=4, classes=3, seed=0, sizes=SIZES):
    draw = torch.Generator().manual_seed(seed)
    logits = torch.randn(clients, examples, classes, generator=draw, dtype=torch.float64)
    return SoftReport((2 * logits).softmax(-1), torch.tensor(sizes, dtype=torch.float64))


def shares(clients=3, seed=1):
    draw = torch.Generator().manual_seed(seed)
    return torch.rand(clients, clients, generator=draw, dtype=torch.float64).softmax(1)


def objective(method, c, reports):
    """Eq. 4 without the private loss, written out client by client and example by example."""
    total, count = 0.0, len(c)
    for n in range(count):
        for x in range(reports.prediction.shape[1]):
            own = reports.prediction[n, x]
            taught = sum(c[n, m] * reports.prediction[m, x] for m in range(count))
            if method.objective == "mse":
                total += float((taught - own).square().mean()) / reports.prediction.shape[1]
            else:
                gap = float((taught * (taught / own).log()).sum())
                weight = float(reports.size[n] / reports.size.sum())
                count_ = 1 if method.reduction == "sum" else reports.prediction.shape[1]
                total += method.transfer * weight * gap / count_
        pull = float((c[n] - 1 / count).square().sum())
        total += method.pull * (pull / count if method.objective == "mse" else pull)
    return total


@pytest.mark.parametrize(("kind", "over"), [("kl", "mean"), ("kl", "sum"), ("mse", "mean")])
def test_the_slope_of_c_is_the_finite_difference_of_its_objective(kind, over):
    method = KTpFL(objective=kind, transfer=1.7, pull=0.3, reduction=over)
    reports, c = soft(), shares()
    slope, step = method.gradient(c, reports), 1e-6
    for n in range(3):
        for m in range(3):
            move = torch.zeros_like(c)
            move[n, m] = step
            rise = objective(method, c + move, reports) - objective(method, c - move, reports)
            assert float(slope[n, m]) == pytest.approx(rise / (2 * step), rel=1e-6)


def test_by_default_every_client_counts_as_one():
    """λ = 0 stands for the number of clients: three here, of any size."""
    reports, c = soft(), shares()
    plain, given = KTpFL(pull=0.4), KTpFL(pull=0.4, transfer=3.0)
    assert torch.equal(plain.gradient(c, reports), given.gradient(c, reports))


def test_a_step_of_c_by_hand():
    """Two clients of equal size, one example, ρ = 0, η₃ = 1: s₁ = (3/4, 1/4), s₂ = (1/4, 3/4).

    Teachers start at (1/2, 1/2). For client 1, log t/s = (ln 2/3, ln 2), so
      g₁₁ = ½ (1 + ¾ ln 2/3 + ¼ ln 2),  g₁₂ = ½ (1 + ¼ ln 2/3 + ¾ ln 2),
    and g₁₂ − g₁₁ = ¼ ln 3. The projection keeps the difference: c₁ = ½ ± ⅛ ln 3.
    """
    reports = SoftReport(
        torch.tensor([[[0.75, 0.25]], [[0.25, 0.75]]]).double(), torch.tensor([5.0, 5.0]).double()
    )
    method = KTpFL(pull=0.0, matrix_lr=1.0, transfer=1.0, sample=1)
    state = method.init_server(setup(Line(), public=1))
    new = method.server_step(state, torch.arange(2), reports)
    more = 0.5 + np.log(3) / 8
    assert new.affinity.flatten().tolist() == close([more, 1 - more, 1 - more, more])
    taught = more * 0.75 + (1 - more) * 0.25
    assert new.teachers[0, 0].tolist() == close([taught, 1 - taught])
    assert new.teachers[1, 0].tolist() == close([1 - taught, taught])


def test_a_step_by_the_sum_is_as_many_as_there_are_examples():
    """The example above three times over, at a third of the rate."""
    one = torch.tensor([[[0.75, 0.25]], [[0.25, 0.75]]]).double()
    reports = SoftReport(one.repeat(1, 3, 1), torch.tensor([5.0, 5.0]).double())
    method = KTpFL(pull=0.0, matrix_lr=1 / 3, transfer=1.0, sample=3, reduction="sum")
    state = method.init_server(setup(Line(), public=3))
    new = method.server_step(state, torch.arange(2), reports)
    more = 0.5 + np.log(3) / 8
    assert new.affinity.flatten().tolist() == close([more, 1 - more, 1 - more, more])


def test_the_released_codes_step_brings_a_rows_mean_slope_to_a_hundredth():
    """Rows of mean slope 0.3, 0.02 and 0.001 are scaled by 1/25... as its loop of five does."""
    method = KTpFL(adaptive=True)
    for mean in (7.0, 0.3, 0.02, 0.011, 0.009, 0.001, 1e-5, 1e-9):
        expected, left = 1.0, mean
        for _ in range(5):
            if left > 0.01:
                left, expected = left / 5, expected / 5
            if left < 0.01:
                left, expected = left * 5, expected * 5
        rate = method._rate(torch.tensor([[mean, -mean]]).double())
        assert float(rate) == pytest.approx(expected)
    rows = method._rate(torch.tensor([[0.3, 0.3, 0.3], [0.02, 0.02, 0.02], [1e-9] * 3]).double())
    assert rows.tolist() == [[pytest.approx(5.0**power)] for power in (-2, 0, 5)]  # each its own


def test_the_presets_are_what_the_paper_says_and_what_its_code_does():
    """The paper: batches of 128, 20 epochs, rate 0.01, and ρ = 0.7 where its sweeps meet.

    The code: batches of 16, 10 epochs at 0.02, reached one by one, its own rule for c, and T = 10,
    which both have. What it is compared with there starts from four epochs, at T = 1.
    """
    paper, code = (KTpFL(**KTpFL.presets[name]) for name in ("paper", "code"))
    assert (paper.batch, paper.epochs, paper.lr, paper.pull) == (128, 20, 0.01, 0.7)
    assert (paper.temperature, paper.transfer, paper.matrix_lr) == (10.0, 1.0, 0.01)
    assert (paper.objective, paper.projection, paper.adaptive) == ("kl", "simplex", False)
    assert paper.reduction == "sum"  # Eq. 2 in Eq. 4
    assert (code.batch, code.epochs, code.lr, code.pull) == (16, 10, 0.02, 0.7)
    assert (code.temperature, code.objective, code.projection) == (10.0, "mse", "softmax")
    assert code.adaptive and code.first_epochs == 1
    for kind, most in ((FedMD, None), (SimPFL, None), (TopKPFL, 10)):
        other = kind(**kind.presets["kt-pfl"])
        assert (other.batch, other.epochs, other.lr, other.gain) == (16, 10, 0.02, "code")
        assert (other.first_epochs, other.temperature) == (4, 1.0)
        assert most is None or other.most == most


def test_the_code_preset_softens_rows():
    method = KTpFL(**KTpFL.presets["code"] | {"sample": 4})
    reports, before = soft(), shares()
    slope = method.gradient(before, reports)
    after = method.learn(before, reports, 1.0)
    assert torch.allclose(after, (5 * (before - method._rate(slope) * slope)).softmax(1))


def test_the_simplex_by_hand():
    rows = torch.tensor([[1.2, 0.2, -0.4], [0.6, 0.6, -1.0], [0.1, 0.2, 0.4], [0.2, 0.3, 0.5]])
    found = onto_simplex(rows.double())
    right = [[1, 0, 0], [0.5, 0.5, 0], [0.2, 0.3, 0.5], [0.2, 0.3, 0.5]]
    assert torch.allclose(found, torch.tensor(right).double())


def test_what_diverged_is_no_point_of_the_simplex():
    """It was an index error, where a run has to say who diverged."""
    assert onto_simplex(torch.tensor([[float("nan"), 0.5], [0.25, 0.75]])).isnan().any(
        1
    ).tolist() == [True, False]


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=6), st.integers(0, 99))
def test_no_point_of_the_simplex_is_nearer(row, seed):
    row = torch.tensor([row]).double()
    found = onto_simplex(row)
    assert float(found.sum()) == pytest.approx(1) and float(found.min()) >= 0
    draw = torch.Generator().manual_seed(seed)
    others = torch.rand(50, row.shape[1], generator=draw, dtype=torch.float64).softmax(1)
    assert float((found - row).norm()) <= float((others - row).norm(dim=1).min()) + 1e-9


@pytest.mark.parametrize("projection", ["simplex", "softmax"])
def test_rows_stay_on_the_simplex_whoever_comes(projection):
    """Cohorts of any size: rows add up to one, and only pairs of the cohort are changed."""
    method = KTpFL(projection=projection, pull=0.1, matrix_lr=3.0, sample=4)
    sizes = (2.0, 1.0, 3.0, 2.0, 4.0)
    state = TeacherState(shares(5), torch.zeros(5, 4, 3).double())
    for number, cohort in enumerate([(0, 1, 2, 3, 4), (1, 3), (4,), (0, 2, 4), (3, 1)]):
        reports = soft(len(cohort), seed=number, sizes=sizes[: len(cohort)])
        before, state = state, method.server_step(state, torch.tensor(cohort), reports)
        assert torch.allclose(state.affinity.sum(1), torch.ones(5).double())
        assert float(state.affinity.min()) >= 0
        changed = state.affinity != before.affinity
        inside = torch.zeros(5, 5, dtype=torch.bool)
        inside[torch.tensor(cohort).unsqueeze(1), torch.tensor(cohort)] = True
        assert not bool((changed & ~inside).any())
        taught = state.teachers.sum((1, 2)) > 0
        assert torch.allclose(state.teachers.sum(-1)[taught], torch.ones(()).double())


def test_teachers_are_mixed_from_the_cohort_alone():
    """Row n over the cohort {0, 2}, renormalised; a client with no share in it has no teacher."""
    method = KTpFL(pull=0.0, matrix_lr=1e-12, sample=4)
    c = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.6, 0.3], [0.0, 1.0, 0.0]]).double()
    state = TeacherState(c, torch.zeros(3, 4, 3).double())
    reports = soft(2, sizes=(1.0, 1.0))
    new = method.server_step(state, torch.tensor([0, 2]), reports)
    first, second = reports.prediction
    assert torch.allclose(new.teachers[0], (5 * first + 2 * second) / 7, atol=1e-9)
    assert torch.allclose(new.teachers[1], (first + 3 * second) / 4, atol=1e-9)
    assert not new.teachers[2].any()


def test_without_projection_rows_go_where_eq_7_says():
    method, reports, c = KTpFL(projection="none", matrix_lr=0.1, sample=4), soft(), shares()
    state = TeacherState(c, torch.zeros(3, 4, 3).double())
    new = method.server_step(state, torch.arange(3), reports)
    assert torch.allclose(new.affinity, c - 0.1 * method.gradient(c, reports))
    teachers = torch.einsum("nm,mxk->nxk", new.affinity, reports.prediction)
    assert torch.allclose(new.teachers, teachers)


def test_without_projection_a_cohort_stands_for_all():
    """Of four, two come: each of them counts double, in the slope of c and in the teachers."""
    method, reports = KTpFL(projection="none", matrix_lr=0.1, sample=4), soft(2, sizes=(1.0, 3.0))
    c, cohort = shares(4), torch.tensor([0, 2])
    new = method.server_step(TeacherState(c, torch.zeros(4, 4, 3).double()), cohort, reports)
    block = 2 * c[cohort][:, cohort]
    learned = (block - 0.1 * method.gradient(block, reports)) / 2
    assert torch.allclose(new.affinity[cohort][:, cohort], learned)
    teachers = torch.einsum("nm,mxk->nxk", 2 * new.affinity[:, cohort], reports.prediction)
    assert torch.allclose(new.teachers, teachers)


def test_an_overwhelming_pull_makes_every_teacher_the_mean():
    """ρ → ∞: FedMD's teacher, whatever c was before and whatever the rate."""
    method, reports = KTpFL(pull=1e9, sample=4), soft()
    state = TeacherState(shares(), torch.zeros(3, 4, 3).double())
    new = method.server_step(state, torch.arange(3), reports)
    assert torch.allclose(new.teachers, reports.prediction.mean(0).expand(3, 4, 3), atol=1e-6)


def test_without_pull_everyone_ends_up_learning_from_itself():
    """The paper's reason for ρ: KL alone is least where the teacher is the student."""
    method, reports = KTpFL(pull=0.0, matrix_lr=2.0, sample=4), soft()
    state = TeacherState(shares(), torch.zeros(3, 4, 3).double())
    for _ in range(300):
        state = method.server_step(state, torch.arange(3), reports)
    assert torch.allclose(state.affinity, torch.eye(3).double(), atol=1e-3)


@pytest.fixture(scope="module")
def planted():
    """Six clients on real digits: three see 0-4, three see 5-9; two architectures, interleaved."""
    digits = load("embedded")
    draw = np.random.default_rng(0)
    low, high = (
        draw.permutation(np.flatnonzero((digits.y < 5) == side))[:360] for side in (True, False)
    )
    held = [rows for group in (low, high) for rows in np.split(group, 3)]
    parts = [tuple(rows[a:b] for rows in held) for a, b in ((0, 80), (80, 100), (100, 120))]
    used = np.concatenate(held)
    rest = draw.permutation(np.setdiff1d(np.arange(len(digits)), used))[:200]
    public = type(digits)(
        "open", digits.x[rest], digits.y[rest], digits.classes, digits.shift, digits.scale
    )
    world = Federation(digits, *parts, public=public)
    build = {name: (lambda name=name: MODELS[name]((1, 28, 28), 10)) for name in ("mlr", "dnn")}
    architectures = {
        "mlr": Architecture(build["mlr"], clients=(0, 2, 4)),
        "dnn": Architecture(build["dnn"], clients=(1, 3, 5)),
    }
    method = KTpFL(
        sample=100,
        lr=0.1,
        batch=20,
        epochs=5,
        pull=0.2,
        transfer=1.0,
        temperature=2.0,
        public_batch=50,
    )
    simulation = worlds.simulation(method, world, architectures=architectures)
    traffic = [simulation.advance().traffic[0] for _ in range(6)]
    return method, simulation, world, traffic


def test_two_planted_groups_are_found(planted):
    """Every client learns more from each of its group, of either architecture, than from others."""
    method, simulation, _, _ = planted
    c = method.trace(simulation.states[0])["weights"].numpy()
    same = np.arange(6)[:, None] // 3 == np.arange(6) // 3
    assert c[same].min() > 2 * c[~same].max()
    np.testing.assert_allclose(c.sum(1), 1, atol=1e-5)


def test_an_architecture_leaves_no_trace_in_a_report(planted):
    """Down and up go 100 × 10 predictions and a size, for a network of 7,850 weights or 79,510."""
    _, simulation, _, traffic = planted
    up, down = 6 * (100 * 10 * 4 + 4), 6 * 100 * 10 * 4
    assert [(one.bytes_down, one.bytes_up) for one in traffic] == [(down, up)] * 6
    assert {crew.store.rows["fc1.weight"].shape[1:] for crew in simulation.groups[1:]} == {
        (100, 784)
    }


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("projection", "l2", "one of 'simplex', 'softmax', 'none'"),
        ("pull", -1.0, "at least 0"),
        ("temperature", 0.0, "above 0"),
    ],
)
def test_settings_out_of_range_are_refused(field, value, rule):
    refuses(KTpFL, field, value, rule)
