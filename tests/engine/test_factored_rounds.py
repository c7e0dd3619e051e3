"""Trainings in which a large layer's weights are factors end where the sequential backend's do."""

import pytest
import torch
from torch import nn

import worlds
from idiolect.bench.workloads import federation
from idiolect.core import tree
from idiolect.core.client import Local
from idiolect.engine import local_group, server_update
from idiolect.engine.architecture import Architecture
from idiolect.engine.backend import Backend
from idiolect.engine.rounds import SeededRun, Simulation
from idiolect.kernels import compiled, linear, row_average
from idiolect.kernels.deferred import DeferredTensor
from idiolect.methods import METHODS
from kernels import emulate

pytestmark = pytest.mark.skipif(emulate.COMPILER is None, reason="needs g++ to run CUDA sources")

PADDED, RAGGED = [20, 18, 17, 16], [20, 14, 9, 4]
CASES = {  # settings, clients, seeds, and whether factors themselves are averaged
    "fedavg of padded batches": ("fedavg", {}, PADDED, (0,), True),
    "fedavg of unequal clients": ("fedavg", {}, RAGGED, (0,), False),
    "fedavg of two seeds": ("fedavg", {}, PADDED, (0, 1), False),
    "momentum": ("fedavg", {"momentum": 0.9, "weight_decay": 0.1}, PADDED, (0,), False),
    "fedprox": ("fedprox", {"pull": 1.0}, RAGGED, (0,), False),
    "ditto": ("ditto", {}, PADDED, (0,), True),
}


class Dense(nn.Module):
    """A network with a wide layer, and one that is its head."""

    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(12, 24), nn.Linear(24, 10)

    def forward(self, x):
        return self.fc2(linear.linear_relu(self.fc1, x.flatten(1)))


@pytest.fixture(scope="module")
def binaries():
    """Make what is launched once for all cases."""
    found = {}

    def kernel(file, name, constants, shared):
        key = (file, name, constants)
        if key not in found:
            found[key] = emulate.Kernel(file, name, dict(constants))
        return found[key]

    return kernel


@pytest.fixture
def as_on_a_gpu(recorded, binaries, monkeypatch):
    """Record rounds, keep factors, and average as on CUDA; tell of which means they were."""
    recorded(8, 4)
    means, mean = [], linear._FactoredWeights.mean

    def counted(self, share, left_out):
        means.append(self._rank)
        return mean(self, share, left_out)

    def without(reports, bad):
        return tree.map(lambda leaf: row_average.without(bad, leaf), reports)

    def unsound(held, finite):
        real = [leaf for leaf in tree.leaves(held) if leaf.is_floating_point() and leaf.numel()]
        return row_average.unsound(real, finite) if real else None

    def once(xs, ys):
        return tree.transformed() and len(xs) > 1

    for where, name, stand_in in (
        (local_group, "_TINY", 1 << 30),  # all clients are one block
        (compiled, "kernel", binaries),
        (compiled, "make_current", lambda: None),
        (row_average, "_has_kernels", lambda leaf: True),
        (linear, "attempt", lambda what, own, plain, on: own()),
        (linear._FactoredWeights, "mean", counted),
        (linear, "_on_cuda", lambda x: True),
        (linear, "float32_on_cuda", lambda x: x.dtype == torch.float32),
        (linear, "_LARGE", 0),
        (tree, "_in_one_launch", once),
        (Local, "_clients_beneath", lambda local: None),
        (server_update, "without_rows", without),
        (tree, "unsound_rows", unsound),
    ):
        monkeypatch.setattr(where, name, stand_in)
    return means


def trained(name, settings, sizes, seeds, kind):
    """Train three rounds: eager, recorded and replayed."""
    fed = federation(sizes, (1, 3, 4), held_out=4)
    method = METHODS[name](batch=5, lr=0.1, **settings)
    runs = [SeededRun(seed, fed.train_data) for seed in seeds]
    backend = Backend(kind, "cpu", width=len(sizes) * len(seeds) if kind == "vectorised" else None)
    sim = Simulation(method, runs, {"all": Architecture(Dense)}, backend=backend)
    for _ in range(3):
        sim.advance()
    verdicts = sim.evaluate([fed.test_data] * len(seeds), keep=True)
    return sim.tree["server"], sim.tree["personal"], [v.deployed[0][1] for v in verdicts]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("case", CASES)
def test_a_training_of_factors_is_the_training(case, as_on_a_gpu, monkeypatch):
    name, settings, sizes, seeds, averaged = CASES[case]
    with monkeypatch.context() as patch:
        patch.setattr(linear, "_RANK", 0.0)
        whole = trained(name, settings, sizes, seeds, "vectorised")
        assert not as_on_a_gpu
        plain = trained(name, settings, sizes, seeds, "sequential")
    monkeypatch.setattr(linear, "_RANK", 1.0)
    factors = trained(name, settings, sizes, seeds, "vectorised")
    assert not any(isinstance(leaf, DeferredTensor) for leaf in tree.leaves(factors))
    assert not worlds.differing(plain, whole, 1e-5)
    assert not worlds.differing(plain, factors, 1e-5)
    assert bool(as_on_a_gpu) == averaged
