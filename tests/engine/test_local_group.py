"""Single clients' images on a CPU: laid out as was measured faster, with the same result."""

import torch
from torch import nn

from idiolect.bench.workloads import CLASSES, federation
from idiolect.core import tree
from idiolect.engine import local_group
from idiolect.engine.architecture import Architecture
from idiolect.engine.backend import Backend
from idiolect.engine.rounds import SeededRun, Simulation
from idiolect.methods import FedAvg

SEEN = []


class Watched(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.head = nn.Linear(4 * 36, CLASSES)

    def forward(self, x):
        SEEN.append(x.stride(1) == 1)  # channels last
        return self.head(self.conv(x).relu().flatten(1))


def simulation():
    fed = federation([12, 9, 7], (3, 8, 8))
    return Simulation(
        FedAvg(batch=4, lr=0.1),
        [SeededRun(0, fed.train_data)],
        {"a": Architecture(Watched)},
        backend=Backend("vectorised", "cpu"),
    )


def test_layouts_agree_and_are_kept_with_the_widths():
    sides = []
    for layout in (1, 2):
        sim = simulation()
        sim.widths = {"0 step": 1, "0 layout": layout}
        SEEN.clear()
        for _ in range(2):
            sim.advance()
        assert set(SEEN) == {layout == 2}
        assert sim.widths == {"0 step": 1, "0 layout": layout}
        sides.append(sim.states[0])
    for name, value in sides[0].items():
        assert torch.allclose(value, sides[1][name], atol=1e-6), name


def test_the_layout_is_measured_where_clients_work_one_by_one(monkeypatch):
    tried = []

    def choose(trial, most, key, cache, usual=None):
        tried.append((key.split()[0], usual))
        assert trial(1) == trial(most) if key.startswith("layout") else trial(1)
        return 2 if key.startswith("layout") else 1

    monkeypatch.setattr(local_group, "choose_width", choose)
    sim = simulation()
    SEEN.clear()
    sim.advance()
    assert tried == [("step", 1), ("layout", None)]  # images, so one by one is usual
    assert sim.widths["0 layout"] == 2 and SEEN[-1] and not SEEN[2]


def test_blocks_that_are_captured_run_side_by_side_the_longest_first(monkeypatch):
    """With the results of blocks one after the other; a block that is not captured stays alone."""

    def ended(captured):
        asked = []

        def beside(works, streams):
            asked.append(len(works))
            return [work([]) for work in works]

        monkeypatch.setattr(local_group, "side_by_side", beside)
        monkeypatch.setattr(local_group.BlockRunner, "captured", property(captured))
        monkeypatch.setattr(local_group, "_TINY", 0)
        fed = federation((9, 9, 2, 1), (4,))
        network = {"all": Architecture(lambda: nn.Linear(4, CLASSES))}
        backend = Backend("vectorised", "cpu", width=4)
        sim = Simulation(FedAvg(batch=2), [SeededRun(0, fed.train_data)], network, backend=backend)
        lengths = []
        run = local_group.BlockRunner.run
        monkeypatch.setattr(
            local_group.BlockRunner,
            "run",
            lambda self, block, *rest: (
                lengths.append(len(block.members[0].rows["train"])), run(self, block, *rest)
            )[1],
        )  # fmt: skip
        sim.advance()
        monkeypatch.setattr(local_group.BlockRunner, "run", run)
        return sim.tree, asked, lengths

    alone, asked, _ = ended(lambda self: False)
    assert asked == []
    first = []

    def one_of_them(self):
        first.append(self)
        return self is first[0]

    assert ended(one_of_them)[1] == []
    beside, asked, lengths = ended(lambda self: True)
    assert asked == [2] and lengths == [9, 2]
    for name, leaf in tree.named(beside).items():
        assert torch.equal(leaf, tree.named(alone)[name])
