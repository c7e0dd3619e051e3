"""Time forms of ResNet-18's convolutions, and rounds of unequal clients, on CUDA.

    PYTHONPATH=src python benchmarks/deep_networks.py [--json FILE]

Rounds of the networks themselves: `idiolect bench resnet18-10 vit-20 gru-20`.
"""

import argparse
import json
import time
from functools import partial
from pathlib import Path
from unittest import mock

import torch

from idiolect.bench.workloads import CIFAR, CLASSES, Workload, federation, simulation
from idiolect.engine import local_group
from idiolect.engine.backend import Backend, multiplying
from idiolect.kernels.autotune import milliseconds
from idiolect.kernels.convolution import PLAIN, forms
from idiolect.kernels.convolution_cuda import ConvShape
from idiolect.methods import FedAvg
from idiolect.models import MODELS

CLIENTS, BATCH = 10, 64
LAYERS = [(64, 64, 32, 1), (64, 128, 32, 2), (128, 128, 16, 1), (128, 256, 16, 2), (256, 256, 8, 1),
          (256, 512, 8, 2), (512, 512, 4, 1)]  # fmt: skip
SIZES = (9528, 6400, 5200, 4200, 3500, 2900, 2500, 2100, 1800, 1500, 1300, 1100, 900, 700, 500, 350,
         250, 150, 100, 59)  # fmt: skip


def convolution(layer: tuple[int, ...], precision: str) -> dict[str, dict[str, float]]:
    channels, out, side, stride = layer
    s = ConvShape(CLIENTS, BATCH, channels, side, side, out, 3, 3, stride, 1)
    kind = torch.bfloat16 if precision == "bf16" else torch.float32
    draw = partial(torch.randn, device="cuda", dtype=kind)
    x, w = draw(CLIENTS, BATCH, channels, side, side), draw(CLIENTS, out, channels, 3, 3)
    g = torch.randn_like(PLAIN["convolve"](x, w, s))
    tasks = {"convolve": (x, w), "input_gradient": (g, w), "weight_gradient": (g, x)}
    return {
        task: {
            name: milliseconds(form, *given, s)
            for name, form in forms(task, s, own=kind == torch.float32).items()
        }
        for task, given in tasks.items()
    }


def rounds(sizes: tuple[int, ...], beside: bool = True) -> float:
    """Return milliseconds of a round of mcmahan-cnn, five epochs in batches of 100."""
    network = partial(MODELS["mcmahan-cnn"], CIFAR, CLASSES)
    work = Workload("", network, CIFAR, sizes, FedAvg(batch=100, lr=0.01, epochs=5))

    def in_turn(works: list, streams: list) -> list:
        return [own(None) for own in works]

    run = local_group.side_by_side if beside else in_turn
    with mock.patch.object(local_group, "side_by_side", run):
        sim = simulation(work, federation(sizes, CIFAR), Backend("vectorised", "cuda"))
        for _ in range(3):
            sim.advance()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(3):
            sim.advance()
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start) / 3


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__)
    ask.add_argument("--json", type=Path, help="also write the figures here")
    path = ask.parse_args().json
    found: dict[str, object] = {}

    def tell(name: str, value: object) -> None:
        found[name] = value
        print(f"{name}: {value}", flush=True)
        if path:
            path.write_text(json.dumps(found, indent=1) + "\n")

    tell("equal clients, ms", rounds((2252,) * 20))
    tell("longest client alone, ms", rounds(SIZES[:1]))
    tell("unequal clients, blocks in turn, ms", rounds(SIZES, beside=False))
    tell("unequal clients, blocks side by side, ms", rounds(SIZES))
    for precision in ("bf16", "tf32", "fp32"):
        for layer in LAYERS:
            with multiplying(precision, torch.device("cuda")):
                tell(f"{precision} {layer}", convolution(layer, precision))


if __name__ == "__main__":
    main()
