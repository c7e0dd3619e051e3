"""Check every method's captured CUDA rounds against the sequential backend, and time them.

    PYTHONPATH=src python benchmarks/gpu_check.py [--json FILE]

First 3 rounds of 8 ragged clients in float64 on both sides, then milliseconds a round for 20
clients of 600 examples at batch 20, as in the table of peers.
"""

import argparse
import json
import time
from pathlib import Path

import torch
from torch import nn

from idiolect import tree
from idiolect.data import Federation
from idiolect.methods import METHODS
from idiolect.models import MODELS
from idiolect.simulate.architecture import Architecture
from idiolect.simulate.backend import Backend
from idiolect.simulate.rounds import Run, Simulation
from random_data import CLASSES, federation

SHAPE = (1, 28, 28)


def network() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(784, 100), nn.GroupNorm(4, 100), nn.ReLU(), nn.Linear(100, 10)
    )


def simulation(name: str, fed: Federation, build: object, backend: Backend, **settings: object):
    method = METHODS[name](**settings)
    return Simulation(method, [Run(0, fed.lessons)], {"a": Architecture(build)}, backend=backend)


def difference(name: str) -> float:
    """Largest relative difference of any tree after 3 rounds and deployment, in float64."""
    fed = federation([90, 61, 40, 33, 20, 7, 64, 80], SHAPE, held_out=10)
    sides = []
    torch.set_default_dtype(torch.float64)
    for backend in (Backend("sequential", "cpu"), Backend("vectorised", "cuda")):
        sim = simulation(name, fed, network, backend, batch=16, lr=0.05)
        for _ in range(4):
            sim.advance()
        verdict = sim.judge([fed.exam], keep=True)[0]
        verdict = sim.judge([fed.exam], keep=True)[0]
        deployed = [kept for _, kept in verdict.deployed]
        sides.append([leaf.cpu().double() for leaf in tree.leaves((sim.tree, deployed))])
    torch.set_default_dtype(torch.float32)
    return max(
        float((a - b).nan_to_num().abs().max() / (1 + a.nan_to_num(posinf=0).abs().max()))
        for a, b in zip(*sides, strict=True)
        if a.numel()
    )


def milliseconds(sim: Simulation, rounds: int = 20) -> float:
    for _ in range(3):
        sim.advance()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(rounds):
        sim.advance()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start) / rounds


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    out: dict[str, dict[str, float]] = {}
    cuda = Backend(device="cuda")
    equal = federation([600] * 20, SHAPE, held_out=10)
    for name in METHODS:
        try:
            out[name] = {"difference": difference(name)}
            sim = simulation(name, equal, network, cuda, batch=20)
            out[name]["ms"] = milliseconds(sim)
        except Exception as error:
            out[name] = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
        print(name, out[name], flush=True)
    colour = federation([600] * 20, (3, 32, 32), held_out=10)
    for label, fed, build in (
        ("dnn", equal, lambda: MODELS["dnn"](SHAPE, CLASSES)),
        ("lenet5", colour, lambda: MODELS["lenet5"]((3, 32, 32), CLASSES)),
    ):
        for batch in (20, 100):
            sim = simulation("fedavg", fed, build, cuda, batch=batch)
            took = milliseconds(sim)
            out[f"fedavg {label} batch {batch}"] = {"ms": took, "samples_per_s": 12e6 / took}
            print(label, batch, out[f"fedavg {label} batch {batch}"], flush=True)
    if options.json:
        about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
        options.json.write_text(json.dumps({"about": about, "rows": out}, indent=1))


if __name__ == "__main__":
    main()
