"""What audit log and policy cost, beside a round of a real federation over TLS.

    python benchmarks/audit.py [--rounds 20] [--nodes 4]

A federation on loopback does a run; every second spent in the audit log (hashing, writing, fsync)
and in the gate (signature of the lead, policy, approval) is measured in the processes themselves,
by a clock around each call, and divided by the time that the rounds of the run took, for server and
nodes alike. So the ratio does not depend on how busy the machine is.
"""

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "deploy"))

TIMER = """
import atexit, functools, json, os, sys, threading, time

def _install():
    from idiolect.deploy import audit
    spent, active, since, lock = {}, {}, {}, threading.Lock()

    def timed(owner, name, group):
        inner = getattr(owner, name)
        @functools.wraps(inner)
        def call(*args, **more):
            with lock:  # several threads at once are counted as one
                active[group] = active.get(group, 0) + 1
                if active[group] == 1:
                    since[group] = time.perf_counter()
            try:
                return inner(*args, **more)
            finally:
                with lock:
                    active[group] -= 1
                    if not active[group]:
                        spent[group] = spent.get(group, 0.0) + time.perf_counter() - since[group]
                    told = json.dumps(spent)
                path = os.path.join(os.environ["IDIOLECT_TIMES"], f"{os.getpid()}.json")
                with open(path, "w") as file:
                    file.write(told)
        setattr(owner, name, call)

    for name in ("append", "append_signed", "head"):
        timed(audit.AuditLog, name, "audit")
    if any("node_process" in word for word in sys.orig_argv):
        from idiolect.deploy import gate
        for name in ("admit", "approved", "opened", "refuse_withdrawn"):
            timed(gate.Gate, name, "policy")

if "IDIOLECT_TIMES" in os.environ and any("idiolect" in w or "nvflare" in w for w in sys.orig_argv):
    _install()
"""

EXPERIMENT = """name = "audited"
rounds = {rounds}
[data]
partition = {{ name = "iid", clients = {nodes}, per_client = 100 }}
[model]
name = "dnn"
hidden = 64
[evaluate]
every = 1
[deploy]
timeout = 120
[[methods]]
name = "fedavg"
"""


def main() -> None:
    """Run, measure, print."""
    from running import Running  # the tests' own way to start a federation

    from idiolect.deploy import audit

    given = argparse.ArgumentParser()
    given.add_argument("--rounds", type=int, default=20)
    given.add_argument("--nodes", type=int, default=4)
    wanted = given.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "site").mkdir()
        (folder / "times").mkdir()
        (folder / "site" / "sitecustomize.py").write_text(TIMER)
        os.environ["IDIOLECT_TIMES"] = str(folder / "times")
        os.environ["PYTHONPATH"] = os.pathsep.join([str(folder / "site"), str(ROOT / "src")])
        running = Running(folder, wanted.nodes)
        path = folder / "experiment.toml"
        path.write_text(EXPERIMENT.format(rounds=wanted.rounds, nodes=wanted.nodes))
        try:
            running.start_all()
            running.run(path, folder / "out")
        finally:
            running.close()
        spent: dict[str, float] = {}
        for file in (folder / "times").glob("*.json"):
            for group, seconds in json.loads(file.read_text()).items():
                spent[group] = spent.get(group, 0.0) + seconds
        log = running.kits / "server" / "idiolect" / audit.LOG_FILE
        lines = [one for line in audit.lines_of(log) if (one := audit.read_entry(line))]
        steps = [one for one in lines if one.fields.get("about", {}).get("what") == "step"]
        seconds = lines[-1].seconds - steps[0].seconds
        members = wanted.nodes + 1
        share = {group: own / members / seconds for group, own in spent.items()}
        sizes = {
            name: (running.kits / name / "idiolect" / audit.LOG_FILE).stat().st_size
            for name in ("server", "site-0")
        }
        counts = {kind: sum(one.kind == kind for one in lines) for kind in ("asked", "got")}
        print(
            json.dumps(
                {
                    "rounds": wanted.rounds,
                    "nodes": wanted.nodes,
                    "seconds_a_round": round(seconds / wanted.rounds, 3),
                    "share_of_a_round_by_member": {k: round(v, 4) for k, v in share.items()},
                    "bytes_an_exchange": {
                        "server": round(sizes["server"] / counts["got"]),
                        "node": round(sizes["site-0"] * wanted.nodes / counts["got"]),
                    },
                },
                indent=1,
            )
        )


if __name__ == "__main__":
    main()
