"""Every method on a real Ray cluster of two workers, against the single process; then kills."""

import os
import signal
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from test_broken_clients import Forgetful

import tiny
import worlds
from idiolect.core import tree
from idiolect.core.method import setting
from idiolect.engine.architecture import Architecture
from idiolect.engine.backend import Backend, Ray
from idiolect.engine.ray_backend import cluster as clusters
from idiolect.engine.rounds import SeededRun, Simulation
from idiolect.errors import ClusterError, ConfigError, MethodError, MissingExtra
from idiolect.experiment.load import parse_experiment
from idiolect.experiment.run import run_experiment
from idiolect.methods import METHODS, Ditto
from test_laws import TIGHT, ended, made

ray = pytest.importorskip("ray", reason="ray is not installed")

BOTH = [worlds.with_public(), worlds.with_public((2, 8, 4, 1, 6, 3), seed=5)]


@pytest.fixture(scope="module", autouse=True)
def _cluster():
    """One cluster for all of these: whoever asks for two workers finds the same two."""
    yield
    ray.shutdown()


def pair(method, **options):
    """Make the same simulation of two seeds twice: in this process, and on the cluster."""
    options = {"seeds": (0, 7), "cohort": 3, **options}
    return [worlds.simulation(method, BOTH, kind=kind, **options) for kind in ("vectorised", "ray")]


def end(simulation, rounds=3):
    return ended(simulation, [world.test_data for world in BOTH], rounds)


def test_a_cluster_computes_what_one_process_does(float64):
    """Every method, saved after a round and resumed: rounds, traffic, scores, what is deployed.

    At last everyone is taken for a newcomer, who meets the state and adapts.
    """
    wrong = {}
    for name in METHODS:
        ends, told = [], []
        for first, second in zip(pair(made(name)), pair(made(name)), strict=True):
            done = first.advance()
            second.tree = tree.like(second.tree, tree.named(first.tree))
            second.round = 1
            ends.append(end(second, rounds=2))
            scores = [own.scores for own in second.evaluate(only_global=True)]
            second.meet()
            come = second.evaluate(newcomers=True, keep=True)
            scores += [own.scores for own in come]
            adapted = [own.deployed[0][1] for own in come]
            ends[-1] = (ends[-1], tree.map(torch.from_numpy, scores), adapted)
            told.append((done.traffic, done.examples, done.crossing))
        wrong |= {(name, leaf): by for leaf, by in worlds.differing(*ends, TIGHT).items()}
        assert told[0] == told[1], name
    assert not wrong


def test_personal_state_of_whoever_is_left_out_is_told_to_its_worker(float64):
    """A client ruins what it keeps: the server is not told, and its worker forgets it again."""
    here, there = pair(Forgetful(batch=3, lr=0.1), cohort=None)
    for _ in range(2):
        done = [simulation.advance() for simulation in (here, there)]
        assert [[own.tolist() for own in one.left_out] for one in done] == [[[2], []]] * 2
    assert not worlds.differing(end(here), end(there), TIGHT)


def test_bystanders_architectures_and_measured_widths(float64):
    """What does not come with every method: two networks, clients who are not heard, disk."""
    here, there = pair(made("pfml"), bystanders="train")
    assert not worlds.differing(end(here), end(there), TIGHT)
    networks = {
        "small": Architecture(worlds.Normed, clients=(0, 2, 5)),
        "large": Architecture(lambda: worlds.Normed(8), clients=(1, 3, 4)),
    }
    here, there = pair(made("ktpfl"), architectures=networks, width=None)
    for _ in range(2):
        here.advance()
        there.advance()
    assert not worlds.differing(here.tree, there.tree, TIGHT)
    assert set(there.widths) >= {"0 step #0", "1 step #1"}


