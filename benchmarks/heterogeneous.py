"""Time a round of KT-pFL with 20 clients of four architectures against the sequential backend.

    PYTHONPATH=src python benchmarks/heterogeneous.py [--device cuda] [--json FILE]

Correctness comes first: three rounds of eight ragged clients, two of each network, in float64, are
compared tensor by tensor with the sequential backend on the CPU; of enough steps that a step is
captured by itself. Then five clients each of LeNet, AlexNet, ResNet-18 and ShuffleNetV2 (the
networks of experiments/ktpfl/cifar10-two.toml) on random 32×32 images: a local epoch of 325 images
and one of distillation on 1,000 public ones, all together, and each architecture alone. Both
backends run on the same device, in fp32.
"""

import argparse
import dataclasses
import json
import os
import statistics
import time
from functools import partial
from pathlib import Path

import torch

from idiolect.bench.workloads import CLASSES, federation
from idiolect.core import tree
from idiolect.data import Federation
from idiolect.engine.architecture import Architecture
from idiolect.engine.backend import Backend
from idiolect.engine.rounds import SeededRun, Simulation
from idiolect.methods import METHODS
from idiolect.models import MODELS

SHAPE = (3, 32, 32)
NETWORKS = {
    "LeNet": ("lenet5", {"init": "he"}),
    "AlexNet": ("alexnet", {"hidden": 1024, "init": "he"}),
    "ResNet-18": ("resnet18", {"width": 16}),
    "ShuffleNetV2": ("shufflenet", {}),
}
# Dropout draws by block, so it is off where results are compared.
STILL = {**NETWORKS, "AlexNet": ("alexnet", {"hidden": 64, "dropout": 0.0})}


def with_public(sizes: list[int], public: int, held_out: int = 10) -> Federation:
    """Give clients of these sizes random images, and everyone the same public ones."""
    own = federation(sizes, SHAPE, held_out)
    return dataclasses.replace(own, public=federation([public], SHAPE).dataset)


def simulation(
    fed: Federation, networks: dict, backend: Backend, chosen: tuple[str, ...], **settings: object
) -> Simulation:
    """Let as many clients run each of the chosen networks, in turn."""
    architectures = {
        label: Architecture(
            partial(MODELS[networks[label][0]], SHAPE, CLASSES, **networks[label][1]),
            clients=tuple(range(place, fed.clients, len(chosen))),
        )
        for place, label in enumerate(chosen)
    }
    method = METHODS["ktpfl"](momentum=0.9, **settings)
    return Simulation(method, [SeededRun(0, fed.train_data)], architectures, backend=backend)


def difference(device: str) -> float:
    """Return the largest relative difference of any tensor after three rounds, in float64."""
    fed = with_public([16, 13, 9, 8, 16, 10, 5, 12], 12, 2)
    sides = []
    torch.set_default_dtype(torch.float64)
    for backend in (Backend("sequential", "cpu"), Backend("vectorised", device, 8)):
        sim = simulation(
            fed, STILL, backend, tuple(STILL), batch=2, sample=8, public_batch=2, lr=0.001
        )
        for _ in range(3):
            sim.advance()
        sides.append([leaf.cpu().double() for leaf in tree.leaves(sim.tree)])
    torch.set_default_dtype(torch.float32)
    return max(
        float((one - two).abs().max() / (1 + two.abs().max()))
        for one, two in zip(*sides, strict=True)
        if one.numel()
    )


def seconds(kind: str, sim: Simulation, rounds: int, before: int) -> float:
    """Return the median time of a round after some, in which it is compiled and captured."""
    took = []
    for number in range(rounds + before):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        start = time.perf_counter()
        sim.advance()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        took.append(time.perf_counter() - start)
        print(f"  {kind} round {number + 1}: {took[-1]:.3f} s", flush=True)
    return statistics.median(took[before:])


def timed(device: str, chosen: tuple[str, ...], clients: int, rounds: int) -> dict[str, float]:
    """Time a round of these architectures with both backends."""
    fed = with_public([325] * clients, 1000)
    settings = {"batch": 128, "sample": 1000, "public_batch": 256, "lr": 0.02}
    ours, plain = (
        seconds(
            kind,
            simulation(fed, NETWORKS, Backend(kind, device, kernels="first"), chosen, **settings),
            *repeats,
        )
        for kind, repeats in (("vectorised", (rounds, 2)), ("sequential", (1, 1)))
    )
    return {"vectorised_s": ours, "sequential_s": plain, "ratio": plain / ours}


def main() -> None:
    """Check, time, print, write."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds of the vectorised side")
    parser.add_argument("--check-only", action="store_true")
    parser.add_argument("--only", help="one of the rows: 'all four', or an architecture")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    began = time.perf_counter()
    out: dict[str, object] = {"difference": difference(options.device)}
    print("largest relative difference, float64:", out["difference"], flush=True)
    if not out["difference"] < 1e-9:
        raise SystemExit("the backends disagree; nothing was timed")
    if not options.check_only:
        rows = out["rows"] = {}
        for label, chosen, clients in (
            ("all four", tuple(NETWORKS), 20),
            *((label, (label,), 5) for label in NETWORKS),
        ):
            if options.only not in (None, label):
                continue
            rows[label] = timed(options.device, chosen, clients, options.rounds)
            print(label, rows[label], flush=True)
    cuda = options.device == "cuda"
    device = torch.cuda.get_device_name() if cuda else f"{os.cpu_count()} cores"
    out["about"] = {"device": device, "torch": torch.__version__}
    out["seconds"] = time.perf_counter() - began
    print(f"{out['seconds']:.0f} s in all", flush=True)
    if options.json:
        options.json.write_text(json.dumps(out, indent=1) + "\n")


if __name__ == "__main__":
    main()
