"""Random numbers of clients: the same in every backend; torch's and NumPy's own are refused."""

import dataclasses
import random
from statistics import NormalDist

import numpy as np
import pytest
import torch
from torch import nn

import worlds
from idiolect.core import tree
from idiolect.core.method import Report
from idiolect.core.randomness import Random, _quantile, generators, states
from idiolect.engine.architecture import Architecture
from idiolect.engine.deployment_runtime import ClientIdentity, ClientRuntime
from idiolect.errors import MethodError
from idiolect.methods import Ditto, FedAvg

CPU = torch.device("cpu")


class Noisy(Ditto):
    """Noise in every step, in the report, and in what is deployed."""

    def client_step(self, sent, personal, local):
        def step(carry, batch):
            return carry + local.random.normal(carry.shape) * local.random.uniform()

        walked = local.scan(step, local.numbers([0.0] * 3), batch=self.batch, epochs=2)
        order = local.random.permutation(3)
        shift = walked[order].sum() + local.random.normal()

        def moved(leaf):
            return leaf + 0.01 * shift * local.random.normal(leaf.shape)

        return Report(tree.map(moved, sent.shared), local.size), tree.map(moved, personal)

    def deploy(self, sent, personal, local):
        def drawn(batch):
            return local.random.normal()

        return tree.map(lambda leaf: leaf + local.mean(drawn, "train", batch=2), personal)


def ended(**settings):
    world = worlds.federation()
    seeds = settings.pop("seeds", (0,))
    simulation = worlds.simulation(Noisy(batch=3), [world] * len(seeds), seeds=seeds, **settings)
    simulation.advance()
    simulation.advance()
    (*_, found) = simulation.evaluate([world.test_data] * len(seeds), keep=True)
    return simulation, found


@pytest.mark.parametrize(
    "settings",
    [{"kind": "sequential"}, {"width": 2}, {"cohort": None}, {"seeds": (7, 0)}],
    ids=["sequential", "narrow", "again", "stacked"],
)
def test_every_backend_draws_the_same_bit_for_bit(settings):
    """Server's mean is by one order of clients, so even sums agree."""
    (first, one), (other, two) = ended(), ended(**settings)
    rows = [s.tree["personal"][0] for s in (first, other)]
    mine, theirs = (tree.named(own) for own in rows)
    for name, leaf in mine.items():
        assert torch.equal(leaf, theirs[name][-len(leaf) :]), name
    assert not worlds.differing(first.states[0], other.states[-1])
    assert not worlds.differing(one.deployed[0][1], two.deployed[0][1])


def test_a_node_draws_what_its_client_of_a_simulation_draws():
    world = worlds.federation()
    method = Noisy(batch=3)
    simulation = worlds.simulation(method, world)
    (state,) = simulation.states
    simulation.advance()
    one = world.train_data
    own = dataclasses.replace(one, names=one.names[2:3], train=one.train[2:3], val=one.val[2:3])
    alone = ClientRuntime(
        method, ClientIdentity(2, 6, 0), own, world.test[2], Architecture(worlds.Normed), CPU
    )
    _, personal = alone.step(method.send(state, torch.tensor([2])), 0)
    for name, leaf in tree.named(simulation.tree["personal"][0]).items():
        assert torch.equal(leaf[2], tree.named(personal)[name]), name


def test_numbers_differ_by_seed_round_client_and_call():
    first, _ = ended()
    again, _ = ended(seeds=(5,))
    shared = next(iter(tree.leaves(first.tree["personal"])))
    assert len({tuple(row.flatten().tolist()) for row in shared[:5]}) == 5
    assert worlds.differing(first.states[0], again.states[0])
    key = torch.tensor(3)
    draw, like = Random(lambda: key, torch.zeros(())), torch.zeros(())
    assert not torch.equal(draw.normal(4), draw.normal(4))
    assert torch.equal(Random(lambda: key, like).uniform(4), Random(lambda: key, like).uniform(4))


def test_numbers_are_distributed_as_they_say():
    draw = Random(lambda: torch.tensor(11), torch.zeros((), dtype=torch.float64))
    normal, uniform = draw.normal(200_000), draw.uniform((100, 2000))
    assert normal.mean().abs() < 0.01 and (normal.std() - 1).abs() < 0.01
    assert (normal.pow(4).mean() - 3).abs() < 0.1
    assert uniform.min() >= 0 and uniform.max() < 1 and (uniform.mean() - 0.5).abs() < 0.005
    assert sorted(draw.permutation(50).tolist()) == list(range(50))
    exact = NormalDist().inv_cdf
    at = [1e-15, 1e-9, 1e-4, 0.02, 0.07, 0.3, 0.5, 0.8, 0.97, 0.9999]
    found = _quantile(torch.tensor(at, dtype=torch.float64))
    np.testing.assert_allclose(found, [exact(p) for p in at], rtol=1e-12, atol=1e-15)


