"""PersFL by hand: the choice of a teacher, one distillation, the search over λ and T."""

import math

import numpy as np
import pytest
import torch

from idiolect.core import capabilities, losses, tree
from idiolect.core.client import Pool
from idiolect.core.method import Sent
from idiolect.engine.batch_plan import BatchPlanner, ClientRows
from idiolect.methods import FedAvg, FedAvgFT, PersFL
from idiolect.methods.persfl import Student, Teacher
from methods.tiny import (
    HIGH,
    LN9,
    ONE,
    Line,
    Ordered,
    Pair,
    alike,
    chance,
    client,
    close,
    line,
    lost,
    pair,
    plus,
    refuses,
    setup,
)

INF, NAN = float("inf"), float("nan")
UPWARD = [(2.0, 1), (-1.0, 0)]  # class 1 lies to the right
DOWNWARD = [(2.0, 0), (-1.0, 1)]  # the same inputs with their labels exchanged
MIXED = [(2.0, 1), (-1.0, 0), (0.5, 0)]


def one_cell(share: float, temperature: float, **settings: object) -> PersFL:
    return PersFL(shares=(share,), temperatures=(temperature,), **settings)


def taught(at: Pair, round: float = 0.0) -> Teacher:
    return Teacher(line(at), torch.tensor(INF).double(), torch.tensor(round).double())


def distilled(method: PersFL, teacher: Pair, stacked: bool = False, **data: object) -> Pair:
    """The student of a client whose last global model is its teacher."""
    student = method.deploy(
        Sent(line(teacher)), taught((7.0, 7.0)), client(stacked=stacked, **data)
    )
    return pair(student.params)


# Stage 2: distillation.


@pytest.mark.parametrize("soft_loss", ["kl", "cross-entropy"])
@pytest.mark.parametrize("stacked", [False, True])
def test_one_distillation_by_hand(stacked: bool, soft_loss: str) -> None:
    """Two steps from the teacher (0, 0) with (2, 1), λ = 1/2, T = 2 and a rate of 0.8 ln 9.

    Step 1: student = teacher, so the soft part is nil; the hard part is (1 − λ)(1/2 − 1) = −1/4
    along (2, 1). The student becomes 0.8 ln 9 · (2, 1)/4 = (0.4, 0.2) ln 9 = HIGH.
    Step 2: z = ln 9 against the teacher's 0. Hard: (1 − λ)(9/10 − 1) = −0.05. Soft: at T = 2 the
    student says 1/(1 + e^(−ln 3)) = 3/4 and the teacher 1/2, and λ T² · (1/T)(3/4 − 1/2) = 0.25.
    Together 0.2 along (2, 1): the student becomes HIGH − 0.8 ln 9 · (0.4, 0.2) = 0.2 HIGH.
    """
    method = one_cell(0.5, 2.0, distil_lr=0.8 * LN9, distil_epochs=2, soft_loss=soft_loss)
    student = distilled(method, (0.0, 0.0), stacked)
    assert student == close((0.2 * HIGH[0], 0.2 * HIGH[1]))


def test_a_tenth_of_the_soft_loss_by_hand() -> None:
    """As above; a tenth of the soft part makes step 2 −0.05 + 0.025, and the student 1.1 HIGH."""
    method = one_cell(0.5, 2.0, distil_lr=0.8 * LN9, distil_epochs=2, soft_weight=0.1)
    assert distilled(method, (0.0, 0.0), False) == close((1.1 * HIGH[0], 1.1 * HIGH[1]))


@pytest.mark.parametrize("soft_loss", ["kl", "cross-entropy"])
def test_many_steps_against_plain_python(soft_loss: str) -> None:
    """(1 − λ)(p − y) + λ T (p_T − q_T) along (x, 1), averaged over the batch; with momentum."""
    share, temperature, teacher = 0.75, 5.0, (0.7, -0.4)
    at, velocity = teacher, (0.0, 0.0)
    for _ in range(6):
        gradient = (0.0, 0.0)
        for x, y in MIXED:
            hard = chance(at, x) - y
            soft = chance(at, x, temperature) - chance(teacher, x, temperature)
            error = (1 - share) * hard + share * temperature * soft
            gradient = plus(gradient, error / 3, (x, 1.0))
        velocity = plus(plus(gradient, 0.01, at), 0.9, velocity)
        at = plus(at, -0.3, velocity)
    method = one_cell(
        share,
        temperature,
        distil_lr=0.3,
        distil_epochs=6,
        soft_loss=soft_loss,
        momentum=0.9,
        weight_decay=0.01,
    )
    assert distilled(method, teacher, train=MIXED) == close(at)


