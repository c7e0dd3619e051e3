"""Say where the GPU's time goes in a captured training round: the kernels, by time.

PYTHONPATH=src python benchmarks/kernels.py [--method fedavg] [--model lenet5] [--clients 50]
"""

import argparse

import torch
from torch.profiler import ProfilerActivity, profile

from idiolect.bench.workloads import CLASSES, federation
from idiolect.engine.architecture import Architecture
from idiolect.engine.backend import Backend
from idiolect.engine.rounds import SeededRun, Simulation
from idiolect.methods import METHODS
from idiolect.models import MODELS


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--method", default="fedavg")
    parser.add_argument("--model", default="lenet5")
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--examples", type=int, default=1280)
    parser.add_argument("--batch", type=int, default=128)
    options = parser.parse_args()
    shape = (1, 28, 28) if options.model in ("dnn", "mlr") else (3, 32, 32)
    fed = federation([options.examples] * options.clients, shape, held_out=10)
    sim = Simulation(
        METHODS[options.method](batch=options.batch, momentum=0.9),
        [SeededRun(0, fed.train_data)],
        {"a": Architecture(lambda: MODELS[options.model](shape, CLASSES))},
        backend=Backend(device="cuda", kernels="first"),
    )
    for _ in range(4):
        sim.advance()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        sim.advance()
        torch.cuda.synchronize()
    rows = sorted(seen.key_averages(), key=lambda row: -row.self_device_time_total)
    steps = options.examples / options.batch
    total = sum(row.self_device_time_total for row in rows)
    print(f"{total / steps:.0f} us a step of {options.clients} x {options.batch}")
    for row in rows[:28]:
        took = row.self_device_time_total / steps
        print(f"{took:8.1f} us {row.count / steps:6.1f} calls  {row.key[:110]}")


if __name__ == "__main__":
    main()
