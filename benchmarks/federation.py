"""What a round costs on a real federation beside its training: FLARE, TLS, four nodes on loopback.

python benchmarks/federation.py [--rounds 40] [--memory 200]

Round overhead is the time of a round of FedAvg with one step on one batch, at a model of 50 kB and
one of 5 MB; memory is that of a node's processes after every tenth round.
"""

import argparse
import json
import sys
import tempfile
import threading
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent.parent / "tests" / "deploy")]
from running import Running  # noqa: E402

TOML = """
name = "overhead"
rounds = {rounds}
[data]
partition = {{ name = "iid", clients = 4, per_client = 20 }}
[model]
name = "dnn"
hidden = {hidden}
[training]
batch = 12
lr = 0.01
[evaluate]
every = {rounds}
[[methods]]
name = "fedavg"
"""


def resident(pids: list[int]) -> float:
    """Return the megabytes that some processes hold."""
    total = 0
    for pid in pids:
        try:
            status = Path(f"/proc/{pid}/status").read_text()
        except OSError:
            continue
        if "VmRSS:" in status:  # a process that has just ended has none
            total += int(status.split("VmRSS:")[1].split()[0])
    return total / 1024


def trainers(running: Running, site: str) -> list[int]:
    """Return a node's processes with the child that trains."""
    own = running.engine(site)
    found = list(own)
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                parent = int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1])
            except OSError:
                continue
            if parent in own and int(folder.name) not in own:
                found.append(int(folder.name))
    return found


def measure(running: Running, hidden: int, rounds: int, watch: bool) -> dict[str, object]:
    path = running.folder / f"{hidden}-{rounds}.toml"
    path.write_text(TOML.format(hidden=hidden, rounds=rounds))
    out = running.folder / f"out-{hidden}-{rounds}"
    seen: list[float] = []
    done = threading.Event()

    def look() -> None:
        while not done.wait(1.0):
            own = trainers(running, "site-1")
            if len(own) == 3:  # the lasting process, the job's, and the one that trains
                seen.append(resident(own))

    watcher = threading.Thread(target=look)
    if watch:
        watcher.start()
    began = time.perf_counter()
    running.run(path, out)
    wall = time.perf_counter() - began
    done.set()
    if watch:
        watcher.join()
    method = json.loads((out / "result.json").read_text())["methods"]["FedAvg"]
    traffic = method["seeds"][0]["traffic"]
    found: dict[str, object] = {
        "bytes of a message": round(traffic["bytes_down"] / traffic["participations"]),
        "seconds a round": round(method["speed"]["train_seconds"] / rounds, 3),
        "seconds of the whole command": round(wall, 1),
    }
    if watch:
        quarter = max(1, len(seen) // 4)
        found["MB of a node, its second and last quarter of the run"] = [
            round(sum(part) / len(part)) for part in (seen[quarter : 2 * quarter], seen[-quarter:])
        ]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=40, help="0: measure memory only")
    parser.add_argument("--memory", type=int, default=200, help="rounds of the memory run; 0: none")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        running = Running(Path(folder))
        try:
            running.start_all()
            for hidden in (16, 1580) if asked.rounds else ():  # 50 kB and 5 MB of parameters
                print(json.dumps(measure(running, hidden, asked.rounds, False)), flush=True)
            if asked.memory:
                print(json.dumps(measure(running, 16, asked.memory, True)), flush=True)
        finally:
            running.close()


if __name__ == "__main__":
    main()
