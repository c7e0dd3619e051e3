"""Tasks: losses derived by hand, equal to torch's and lifelines'; labels there and back."""

import json
import math

import numpy as np
import pytest
import torch
from torch.nn import functional

from idiolect.core.survival import Cox, Discrete, concordance, task_from_json
from idiolect.core.task import Classes, Labels, Number
from idiolect.errors import ConfigError, DataError

ONES = torch.ones(3)
TASKS = [
    Classes(),
    Classes(weights=(1.0, 3.0)),
    Labels(),
    Number(shift=3.0, scale=2.0, fitted=True),
    Number(huber=True),
    Cox(),
    Discrete(intervals=3, cuts=(1.0, 2.5)),
]


def batch_of(task, rows, seed=0):
    draw = torch.Generator().manual_seed(seed)
    width = {"classes": 2, "labels": 4, "number": 1}.get(task.kind, 3 if task.form != "cox" else 1)
    outputs = torch.randn(rows, width, generator=draw)
    if task.kind == "classes":
        y = torch.randint(0, width, (rows,), generator=draw)
    elif task.kind == "labels":
        y = torch.randint(0, 2, (rows, width), generator=draw).float()
    elif task.kind == "number":
        y = torch.randn(rows, generator=draw)
    else:
        time = torch.randint(0, 3, (rows, 1), generator=draw)
        y = torch.cat([time, torch.randint(0, 2, (rows, 1), generator=draw)], 1).float()
    return outputs, y


def test_cox_by_hand_with_three_patients():
    """Times 1, 2, 3; events 1, 0, 1; log risks a, b, c.

    −log L = (log(e^a + e^b + e^c) − a) + (log e^c − c), divided by three patients.
    """
    a, b, c = 0.3, -0.5, 1.1
    y = torch.tensor([[1.0, 1], [2, 0], [3, 1]])
    found = Cox().loss(torch.tensor([[a], [b], [c]]), y, ONES)
    expected = (math.log(math.exp(a) + math.exp(b) + math.exp(c)) - a) / 3
    assert found.item() == pytest.approx(expected, abs=1e-6)


def test_cox_ties_are_breslows():
    """Both events at time 1 see all three patients at risk."""
    risk = torch.tensor([[0.2], [0.7], [-1.0]])
    y = torch.tensor([[1.0, 1], [1, 1], [2, 0]])
    everyone = torch.logsumexp(risk[:, 0], 0)
    expected = (2 * everyone - 0.2 - 0.7) / 3
    assert Cox().loss(risk, y, ONES).item() == pytest.approx(expected.item(), abs=1e-6)


@pytest.mark.filterwarnings("ignore")  # of pandas, about lifelines
def test_cox_is_the_log_likelihood_of_lifelines():
    lifelines = pytest.importorskip("lifelines")
    pandas = pytest.importorskip("pandas")
    draw = np.random.default_rng(0)
    x = draw.normal(size=60)
    time, event = draw.exponential(np.exp(-0.8 * x)), draw.integers(0, 2, 60)
    frame = pandas.DataFrame({"x": x, "time": time, "event": event})
    model = lifelines.CoxPHFitter().fit(frame, "time", "event")
    risk = torch.tensor(x[:, None] * float(model.params_["x"]))
    y = torch.tensor(np.stack([time, event], 1))
    weight = torch.ones(60, dtype=torch.float64)
    assert -60 * Cox().loss(risk, y, weight).item() == pytest.approx(model.log_likelihood_, 1e-6)


def test_a_batch_without_events_teaches_nothing():
    risk = torch.randn(4, 1, requires_grad=True)
    y = torch.tensor([[1.0, 0], [2, 0], [3, 0], [4, 0]])
    loss = Cox().loss(risk, y, torch.ones(4))
    (slope,) = torch.autograd.grad(loss, risk)
    assert loss.item() == 0 and not slope.any()


