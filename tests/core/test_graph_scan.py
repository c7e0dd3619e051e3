"""Folds that are captured in pieces do what folds step by step do, for every method.

Here a piece is run in place of a graph's replay: it reads and writes the same buffers. That graphs
do the same on CUDA is for `benchmarks/gpu_check.py` to say.
"""

import time
from dataclasses import dataclass

import pytest
import torch

import worlds
from idiolect.core import graph_scan, tree
from idiolect.core.client import Local
from idiolect.core.method import Report
from idiolect.engine import block_runner
from idiolect.methods import METHODS, FedAvg
from idiolect.methods.personalise import Combined
from test_laws import ended, made

LONGER = {"epochs": 4, "tune_epochs": 3, "distil_epochs": 3, "head_epochs": 3, "expert_epochs": 3}


def repeated(piece, times, record=None):
    for _ in range(times if isinstance(times, int) else times()):
        piece()


class Emulated:
    """A tape that does at once what it would record."""

    recording = True
    repeat = staticmethod(repeated)


MODES = {
    "in pieces": (False, None),
    "slow steps": (True, None),
    "recorded": (False, Emulated()),
    "slow steps, recorded": (True, Emulated()),
}


def graphs(mode):
    """Make a scan that knows whether steps are slow, perhaps while a round is recorded."""
    made = graph_scan.GraphScan()
    made._slow, made._tape = MODES[mode]
    return made


@pytest.fixture
def folded(monkeypatch):
    """Let every fold of four steps or more be done in pieces; count them."""
    done = []

    def counted(self, step, carry, steps, *rest):
        done.append(steps)
        return fold(self, step, carry, steps, *rest)

    fold = graph_scan.GraphScan.scan
    monkeypatch.setattr(graph_scan, "PIECE", 2)
    monkeypatch.setattr(graph_scan, "_WORTH", 1)
    monkeypatch.setattr(graph_scan, "_SLOW", 1000)
    monkeypatch.setattr(graph_scan, "repeat", repeated)
    monkeypatch.setattr(graph_scan.GraphScan, "scan", counted)
    monkeypatch.setattr(graph_scan.GraphScan, "worth", lambda self, steps, *_: steps >= 4)

    def switch(mode):
        def graphed(networks, book, slot, size, round, stacked, *rest):
            made = graphs(mode) if stacked else None
            return Local(networks, book, slot, size, round, stacked, *rest[:2], graphs=made)

        monkeypatch.setattr(block_runner, "Local", graphed if mode else Local)
        return done

    return switch


def both(method, folded, mode="in pieces", **options):
    """Play a world step by step and in pieces."""
    world, ends = worlds.with_public(), []
    for how in ("", mode):
        done = folded(how)
        sim = worlds.simulation(method, world, cohort=3, **options)
        ends.append(ended(sim, [world.test_data], rounds=2))
    return ends, done


RECORDED = ("fedavg", "persfl", "apfl", "pfedme", "scaffold", "portfolio")  # one scan, or several


@pytest.mark.parametrize(
    ("name", "mode"), [*((n, "in pieces") for n in METHODS), *((n, "recorded") for n in RECORDED)]
)
def test_a_fold_in_pieces_is_the_fold(name, mode, folded, float64):
    """Also of clients that are done while others go on, and of one without data.

    How a fold is cut does not depend on the method, so recorded rounds are tried with some.
    """
    ends, done = both(made(name, **LONGER), folded, mode)
    assert max(done, default=0) >= 5
    assert not worlds.differing(*ends, 1e-12)


@pytest.mark.parametrize("build", [worlds.Normed, worlds.Batched])
def test_it_is_so_after_the_rounds_and_with_any_optimiser(build, folded, float64, monkeypatch):
    monkeypatch.setattr("idiolect.engine.local_group._TINY", 0)  # several blocks, so many folds
    base = made("fedavg", optimiser="adam", lr=0.02, weight_decay=0.1, clip=0.5)
    ends, done = both(Combined(base, tune_epochs=3, expert_epochs=3), folded, build=build)
    assert len(done) > 8  # the rounds' folds are short
    assert not worlds.differing(*ends, 1e-12)


@dataclass(frozen=True, kw_only=True)
class Through(FedAvg):
    """Takes the gradient through a whole training, as meta-learning does."""

    def client_step(self, sent, personal, local):
        def trained(params, batch):
            inner = local.fit(local.loss, params, self.local_optimiser(local), batch=2, steps=6)
            return local.loss(inner, batch)

        def step(params, batch):
            return tree.axpy(-0.1, local.gradient(trained, params, batch), params)

        return Report(local.scan(step, sent.shared, batch=8, epochs=1), local.size), personal


def test_no_gradient_is_taken_through_a_fold_in_pieces(folded, float64):
    ends, done = both(Through(lr=0.1), folded)
    assert not done
    assert not worlds.differing(*ends, 1e-12)


def in_turn(number, carry, count):
    for ahead in range(count):
        last, _ = carry
        carry = 10 * last + number[0] + ahead + 1, last  # what was held moves to the other place
    return carry


START = (torch.tensor(0, dtype=torch.int64), torch.tensor(0, dtype=torch.int64))
CPU = torch.device("cpu")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("steps", range(3, 17))
def test_every_step_is_done_once_and_in_turn(steps, mode, monkeypatch):
    monkeypatch.setattr(graph_scan, "PIECE", 3)
    monkeypatch.setattr(graph_scan, "_WORTH", 1)
    monkeypatch.setattr(graph_scan, "repeat", repeated)
    last, before = graphs(mode).scan(in_turn, START, steps, CPU)
    wanted = 0
    for number in range(steps):
        earlier, wanted = wanted, 10 * wanted + number + 1
    assert (last, before) == (wanted, earlier)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("steps", [3, 10, 17, 40])
