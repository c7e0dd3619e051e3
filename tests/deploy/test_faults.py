"""What dies in a real federation, killed for real: the run ends with the fault-free result.

Run by `make test-faults`. A node's training process that dies, and rubbish on the wire, are tested
with every run of the tests too: see test_crashes.py, test_server.py and test_node.py.
"""

import importlib.util
import signal

import disturbing
import federations as fed
import pytest
from disturbing import (
    FEWER,
    NODES,
    ROUNDS,
    check_nothing_lost,
    check_state_on_nodes,
    kill,
)
from running import Running

pytestmark = [
    pytest.mark.faults,
    pytest.mark.skipif(
        importlib.util.find_spec("nvflare") is None, reason="nvflare is not installed (extra flare)"
    ),
]


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    running = Running(tmp_path_factory.mktemp("faults"), NODES)
    try:
        running.start_all()
        yield running
    finally:
        running.close()


@pytest.fixture(scope="module")
def faultless(tmp_path_factory):
    folder = tmp_path_factory.mktemp("simulated")
    content = fed.simulated(fed.experiment(toml=disturbing.TOML), folder)
    return content, fed.server_state(folder, "FedPer")


def lasting(federation, name):
    pid, *_ = federation.engine(name)
    return pid


def test_the_process_of_a_run_is_killed(federation, faultless):
    """On the server, which puts the run into its queue again: it goes on from its last round."""

    def fault():
        _, *jobs = federation.engine("server")
        kill(*jobs)

    out, _ = disturbing.disturbed(federation, "job", fault)
    check_nothing_lost(out, faultless)
    check_state_on_nodes(federation, out)


def test_the_terminal_is_gone_and_a_node_dies(federation, faultless):
    """The run goes on at the server, waits for the node, and is watched to its end afterwards."""
    (federation.folder / "faults.toml").write_text(disturbing.TOML)
    out = federation.folder / "terminal"
    run = disturbing.begun(federation, out)
    run.kill()
    run.wait()
    kill(*federation.engine("site-1"))
    federation.run(federation.folder / "faults.toml", out, "--resume")
    check_nothing_lost(out, faultless)
    check_state_on_nodes(federation, out)


def test_a_nodes_training_process_crashes(federation, faultless):
    """A segmentation fault amid a round: it is that node's, which is told all again; no new job."""
    log = federation.kits / "site-1" / "idiolect" / "node.log"
    opened = []

    def fault():
        opened.append(log.read_text().count("opened run"))
        kill(*federation.training("site-1"), sign=signal.SIGSEGV)

    out, _ = disturbing.disturbed(federation, "training", fault)
    assert disturbing.faults(out) == {}
    assert log.read_text().count("opened run") == opened[0] + 1
    check_nothing_lost(out, faultless)
    check_state_on_nodes(federation, out)


def test_a_nodes_lasting_process_is_killed(federation, faultless):
    """`idiolect node` starts another; as all must report (minimum), the round is done again."""
    fault = lambda: kill(lasting(federation, "site-1"))  # noqa: E731
    out, _ = disturbing.disturbed(federation, "parent", fault)
    check_nothing_lost(out, faultless)
    check_state_on_nodes(federation, out)


def test_the_server_is_killed(federation, faultless):
    fault = lambda: kill(*federation.engine("server"))  # noqa: E731
    out, _ = disturbing.disturbed(federation, "server", fault)
    check_nothing_lost(out, faultless)
    check_state_on_nodes(federation, out)


def test_everything_is_killed_at_once(federation, faultless):
    def fault():
        names = ("server", *federation.sites)
        kill(*(pid for name in names for pid in federation.engine(name)))

    out, _ = disturbing.disturbed(federation, "all", fault)
    check_nothing_lost(out, faultless)
    check_state_on_nodes(federation, out)


def test_a_nodes_machine_is_lost_and_comes_back(federation, faultless):
    """All processes of a node: the others go on, and it is let in again when it is back."""
    fault = lambda: kill(*federation.engine("site-2"))  # noqa: E731
    out, _ = disturbing.disturbed(federation, "node", fault, *FEWER)
    part = disturbing.participations(out)
    assert (NODES - 1) * ROUNDS <= part <= NODES * ROUNDS
    if part == NODES * ROUNDS:
        check_nothing_lost(out, faultless)
    for number in range(NODES - 1):
        assert disturbing.personal(federation, out, number)[1] == ROUNDS
    assert 1 <= disturbing.personal(federation, out, NODES - 1)[1] <= ROUNDS