def test_discrete_time_by_hand():
    """Event in interval 1: passed 0, not 1. Censored in interval 2: passed 0 and 1, half of 2."""
    z = torch.tensor([[0.5, -0.2, 1.0], [0.1, 0.4, -0.7]])
    y = torch.tensor([[1.0, 1], [2, 0]])
    hazard = z.sigmoid()
    first = -(1 - hazard[0, 0]).log() - hazard[0, 1].log()
    second = -(1 - hazard[1]).log() * torch.tensor([1, 1, 0.5])
    expected = (first + second.sum()) / 2
    found = Discrete(intervals=3).loss(z, y, torch.ones(2))
    assert found.item() == pytest.approx(expected.item(), abs=1e-6)


def test_cut_points_are_quantiles_of_event_times_and_begin_an_interval():
    y = np.array([[1, 1], [2, 1], [3, 1], [4, 1], [100, 0]], np.float32)
    task = Discrete(intervals=4).fit(y, 4)
    assert task.cuts == pytest.approx((1.75, 2.5, 3.25))  # numpy's quantiles of 1, 2, 3, 4
    placed = Discrete(intervals=3, cuts=(1.0, 2.0)).encode(
        np.array([[0.5, 1], [1, 1], [1.9, 0], [7, 1]])
    )
    assert placed.tolist() == [[0, 1], [1, 1], [1, 0], [2, 1]]


def test_cut_points_that_are_given_stay_and_no_event_is_an_error():
    y = np.array([[1, 0], [2, 0]], np.float32)
    assert Discrete(intervals=2, cuts=(5.0,)).fit(y, 2).cuts == (5.0,)
    with pytest.raises(DataError, match="cut points"):
        Discrete(intervals=4).fit(y, 4)


def test_survival_is_a_falling_curve_and_risk_grows_with_hazard():
    z = np.array([[0.0, 0.0], [2.0, 0.0]])
    task = Discrete(intervals=2)
    assert task.probabilities(z)[0] == pytest.approx([0.5, 0.25])
    assert task.predictions(z)[1] > task.predictions(z)[0]


def test_squared_error_and_hubers_by_hand():
    outputs, y = torch.tensor([[1.0], [2.0], [0.0]]), torch.tensor([1.5, -1.0, 0.0])
    assert Number().loss(outputs, y, ONES).item() == pytest.approx((0.25 + 9) / 3)
    assert Number(huber=True).loss(outputs, y, ONES).item() == pytest.approx((0.25 + 5) / 3)


def test_numbers_are_learnt_in_deviations_and_told_in_the_users_unit():
    y = np.array([10.0, 20.0, 30.0], np.float32)
    task = Number().fit(y, 1)
    assert (task.shift, task.scale) == pytest.approx((20.0, np.std(y)))
    assert task.predictions(task.encode(y)[:, None]) == pytest.approx(y)
    assert Number().fit(np.full(3, 7.0, np.float32), 1).scale == 1.0


def test_multi_label_loss_is_torchs():
    outputs, y = batch_of(Labels(), 3)
    expected = functional.binary_cross_entropy_with_logits(outputs, y)
    assert Labels().loss(outputs, y, ONES).item() == pytest.approx(expected.item(), abs=1e-6)


@pytest.mark.parametrize("task", TASKS, ids=lambda task: repr(task))
def test_padding_counts_nothing_alone_or_mapped(task):
    """Rows of weight zero leave loss, score, distillation and gradient as they are."""
    outputs, y = batch_of(task, 6)
    teacher, _ = batch_of(task, 6, seed=9)
    weight = torch.tensor([1.0, 1, 1, 1, 0, 0])

    def values(outputs, y, teacher, weight):
        return torch.stack(
            [
                task.loss(outputs, y, weight),
                task.score(outputs, y, weight),
                task.distil(outputs, teacher, weight, 2.0),
            ]
        )

    alone = values(outputs[:4], y[:4], teacher[:4], weight[:4])
    assert values(outputs, y, teacher, weight) == pytest.approx(alone, abs=1e-6)
    stacked = [torch.stack([one, one]) for one in (outputs, y, teacher, weight)]
    mapped = torch.vmap(values)(*stacked)
    assert mapped[1] == pytest.approx(alone, abs=1e-6)
    slope = torch.func.grad(lambda out: task.loss(out, y, weight))(outputs)
    assert slope.isfinite().all() and not slope[4:].any() and slope[:4].any()
    nothing = task.loss(outputs, y, torch.zeros(6))
    assert nothing.item() == 0


