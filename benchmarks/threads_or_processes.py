"""Time single clients on a CPU: what they lose between threads of one process.

    PYTHONPATH=src python benchmarks/threads_or_processes.py [SECONDS]

LeNet-5 of `lenet5-20`, width 1: twenty clients in two threads of one process, ten in one thread of
each of two processes side by side, and ten in one process alone. Needs a quiet machine.
"""

import subprocess
import sys
import time
from dataclasses import replace

import torch

from idiolect.bench.workloads import WORKLOADS, federation, simulation
from idiolect.engine.backend import Backend


def measure(threads: int, clients: int, start: float, seconds: float) -> None:
    """Train rounds from a moment on, and print the least and the median time of one."""
    torch.set_num_threads(threads)
    workload = WORKLOADS["lenet5-20"]
    workload = replace(workload, sizes=workload.sizes[:1] * clients)
    backend = Backend("vectorised", "cpu", width=1, kernels="first")
    trained = simulation(workload, federation(workload.sizes, workload.shape), backend)
    for _ in range(2):
        trained.advance()
    time.sleep(max(0.0, start - time.time()))
    found, end = [], time.time() + seconds
    while time.time() < end:
        before = time.perf_counter()
        trained.advance()
        found.append(1e3 * (time.perf_counter() - before))
    median = sorted(found)[len(found) // 2]
    print(f"{threads} threads, {clients} clients: {min(found):.0f} ms, median {median:.0f}")


def main(seconds: float) -> None:
    """Run each of the three ways."""
    for processes, threads, clients in ((1, 2, 20), (2, 1, 10), (1, 1, 10)):
        print(f"{processes} processes")
        given = [threads, clients, time.time() + 15, seconds]
        command = [sys.executable, __file__, *map(str, given)]
        running = [subprocess.Popen(command) for _ in range(processes)]
        for one in running:
            one.wait()


if __name__ == "__main__":
    if len(sys.argv) == 5:
        measure(int(sys.argv[1]), int(sys.argv[2]), *map(float, sys.argv[3:]))
    else:
        main(float(sys.argv[1]) if len(sys.argv) > 1 else 12.0)
