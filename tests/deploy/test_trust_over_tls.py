"""Approval, renewal, revocation and audit over the real engine. `make test-faults`."""

import importlib.util
import json
import subprocess
import sys
import time

import pytest
from running import ADMIN, SMALL, CommandFailed, Running

from idiolect.deploy import audit, audit_check
from idiolect.deploy.approval import Approvals
from idiolect.deploy.flare import site_keys
from idiolect.deploy.identity import Authority
from idiolect.experiment.federation_file import load_project

pytestmark = [
    pytest.mark.faults,
    pytest.mark.skipif(
        importlib.util.find_spec("nvflare") is None, reason="nvflare is not installed (extra flare)"
    ),
]
TOML = """name = "trusted"
rounds = 300
[data]
partition = { name = "iid", clients = 3, per_client = 40 }
[model]
name = "dnn"
hidden = 8
[evaluate]
every = 300
[deploy]
timeout = 60
join = 60
minimum = 2
approval = 120
[[methods]]
name = "fedavg"
"""


def until(seconds, found):
    end = time.monotonic() + seconds
    while not found():
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.2)


def rounds(running, site):
    """Count the rounds that a site's log has answered."""
    path = running.kits / site / "idiolect" / audit.LOG_FILE
    if not path.exists():
        return 0
    known = [one for line in audit.lines_of(path) if (one := audit.read_entry(line))]
    about = [one.fields.get("about", {}).get("what") for one in known]
    return about.count("step")


def checked(running):
    kits = [running.kits / name for name in ("server", *running.sites)]
    return audit_check.check(audit_check.log_paths(kits), Authority.from_kit(kits[0]))


def test_a_run_is_approved_renewed_and_cut_off_and_the_logs_tell_it_all(tmp_path):
    running = Running(tmp_path, 3)
    project, path = tmp_path / "project.toml", tmp_path / "trusted.toml"
    path.write_text(TOML)
    running.allow("site-0", SMALL + "require_approval = true\n")
    running.allow("site-1", SMALL + f'submitters = ["{ADMIN}"]\n')
    words = [sys.executable, "-m", "idiolect", "run", str(path)]
    words += ["--on", str(running.kits / ADMIN), "--out", str(tmp_path / "out")]
    site, members = running.kits / "site-1", load_project(project)
    said = running.command("federation", "request", str(site)).stdout
    print_ = said.split("fingerprint of the key: ")[1].splitlines()[0]
    out = ("--out", str(running.kits), "--fingerprint", print_)
    running.command("federation", "approve", str(project), str(site / "site-1.csr"), *out)
    renewed = running.kits / "renewed" / "site-1"
    try:
        running.start_all()
        with (tmp_path / "lead.txt").open("w") as told:
            lead = subprocess.Popen(words, stdout=told, stderr=told, cwd=tmp_path)
        kit = running.kits / "site-0"
        until(120, lambda: Approvals(kit / "idiolect").all())
        assert rounds(running, "site-1") == 0  # nobody trains before the yes
        assert "waits for a yes or no" in running.command("node", "status", str(kit)).stdout
        running.command("node", "approve", str(kit), "--yes")
        until(120, lambda: rounds(running, "site-1") >= 2)
        # A site's new certificate, of a key of its own, is put in place; another site is revoked.
        site_keys.install(site, renewed)
        before = rounds(running, "site-2")
        site_keys.revoke_members(members, running.kits, ["site-2"], "", None)
        lead.wait(240)
        assert lead.returncode == 0, (tmp_path / "lead.txt").read_text()
        assert before < 200 and rounds(running, "site-2") < 200
        assert rounds(running, "site-1") >= 300  # one may have been asked for twice
        found = json.loads((tmp_path / "out" / "result.json").read_text())
        there = found["methods"]["FedAvg"]["seeds"][0]["attendance"]
        assert there["site-2"]["missed"] > 100 and "revoked" in json.dumps(there["site-2"])
        assert there["site-1"]["missed"] == 0
        shown = running.command("status", str(running.kits / ADMIN)).stdout
        assert "certificate of localhost: until" in shown
    finally:
        running.close()
    told = checked(running)
    assert not told.problems and told.exchanges > 30
    heads = audit_check.log_paths([tmp_path / "out", running.kits / "site-0"])
    assert not audit_check.check(heads, Authority.from_kit(kit)).problems
    log = (running.kits / "site-0" / "idiolect" / audit.LOG_FILE).read_text().splitlines()
    run = next(json.loads(line) for line in log if '"kind":"run"' in line)
    assert run["submitter"] == ADMIN and run["approved"] and run["promise"]["secure"] is False
    # Someone takes an answer out of a site's log.
    place = max(n for n, line in enumerate(log) if '"kind":"answered"' in line)
    whole = log[:place] + log[place + 1 :]
    (running.kits / "site-0" / "idiolect" / audit.LOG_FILE).write_text("\n".join(whole) + "\n")
    with pytest.raises(CommandFailed) as failed:
        kits = [str(running.kits / name) for name in ("server", *running.sites)]
        running.command("audit", "verify", *kits)
    assert failed.value.done.returncode == 12 and "denies an answer" in failed.value.done.stdout


def test_kill_9_of_server_and_node_leaves_logs_that_agree(tmp_path):
    running = Running(tmp_path, 3)
    path = tmp_path / "trusted.toml"
    path.write_text(TOML)
    words = [sys.executable, "-m", "idiolect", "run", str(path)]
    words += ["--on", str(running.kits / ADMIN), "--out", str(tmp_path / "out")]
    try:
        running.start_all()
        lead = subprocess.Popen(words, stdout=subprocess.DEVNULL, cwd=tmp_path)
        until(120, lambda: rounds(running, "site-1") >= 2)
        for name in ("site-0", "server"):
            for pid in running.engine(name):
                subprocess.run(["kill", "-9", str(pid)], check=False)
            time.sleep(3)
        lead.wait(240)
        assert lead.returncode == 0
    finally:
        running.close()
    assert not checked(running).problems