OWN = {
    "randn": lambda leaf: torch.randn(leaf.shape),
    "randn_like": torch.randn_like,
    "bernoulli_": lambda leaf: torch.zeros_like(leaf).bernoulli_(0.5),
    "normal": lambda leaf: torch.normal(leaf, 1.0),
    "randperm": lambda leaf: leaf + torch.randperm(3).sum(),
    "dropout": lambda leaf: nn.functional.dropout(leaf, 0.5),
    "own generator": lambda leaf: torch.rand(
        leaf.shape, generator=torch.Generator().manual_seed(1)
    ),
    "numpy": lambda leaf: leaf + float(np.random.normal()),
}


def drawing(draw, where="client_step"):
    class Drawing(FedAvg):
        pass

    def step(self, sent, personal, local):
        return Report(tree.map(draw, sent.shared), local.size), personal

    def deploy(self, sent, personal, local):
        return tree.map(draw, sent.shared)

    setattr(Drawing, where, {"client_step": step}.get(where, deploy))
    return Drawing(batch=3)


class Dropping(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 3))

    def forward(self, x):
        return self.layers(x)


@pytest.mark.parametrize("build", [worlds.Normed, Dropping], ids=["plain", "dropout"])
@pytest.mark.parametrize("kind", ["vectorised", "sequential"])
@pytest.mark.parametrize("own", OWN)
def test_torchs_and_numpys_own_numbers_are_refused(own, kind, build):
    simulation = worlds.simulation(drawing(OWN[own]), worlds.federation(), kind=kind, build=build)
    with pytest.raises(MethodError, match=r"local\.random\.normal"):
        simulation.advance()


def test_they_are_refused_in_deployment_and_in_later_rounds_too():
    world = worlds.federation()
    simulation = worlds.simulation(drawing(OWN["randn"], "deploy"), world, kind="sequential")
    simulation.advance()
    with pytest.raises(MethodError, match=r"local\.random"):
        simulation.evaluate([world.test_data])

    def later(leaf):
        return torch.randn(leaf.shape) if simulation.round else leaf

    simulation = worlds.simulation(drawing(later), world, kind="sequential")
    simulation.advance()
    with pytest.raises(MethodError, match=r"local\.random"):
        simulation.advance()


@pytest.mark.parametrize("kind", ["vectorised", "sequential"])
def test_dropout_layers_work_are_repeatable_and_differ_from_round_to_round(kind):
    def trained():
        simulation = worlds.simulation(
            Still(batch=3), worlds.federation(), kind=kind, build=Dropping
        )
        return [_gaps(simulation) for _ in range(2)]

    first, again = trained(), trained()
    assert first == again
    assert first[0] != first[1]


class Still(FedAvg):
    """Reports its network's loss in training, where the size would be; its parameters stay."""

    def client_step(self, sent, personal, local):
        seen = local.scan(
            lambda carry, batch: carry + local.loss(sent.shared, batch),
            local.numbers([0.0])[0],
            batch=100,
        )
        return Report(sent.shared, 1 + seen), personal


def _gaps(simulation):
    told = []
    found = Still.server_step

    def step(self, state, cohort, reports):
        told.extend(reports.size.tolist())
        return found(self, state, cohort, reports)

    Still.server_step = step
    try:
        simulation.advance()
    finally:
        del Still.server_step
    return told


def test_what_starts_over_draws_the_same_numbers():
    """What hears the others at the end runs after the deployment, or by itself: both draw alike."""
    local = worlds.local(worlds.federation(), 0)
    first, second = local.random.normal(3), local.random.normal(3)
    local.restart()
    assert torch.equal(local.random.normal(3), first) and not torch.equal(first, second)


def test_what_other_threads_draw_from_python_stops_no_client():
    """Retries and logging draw from it while clients train; torch and NumPy alone are watched."""

    class Beside(FedAvg):
        def client_step(self, sent, personal, local):
            random.random()  # as a thread would, in each try
            return super().client_step(sent, personal, local)

    simulation = worlds.simulation(Beside(batch=3), worlds.federation(), kind="sequential")
    for _ in range(2):
        simulation.advance()


def test_every_draw_of_numpy_is_noticed():
    """Normal numbers come in pairs: the second moves nothing but what waits."""
    seen = {states()}
    for _ in range(4):
        np.random.normal()
        seen.add(states())
    assert len(seen) == 5


# Generators made many at once draw what NumPy's own do.


@pytest.mark.parametrize("words", [1, 3, 4, 5, 7])
def test_many_generators_are_numpys_own(words):
    keys = [
        tuple(int(n) for n in key)
        for key in np.random.default_rng(words).integers(0, 1 << 32, (40, words))
    ]
    keys += [(0,) * words, ((1 << 32) - 1,) * words]
    for key, ours in zip(keys, generators(keys), strict=True):
        theirs = np.random.default_rng(key)
        assert ours.permutation(7).tolist() == theirs.permutation(7).tolist()
        assert ours.integers(0, 1 << 60, 3).tolist() == theirs.integers(0, 1 << 60, 3).tolist()
        assert ours.random() == theirs.random()


@pytest.mark.parametrize("key", [(1 << 32, 1), (1, 2, 3)])
def test_keys_that_hash_otherwise_are_left_to_numpy(key):
    """A number of two words is hashed as two, and keys may be of several lengths."""
    keys = [(n, 1) for n in range(20)] + [key]
    for own, ours in zip(keys, generators(keys), strict=True):
        assert ours.random() == np.random.default_rng(own).random()
