"""A node with a full disk, and one whose program lies: over the real engine, and for real.

Run by `make test-faults`. The same lies are told within one process in test_server.py.
"""

import importlib.util
import os
import re
import shutil
import subprocess
import time
from collections import Counter
from pathlib import Path

import disturbing
import federations as fed
import pytest
from disturbing import FEWER, NODES, ROUNDS
from meddling import RUBBISH, Meddler
from running import Running

from idiolect.deploy import protocol
from idiolect.deploy.node_process import InProcess

pytestmark = [
    pytest.mark.faults,
    pytest.mark.skipif(
        importlib.util.find_spec("nvflare") is None, reason="nvflare is not installed (extra flare)"
    ),
]
VICTIM = ("site-2", "--data", "embedded", "--client", "2")


@pytest.fixture
def federation(tmp_path):
    """Everyone but the last node."""
    running = Running(tmp_path, NODES)
    try:
        running.start("server")
        for number, site in enumerate(running.sites[:-1]):
            running.start(site, "--data", "embedded", "--client", str(number))
        yield running
    finally:
        running.close()


def expected(transport, folder):
    """Return what a run over other nodes, in this process, ends with."""
    wanted = fed.experiment(toml=disturbing.TOML, sets=FEWER[1:])
    return fed.served(wanted, transport, folder), fed.server_state(folder, "FedPer")


LIAR = """
import sys

if any("client_train" in word for word in sys.orig_argv):
    import meddling

    meddling.install()
"""


def test_a_node_that_lies_is_left_out_of_every_round_it_lies_in(federation, tmp_path):
    """After an honest round one lie of each kind; the result is that of a node which said no.

    What is not even bytes cannot be signed, so that counts as of nobody (`identity`).
    """
    (tmp_path / "liar").mkdir()
    (tmp_path / "liar" / "sitecustomize.py").write_text(LIAR)
    paths = [str(tmp_path / "liar"), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    federation.start(*VICTIM, environment={"PYTHONPATH": os.pathsep.join(paths)})
    sets = ("--set", "deploy.limit_mb=1", "--set", "deploy.patience=100")
    out, _ = disturbing.disturbed(federation, "lies", lambda: None, *FEWER, *sets)
    lies = Counter(reason for reason, _ in RUBBISH.values()) + Counter(["round", "identity"])
    assert disturbing.faults(out) == {"site-2": dict(lies)}
    assert lies.total() == ROUNDS - 1
    assert disturbing.participations(out) == NODES * ROUNDS - lies.total()
    nodes = fed.inside(tmp_path / "nodes", NODES)._nodes
    no = Meddler(nodes, "site-2", lambda _: protocol.refusal("failed"), range(1, ROUNDS))
    disturbing.check_nothing_lost(out, expected(no, tmp_path / "expected"))


class Absent(InProcess):
    """Nodes, one of which does not do some rounds."""

    def __init__(self, nodes, site, rounds):
        super().__init__(nodes)
        self._site, self._rounds = site, rounds

    def call(self, site, blob, seconds):
        message = protocol.unpack(blob)
        if site == self._site and message.kind == "step":
            if message.head["round"] + 1 in self._rounds:
                return protocol.refusal("disk")
        return super().call(site, blob, seconds)


# The kit moves to a disk of its own, which only this process and what it starts can see.
DISK = 'cp -a "$1" "$2" && mount -t tmpfs -o size=16m tmpfs "$1" && cp -a "$2/." "$1" && shift 2'


def mounting():
    """Say whether a process may have a small disk of its own here."""
    tried = ["unshare", "-Urm", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    return shutil.which("unshare") and not subprocess.run(tried, capture_output=True).returncode


@pytest.mark.skipif(not mounting(), reason="no file systems can be mounted here (unshare, tmpfs)")
def test_a_full_disk_costs_a_node_rounds_and_not_its_state(federation, tmp_path):
    """All of a node's kit, its logs too, is on the disk, which is filled amid the run for a while.

    The result is that of a run in which the node did not do the rounds it missed.
    """
    kit = federation.kits / "site-2"
    disk = ["unshare", "-Urm", "sh", "-c", f'{DISK} && exec "$@"', "sh", str(kit), f"{kit}-copy"]
    federation.start(*VICTIM, before=disk)
    root = Path(f"/proc/{federation.processes['site-2'].pid}/root")
    seen = root / kit.relative_to("/")
    states = []

    def fill():
        with (seen / "ballast").open("wb", buffering=0) as file:
            with pytest.raises(OSError, match="No space left"):
                while file.write(bytes(4096)):
                    pass
            (path,) = seen.glob("idiolect/state/test/*/*/*.safetensors")
            # A write under way ends one way or the other; after the first refusal nothing changes.
            told = federation.kits / "server" / "idiolect" / "runs" / path.parent.name
            until = time.monotonic() + 120
            while disturbing.faults(told) == {} and time.monotonic() < until:
                time.sleep(0.05)
            states.extend([path.read_bytes(), list(path.parent.glob(".*.part"))])
        (seen / "ballast").unlink()

    out, _ = disturbing.disturbed(federation, "disk", fill, *FEWER)
    missed = disturbing.faults(out)["site-2"]
    assert set(missed) == {"disk"} and disturbing.participations(out) + missed["disk"] == 36
    log = (seen / "idiolect" / "node.log").read_text(errors="replace")
    done = {int(number) for number in re.findall(r"round (\d+) of FedPer is done", log)}
    assert len(done) == ROUNDS - missed["disk"] and ROUNDS in done
    assert states[0] and not states[1]
    assert disturbing.personal(federation, out, 2, root)[1] == ROUNDS
    nodes = fed.inside(tmp_path / "nodes", NODES)._nodes
    absent = Absent(nodes, "site-2", set(range(1, ROUNDS + 1)) - done)
    disturbing.check_nothing_lost(out, expected(absent, tmp_path / "expected"))
