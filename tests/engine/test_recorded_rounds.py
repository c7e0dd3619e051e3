"""Whole rounds that are recorded, in pieces and side by side, equal the sequential backend's."""

import pytest
import torch
from torch import nn

import worlds
from idiolect.bench.workloads import federation
from idiolect.core import graph_scan, tree
from idiolect.core.client import Local
from idiolect.engine import block_runner, local_group
from idiolect.engine.architecture import Architecture
from idiolect.engine.backend import Backend
from idiolect.engine.rounds import SeededRun, Simulation
from idiolect.kernels import autotune, linear
from idiolect.kernels.cuda_graph import side_by_side
from idiolect.kernels.deferred import DeferredTensor
from idiolect.methods import FedALA, FedAvg
from test_laws import ended, made

PIECES, WHOLE = (2, 1), (8, 4)
CASES = [
    ("fedavg", WHOLE),
    *((name, PIECES) for name in ("fedavg", "persfl", "pfedme", "scaffold")),
]
LONGER = {"epochs": 4, "tune_epochs": 2, "distil_epochs": 2, "head_epochs": 2}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("name", "length"), CASES)
def test_a_recorded_round_is_the_round(name, length, recorded, float64, monkeypatch):
    """Of clients of unequal size in several blocks; the first two rounds are not side by side."""
    recorded(*length)
    beside, ends = [], []
    monkeypatch.setattr(
        local_group,
        "side_by_side",
        lambda works, streams: beside.append(len(works)) or side_by_side(works, streams),
    )
    for kind in ("sequential", "vectorised"):
        world = worlds.with_public()
        sim = worlds.simulation(made(name, **LONGER), world, kind=kind)
        ends.append(ended(sim, [world.test_data], rounds=4))
    assert len(beside) == 2 and min(beside) > 1
    assert not worlds.differing(*ends, 1e-10)


class Dense(nn.Module):
    """A network with a layer of our own kind."""

    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(12, 8), nn.Linear(8, 10)

    def forward(self, x):
        return self.fc2(linear.linear_relu(self.fc1, x.flatten(1)))


@pytest.mark.parametrize("lends", [True, False])
def test_weights_that_are_factors_are_those_of_this_round(lends, recorded, float64, monkeypatch):
    """Three recorded rounds, each read as if it were on a GPU: factors wait anew after a replay."""
    recorded(*WHOLE)
    for where, name, stand_in in (
        (linear, "_on_cuda", lambda x: True),
        (linear, "float32_on_cuda", lambda x: True),
        (linear, "_put_off", lambda gradient, x: True),
        (linear, "_LARGE", 0),
        (linear, "_RANK", 20),
        (tree, "_in_one_launch", lambda xs, ys: tree.transformed() and len(xs) > 1),
        (Local, "_clients_beneath", lambda local: None),
    ):
        monkeypatch.setattr(where, name, stand_in)
    seen, replay = [], block_runner.CapturedBlock.replay

    def watched(self, inputs, lend=False, later=None):
        made = replay(self, inputs, lend and lends, later)
        seen.append(isinstance(tree.leaves(made)[0], DeferredTensor))
        return made

    monkeypatch.setattr(block_runner.CapturedBlock, "replay", watched)
    fed, ends = federation([20] * 4, (1, 3, 4)), []
    for kind in ("sequential", "vectorised"):
        run = [SeededRun(0, fed.train_data)]
        backend = Backend(kind, "cpu", width=4 if kind == "vectorised" else None)
        network = {"all": Architecture(Dense)}
        sim = Simulation(FedAvg(batch=5, lr=0.1), run, network, backend=backend)
        for _ in range(4):
            sim.advance()
        ends.append(sim.tree["server"])
    assert seen == [lends] * 3
    assert not worlds.differing(*ends, 1e-12)


def test_a_tape_that_is_left_for_later_lends_its_results(recorded):
    """What is replayed at once is copied."""
    tensor = torch.arange(3.0)
    block = block_runner.CapturedBlock(lambda x: x + 1, (tensor,), graph_scan.GraphScan())
    kept = block.replay((tensor,))
    tapes = []
    lent = block.replay((2 * tensor,), later=tapes)
    assert lent.tolist() == kept.tolist() == [1, 2, 3]
    tapes[0].replay()
    assert lent.tolist() == [1, 3, 5] and kept.tolist() == [1, 2, 3]


def test_what_was_recorded_in_plain_forms_is_recorded_anew_once_better_ones_are_chosen(
    recorded, float64, monkeypatch
):
    """After an eager round, with the blocks in turn; what was recorded later than that stays."""
    recorded(*WHOLE)
    executed, client = [], block_runner.BlockRunner._client
    waits = [True, True, True, False, False, False, False]

    def counted(self, *given):
        autotune._Choosing.plain += waits[sim.round]
        executed[sim.round] += 1
        return client(self, *given)

    monkeypatch.setattr(block_runner.BlockRunner, "_client", counted)
    monkeypatch.setattr(autotune._Choosing, "switches", 0)
    world, ends = worlds.with_public(), []
    for kind in ("sequential", "vectorised"):
        executed[:] = [0] * len(waits)
        sim = worlds.simulation(made("fedavg"), world, kind=kind)
        for round in range(len(waits)):
            autotune._Choosing.switches += round in (3, 6)
            sim.advance()
        ends.append(sim.tree["server"])
    blocks = executed[0]
    assert blocks > 1 and executed == [n * blocks for n in (1, 1, 0, 1, 1, 0, 0)]
    assert not worlds.differing(*ends, 1e-10)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("length", [PIECES, WHOLE])
def test_passes_in_a_row_are_run_once_recorded_once_and_replayed(
    length, recorded, float64, monkeypatch
):
    """FedALA's first weights: seven passes before the second round, of which a block runs two."""
    recorded(*length)
    passes, ends = [], []

    def counted(self, *given):
        passes.append(sim.round)
        return learned(self, *given)

    learned = FedALA._learned
    monkeypatch.setattr(FedALA, "_learned", counted)
    for kind in ("sequential", "vectorised"):
        passes.clear()
        world = worlds.with_public()
        method = made("fedala", epochs=4, weight_lr=3.0, start_epochs=7, tolerance=0.02)
        sim = worlds.simulation(method, world, kind=kind)
        ends.append(ended(sim, [world.test_data], rounds=4))
    blocks = passes.count(0)
    assert blocks > 1 and passes.count(1) == 3 * blocks  # and one of the round itself
    assert not worlds.differing(*ends, 1e-10)
