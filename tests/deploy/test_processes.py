"""Nodes as processes: what kills one is its own affair, and costs nothing where it comes back."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import federations as fed
import pytest

from idiolect.deploy import wire
from idiolect.deploy.child import Child
from idiolect.deploy.lock import held
from idiolect.deploy.transport import Processes
from idiolect.results import document

SETS = ("model.name=mlr", "rounds=3", "evaluate.every=3")


@pytest.fixture
def processes(tmp_path):
    made = []

    def make(count=4):
        made.append(Processes(fed.sites(tmp_path / "nodes", count)))
        return made[-1]

    yield make
    for transport in made:
        transport.close()
        assert all(child.pid is None for child in transport.children.values())


class Killer:
    """Passes calls on, and kills a node's process once, amid the round it is told."""

    def __init__(self, inner, site, round):
        self._inner, self._site, self._round = inner, site, round
        self.sites, self.killed = inner.sites, 0

    def call(self, site, blob, seconds):
        message = wire.unpack(blob)
        mine = site == self._site and message.head.get("round") == self._round
        if mine and message.kind == "step" and not self.killed:
            self.killed = self._inner.children[site].pid
            os.kill(self.killed, signal.SIGKILL)
        return self._inner.call(site, blob, seconds)

    def returned(self, site):
        return False

    def stopped(self):
        return False


def test_a_killed_training_process_is_told_everything_again_and_nothing_is_lost(
    processes, tmp_path
):
    wanted = fed.experiment("fedper", sets=SETS)
    content = fed.simulated(wanted, tmp_path / "simulated")
    killer = Killer(processes(), "site-1", 1)
    found = fed.served(wanted, killer, tmp_path / "served")
    assert killer.killed
    assert fed.scores(found, "FedPer") == fed.scores(content, "FedPer")
    assert found["methods"]["FedPer"]["notices"] == content["methods"]["FedPer"]["notices"]


def test_a_node_ends_with_its_parent(tmp_path):
    """The parent is killed hard; no orphan stays."""
    code = f"""
import sys, time
sys.path[:0] = [{str(Path(__file__).parent)!r}]
from pathlib import Path
import federations as fed
from idiolect.deploy.child import Child
from idiolect.deploy import wire
child = Child(fed.sites(Path({str(tmp_path)!r}), 1)[0])
child.answer(wire.pack("dance"))
print(child.pid, flush=True)
time.sleep(60)
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True
    ) as parent:
        pid = int(parent.stdout.readline())
        parent.kill()
    until = time.monotonic() + 10
    while time.monotonic() < until and Path(f"/proc/{pid}").exists():
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        if state == "Z":
            break
        time.sleep(0.05)
    else:
        assert not Path(f"/proc/{pid}").exists()


def test_one_process_at_a_time_works_with_a_nodes_state(tmp_path):
    with held(tmp_path) as free, held(tmp_path, 0.2) as second:
        assert free and not second
    with held(tmp_path, 0.2) as free:
        assert free


def test_a_child_answers_and_can_be_closed(tmp_path):
    child = Child(fed.sites(tmp_path, 1)[0])
    assert wire.unpack(child.answer(b"noise")).head == {"code": "format"}
    assert child.pid
    child.close()
    assert child.pid is None


def test_a_federation_on_one_machine_from_the_command_line(tmp_path):
    """Run, be refused, go on for another round, and use a node's model; as the simulator scores."""
    (tmp_path / "e.toml").write_text(fed.TOML.replace("federations:normed", "mlr") + FEDPER)
    run = ["run", "e.toml", "--on", "local", "--out", "out"]
    printed = command(tmp_path, *run)
    assert "4 nodes start" in printed.stdout and "round 2 of 2" in printed.stdout
    again = command(tmp_path, *run, status=7)
    assert "already holds a run" in again.stderr
    command(tmp_path, *run, "--resume", "--set", "rounds=3")
    wanted = fed.experiment("fedper", sets=("model.name=mlr", "rounds=3"))
    content = fed.simulated(wanted, tmp_path / "simulated")
    found = document.read(tmp_path / "out")
    assert fed.scores(found, "FedPer") == fed.scores(content, "FedPer")
    command(tmp_path, "export", "out/nodes/node-3", "--out", "model.safetensors")


FEDPER = '[[methods]]\nname = "fedper"\n'


def command(folder, *words, status=0):
    done = subprocess.run(
        [sys.executable, "-m", "idiolect", *words],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == status, done.stderr
    return done


def limit_files(pid, size):
    """Let a process write no file beyond a size: what a full disk does to it, without a disk."""
    _, most = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, most))


class Filler(Killer):
    """Fills a node's disk before one round, and empties it before the next."""

    def call(self, site, blob, seconds):
        message = wire.unpack(blob)
        if site == self._site and message.kind == "step":
            now = message.head["round"]
            size = 100 if now == self._round else resource.RLIM_INFINITY
            limit_files(self._inner.children[site].pid, size)
            if now == self._round:
                (path,) = self._home.glob("state/**/*.safetensors")
                before = path.read_bytes()
                answer = self._inner.call(site, blob, seconds)
                assert path.read_bytes() == before and not list(path.parent.glob(".*.part"))
                self.killed = wire.unpack(answer).head["code"]
                return answer
        return self._inner.call(site, blob, seconds)


def test_a_full_disk_costs_a_node_its_round_and_not_its_state(processes, tmp_path):
    """The kernel refuses the write; the state before stays, and the next round is done again."""
    wanted = fed.experiment("fedper", sets=SETS)
    filler = Filler(processes(), "site-1", 1)
    filler._home = tmp_path / "nodes" / "site-1"
    found = fed.served(wanted, filler, tmp_path / "served")
    assert filler.killed == "disk"
    assert found["methods"]["FedPer"]["seeds"][0]["traffic"]["participations"] == 3 * 4 - 1
    faults = json.loads((tmp_path / "served" / "faults.json").read_text())
    assert faults == {"site-1": {"disk": 1}}