def test_of_a_fold_that_varies_as_much_is_done_as_is_needed(steps, mode, monkeypatch):
    """But for the first steps, those that fill no piece, and the rest of the last piece."""
    monkeypatch.setattr(graph_scan, "repeat", repeated)
    done = []

    def fold(number, carry, count):
        done.extend(range(int(number), int(number) + count))
        return carry

    for needed in (1, 5, steps):
        done.clear()
        graphs(mode).scan(fold, torch.zeros(()), steps, CPU, lambda n=needed: n)
        assert done == list(range(len(done)))
        assert min(needed, steps) <= len(done) <= steps
        if steps >= 10:
            assert len(done) <= needed + {10: 4, 17: 6, 40: 18}[steps]


@pytest.mark.parametrize(
    ("slow", "pieces"), [((), []), (range(60), [4, 4]), ((0, 1), []), ((0, 2), [])]
)
def test_four_steps_that_take_the_host_long_are_a_piece(slow, pieces, monkeypatch):
    """Twenty quick steps are not worth a graph; of slow ones all but the first few are replayed.

    Three tell which they are: the first has much to do, and of the others one may have to wait.
    """
    done, begun = [], iter(range(60))
    monkeypatch.setattr(graph_scan, "repeat", lambda piece, times: done.append(times))

    def fold(number, carry, count):
        for _ in range(count):
            time.sleep(0.05 * (next(begun) in slow))
        return carry + count

    graphs = graph_scan.GraphScan()
    for _ in range(2):
        graphs.scan(fold, torch.zeros(()), 20, CPU)
    assert done == pieces


@pytest.mark.parametrize(
    ("slow", "recording", "capturing", "steps", "worth"),
    [
        (None, False, False, 14, True),  # it is seen after two steps whether more is to be gained
        (None, False, False, 13, False),  # a piece that is run twice saves less than it copies
        (False, False, False, 33, False),
        (False, False, False, 34, True),
        (True, False, False, 14, True),
        (True, False, False, 13, False),
        (True, True, True, 14, True),
        (True, True, True, 13, False),
        (True, False, True, 100, False),  # within a piece
        (False, True, True, 33, False),  # a round of a few quick steps is recorded whole
        (False, True, True, 34, True),
        (False, False, True, 100, False),
        (None, True, True, 14, False),  # nothing is timed while a round is recorded
    ],
)
def test_which_folds_are_captured(slow, recording, capturing, steps, worth, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    made = graph_scan.GraphScan()
    made._slow, made._tape = slow, Emulated() if recording else None
    assert made.worth(steps, torch.device("cuda")) is worth
    assert not made.worth(10_000, CPU)


@pytest.mark.parametrize("slow", [None, True])
def test_slow_steps_are_captured_where_a_round_may_need_none_of_them(slow, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    made = graph_scan.GraphScan()
    made._slow = slow
    assert made.worth(3, torch.device("cuda"), True)
    assert not made.worth(2, torch.device("cuda"), True)


def test_a_few_slow_steps_are_recorded_as_they_are(monkeypatch):
    """A piece that is run twice would copy what all clients hold three times."""
    monkeypatch.setattr(graph_scan, "repeat", None)  # which nobody may call
    made, done = graphs("slow steps"), []

    def fold(number, carry, count):
        done.extend(range(int(number), int(number) + count))
        return carry

    carry = torch.zeros(())
    assert made.scan(fold, carry, 13, CPU) is carry
    assert done == [*range(13)]


@pytest.mark.parametrize(("steps", "worth"), [(9, False), (10, True)])
def test_short_folds_are_captured_where_not_all_of_their_steps_are_always_needed(
    steps, worth, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert graphs("in pieces").worth(steps, torch.device("cuda"), True) is worth


def test_a_fold_within_a_step_of_a_recorded_one_is_not_recorded_by_itself():
    """The steps are 14: two as they come, and three times a piece of four."""
    made, seen = graphs("slow steps, recorded"), []

    def fold(number, carry, count):
        seen.append(made._tape is not None)
        return carry

    made.scan(fold, torch.zeros(()), 14, CPU)
    assert seen == [True, True, False, False, False]
    assert made._tape is not None


@pytest.mark.parametrize("steps", [32, 34, 100, 355, 677, 678, 1000])
def test_of_a_long_scan_few_steps_are_recorded_and_replays_are_few(steps):
    """Two lengths of a piece are recorded at most: the piece and what is left over."""
    long = graph_scan.piece_length(steps)
    assert long + steps % long <= 2 * graph_scan.PIECE - 1
    assert steps // long <= steps / graph_scan.PIECE


def test_what_is_held_is_overwritten_even_by_itself_in_another_place():
    """A carry may give back its leaves in another order, or part of one of them."""
    for new in (
        lambda a, b: (a + 1, b + 1),
        lambda a, b: (b, a),
        lambda a, b: (a + 1, a[:1].expand(2)),
        lambda a, b: (torch.zeros(2), b),
    ):

        def piece(a, b, new=new):
            expected = [leaf.clone() for leaf in new(a, b)]
            graph_scan.overwrite([a, b], new(a, b))
            return [a, b], expected

        held, expected = piece(torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0]))
        assert all(map(torch.equal, held, expected))
        held, expected = torch.vmap(piece)(torch.rand(3, 2), torch.rand(3, 2))
        assert all(map(torch.equal, held, expected))