def test_without_imitation_it_is_fine_tuning() -> None:
    """λ = 0 from the teacher: to the last bit what FedAvg + FT does, whatever T is."""
    settings = {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01, "batch": 2}
    sent = Sent(line((0.7, -0.4)))
    method = one_cell(0.0, 5.0, distil_lr=0.3, distil_epochs=4, **settings)
    student = method.deploy(sent, taught((7.0, 7.0)), client(MIXED))
    tuning = FedAvgFT(tune_lr=0.3, tune_epochs=4, **settings)
    assert alike(student.params, tuning.deploy(sent, (), client(MIXED)))


@pytest.mark.parametrize("temperature", [1.0, 5.0, 25.0])
def test_pure_imitation_leaves_the_teacher(temperature: float) -> None:
    """At λ = 1 the student starts where the soft loss is least, so it stays."""
    method = one_cell(1.0, temperature, distil_lr=0.5, distil_epochs=5)
    assert distilled(method, (0.7, -0.4), train=MIXED) == close((0.7, -0.4))


def test_the_two_soft_losses_have_equal_students() -> None:
    """Eq. 7 differs from Eq. 3 by the teacher's entropy, a constant: whole grids are equal."""
    sent, settings = Sent(line((0.7, -0.4))), {"distil_lr": 0.3, "keep_grid": True}
    grids = [
        PersFL(soft_loss=loss, **settings).deploy(sent, taught((7.0, 7.0)), client(MIXED, MIXED))
        for loss in ("kl", "cross-entropy")
    ]
    for name in ("w", "b"):
        left, right = (grid.cells[name] for grid in grids)
        torch.testing.assert_close(left, right, rtol=1e-12, atol=1e-12)
        assert left.unique().numel() == 11  # λ and T make a difference
    assert PersFL.presets["gd"] == {"soft_loss": "cross-entropy"}


def test_no_gradient_reaches_the_teacher() -> None:
    """In the losses a teacher is constant; distillation leaves its parameters as they were."""
    student = torch.tensor([[0.0, 1.0]], requires_grad=True)
    teacher = torch.tensor([[0.0, -1.0]], requires_grad=True)
    for loss in (losses.divergence, losses.soft_cross_entropy):
        loss(student, teacher, torch.ones(1)).backward()
        assert teacher.grad is None
        assert student.grad is not None and student.grad.abs().sum() > 0
    sent = Sent(line((0.7, -0.4)))
    PersFL(distil_lr=0.3).deploy(sent, taught((7.0, 7.0)), client(MIXED))
    assert pair(sent.shared) == (0.7, -0.4)


def test_the_student_trains_and_the_teacher_is_in_evaluation_mode() -> None:
    """A network that triples z in training: p = σ(3z) of the student against the teacher's σ(z).

    At HIGH and x = 2, z = ln 9; with λ = 1, T = 1 the error is σ(3 ln 9) − 9/10, times 3 (dz/dw).
    """
    local = client(main=Line(boost=3.0))
    method = one_cell(1.0, 1.0, distil_lr=0.1, distil_epochs=1)
    student = method.deploy(Sent(line(HIGH)), taught((7.0, 7.0)), local)
    error = 3 * (1 / (1 + math.exp(-3 * LN9)) - 0.9)
    assert pair(student.params) == close(plus(HIGH, -0.1 * error, (2.0, 1.0)))


def test_stage_two_only_trains_on_training_data() -> None:
    """Every training step is on `train`; validation data are only averaged over."""
    plans = Ordered({"train": UPWARD, "val": []})
    trained = one_cell(0.5, 2.0, distil_lr=0.3).deploy(
        Sent(line((0.7, -0.4))), taught((0.0, 0.0)), client(plans=plans)
    )
    assert pair(trained.params) == distilled(
        one_cell(0.5, 2.0, distil_lr=0.3), (0.7, -0.4), train=UPWARD, val=DOWNWARD
    )
    assert set(plans.asked) == {"train", "val"}


