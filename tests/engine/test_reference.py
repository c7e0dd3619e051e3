"""FedAvg against a plain loop of `nn.Module` and `torch.optim`, as one would write it by hand."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import worlds
from idiolect.core.client import Request
from idiolect.engine.batch_plan import BatchPlanner
from idiolect.engine.data_pools import DataPools
from idiolect.methods import FedAvg

SIZES = (13, 4, 7, 1, 10, 6)
ROUNDS = 4


def build():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


def batches(world, client, round, method):
    """The batches of a client are data: take them from the plan, without the padding."""
    library = DataPools([world.train_data], torch.device("cpu"))
    book = BatchPlanner(library.pools, torch.device("cpu"))
    book.turn([library.members(0, 5, world.train_data)[client]], round)
    plan = book.ask(Request("train", method.batch, method.epochs, method.steps, True, 0))
    x, y = torch.from_numpy(world.dataset.x), torch.from_numpy(world.dataset.y)
    for rows, weight in zip(plan.rows[0], plan.weight[0], strict=True):
        yield x[rows[weight > 0]], y[rows[weight > 0]]


def plain_loop(world, cohorts, method, make_rule, clip=0.0, decay=1.0):
    torch.manual_seed(5)
    server = build()
    for round, cohort in enumerate(cohorts):
        trained = []
        for client in cohort:
            model = copy.deepcopy(server)
            rule = make_rule(model.parameters(), method.lr * decay**round)
            for x, y in batches(world, client, round, method):
                rule.zero_grad()
                F.cross_entropy(model(x), y).backward()
                if clip:
                    nn.utils.clip_grad_norm_(model.parameters(), clip)
                rule.step()
            trained.append(model.state_dict())
        sizes = [1 if method.uniform else SIZES[client] for client in cohort]
        average = {
            name: sum(n * model[name] for n, model in zip(sizes, trained, strict=True)) / sum(sizes)
            for name in trained[0]
        }
        old = server.state_dict()
        server.load_state_dict(
            {name: old[name] + method.server_lr * (average[name] - old[name]) for name in old}
        )
    return server.state_dict()


@pytest.mark.parametrize("kind", ["vectorised", "sequential"])
@pytest.mark.parametrize(
    ("settings", "make_rule", "extras"),
    [
        (
            {"momentum": 0.9},
            lambda params, lr: torch.optim.SGD(params, lr, momentum=0.9),
            {},
        ),
        (
            {"momentum": 0.8, "nesterov": True, "weight_decay": 0.05, "uniform": True},
            lambda params, lr: torch.optim.SGD(
                params, lr, momentum=0.8, nesterov=True, weight_decay=0.05
            ),
            {},
        ),
        (
            {"schedule": "exponential", "decay": 0.8, "clip": 0.3, "server_lr": 0.7},
            lambda params, lr: torch.optim.SGD(params, lr),
            {"clip": 0.3, "decay": 0.8},
        ),
        (
            {"optimiser": "adam", "weight_decay": 0.01, "steps": 3},
            lambda params, lr: torch.optim.Adam(params, lr, weight_decay=0.01),
            {},
        ),
    ],
    ids=["momentum", "nesterov", "clip", "adam"],
)
def test_fedavg_equals_a_plain_loop(kind, settings, make_rule, extras):
    """Six clients of 13, 4, 7, 1, 10 and 6 examples, three a round, batches of four, float32."""
    world = worlds.federation(SIZES, (1,) * 6)
    method = FedAvg(**{"lr": 0.1, "batch": 4, "epochs": 2, **settings})
    simulation = worlds.simulation(method, world, build=build, cohort=3, kind=kind, seeds=(5,))
    start, cohorts = simulation.states[0], []
    for _ in range(ROUNDS):
        cohorts.append([int(client) for client in simulation.cohort(0)])
        simulation.advance()
    assert len({client for cohort in cohorts for client in cohort}) > 3
    expected = plain_loop(world, cohorts, method, make_rule, **extras)
    for name, value in simulation.states[0].items():
        assert (value - expected[name]).abs().max() < 1e-6, name
        assert (value - start[name]).abs().max() > 0.01, name