def test_an_interrupted_round_is_begun_anew(float64, monkeypatch):
    """Workers have done it when Ctrl-C comes, but nothing was kept: it must not count twice."""
    here, there = pair(made("ditto"))
    there.advance()
    with monkeypatch.context() as patch:
        patch.setattr("idiolect.engine.rounds.update_servers", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            there.advance()
    assert not worlds.differing(end(here), end(there), TIGHT)


@dataclass(frozen=True, kw_only=True)
class Halting(Ditto):
    """Ditto of whose blocks one, in the third round, leaves its process number and waits."""

    flag: str = setting("", "where to leave it")

    def client_step(self, sent, personal, local):
        if int(local.round) == 2 and self.flag:
            try:
                with Path(self.flag).open("x") as file:
                    file.write(str(os.getpid()))
                time.sleep(600)
            except FileExistsError:
                pass
        return super().client_step(sent, personal, local)


def test_a_worker_killed_in_the_middle_of_a_round_changes_nothing(tmp_path, float64):
    """Its clients' round is done again elsewhere, from the state it had kept: bit for bit."""
    flag = tmp_path / "flag"
    here, whole = pair(Halting(batch=3, lr=0.1))
    _, cut = pair(Halting(batch=3, lr=0.1, flag=str(flag)))

    def kill():
        while not flag.exists() or not flag.read_text():
            time.sleep(0.02)
        os.kill(int(flag.read_text()), signal.SIGKILL)

    before = workers(cut)
    killer = threading.Thread(target=kill)
    killer.start()
    last = end(cut, rounds=5)
    killer.join()
    assert int(flag.read_text()) in before
    assert not worlds.differing(end(whole, rounds=5), last)
    assert not worlds.differing(end(here, rounds=5), last, TIGHT)
    assert cut.remarks() == ["work was lost with a worker of the cluster and done again (1 times)"]
    assert not whole.remarks()


def workers(simulation):
    return [about["pid"] for about in simulation._job.cluster.about()]


class Stuck(Ditto):
    """A method with a mistake in it."""

    def client_step(self, sent, personal, local):
        raise MethodError("client code asked for 'secret' data")


def test_errors_of_workers_come_back_as_they_are():
    simulation = worlds.simulation(Stuck(), worlds.federation(), kind="ray")
    with pytest.raises(MethodError, match=r"^client code asked for 'secret' data$"):
        simulation.advance()


def test_an_experiment_on_the_cluster_has_the_result_of_one_process(tmp_path, monkeypatch):
    """From its file, with checkpoints, resumed for more rounds."""
    monkeypatch.setenv("IDIOLECT_CACHE", str(tmp_path / "cache"))
    found = []
    for kind in ("vectorised", "ray"):
        changes = (
            f"backend.kind={kind}",
            "backend.ray.workers=2",
            "backend.ray.cpus=0.5",
            "seeds=[0]",
        )
        for rounds in (2, 3):
            experiment = parse_experiment(tiny.TOML, (*changes, f"rounds={rounds}"))
            run_experiment(experiment, tmp_path / kind, resume=rounds == 3)
        found.append(tiny.findings(tmp_path / kind)["methods"])
    assert found[0].keys() == found[1].keys()
    for label, one in found[0].items():
        other = found[1][label]
        assert one["seeds"][0]["traffic"] == other["seeds"][0]["traffic"]
        assert np.allclose(accuracies(one), accuracies(other), atol=0.05), label


def accuracies(method):
    return [client["personal"]["accuracy"] for client in method["seeds"][0]["clients"]]


def test_what_cannot_be_is_said_before_anything_starts(monkeypatch):
    world = worlds.federation()

    def asked(**options):
        backend = Backend("ray", "cpu", ray=Ray(**options))
        runs = [SeededRun(0, world.train_data)]
        Simulation(made("fedavg"), runs, {"main": Architecture(worlds.Normed)}, backend=backend)

    with pytest.raises(ConfigError, match="device is 'cuda', but Ray's workers get no GPU"):
        Backend("ray", "cuda")
    with pytest.raises(ConfigError, match=r"ray.workers is -1, expected 0 or more"):
        Ray(workers=-1)
    with pytest.raises(ClusterError, match=r"no Ray cluster could be reached at '127.0.0.1:6'"):
        clusters._connect(ray, Ray(address="127.0.0.1:6"))
    asked(workers=2, cpus=0.5)
    with pytest.raises(ConfigError, match=r"64 workers with 1 CPUs each, and the cluster has \d"):
        asked(workers=64)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtra, match=r"pip install 'idiolect\[ray\]'"):
        asked(workers=2, cpus=0.5)


def test_when_all_workers_are_killed_new_ones_go_on(float64, monkeypatch):
    """They are told everything anew. With no room for any, the run ends with a clear word."""
    here, there = pair(made("ditto"))
    there.advance()
    for pid in workers(there):
        os.kill(pid, signal.SIGKILL)
    assert not worlds.differing(end(here), end(there), TIGHT)
    cluster = there._job.cluster
    monkeypatch.setattr(cluster, "_wanted", Ray(workers=2, cpus=1000.0))
    monkeypatch.setattr(clusters, "_SECONDS", 1.0)
    for worker in [*cluster.workers(), *cluster._coming]:
        ray.kill(worker.actor)
    with pytest.raises(ClusterError, match="all workers were lost, and none started again"):
        there.advance()
    ray.shutdown()  # whoever may come next needs a cluster that is well


@pytest.mark.faults
def test_a_machine_that_is_gone_costs_its_part_of_a_round(float64):
    """Two nodes of a core each, found by their address; one goes, and the other does it all."""
    from ray.cluster_utils import Cluster

    ray.shutdown()
    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    second = nodes.add_node(num_cpus=1)
    try:
        backend = Backend("ray", "cpu", 64, ray=Ray(nodes.address, workers=2))
        runs = [SeededRun(seed, world.train_data) for seed, world in zip((0, 7), BOTH, strict=True)]
        networks = {"main": Architecture(worlds.Normed)}
        there = Simulation(made("ditto"), runs, networks, cohort=3, backend=backend)
        there.advance()
        before = workers(there)
        nodes.remove_node(second, allow_graceful=False)
        here = worlds.simulation(made("ditto"), BOTH, seeds=(0, 7), cohort=3)
        assert not worlds.differing(end(here), end(there), TIGHT)
        assert there.remarks() and set(workers(there)) < set(before)
    finally:
        ray.shutdown()
        nodes.shutdown()
