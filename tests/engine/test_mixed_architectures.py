"""Clients of several architectures in one simulation."""

import dataclasses
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch

import worlds
from idiolect.core import tree
from idiolect.core.method import Method
from idiolect.engine.architecture import Architecture
from idiolect.errors import ConfigError, MethodError
from idiolect.methods import FedAvg, LocalOnly
from worlds import Normed


class Votes(NamedTuple):
    logits: torch.Tensor  # [example, class] on the public data
    size: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class Voting(Method):
    """Clients train alone, then tell what they think of public data; the server averages."""

    def init_server(self, setup):
        return {"votes": torch.zeros(5, setup.classes)}

    def init_personal(self, setup):
        return setup.params

    def client_step(self, sent, personal, local):
        trained = self.fit(local, personal)
        votes = local.rows(lambda batch: local.logits(trained, batch.x), batch=2)
        return Votes(votes, local.size), trained

    def server_step(self, state, cohort, reports):
        return {"votes": tree.mean(reports.logits, reports.size)}

    def deploy(self, sent, personal, local):
        return personal

    def models(self, sent, deployed):
        return {"personal": deployed}


MIXED = {
    "narrow": Architecture(Normed, clients=(0, 3, 5)),
    "wide": Architecture(lambda: Normed(10), clients=(1, 2, 4)),
}


@pytest.mark.parametrize("cohort", [None, 2])
def test_architectures_mix_where_reports_are_free_of_them(cohort, float64):
    """Five public examples in batches of two: padding is dropped; votes weigh by examples."""
    world = dataclasses.replace(worlds.federation(), public=worlds.dataset(5, seed=9))
    method = Voting(batch=3, lr=0.1)
    ends = []
    for kind in ("vectorised", "sequential"):
        simulation = worlds.simulation(method, world, architectures=MIXED, cohort=cohort, kind=kind)
        cohorts = [simulation.cohort(0)]
        simulation.advance()
        ends.append(simulation.tree)
        (verdict,) = simulation.evaluate([world.test_data], keep=True)
        assert [clients.tolist() for clients, _ in verdict.deployed] == [[0, 3, 5], [1, 2, 4]]
        assert verdict.scores["personal"]["loss"].shape == (6,)
    assert not worlds.differing(*ends, 1e-9)
    # By hand: everyone's logits on the public data, averaged by its number of examples.
    narrow, wide = ends[0]["personal"]
    sizes, total = dict(enumerate((7, 4, 5, 9, 3))), 0
    public = torch.from_numpy(world.public.x).double()
    for client in cohorts[0]:
        group, rows, hidden = (
            (MIXED["narrow"], narrow, 6) if client in (0, 3) else (MIXED["wide"], wide, 10)
        )
        place = group.clients.index(client)
        params = tree.map(lambda leaf, place=place: leaf[place], rows)
        logits = torch.func.functional_call(Normed(hidden), params, (public,))
        total = total + sizes[client] * logits / sum(sizes[n] for n in cohorts[0])
    assert torch.allclose(ends[0]["server"][0]["votes"], total, 1e-9, 1e-9)


@pytest.mark.parametrize("kind", ["vectorised", "sequential"])
def test_averaging_two_architectures_is_refused_by_the_leaf(kind):
    with pytest.raises(
        MethodError, match=r"'fc1.* among all clients, but architecture 'wide' differs"
    ):
        worlds.simulation(FedAvg(), worlds.federation(), architectures=MIXED, kind=kind)


@pytest.mark.parametrize("kind", ["vectorised", "sequential"])
def test_reports_of_two_shapes_are_refused_by_the_leaf(kind):
    @dataclass(frozen=True, kw_only=True)
    class Telling(LocalOnly):
        def client_step(self, sent, personal, local):
            return {"mine": personal["fc1.bias"]}, personal

    simulation = worlds.simulation(Telling(), worlds.federation(), architectures=MIXED, kind=kind)
    with pytest.raises(MethodError, match=r"report leaf 'mine' is \(6,\).*\(10,\)"):
        simulation.advance()


@pytest.mark.parametrize("clients", [(0, 1), (0, 1, 2, 2, 3, 4, 5)])
def test_architectures_name_everyone_once(clients):
    split = {"a": Architecture(Normed, clients=clients), "b": Architecture(Normed, clients=(2,))}
    with pytest.raises(ConfigError, match="exactly once"):
        worlds.simulation(FedAvg(), worlds.federation(), architectures=split)
