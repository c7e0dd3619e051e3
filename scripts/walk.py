"""The walk: which modules one FedAvg run enters, in order, and which one deployed round enters.

    python scripts/walk.py [--list]

Calls of functions are traced in every process of the command. What importing a module runs (its
code, decorators, registries), lambdas and comprehensions do not count. A switch is a call in
another module than the call before it in the same thread. For another version:
PYTHONPATH=/path/to/its/src python scripts/walk.py

Only the command line and keys of experiment files are used, and one name, ROUND_HOOK.
"""

import argparse
import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROUND_HOOK = "tick"
"""The function that the server's process calls once a round, when the round is over: the watcher's
hook. What lies between its calls for rounds 1 and 2 is one deployed round. Adjust it if the hook
is renamed; several functions of the name that hear of the same round do no harm."""

ROUNDS = 3
EXPERIMENT = f"""
name = "walk"
seeds = [0]
rounds = {ROUNDS}

[data]
source = "embedded"
partition = {{ name = "iid", clients = 3, per_client = 60 }}

[model]
name = "dnn"
hidden = 12

[training]
batch = 16

[evaluate]
every = 2

[backend]
device = "cpu"
width = 4

[[methods]]
name = "fedavg"
"""

# Python imports a module of this name by itself at every start, so nodes are traced too.
TRACER = """
import os, sys, threading, time

def start(home, out):
    importing = threading.local()  # how many modules are being imported, one inside another

    def traced(frame, event, _):
        code = frame.f_code
        if not code.co_filename.startswith(home):
            return
        name, depth = code.co_name, getattr(importing, "depth", 0)
        caller = frame.f_back and frame.f_back.f_code.co_filename
        if (caller or "").startswith("<frozen importlib"):
            if name == "<module>":
                importing.depth = depth + {"call": 1, "return": -1}.get(event, 0)
        # 2: a function's own locals, which code of modules and classes has not
        elif event == "call" and code.co_flags & 2 and not name.startswith("<") and not depth:
            module = code.co_filename[len(home):]
            thread = threading.get_ident()
            out.write(f"{time.monotonic_ns()}\\t{thread}\\t{module}\\t{name}\\n")

    threading.setprofile(traced)
    sys.setprofile(traced)

if "IDIOLECT_WALK" in os.environ:
    into = os.path.join(os.environ["IDIOLECT_WALK"], f"{os.getpid()}.tsv")
    start(os.environ["IDIOLECT_WALK_HOME"], open(into, "w", buffering=1))
"""


class Call(NamedTuple):
    """One call of a function of the package; times are comparable between processes."""

    time: int
    process: str
    thread: str
    module: str
    function: str


def traced(*options: str) -> list[Call]:
    """Run the experiment in processes of its own; returns all calls in order."""
    spec = importlib.util.find_spec("idiolect")
    if spec is None or not spec.submodule_search_locations:
        sys.exit("idiolect is not installed here")
    home = str(Path(next(iter(spec.submodule_search_locations))).resolve()) + os.sep
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        (folder / "tracer").mkdir()
        (folder / "calls").mkdir()
        (folder / "tracer" / "sitecustomize.py").write_text(TRACER)
        (folder / "e.toml").write_text(EXPERIMENT)
        paths = [str(folder / "tracer"), str(Path(home).parent)]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(paths),
            "IDIOLECT_WALK": str(folder / "calls"),
            "IDIOLECT_WALK_HOME": home,
            "OMP_NUM_THREADS": "1",
        }
        done = subprocess.run(
            [sys.executable, "-m", "idiolect", "run", "e.toml", "--out", "out", *options],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            sys.exit(f"the run failed:\n{done.stderr[-2000:]}")
        found = []
        for path in (folder / "calls").glob("*.tsv"):
            for line in path.read_text().splitlines():
                when, thread, module, function = line.split("\t")
                found.append(Call(int(when), path.stem, thread, module, function))
    return sorted(found)


def one_round(calls: Sequence[Call]) -> list[Call]:
    """Return the calls of the second round, of the server and all nodes together."""
    hooks = [call.time for call in calls if call.function == ROUND_HOOK]
    each = len(hooks) // ROUNDS
    if not hooks or len(hooks) % ROUNDS:
        sys.exit(f"{len(hooks)} calls of {ROUND_HOOK} in {ROUNDS} rounds: adjust ROUND_HOOK")
    found = [call for call in calls if hooks[each - 1] < call.time < hooks[each]]
    if len({call.process for call in found}) < 2:
        sys.exit("no node was traced: do nodes hand PYTHONPATH on?")
    return found


def told(title: str, calls: Sequence[Call], lines: bool) -> None:
    """Print the modules in order of first entry."""
    modules = list(dict.fromkeys(call.module.removesuffix(".py") for call in calls))
    last: dict[tuple[str, str], str] = {}
    switches = 0
    for call in calls:
        before = last.get((call.process, call.thread), call.module)
        switches += before != call.module
        last[call.process, call.thread] = call.module
    print(f"{title}: {len(modules)} modules, {switches:,} switches")
    print("\n".join(f"  {name}" for name in modules) if lines else "  " + " → ".join(modules))


def main() -> None:
    """Print both walks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--list", action="store_true", help="one module a line")
    lines = parser.parse_args().list
    told("one FedAvg run", traced(), lines)
    # scored at the end only, so that round 2 is a round and nothing else
    deployed = traced("--on", "local", "--set", f"evaluate.every={ROUNDS}")
    told("one deployed round", one_round(deployed), lines)


if __name__ == "__main__":
    main()
