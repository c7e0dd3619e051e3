"""Time Portfolio against FedAvg + fine-tuning at the same rounds.

    python benchmarks/portfolio.py [EXPERIMENT.toml...] [--set KEY=VALUE...]

Each method has a process of its own, after a round that compiles and measures; the seconds are
training and judging, without reading data. They are kept in benchmarks/results/portfolio.json, from
which scripts/reproduce_portfolio.py fills docs/portfolio.md. Run it on an idle machine.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
FILES = [
    HERE.parent / "experiments" / "portfolio" / f"{n}.toml" for n in ("mnist-ds1", "cifar10-ds1")
]
METHODS = ("FedAvg + FT", "Portfolio")
# Every candidate is scored in the tables only; a user's run scores the chosen model.
QUIET = ("methods.Portfolio.keep_candidates=false", "evaluate.save_models=false")


def seconds(file, method, home, sets):
    """Run one method; return its seconds and its device."""
    out = home / f"{file.stem}-{method[:3]}"
    words = [sys.executable, "-m", "idiolect", "run", str(file), "--method", method, "--json"]
    for one in (*QUIET, *sets):
        words += ["--set", one]
    environment = {**os.environ, "IDIOLECT_CACHE": str(home / "cache")}
    warm = ["--set", "rounds=1", "--set", "training.tune_epochs=1", "--set", "evaluate.every=1"]
    for more in ([*warm, "--out", f"{out}-warm"], ["--out", str(out)]):
        done = subprocess.run(
            [*words, *more], capture_output=True, text=True, check=False, env=environment
        )
        if done.returncode:
            raise SystemExit(f"{file.name}, {method}: {done.stderr[-2000:]}")
    found = json.loads(done.stdout)["result"]["methods"][method]
    return found["speed"]["seconds"], found["device"], found["rounds"]


def main():
    words = sys.argv[1:]
    cut = words.index("--set") if "--set" in words else len(words)
    files, sets = [Path(word) for word in words[:cut]] or FILES, words[cut + 1 :]
    path = HERE / "results" / "portfolio.json"
    kept = {one["name"]: one for one in json.loads(path.read_text())} if path.exists() else {}
    with tempfile.TemporaryDirectory() as scratch:
        for file in files:
            plain, device, rounds = seconds(file, METHODS[0], Path(scratch), sets)
            ours, _, _ = seconds(file, METHODS[1], Path(scratch), sets)
            name = f"{file.stem}, {rounds} rounds" + (f", {' '.join(sets)}" if sets else "")
            kept[name] = {"name": name, "device": device, "plain": plain, "ours": ours}
            print(f"{name}: {plain:.1f} s and {ours:.1f} s, {ours / plain:.2f} times as long")
    path.write_text(json.dumps(list(kept.values()), indent=1) + "\n")


if __name__ == "__main__":
    main()
