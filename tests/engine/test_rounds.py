"""The loop of rounds: what it counts, what it refuses and in which words."""

import dataclasses
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn

import worlds
from idiolect.core import tree
from idiolect.core.method import Sent
from idiolect.engine import block_runner
from idiolect.engine.architecture import Architecture
from idiolect.engine.block_runner import BlockRunner
from idiolect.errors import DataError, Diverged, MethodError
from idiolect.methods import METHODS, FedAvg, FedPer, LocalOnly
from worlds import Normed

FLOAT = 4  # bytes


def weights(*layers):
    """Count parameters of linear layers (in, out)."""
    return sum(inside * out + out for inside, out in layers)


BASE, NORM, HEAD = weights((4, 6)), 12, weights((6, 3))


# What crosses the network.


@pytest.mark.parametrize("kind", ["vectorised", "sequential"])
@pytest.mark.parametrize(
    ("method", "down", "up"),
    [
        # 63 parameters down; the same and the number of examples up.
        (FedAvg(), BASE + NORM + HEAD, BASE + NORM + HEAD + 1),
        (FedPer(head_layers=1), BASE + NORM, BASE + NORM + 1),
        (FedPer(head_layers=2), BASE, BASE + 1),
        (LocalOnly(), 0, 0),
    ],
)
def test_traffic_is_counted_to_the_byte(method, down, up, kind):
    done = worlds.simulation(method, worlds.federation(), cohort=3, kind=kind).advance()
    clients = 5 if method.alone else 3  # without a server all that have examples train
    assert done.traffic == [(clients, 3 * down * FLOAT, 3 * up * FLOAT, 0)]


def test_own_messages_count_once_and_pooled_data_crosses_nothing():
    @dataclass(frozen=True, kw_only=True)
    class Addressed(FedAvg):
        def send(self, state, cohort):
            return Sent(state, {"number": cohort.double()})

    world = worlds.federation()
    (traffic,) = worlds.simulation(Addressed(), world, cohort=2).advance().traffic
    assert traffic.bytes_down == 2 * (BASE + NORM + HEAD) * FLOAT + 2 * 8
    (traffic,) = worlds.simulation(METHODS["centralised"](), world).advance().traffic
    assert traffic == (1, 0, 0, 0)


@pytest.mark.parametrize("width", [1, 2, 64])
def test_examples_are_those_of_the_cohort_in_every_round(width):
    """Cohorts of other sizes need other blocks; what an idle block did before does not count."""
    simulation = worlds.simulation(FedAvg(batch=2, epochs=3), worlds.federation(), width=width)
    sizes = [7, 4, 5, 9, 3]
    for cohort in ((0, 1, 2, 3, 4), (1, 4), (3,), (0, 2, 4)):
        simulation.cohort = lambda run, cohort=cohort: np.array(cohort)
        assert simulation.advance().examples == 3 * sum(sizes[n] for n in cohort)
        # 4 and 3 examples take two batches of two each: one place in eight is padding; 9 take
        # five, one place in ten.
        if cohort == (1, 4):
            assert simulation.padding() == pytest.approx(1 / 8)
        if cohort == (3,):
            assert simulation.padding() == pytest.approx(1 / 10)


# What client code cannot do.


@dataclass(frozen=True, kw_only=True)
class Branching(FedAvg):
    def client_step(self, sent, personal, local):
        report, personal = super().client_step(sent, personal, local)
        if local.size > 4:
            report = report._replace(params=sent.shared)
        return report, personal


@dataclass(frozen=True, kw_only=True)
class Itemising(FedAvg):
    def client_step(self, sent, personal, local):
        local.size.item()
        return super().client_step(sent, personal, local)


@pytest.mark.parametrize("method", [Branching(), Itemising()])
@pytest.mark.parametrize("width", [None, 64])
def test_a_step_that_cannot_be_vectorised_is_told_the_way_out(method, width):
    simulation = worlds.simulation(method, worlds.federation(), width=width)
    with pytest.raises(MethodError, match=r"tree\.where.*backend='sequential'"):
        simulation.advance()
    worlds.simulation(method, worlds.federation(), kind="sequential").advance()


def test_other_errors_of_client_code_are_passed_on_as_they_are():
    @dataclass(frozen=True, kw_only=True)
    class Wrong(FedAvg):
        def client_step(self, sent, personal, local):
            raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match=r"^mine$"):
        worlds.simulation(Wrong(), worlds.federation()).advance()


