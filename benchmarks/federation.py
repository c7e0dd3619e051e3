"""What a round costs on a real federation beside its training: FLARE, TLS, four nodes on loopback.

python benchmarks/federation.py [--rounds 40] [--memory 240]

Prints two tables in markdown. Overhead: how long a round of FedAvg takes with one step on one
small batch, at a model of 50 kB and one of 5 MB, from node to node; the first rounds are left out.
Memory: what a node's and the server's processes hold after every 20th round, and the slope of a
line through that with its 95 % interval.
"""

import argparse
import statistics
import sys
import tempfile
import threading
import time
from datetime import datetime
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
SITE = "site-1"
HIDDEN = {"50 kB": 16, "5 MB": 1580}  # units that make a model this large
WARM = 3  # rounds that are left out
STEP = 20  # rounds between two looks at memory
_MARK = "of FedAvg is done"


class Diary:
    """A node's own log, which tells each round as it ends, and when."""

    def __init__(self, running: Running) -> None:
        self._path = running.kits / SITE / "idiolect" / "node.log"
        self._start = self._path.stat().st_size if self._path.exists() else 0

    def rounds(self) -> list[float]:
        """Return when each round of this run ended, in seconds."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._start)
            lines = file.read().decode(errors="replace").splitlines()
        stamps = [" ".join(line.split()[:2]) for line in lines if line.endswith(_MARK)]
        return [datetime.strptime(one, "%Y-%m-%d %H:%M:%S,%f").timestamp() for one in stamps]


def resident(pid: int) -> float:
    """Return the megabytes of its own that a process holds; a process that has ended has none."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return float("nan")
    words = status.split("RssAnon:")
    return int(words[1].split()[0]) / 1024 if len(words) > 1 else float("nan")


def cast(running: Running) -> dict[str, int]:
    """Return the processes that take part in a run, once all are there."""
    node, own, server = running.engine(SITE), running.training(SITE), running.engine("server")
    if len(node) != 1 or len(server) != 2 or len(own) != 1:
        return {}
    names = ("node, lasting", "node, training", "server, lasting", "server, job")
    return dict(zip(names, (*node, *own, *server), strict=True))


def run(running: Running, name: str, rounds: int, look: bool) -> tuple[list[float], dict]:
    """Run an experiment; return when a node's rounds ended, and what was held after which."""
    path = running.folder / f"{name.replace(' ', '')}-{rounds}.toml"
    path.write_text(TOML.format(hidden=HIDDEN[name], rounds=rounds))
    diary = Diary(running)
    held: dict[int, dict[str, float]] = {}
    over = threading.Event()

    def watch() -> None:
        pids: dict[str, int] = {}
        while not over.wait(0.1):
            done = len(diary.rounds())
            pids = pids or (cast(running) if done else {})
            mark = done // STEP * STEP
            if pids and mark and mark not in held:
                held[mark] = {who: resident(pid) for who, pid in pids.items()}

    watcher = threading.Thread(target=watch)
    if look:
        watcher.start()
    try:
        running.run(path, path.with_suffix(".out"))
    finally:
        over.set()
    if look:
        watcher.join()
    return diary.rounds(), held


def slope(held: dict[int, float]) -> tuple[float, float]:
    """Fit a line to megabytes over rounds; return kB a round and half its 95 % interval."""
    from scipy import stats

    x, y = zip(*held.items(), strict=True)
    line = stats.linregress(x, y)
    half = line.stderr * float(stats.t.ppf(0.975, len(x) - 2)) if len(set(y)) > 1 else 0.0
    return 1024 * line.slope, 1024 * half


def row(*cells: object) -> None:
    print("| " + " | ".join(str(cell) for cell in cells) + " |", flush=True)


def overhead(running: Running, rounds: int) -> None:
    row("model", "seconds a round: median", "fastest", "slowest", "rounds")
    row(*["---"] * 5)
    for name in HIDDEN:
        ends, _ = run(running, name, rounds + WARM, False)
        took = [b - a for a, b in zip(ends[WARM - 1 :], ends[WARM:], strict=False)]
        figures = (statistics.median(took), min(took), max(took))
        row(name, *(f"{one:.3f}" for one in figures), len(took))
    print()


def memory(running: Running, rounds: int) -> None:
    _, held = run(running, "50 kB", rounds, True)
    marks = sorted(held)
    row("MB of its own after round", *marks, "kB a round")
    row(*["---"] * (len(marks) + 2))
    everyone = list(held[marks[0]])
    groups = {**{who: [who] for who in everyone}, "node, all": [w for w in everyone if "node" in w]}
    for who, parts in groups.items():
        seen = {mark: sum(held[mark][one] for one in parts) for mark in marks}
        found, half = slope(seen)
        row(who, *(f"{seen[mark]:.1f}" for mark in marks), f"{found:+.2f} ± {half:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=40, help="0: measure memory only")
    parser.add_argument("--memory", type=int, default=240, help="rounds of the memory run; 0: none")
    asked = parser.parse_args()
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        running = Running(Path(folder))
        try:
            running.start_all()
            if asked.rounds:
                overhead(running, asked.rounds)
            if asked.memory:
                memory(running, asked.memory)
        finally:
            running.close()
    print(f"\n{time.perf_counter() - began:.0f} seconds in all")


if __name__ == "__main__":
    main()