# Stage 1: the teacher.


def judged(method: PersFL, val: list[tuple[float, int]], models: list[Pair]) -> Teacher:
    """Feed a scripted sequence of global models to one client."""
    teacher = method.init_personal(setup(Line(9.0, 9.0)))
    for number, model in enumerate(models):
        local = client(UPWARD, val, round=number)
        report, teacher = method.client_step(Sent(line(model)), teacher, local)
        plain, _ = FedAvg(lr=method.lr).client_step(Sent(line(model)), (), local)
        assert alike(report, plain)  # judging changes nothing that is sent
    return teacher


def test_a_label_shift_makes_clients_choose_different_teachers() -> None:
    """Global models swing right, left and back; each client keeps the one that fits its labels.

    `UPWARD` is fitted the better the larger w is, `DOWNWARD` the smaller w is.
    """
    script = [(0.0, 0.0), (1.5, 0.0), (-0.5, 0.0), (0.5, 0.0), (-2.0, 0.0), (1.0, 0.0)]
    method = PersFL(lr=0.1)
    up, down = judged(method, UPWARD, script), judged(method, DOWNWARD, script)
    assert (pair(up.params), float(up.round)) == ((1.5, 0.0), 1)
    assert (pair(down.params), float(down.round)) == ((-2.0, 0.0), 4)
    assert float(up.loss) == close(lost((1.5, 0.0), UPWARD))
    assert float(down.loss) == close(lost((-2.0, 0.0), DOWNWARD))

    students = [
        method.deploy(Sent(line((0.0, 0.0))), teacher, client(UPWARD, val, round=6))
        for teacher, val in ((up, UPWARD), (down, DOWNWARD))
    ]
    assert [float(student.teacher_round) for student in students] == [1, 4]


def test_equal_loss_keeps_the_earlier_teacher() -> None:
    teacher = judged(PersFL(), UPWARD, [(0.0, 0.0), (1.0, 0.0), (1.0, 0.0), (0.5, 0.0)])
    assert float(teacher.round) == 1


def test_the_teacher_is_judged_by_loss_not_accuracy() -> None:
    """On (2, 1), (2, 1), (2, 0): z = 4 is right twice in three with loss (2 · 0.018 + 4.018)/3.

    z = −0.1 is right only once in three, but with the lower loss (2 · 0.744 + 0.644)/3.
    """
    val = [(2.0, 1), (2.0, 1), (2.0, 0)]
    assert lost((2.0, 0.0), val) == close(1.3515, 1e-3)
    assert lost((-0.05, 0.0), val) == close(0.7112, 1e-3)
    teacher = judged(PersFL(), val, [(2.0, 0.0), (-0.05, 0.0)])
    assert float(teacher.round) == 1


def test_the_model_as_received_is_kept_not_the_trained_one() -> None:
    teacher = judged(PersFL(lr=1.0), UPWARD, [(1.0, 0.25)])
    assert pair(teacher.params) == (1.0, 0.25)


def test_the_last_global_model_may_become_the_teacher_at_deploy() -> None:
    """The final model counts too, and its number is that of the rounds behind it."""
    method = one_cell(1.0, 1.0)
    teacher = judged(method, UPWARD, [(0.0, 0.0), (1.0, 0.0)])
    local = client(UPWARD, UPWARD, round=2)
    better = method.deploy(Sent(line((3.0, 0.0))), teacher, local)
    assert (pair(better.params), float(better.teacher_round)) == (close((3.0, 0.0)), 2)
    worse = method.deploy(Sent(line((-3.0, 0.0))), teacher, local)
    assert (pair(worse.params), float(worse.teacher_round)) == (close((1.0, 0.0)), 1)


def test_table_4_takes_the_last_model_as_teacher_and_start() -> None:
    method = one_cell(1.0, 1.0, teacher="last")
    teacher = judged(method, UPWARD, [(0.0, 0.0), (1.0, 0.0)])
    student = method.deploy(Sent(line((-3.0, 0.0))), teacher, client(UPWARD, UPWARD, round=2))
    assert (pair(student.params), float(student.teacher_round)) == (close((-3.0, 0.0)), 2)