@pytest.mark.parametrize("kind", ["vectorised", "sequential"])
@pytest.mark.parametrize("stream", ["test", "public"])
@pytest.mark.parametrize("verb", ["scan", "mean", "rows"])
def test_test_data_is_out_of_reach_of_every_verb(kind, stream, verb):
    """A client holds training and validation data; there is no name for anything else."""

    @dataclass(frozen=True, kw_only=True)
    class Peeking(FedAvg):
        def client_step(self, sent, personal, local):
            if verb == "scan":
                local.scan(lambda carry, batch: carry, (), stream, batch=2)
            else:
                getattr(local, verb)(lambda batch: batch.weight.sum(), stream)
            return super().client_step(sent, personal, local)

        def deploy(self, sent, personal, local):
            self.client_step(sent, personal, local)

    world = worlds.federation()
    simulation = worlds.simulation(Peeking(), world, kind=kind)
    message = f"asked for '{stream}' data; a client holds labelled, train, val"
    with pytest.raises(MethodError, match=message):
        simulation.advance()
    with pytest.raises(MethodError, match=message):
        simulation.evaluate([world.test_data])


# Rubbish is stopped where it arises.


@pytest.mark.parametrize("name", ["fedavg", "local", "fedper"])
def test_divergence_names_the_client_and_the_round(name):
    """One client's features are 1e30: its first step overflows, its second makes NaN."""
    world = worlds.federation()
    x = world.dataset.x.copy()
    x[world.train[3]] = 1e30
    world = dataclasses.replace(world, dataset=dataclasses.replace(world.dataset, x=x))
    build = lambda: nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3))  # noqa: E731
    method = METHODS[name](lr=1e30, batch=2)
    simulation = worlds.simulation(method, world, build=build, seeds=(8,))
    simulation.cohort = lambda run: np.array([3])
    before = simulation.tree
    with pytest.raises(Diverged, match=r"round 1, seed 8: client 3 .*1 of 1.*lower lr") as told:
        simulation.advance()
    assert "1e+30" in str(told.value)
    assert not worlds.differing(before, simulation.tree)


def test_a_diverged_round_leaves_the_state_before_it():
    simulation = worlds.simulation(FedAvg(lr=1e30, batch=2), worlds.federation(), cohort=2)
    states = []
    with pytest.raises(Diverged, match="lower lr"):
        for _ in range(5):
            states.append(simulation.tree)
            simulation.advance()
    assert not worlds.differing(states[-1], simulation.tree)
    assert simulation.round == len(states) - 1


# What is addressed to one client.


@dataclass(frozen=True, kw_only=True)
class Posting(FedAvg):
    """Writes to every client its number and how often it was called; clients keep the letter."""

    def init_server(self, setup):
        return {"called": torch.zeros(setup.clients), "seed": setup.params["fc1.bias"].sum()}

    def init_personal(self, setup):
        return torch.zeros(3)

    def send(self, state, cohort):
        return Sent(state["seed"], torch.stack([cohort.float(), state["called"][cohort]], 1))

    def client_step(self, sent, personal, local):
        return sent.own[0], torch.cat([sent.own, sent.shared.reshape(1)])

    def server_step(self, state, cohort, reports):
        assert torch.equal(reports, cohort.float())  # reports come in the cohort's order
        return {**state, "called": state["called"].index_add(0, cohort, torch.ones(len(cohort)))}


@pytest.mark.parametrize("kind", ["vectorised", "sequential"])
@pytest.mark.parametrize("width", [1, 2, 64])
@pytest.mark.parametrize("mixed", [False, True])
def test_letters_reach_whom_they_are_addressed_to(kind, width, mixed):
    """Clients are sorted by size, cut into blocks, runs and architectures; the post still comes."""
    both = [worlds.federation(), worlds.federation((1, 8, 2, 9, 3, 3), seed=5)]
    split = {
        "one": Architecture(Normed, clients=(0, 3, 5)),
        "two": Architecture(Normed, clients=(1, 2, 4)),
    }
    simulation = worlds.simulation(
        Posting(), both, seeds=(0, 7), kind=kind, width=width, architectures=mixed and split
    )
    for cohort in ((4, 0, 3), (3, 1, 0)):
        simulation.cohort = lambda run, cohort=cohort: np.array(cohort) + run
        simulation.advance()
    # A letter of the second round to 0, 1, 3 (of the second run 1, 2, 4), of the first to 4 (5).
    number = torch.arange(6.0)
    for run in range(2):
        assert simulation.states[run]["called"].roll(-run).tolist() == [2, 1, 0, 2, 1, 0]
        rows = {}
        for crew, kept in zip(split.values(), simulation.tree["personal"], strict=False):
            clients = crew.clients if mixed else range(6)
            rows |= dict(zip(clients, kept[run * len(clients) :], strict=False))
        letters = torch.stack([rows[n] for n in range(6)]).roll(-run, 0)
        came = torch.tensor([True, True, False, True, True, False])
        assert torch.equal(letters[came, 0], (number + run)[came])
        assert letters[:, 1].tolist() == [1, 0, 0, 1, 0, 0]
        assert torch.equal(letters[came, 2], simulation.states[run]["seed"].expand(4))


