"""Time a comparison of six methods over five seeds, whole, and killed half-way and given again.

    python benchmarks/compare.py [EXPERIMENT.toml]

Prints seconds, and fails if a part that was finished when the process was killed (SIGKILL) was
written again. Both runs start with an empty cache, so that measuring widths counts too.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from idiolect.core import checkpoint

EXPERIMENT = Path(__file__).parent.parent / "experiments" / "six-methods.toml"


def command(experiment, out):
    return [sys.executable, "-m", "idiolect", "compare", str(experiment), "--out", str(out)]


def timed(experiment, out, cache):
    start = time.monotonic()
    done = subprocess.run(
        [*command(experiment, out), "--json"],
        capture_output=True,
        text=True,
        check=True,
        env=environment(cache),
    )
    seconds = time.monotonic() - start
    told = json.loads(done.stdout)["result"]["splits"][0]["comparison"]
    return seconds, told


def environment(cache):
    import os

    return {**os.environ, "IDIOLECT_CACHE": str(cache)}


def finished(out):
    """Say when each finished checkpoint was written."""
    found = {}
    for path in out.rglob("checkpoints/[!.]*.safetensors"):
        if checkpoint.read(path)[1]["finished"]:
            found[path] = path.stat().st_mtime_ns
    return found


def main():
    experiment = Path(sys.argv[1]) if len(sys.argv) > 1 else EXPERIMENT
    with tempfile.TemporaryDirectory() as scratch:
        home = Path(scratch)
        whole, told = timed(experiment, home / "whole", home / "cache-whole")
        print(f"{len(told['methods'])} methods x {len(told['seeds'])} seeds: {whole:.0f} s")
        print(told["verdict"]["sentence"])
        process = subprocess.Popen(
            command(experiment, home / "cut"),
            stdout=subprocess.DEVNULL,
            env=environment(home / "cache-cut"),
        )
        time.sleep(whole / 2)
        process.kill()
        process.wait()
        before = finished(home / "cut")
        rest, again = timed(experiment, home / "cut", home / "cache-cut")
        after = finished(home / "cut")
        print(
            f"killed after {whole / 2:.0f} s with {len(before)} of {len(after)} parts finished, "
            f"then {rest:.0f} s more"
        )
        repeated = [path for path, at in before.items() if after[path] != at]
        if repeated:
            sys.exit(f"finished work was repeated: {repeated[0]}")
        print(f"the same means: {means(again) == means(told)}")


def means(told):
    return {label: round(own["mean"], 6) for label, own in told["methods"].items()}


if __name__ == "__main__":
    main()
