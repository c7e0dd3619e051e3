"""Whole rounds that are recorded, in pieces and side by side, equal the sequential backend's.

A stand-in for CUDA's graphs notes every operation of torch with its very tensors, and does them
again on replay: a value that was baked in, or a buffer that is not filled anew, shows. What only a
GPU has, such as memory that is used again, is for `benchmarks/gpu_check.py`.
"""

import contextlib
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

import worlds
from idiolect.core import client, graph_scan
from idiolect.engine import block_runner, local_group
from idiolect.kernels import autotune, cuda_graph
from idiolect.kernels.cuda_graph import side_by_side
from idiolect.methods import FedALA
from test_laws import ended, made

PIECES, WHOLE = (2, 1), (8, 4)
CASES = [
    ("fedavg", WHOLE),
    *((name, PIECES) for name in ("fedavg", "persfl", "pfedme", "scaffold")),
]
LONGER = {"epochs": 4, "tune_epochs": 2, "distil_epochs": 2, "head_epochs": 2}


class Graph(TorchDispatchMode):
    """Notes operations while it is captured. Unlike CUDA it does them, and undoes what it wrote."""

    capturing, replays = False, 0

    def capture_begin(self, pool, capture_error_mode):
        self.noted, self.before = [], []
        Graph.capturing = True
        self.__enter__()

    def capture_end(self):
        self.__exit__(None, None, None)
        Graph.capturing = False
        for place, value in reversed(self.before):
            place.copy_(value)
        self.before = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        aliases = [own.alias_info for own in op._schema.returns]
        given = tree_map_only(torch.Tensor, torch.detach, (args, kwargs or {}))  # same memory
        named = zip(op._schema.arguments, given[0], strict=False)
        written = [one for name, one in named if name.alias_info and name.alias_info.is_write]
        self.before += [(one, one.clone()) for one in tree_leaves(written)]
        made = op(*args, **(kwargs or {}))
        views = not written and all(own is not None for own in aliases)
        if not views and torch.Tag.inplace_view not in op.tags:
            made_as = tree_map_only(torch.Tensor, torch.detach, made)
            self.noted.append((op, *given, None if written else made_as))
        return made

    def replay(self):
        Graph.replays += 1
        for op, args, kwargs, results in self.noted:
            again = op(*args, **kwargs)
            for old, new in zip(tree_leaves(results), tree_leaves(again), strict=False):
                if isinstance(old, torch.Tensor):
                    old.copy_(new)


class Stream:
    count = 0

    def __init__(self):
        Stream.count += 1
        self.stream_id = Stream.count

    def wait_stream(self, other):
        pass


@pytest.fixture
def recorded(monkeypatch):
    """Let vectorised rounds on a CPU be recorded as on CUDA; tell how long pieces are."""
    cuda = {
        "CUDAGraph": Graph,
        "graph_pool_handle": lambda: "a pool",
        "current_stream": Stream,
        "stream": lambda stream: contextlib.nullcontext(),
        "is_current_stream_capturing": lambda: Graph.capturing,
        "mem_get_info": lambda: (8, 9),
        "memory_reserved": lambda: 7,
    }
    for name, stand_in in cuda.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    begin, worth = block_runner.BlockRunner.__init__, graph_scan.GraphScan.worth

    def graphed(self, *given, **options):
        begin(self, *given, **options)
        if options["stacked"]:
            self._graphs = graph_scan.GraphScan()

    monkeypatch.setattr(block_runner.BlockRunner, "__init__", graphed)
    monkeypatch.setattr(
        graph_scan.GraphScan, "worth", lambda self, steps, device: worth(self, steps, GPU)
    )
    monkeypatch.setattr(client, "_span", lambda plan: 3)
    monkeypatch.setattr(local_group, "_TINY", 0)  # several blocks of a tiny network
    monkeypatch.setattr(Graph, "replays", 0)
    monkeypatch.setattr(local_group, "BESIDE", [])  # streams of this test are no other's
    monkeypatch.setattr(cuda_graph, "_ALIVE", weakref.WeakSet())

    def pieces(steps, worth):
        monkeypatch.setattr(graph_scan, "PIECE", steps)
        monkeypatch.setattr(graph_scan, "_WORTH", worth)

    return pieces


GPU = torch.device("cuda")


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
