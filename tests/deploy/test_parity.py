"""Over messages every method gives the simulator's result, bit for bit."""

import federations as fed
import pytest

from idiolect.deploy import protocol
from idiolect.deploy.node_process import InProcess
from idiolect.methods import METHODS

NAMES = [name for name, kind in METHODS.items() if not kind.pooled]


@pytest.mark.parametrize("name", NAMES)
def test_nodes_give_the_simulators_result(name, tmp_path):
    wanted = fed.experiment(name, sets=("cohort=3",))
    label = wanted.methods[0].label
    content = fed.simulated(wanted, tmp_path / "simulated")
    found = fed.served(wanted, fed.inside(tmp_path / "nodes"), tmp_path / "served")
    assert fed.scores(found, label) == fed.scores(content, label)
    there, here = (
        fed.server_state(tmp_path / kind, label.replace(" ", "_").replace("+", "_"))
        for kind in ("served", "simulated")
    )
    assert there.keys() == here.keys()
    assert all(there[leaf].equal(here[leaf]) for leaf in there)
    assert max(fed.bytes_beside(found, content, label), default=0.0) < 0.05


def test_portfolio_trains_its_second_model_on_nodes_too(tmp_path):
    """By the server's two models, which a node's rows of both parts train."""
    own = ("refit=true", "tune_epochs=1", "shares=[0.5]", 'candidates=["local", "teacher", "fb"]')
    sets = ("model.name=mlr", "rounds=1", *(f"methods.Portfolio.{one}" for one in own))
    wanted = fed.experiment("portfolio", sets=sets)
    content = fed.simulated(wanted, tmp_path / "simulated")
    found = fed.served(wanted, fed.inside(tmp_path / "nodes"), tmp_path / "served")
    assert fed.scores(found, "Portfolio") == fed.scores(content, "Portfolio")
    there = fed.server_state(tmp_path / "served", "Portfolio")
    assert any("chosen_by" in name for name in there) and any("used" in name for name in there)


def test_nodes_do_once_what_comes_before_their_first_round(tmp_path):
    """FedMD's transfer phase; with cohorts of three of four nodes one comes later."""
    sets = ("cohort=3", "methods.FedMD.transfer_epochs=1", "methods.FedMD.private_epochs=1")
    wanted = fed.experiment("fedmd", sets=sets)
    content = fed.simulated(wanted, tmp_path / "simulated")
    found = fed.served(wanted, fed.inside(tmp_path / "nodes"), tmp_path / "served")
    assert fed.scores(found, "FedMD") == fed.scores(content, "FedMD")
    plain = fed.simulated(fed.experiment("fedmd", sets=sets[:1]), tmp_path / "plain")
    assert fed.scores(plain, "FedMD") != fed.scores(content, "FedMD")


@pytest.mark.parametrize("name", ["ditto", "ktpfl", "pfedhn", "portfolio", "local"])
def test_nodes_that_were_never_asked_get_their_models_as_newcomers_do(name, tmp_path):
    """One of four nodes a round, for two rounds; `fed.scores` has the figures of both sorts."""
    wanted = fed.experiment(name, sets=("cohort=1",))
    label = wanted.methods[0].label
    content = fed.simulated(wanted, tmp_path / "simulated")
    found = fed.served(wanted, fed.inside(tmp_path / "nodes"), tmp_path / "served")
    assert fed.scores(found, label) == fed.scores(content, label)
    counts = fed.scores(found, label)[0]["participation"]["clients"]
    assert counts["never"] == (0 if name == "local" else 4 - counts["took_part"])
    assert counts["never"] >= 2 or name == "local"


@pytest.mark.parametrize("name", ["ktpfl", "feddf", "fedbe"])
def test_rounds_that_nobody_came_to_are_the_same_on_nodes(name, tmp_path):
    """By its own coin of one in four: seed 16 draws nobody in rounds 2 and 4."""
    sets = ("cohort=1", "draw=poisson", "rounds=5", "evaluate.every=5", "seeds=[16]")
    wanted = fed.experiment(name, sets=sets)
    label = wanted.methods[0].label
    content = fed.simulated(wanted, tmp_path / "simulated")
    found = fed.served(wanted, fed.inside(tmp_path / "nodes"), tmp_path / "served")
    assert fed.scores(found, label) == fed.scores(content, label)
    for part in ("server", "groups", "attended"):
        here, there = (
            fed.server_state(tmp_path / kind, label, part) for kind in ("simulated", "served")
        )
        assert here.keys() == there.keys()
        assert all(here[leaf].equal(there[leaf]) for leaf in here)
    assert int(here["state.attended.idle"]) == 2