def test_a_newcomer_meets_the_kept_models() -> None:
    """It trains nothing while it meets them, then distils the best: `adapt` is `deploy`."""
    method = one_cell(0.0, 1.0, distil_lr=0.2)
    teacher = method.init_personal(setup(Line()))
    plans = Ordered({"train": DOWNWARD, "val": DOWNWARD})
    for number, w in enumerate((0.0, 1.5, -2.0, 1.0)):
        local = client(plans=plans, round=number)
        teacher = method.meet(Sent(line((w, 0.0))), teacher, local)
    assert plans.asked == ["val"] * 4
    assert (pair(teacher.params), float(teacher.round)) == ((-2.0, 0.0), 2)
    last = Sent(line((1.0, 0.0)))
    adapted = capabilities.adapt(method, last, teacher, client(DOWNWARD, DOWNWARD, round=4))
    assert float(adapted.teacher_round) == 2
    tuned = FedAvgFT(tune_lr=0.2).deploy(Sent(line((-2.0, 0.0))), (), client(DOWNWARD))
    assert alike(adapted.params, tuned)


def test_without_validation_data_the_newest_model_teaches() -> None:
    """Nothing can be judged: neither the initial model nor NaN may stay with the client."""
    teacher = judged(PersFL(), [], [(0.0, 0.0), (1.5, 0.0), (-0.5, 0.0)])
    assert (pair(teacher.params), float(teacher.round)) == ((-0.5, 0.0), 2)
    assert float(teacher.loss) == INF
    student = PersFL().deploy(Sent(line((0.25, 0.0))), teacher, client(UPWARD, [], round=3))
    assert float(student.teacher_round) == 3
    assert (float(student.share), float(student.temperature)) == (0.0, 1.0)


# The search.


@pytest.mark.parametrize(
    ("accuracies", "lost", "by_accuracy", "by_loss"),
    [
        ([0.1, 0.9, 0.5], [0.1, 0.3, 0.2], 1, 0),  # the two rules differ
        ([0.9, 0.9, 0.5], [0.3, 0.2, 0.1], 1, 2),  # equal accuracy: the lower loss
        ([0.5, 0.9, 0.9], [0.1, 0.2, 0.2], 1, 0),  # equal in both: the first in the grid
        ([0.5, 0.5, 0.5], [0.2, 0.2, 0.2], 0, 0),
        ([0.5, 0.5, 0.9], [0.2, 0.1, 0.7], 2, 1),
        ([NAN, NAN, NAN], [NAN, NAN, NAN], 0, 0),  # no validation data
        ([0.5, 0.5, 0.5], [NAN, 0.2, 0.3], 1, 1),  # a student diverged: it comes last
        ([0.9, 0.4, 0.5], [NAN, 0.2, 0.3], 2, 1),  # however well it guesses
        ([0.5, 0.4, 0.9], [INF, 0.2, NAN], 0, 1),
    ],
)
def test_the_choice(
    accuracies: list[float], lost: list[float], by_accuracy: int, by_loss: int
) -> None:
    planted = torch.tensor(accuracies), torch.tensor(lost)
    assert int(PersFL()._choose(*planted)) == by_accuracy
    assert int(PersFL(select="loss")._choose(*planted)) == by_loss


def test_cells_are_in_grid_order_without_repeats() -> None:
    """λ outside, T inside; at λ = 0 and λ = 1 T means nothing and its first value stands."""
    middle = [(share, t) for share in (0.25, 0.5, 0.75) for t in (1.0, 5.0, 25.0)]
    assert PersFL().cells == [(0.0, 1.0), *middle, (1.0, 1.0)]
    few = PersFL(shares=(1.0, 0.5, 0.0), temperatures=(5.0, 2.0))
    assert few.cells == [(1.0, 5.0), (0.5, 5.0), (0.5, 2.0), (0.0, 5.0)]


