"""Count how often a step of a single client releases Python's lock.

    PYTHONPATH=src python benchmarks/lock_releases.py

LeNet-5 of `lenet5-20`, width 1, one thread: two clients with one epoch and with two, of which the
difference is of the steps alone. A library that counts calls of `PyEval_SaveThread` is compiled and
preloaded, so it needs gcc and Linux. Other work on the machine does not change what it counts.
"""

import ctypes
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

from idiolect.bench.workloads import WORKLOADS, federation, simulation
from idiolect.engine.backend import Backend

SOURCE = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdatomic.h>
static atomic_long count;
long lock_releases(void) { return count; }
void *PyEval_SaveThread(void) {
    static void *(*real)(void);
    if (!real) real = dlsym(RTLD_NEXT, "PyEval_SaveThread");
    count++;
    return real();
}
"""
CLIENTS = 2


def releases(library: ctypes.PyDLL, epochs: int) -> tuple[int, int]:
    """Return how often the lock is released in the third round, and of how many steps that is."""
    workload = WORKLOADS["lenet5-20"]
    method = replace(workload.method, epochs=epochs)
    workload = replace(workload, sizes=workload.sizes[:1] * CLIENTS, method=method)
    backend = Backend("vectorised", "cpu", width=1, kernels="first")
    trained = simulation(workload, federation(workload.sizes, workload.shape), backend)
    for _ in range(2):
        trained.advance()
    before = library.lock_releases()
    trained.advance()
    steps = CLIENTS * epochs * -(-workload.sizes[0] // method.batch)
    return library.lock_releases() - before, steps


def main() -> None:
    """Start again under the library, and count."""
    preloaded = os.environ.get("LD_PRELOAD", "")
    if not preloaded:
        with tempfile.TemporaryDirectory() as folder:
            source, made = Path(folder, "count.c"), Path(folder, "count.so")
            source.write_text(SOURCE)
            subprocess.run(["gcc", "-shared", "-fPIC", "-o", made, source, "-ldl"], check=True)
            given = {**os.environ, "LD_PRELOAD": str(made)}
            sys.exit(subprocess.run([sys.executable, __file__], env=given).returncode)
    torch.set_num_threads(1)
    library = ctypes.PyDLL(preloaded)  # CDLL would release the lock itself
    library.lock_releases.restype = ctypes.c_long
    (few, fewer), (many, more) = releases(library, 1), releases(library, 2)
    print(f"a step releases the lock {(many - few) / (more - fewer):.1f} times")


if __name__ == "__main__":
    main()
