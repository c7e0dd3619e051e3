"""A training that brings its process down, or runs out of memory or disk: that node's own affair.

Each node is a process, and what happens to it is real: the kernel kills it or says no.
"""

import json
import os
import resource
import signal
from pathlib import Path

import crashing
import federations as fed
import pytest

from idiolect.deploy import protocol
from idiolect.deploy.messenger import Transport
from idiolect.deploy.node_process import Processes
from idiolect.deploy.serve_experiment import ServerSettings

NODES, ROUNDS = 2, 3
SETS = (f"data.partition.clients={NODES}", f"rounds={ROUNDS}", f"evaluate.every={ROUNDS}")
VICTIM = "site-1"
HOST = ServerSettings(
    packages=("crashing",)
)  # whoever runs server and nodes allows the fragile network


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("nodes")


@pytest.fixture(scope="module")
def marked(home):
    """The file that names the process in which the fragile network crashes."""
    return home / "victim"


@pytest.fixture(scope="module")
def processes(home, marked):
    """Two nodes for all tests: each is another run, and what has crashed is started again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(
            "PYTHONPATH",
            os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]),
        )
        patch.setenv(crashing.VARIABLE, str(marked))
        patch.setenv("MALLOC_MMAP_THRESHOLD_", str(1 << 20))
        made = Processes(fed.sites(home, NODES, packages=HOST.packages))
        yield made
        made.close()
    assert all(child.pid is None for child in made.children.values())


class Fate(Transport):
    """Passes calls on; lets something happen to one node's process as it gets the second round."""

    def __init__(self, inner, before, after=lambda pid: None, times=1):
        self._inner, self._before, self._after, self._left = inner, before, after, times
        self.sites, self.codes = inner.sites, []

    def call(self, site, blob, seconds):
        message = protocol.unpack(blob)
        mine = site == VICTIM and message.kind == "step" and message.head["round"] == 1
        if not mine or not self._left:
            return self._inner.call(site, blob, seconds)
        self._left -= 1
        pid = self._inner.children[site].pid
        self._before(pid)
        try:
            answer = self._inner.call(site, blob, seconds)
        finally:
            self._after(pid)
        self.codes.append(protocol.unpack(answer).head.get("code"))
        return answer


def faults(folder):
    path = folder / "faults.json"
    return json.loads(path.read_text()) if path.exists() else {}


def state(home, run):
    (path,) = (home / VICTIM).glob(f"state/**/{run}/*.safetensors")
    return path


def missed_one(found, folder, reason):
    """The round goes on without the node's report, the next one with it."""
    part = found["methods"]["FedPer"]["seeds"][0]["traffic"]["participations"]
    assert part == ROUNDS * NODES - 1
    assert faults(folder) == {VICTIM: {reason: 1}}
    return True


def test_a_killed_training_process_is_told_everything_again_and_nothing_is_lost(
    processes, tmp_path
):
    """As the kernel does where memory is short; the node may see it before it passes a task on."""
    wanted = fed.experiment("fedper", sets=("model.name=mlr", *SETS))
    content = fed.simulated(wanted, tmp_path / "simulated")
    fate = Fate(processes, lambda pid: os.kill(pid, signal.SIGKILL))
    found = fed.served(wanted, fate, tmp_path / "served", "killed")
    assert fate.codes in (["crashed"], ["closed"]) and faults(tmp_path / "served") == {}
    assert fed.scores(found, "FedPer") == fed.scores(content, "FedPer")
    assert found["methods"]["FedPer"]["notices"] == content["methods"]["FedPer"]["notices"]


@pytest.mark.parametrize("times", [1, 2])
def test_a_training_that_crashes_is_tried_once_more_and_then_misses_its_round(
    times, processes, marked, tmp_path
):
    """A segmentation fault within the network's own code, amid the training."""
    network = ("model.name=crashing:fragile", 'deploy.packages=["crashing"]')
    wanted = fed.experiment("fedper", sets=(*network, *SETS))
    content = fed.simulated(wanted, tmp_path / "simulated")
    fate = Fate(processes, lambda pid: marked.write_text(str(pid)), times=times)
    found = fed.served(wanted, fate, tmp_path / "served", f"crashed{times}", host=HOST)
    assert fate.codes == ["crashed"] * times
    if times == 1:
        assert faults(tmp_path / "served") == {}
        assert fed.scores(found, "FedPer") == fed.scores(content, "FedPer")
    else:
        assert missed_one(found, tmp_path / "served", "crashed")


def limited(kind, most):
    """Return how to limit a process, and how to lift it again."""

    def limit(pid, size):
        _, hard = resource.prlimit(pid, kind)
        resource.prlimit(pid, kind, (size, hard))

    return lambda pid: limit(pid, most(pid)), lambda pid: limit(pid, resource.RLIM_INFINITY)


def mapped(pid):
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmSize:")[1].split()[0]) << 10


def test_a_training_out_of_memory_costs_a_node_its_round(processes, tmp_path):
    """It may map no more than it has, and whatever is larger than a megabyte must be mapped."""
    sets = ("model.name=dnn", "model.hidden=3200", *SETS)
    before, after = limited(resource.RLIMIT_AS, mapped)
    fate = Fate(processes, before, after)
    found = fed.served(fed.experiment("fedper", sets=sets), fate, tmp_path / "served", "memory")
    assert fate.codes == ["memory"]
    assert missed_one(found, tmp_path / "served", "memory")


def test_a_full_disk_costs_a_node_its_round_and_not_its_state(processes, home, tmp_path):
    """The kernel refuses the write; the state before stays, and the next round is done with it."""
    before, after = limited(resource.RLIMIT_FSIZE, lambda pid: 100)
    kept = []

    def look(pid):
        after(pid)
        kept.append(state(home, "disk").read_bytes())
        assert not list(state(home, "disk").parent.glob(".*.part"))

    def fill(pid):
        kept.append(state(home, "disk").read_bytes())
        before(pid)

    fate = Fate(processes, fill, look)
    wanted = fed.experiment("fedper", sets=("model.name=mlr", *SETS))
    found = fed.served(wanted, fate, tmp_path / "served", "disk")
    assert fate.codes == ["disk"] and kept[0] == kept[1]
    assert missed_one(found, tmp_path / "served", "disk")