@pytest.mark.parametrize("stacked", [False, True])
def test_the_best_cell_is_returned_with_what_was_found(stacked: bool) -> None:
    """The teacher (1, 0) is right on `UPWARD` validation data; training labels are `DOWNWARD`.

    λ = 0 follows the labels and turns (accuracy 0); λ = 1 keeps the teacher (accuracy 1): chosen.
    """
    method = PersFL(shares=(0.0, 1.0), temperatures=(5.0,), distil_lr=1.0, keep_grid=True)
    local = client(DOWNWARD, UPWARD, round=3, stacked=stacked)
    student = method.deploy(Sent(line((1.0, 0.0))), taught((7.0, 0.0)), local)
    facts = method.facts(student)
    assert list(facts) == ["share", "temperature", "teacher_round", "validation_accuracy_of_cells"]
    assert [float(facts[name]) for name in list(facts)[:3]] == [1.0, 5.0, 3.0]
    assert facts["validation_accuracy_of_cells"].tolist() == [0.0, 1.0]
    assert pair(student.params) == close((1.0, 0.0))
    turned = {name: leaf[0] for name, leaf in student.cells.items()}
    tuned = FedAvgFT(tune_lr=1.0).deploy(Sent(line((1.0, 0.0))), (), client(DOWNWARD))
    assert pair(turned) == close(pair(tuned))


def test_all_cells_see_the_same_batches() -> None:
    """Two cells of equal λ and T are equal under shuffling: the grid is compared on equal terms."""
    examples = [(float(n), n % 2) for n in range(-4, 5)]
    pool = Pool(
        torch.tensor([x for x, _ in examples]).double(), torch.tensor([y for _, y in examples])
    )
    book = BatchPlanner({"train": pool, "val": pool}, torch.device("cpu"))
    rows = np.arange(len(examples))
    book.turn([ClientRows(0, 0, {"train": rows, "val": rows})], 0)
    method = PersFL(shares=(0.5, 0.5), temperatures=(2.0,), keep_grid=True, batch=2, distil_lr=0.5)
    student = method.deploy(Sent(line((1.0, 0.0))), taught((7.0, 0.0)), client(plans=book))
    first, second = ({n: leaf[k] for n, leaf in student.cells.items()} for k in (0, 1))
    assert alike(first, second)


def test_models_are_named() -> None:
    """The student and the global model; every cell by its λ and T where the grid is kept."""
    method = PersFL(shares=(0.0, 0.25), temperatures=(1.0, 5.0), keep_grid=True)
    sent = Sent(line((1.0, 0.0)))
    student = method.deploy(sent, taught((7.0, 0.0)), client(MIXED, MIXED))
    models = method.models(sent, student)
    assert list(models) == ["personal", "global", "λ=0 T=1", "λ=0.25 T=1", "λ=0.25 T=5"]
    assert models["global"] is sent.shared
    assert alike(models["λ=0.25 T=5"], tree.map(lambda leaf: leaf[2], student.cells))
    assert list(PersFL().models(sent, ())) == ["global"]
    plain = PersFL().deploy(sent, taught((7.0, 0.0)), client(MIXED, MIXED))
    assert isinstance(plain, Student) and plain.cells == ()
    assert list(PersFL().models(sent, plain)) == ["personal", "global"]


def test_stage_two_settings_leave_the_rounds_alike() -> None:
    """Ablations share one training: only what happens in the rounds is in the key."""
    ablation = PersFL(
        teacher="last",
        soft_loss="cross-entropy",
        select="loss",
        shares=(0.5,),
        temperatures=(9.0,),
        distil_lr=1.0,
        distil_epochs=1,
        keep_grid=True,
    )
    assert ablation.training() == PersFL().training()
    assert PersFL(lr=0.5).training() != PersFL().training()
    assert PersFL().training() != FedAvg().training()


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("shares", (0.5, 1.5), "at most 1"),
        ("shares", (0.5, -0.5), "at least 0"),
        ("temperatures", (1.0, 0.0), "above 0"),
        ("distil_epochs", 0, "at least 1"),
        ("distil_lr", 0.0, "above 0"),
        ("soft_loss", "mse", "one of 'kl', 'cross-entropy'"),
        ("teacher", "first", "one of 'best', 'last'"),
        ("select", "luck", "one of 'accuracy', 'loss'"),
    ],
)
def test_settings_out_of_range_are_refused(field: str, value: object, rule: str) -> None:
    refuses(PersFL, field, value, rule)


def test_one_example_is_enough() -> None:
    """The default grid on a single example."""
    student = PersFL().deploy(Sent(line((0.0, 0.0))), taught((0.0, 0.0)), client(ONE, ONE))
    assert student.accuracies.shape == (11,)