@pytest.mark.parametrize("secure", ["false", "true"])
def test_bystanders_train_without_being_heard(secure, tmp_path):
    """Who is outside the cohort moves its own state, and no report of it leaves the node."""
    sets = ("cohort=3", "bystanders=train", "model.name=mlr", f"deploy.secure={secure}")
    wanted = fed.experiment("ditto", sets=sets)
    content = fed.simulated(wanted, tmp_path / "simulated")
    transport = Heard(fed.inside(tmp_path / "nodes")._nodes)
    found = fed.served(wanted, transport, tmp_path / "served")
    here, there = (fed.server_state(tmp_path / kind, "Ditto") for kind in ("simulated", "served"))
    assert fed.largest_gap(here, there) < 1e-6
    mine, theirs = (fed.scores(one, "Ditto")[0]["clients"] for one in (found, content))
    assert [c["personal"]["accuracy"] for c in mine] == [c["personal"]["accuracy"] for c in theirs]
    assert sorted(transport.reports) == ([0] * 8 if secure == "true" else [0, 0, *[3] * 6])


class Heard(InProcess):
    """Nodes, of whose answers in a round the tensors are counted, as none, or some."""

    def __init__(self, nodes):
        super().__init__(nodes)
        self.reports = []

    def call(self, site, blob, seconds):
        answer = super().call(site, blob, seconds)
        if protocol.unpack(blob).kind == "step":
            self.reports.append(len(protocol.unpack(answer).leaves))
        return answer


def test_several_seeds_and_methods_and_the_bytes(tmp_path):
    """What crosses is what the simulator counts, give or take a message's head: under 5 %."""
    wanted = fed.experiment("fedavg", "persfl", sets=("seeds=[0,1]", "rounds=2"))
    content = fed.simulated(wanted, tmp_path / "simulated")
    found = fed.served(wanted, fed.inside(tmp_path / "nodes"), tmp_path / "served")
    for label in ("FedAvg", "PersFL"):
        assert fed.scores(found, label) == fed.scores(content, label)
        beside = fed.bytes_beside(found, content, label)
        assert len(beside) == 4 and max(beside) < 0.05
    assert (tmp_path / "served" / "metrics.parquet").is_file()
    assert found["complete"]


def test_the_vectorised_simulator_agrees_to_a_millionth(tmp_path):
    sets = ("backend.kind=vectorised", "backend.width=4")
    wanted = fed.experiment("pfml", sets=sets)
    fed.simulated(wanted, tmp_path / "simulated")
    fed.served(wanted, fed.inside(tmp_path / "nodes"), tmp_path / "served")
    there, here = (fed.server_state(tmp_path / kind, "PFML") for kind in ("served", "simulated"))
    assert fed.largest_gap(there, here) < 1e-6


@pytest.mark.parametrize("name", ["ktpfl", "feddf"])
def test_two_architectures_learn_together(name, tmp_path):
    """Two nodes run one network, two another: predictions are of one form, or the server reads.

    FedDF's server keeps a model for each of them, which it sends to those who run it.
    """
    toml = fed.TOML.replace('name = "federations:normed"', "each = { mlr = 2, dnn = 2 }")
    wanted = fed.experiment(name, toml=toml)
    content = fed.simulated(wanted, tmp_path / "simulated")
    found = fed.served(wanted, fed.inside(tmp_path / "nodes"), tmp_path / "served")
    label = wanted.methods[0].label
    assert fed.scores(found, label) == fed.scores(content, label)
    leaves = [
        sum(path.stat().st_size for path in (tmp_path / "nodes" / f"site-{n}").rglob("seed-3.*"))
        for n in range(4)
    ]
    assert leaves[0] != leaves[3]  # the models on the nodes are of different networks
