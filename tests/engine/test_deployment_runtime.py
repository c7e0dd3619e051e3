"""One client alone does what it does among others."""

import dataclasses
from functools import partial

import numpy as np
import pytest
import torch

import worlds
from idiolect.core import capabilities, tree
from idiolect.core.capabilities import FinalExchange, has
from idiolect.engine import final_exchange
from idiolect.engine.architecture import Architecture
from idiolect.engine.deployment_runtime import ClientIdentity, ClientRuntime
from idiolect.errors import DataError
from idiolect.methods import METHODS
from test_laws import made

METHOD_NAMES = [
    name
    for name, kind in METHODS.items()
    if not (kind.pooled or capabilities.has(kind(), capabilities.ArchitectureState))
]


def lone(world, client, method, *, seed=0):
    own = world.subset([client])
    architecture = Architecture(worlds.network_of(method), lambda: worlds.Normed(4))
    place = ClientIdentity(client, world.clients, seed)
    device = torch.device("cpu")
    return ClientRuntime(method, place, own.train_data, own.test[0], architecture, device)


@pytest.mark.parametrize("name", METHOD_NAMES)
def test_clients_alone_are_the_sequential_simulation_bit_for_bit(name):
    """Two rounds of a hub of five nodes, by hand: same reports, personal states and scores.

    And between the two, where a method says so, what they tell each other. The last has nothing to
    train on, so no round calls it: where a method adapts to newcomers, it is one in the end.
    """
    world = worlds.with_public()
    method = made(name)
    simulation = worlds.simulation(
        method,
        world,
        seeds=[5],
        architectures={"main": Architecture(worlds.network_of(method), lambda: worlds.Normed(4))},
        kind="sequential",
        width=1,
    )
    nodes = [lone(world, client, method, seed=5) for client in range(world.clients)]
    sizes = torch.tensor([float(len(rows)) for rows in world.train])
    state = method.init_server(nodes[0].setup._replace(sizes=sizes))
    cohort = torch.arange(world.clients - 1)  # the last has nothing to train on
    for round in range(2):
        simulation.advance()
        sent = method.send(state, cohort)
        reports = []
        for place, client in enumerate(cohort.tolist()):
            own = tree.map(lambda leaf, row=place: leaf[row : row + 1], sent.own)
            node = nodes[client]
            work = node.step if node.prepared(round) else node.first
            report, node.personal = work(sent._replace(own=own), round)
            reports.append(report)
        state = method.server_step(state, cohort, tree.stack(reports))
    assert not worlds.differing(state, simulation.states[0])
    personal = tree.stack([node.personal for node in nodes])
    assert not worlds.differing(personal, simulation.tree["personal"][0])
    (verdict,) = simulation.evaluate([world.test_data], keep=True)
    absent = [n for n in range(world.clients) if n not in cohort]
    never = absent if capabilities.adapts(method) else []
    took = [n for n in range(world.clients) if n not in never]
    addressed = {}
    for clients, send in ((took, method.send), (never, partial(capabilities.welcome, method))):
        sent = send(state, torch.tensor(clients, dtype=torch.int64))
        for place, client in enumerate(clients):
            own = tree.map(lambda leaf, row=place: leaf[row : row + 1], sent.own)
            addressed[client] = sent._replace(own=own)
    heard = [{} for _ in nodes]
    if has(method, FinalExchange):
        spoken = {client: nodes[client].tell(addressed[client], 2) for client in took}
        rows = tree.stack([told for told, _ in spoken.values()])
        sums = final_exchange.added(rows)
        others = final_exchange.without(sums, rows)
        heard = [{"others": sums} for _ in nodes]  # a newcomer told none of it
        for place, (client, (_, deployed)) in enumerate(spoken.items()):
            own = {name: leaf[place] for name, leaf in others.items()}
            heard[client] = {"others": own, "deployed": deployed}
    for client, node in enumerate(nodes):
        flags = ["newcomers"] if client in never else []
        marks, facts, _ = node.evaluate(
            addressed[client], 2, tested=True, flags=flags, **heard[client]
        )
        for model, metrics in verdict.scores.items():
            for metric, values in metrics.items():
                assert np.array_equal(marks[model][metric], values[client], equal_nan=True)
        for fact, values in verdict.facts.items():
            assert np.array_equal(facts[fact].numpy(), values[client], equal_nan=True)


def test_a_node_does_not_know_how_much_the_others_hold():
    node = lone(worlds.with_public(), 1, METHODS["fedavg"]())
    assert node.setup.clients == 6
    assert node.setup.sizes[1] == 4
    assert node.setup.sizes[[0, 2, 3, 4, 5]].isnan().all()


def test_a_node_holds_one_clients_data():
    world = worlds.with_public()
    place = ClientIdentity(0, world.clients, 0)
    with pytest.raises(DataError, match="one client's data; got 6 clients'"):
        ClientRuntime(
            METHODS["fedavg"](),
            place,
            dataclasses.replace(world.train_data),
            world.test[0],
            Architecture(worlds.Normed),
            torch.device("cpu"),
        )