# Starting and judging.


def test_a_federation_without_training_data_is_refused():
    with pytest.raises(DataError, match="no client has a training example"):
        worlds.simulation(FedAvg(), worlds.federation((0, 0), (1, 1)))


def test_torchs_own_random_state_is_left_alone():
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    worlds.simulation(FedAvg(), worlds.federation()).advance()
    assert torch.equal(torch.rand(1), expected)


def test_equal_seeds_start_equal_and_others_differ():
    starts = [worlds.simulation(FedAvg(), worlds.federation(), seeds=(s,)).tree for s in (1, 1, 2)]
    assert not worlds.differing(starts[0], starts[1])
    assert worlds.differing(starts[0], starts[2])


def test_judging_scores_what_it_is_handed(float64):
    """Accuracy and loss by hand, on validation rows, on test rows, then on other test rows."""
    world = worlds.federation((4, 5), (3, 2))
    simulation = worlds.simulation(FedAvg(), world)
    simulation.advance()
    swapped = dataclasses.replace(world.test_data, test=(world.train[0][:2], world.train[1][:2]))
    for exams, rows in (
        (None, world.val),
        ([world.test_data], world.test),
        ([swapped], swapped.test),
    ):
        (verdict,) = simulation.evaluate(exams)
        for client, own in enumerate(rows):
            x = torch.from_numpy(world.dataset.x[own]).double()
            logits = torch.func.functional_call(Normed(), simulation.states[0], (x,))
            labels = torch.from_numpy(world.dataset.y[own])
            scores = {metric: v[client] for metric, v in verdict.scores["personal"].items()}
            loss = nn.functional.cross_entropy(logits, labels)
            assert scores["loss"] == pytest.approx(loss.item(), abs=1e-12)
            right = (logits.argmax(1) == labels).double().mean().item()
            assert scores["accuracy"] == pytest.approx(right)


@pytest.mark.parametrize("width", [1, 3])
def test_dropout_can_be_repeated_and_resumed(width):
    """Layers draw from (seed, round, client): torch's own random state does not matter or move."""

    class Dropped(nn.Sequential):
        def __init__(self):
            super().__init__(nn.Linear(4, 6), nn.Dropout(0.5), nn.ReLU(), nn.Linear(6, 3))

    def start():
        return worlds.simulation(FedAvg(), worlds.federation(), build=Dropped, width=width)

    torch.manual_seed(1)
    whole = start()
    for _ in range(3):
        whole.advance()
    torch.manual_seed(2)
    before = torch.get_rng_state()
    first, second = start(), start()
    first.advance()
    second.tree, second.round = first.tree, first.round
    second.advance()
    second.advance()
    assert torch.equal(before, torch.get_rng_state())
    for name, leaf in tree.named(whole.tree).items():
        assert torch.equal(leaf, tree.named(second.tree)[name]), name


def test_layers_are_seeded_without_asking_every_device(monkeypatch):
    """To seed kinds of devices that are not there takes torch longer than a small round."""
    asked = []
    monkeypatch.setattr(torch.xpu, "manual_seed_all", asked.append)
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda seed: asked.append(("cuda", seed)))
    before = torch.get_rng_state()
    block_runner._seed_layers(7, torch.device("cuda", 1))
    drawn = torch.rand(3)
    assert asked == [("cuda", 7)]
    block_runner._seed_layers(7, torch.device("cpu"))
    assert asked == [("cuda", 7)] and torch.equal(drawn, torch.rand(3))
    torch.manual_seed(7)
    assert torch.equal(drawn, torch.rand(3))
    torch.set_rng_state(before)


@pytest.mark.parametrize("width", [None, 64])
def test_a_block_that_does_not_fit_in_memory_is_halved_and_loses_nothing(monkeypatch, width):
    """Blocks wider than two fail: five clients are tried as five, then three, then two."""
    tried = []
    run = BlockRunner.run

    def tight(self, block, *rest):
        tried.append(len(block.members))
        if len(block.members) > 2:
            raise torch.OutOfMemoryError("too wide")
        return run(self, block, *rest)

    world = worlds.federation()
    narrow = worlds.simulation(LocalOnly(steps=2), world, width=2)
    wide = worlds.simulation(LocalOnly(steps=2), world, width=width)
    if width is None:
        wide.widths = {"0 step": 5}  # as on a GPU, where the first width is everyone
    monkeypatch.setattr(BlockRunner, "run", tight)
    for _ in range(2):
        narrow.advance()
        tried.clear()
        done = wide.advance()
        assert max(tried[-3:]) <= 2
        assert not worlds.differing(narrow.tree, wide.tree, 1e-6)
    assert done.examples == narrow.advance().examples
    assert tried[:3] == [2, 2, 1]  # the second round remembers what fitted