@pytest.mark.parametrize("task", TASKS, ids=lambda task: repr(task))
def test_distillation_is_least_at_the_teacher_and_pulls_towards_it(task):
    student, _ = batch_of(task, 5)
    teacher, _ = batch_of(task, 5, seed=3)
    weight = torch.ones(5)

    def far(at):
        return task.distil(at, teacher, weight, 2.0)

    assert far(teacher).item() == pytest.approx(0, abs=1e-6)
    slope = torch.func.grad(far)(student)
    assert far(student - 0.1 * slope) < far(student)
    soft = task.soften(teacher, 2.0)
    by_target = task.distil_from(
        student / (1 if task.kind == "number" or task.form == "cox" else 2), soft, weight
    )
    factor = 1 if task.kind == "number" or task.form == "cox" else 4
    assert factor * by_target.item() == pytest.approx(far(student).item(), rel=1e-4, abs=1e-6)


def test_distillation_of_numbers_is_squared_error_whatever_the_temperature():
    student, teacher = torch.tensor([[1.0], [2.0]]), torch.tensor([[0.0], [4.0]])
    assert Number().distil(student, teacher, torch.ones(2), 5.0).item() == pytest.approx(2.5)


@pytest.mark.parametrize("task", TASKS, ids=lambda task: repr(task))
def test_a_mixture_of_one_is_the_model_and_halves_lie_between(task):
    one, _ = batch_of(task, 4)
    two, _ = batch_of(task, 4, seed=5)
    both = torch.stack([one, two])
    first = task.mixture(both, torch.tensor([0.0, -1e30]))
    assert task.soften(first) == pytest.approx(task.soften(one), abs=1e-5)
    half = task.mixture(both, torch.tensor([0.5, 0.5]).log())
    expected = (task.soften(one) + task.soften(two)) / 2
    assert task.soften(half) == pytest.approx(expected, abs=1e-5)


def test_concordance_counts_ties_of_risk_half():
    y = torch.tensor([[1.0, 1], [2, 1], [3, 0]])
    assert concordance(torch.tensor([3.0, 2, 1]), y, ONES) == 1
    assert concordance(torch.tensor([1.0, 1, 1]), y, ONES) == 0.5
    assert concordance(torch.tensor([1.0, 2, 3]), y, ONES) == 0
    assert concordance(torch.zeros(3), torch.zeros(3, 2), ONES) == 0.5


def test_balanced_weights_are_scikit_learns():
    y = np.array([0] * 90 + [1] * 10)
    weights = Classes(balanced=True).fit(y, 2).weights
    assert weights == pytest.approx((100 / 180, 100 / 20))
    class_weight = pytest.importorskip("sklearn.utils.class_weight")
    expected = class_weight.compute_class_weight("balanced", classes=np.array([0, 1]), y=y)
    assert weights == pytest.approx(tuple(expected))


@pytest.mark.parametrize("task", TASKS, ids=lambda task: repr(task))
def test_a_task_survives_json(task):
    assert task_from_json(json.loads(json.dumps(task.to_json()))) == task


@pytest.mark.parametrize(
    "given",
    [{"kind": "x"}, {"kind": "number", "shift": "1"}, {"kind": "number", "a": 1}, {"kind": 3}],
)
def test_json_of_another_form_is_refused(given):
    with pytest.raises(ConfigError, match="task"):
        task_from_json(given)
