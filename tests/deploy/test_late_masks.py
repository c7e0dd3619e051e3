"""A masked report that comes after the timeout, over the real engine. `make test-faults`."""

import importlib.util
import os
from pathlib import Path

import delaying
import federations as fed
import numpy as np
import pytest
from running import Running
from test_secure_sum import values_of

from idiolect.deploy import protocol, secure_aggregation
from idiolect.deploy.node_process import InProcess
from idiolect.deploy.protocol import Refused, read_shares
from idiolect.deploy.secure_aggregation import SHARE

pytestmark = [
    pytest.mark.faults,
    pytest.mark.skipif(
        importlib.util.find_spec("nvflare") is None, reason="nvflare is not installed (extra flare)"
    ),
]
LATE, SLOW, TIMEOUT = "site-3", "site-0", 20
TOML = f"""name = "late"
rounds = 3
[data]
partition = {{ name = "iid", clients = 4, per_client = 40 }}
[model]
name = "dnn"
hidden = 8
[evaluate]
every = 3
[backend]
kind = "sequential"
checkpoint_every = 1
[deploy]
timeout = {TIMEOUT}
minimum = 3
secure = true
[[methods]]
name = "fedavg"
"""
PATCH = """
import sys

if any("{process}" in word for word in sys.orig_argv):
    import delaying

    delaying.{call}
"""


class Lost(InProcess):
    """The same within this process: what is right among the survivors, and the late report."""

    def call(self, site, blob, seconds):
        message = protocol.unpack(blob)
        answer = super().call(site, blob, seconds)
        if (site, message.kind, message.head.get("round")) == (LATE, "mask", 0):
            self.late = values_of(self._nodes, site)
            raise Refused("timeout")
        return answer


def patched(folder, process, call):
    """Return the environment of a process whose jobs do something else."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(PATCH.format(process=process, call=call))
    here = [str(folder), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(here), delaying.VIEW: str(folder / "view")}


def test_a_masked_report_after_the_timeout_tells_the_server_nothing(tmp_path):
    running = Running(tmp_path, 4)
    path, out = tmp_path / "late.toml", tmp_path / "out"
    path.write_text(TOML)
    server = patched(tmp_path / "noting", "runner_process", "note()")
    slow = f"delay('step', 1, {TIMEOUT - 8})"  # so that the late report comes before the end
    delays = {LATE: f"delay('mask', 0, {TIMEOUT + 4})", SLOW: slow}
    try:
        running.start("server", environment=server)
        for number, site in enumerate(running.sites):
            more = {}
            if site in delays:
                more = patched(tmp_path / f"{site}-patch", "client_train", delays[site])
            options = ("--data", "embedded", "--client", str(number))
            running.start(site, *options, environment=more)
        running.run(path, out)
    finally:
        running.close()
    lost = Lost(fed.inside(tmp_path / "nodes")._nodes)
    fed.served(fed.experiment(toml=TOML), lost, tmp_path / "expected")
    states = [fed.server_state(folder, "FedAvg") for folder in (out, tmp_path / "expected")]
    assert fed.largest_gap(*states) < 1e-6

    view = [one for one in delaying.noted(tmp_path / "noting" / "view") if "of" in one[1].head]
    first = [one for one in view if one[1].head["round"] == 0]
    told = {(site, asked.kind): (asked, answer) for site, asked, answer in first}
    assert len(told) == len(first)  # nobody was asked twice in that round
    masked = {
        site: told[site, "mask"][1].leaves["masked"].numpy().view(np.uint64)
        for site in running.sites
    }  # the late one too
    asked = told[SLOW, "shares"][0]
    members = {
        name: secure_aggregation.Keys.read(own) for name, own in asked.head["members"].items()
    }
    revealed = {
        site: read_shares(told[site, "unmask"][1], running.sites, SHARE)
        for site in running.sites
        if site != LATE
    }
    assert (LATE, "unmask") not in told and all(keys.signature for keys in members.values())
    others = {site: own for site, own in masked.items() if site != LATE}
    total = secure_aggregation.unmasked(asked.sum_id(), members, others, revealed)
    whole = sum(masked.values())
    assert not (whole - total == lost.late).any()  # the attack that gave the report
    # Nor do the shares: all that were revealed of that node are of its key, none of its seed.
    shares = {running.sites.index(site) + 1: own[LATE] for site, own in revealed.items()}
    secure_aggregation._recovered(shares, LATE, members, survived=False)
    assert LATE in {site for site, asked, _ in view if asked.head["round"] == 2}  # it is back
