"""Time every form of a stacked convolution on CUDA, and whole training rounds with each.

    PYTHONPATH=src python benchmarks/convolutions.py [--json FILE]

Each form is checked against float64 first. Rounds are FedAvg's, captured, on random images.
"""

import argparse
import json
import time
from pathlib import Path
from unittest import mock

import torch
from torch import nn

from idiolect.bench.workloads import CLASSES, federation
from idiolect.engine.architecture import Architecture
from idiolect.engine.backend import Backend
from idiolect.engine.rounds import SeededRun, Simulation
from idiolect.kernels import autotune, convolution_cuda
from idiolect.kernels.convolution import PLAIN, forms
from idiolect.kernels.convolution_cuda import ConvShape
from idiolect.methods import METHODS
from idiolect.models import MODELS

SHAPES = {
    "lenet5 conv1, 50 x 128": ConvShape(50, 128, 3, 32, 32, 6, 5, 5, 1, 0),
    "lenet5 conv2, 50 x 128": ConvShape(50, 128, 6, 14, 14, 16, 5, 5, 1, 0),
    "lenet5 conv1, 20 x 20": ConvShape(20, 20, 3, 32, 32, 6, 5, 5, 1, 0),
    "lenet5 conv2, 20 x 20": ConvShape(20, 20, 6, 14, 14, 16, 5, 5, 1, 0),
    "pfl conv1, 50 x 10": ConvShape(50, 10, 3, 32, 32, 32, 3, 3, 1, 0),
    "pfl conv2, 50 x 10": ConvShape(50, 10, 32, 30, 30, 64, 3, 3, 1, 0),
    "mcmahan conv2, 20 x 100": ConvShape(20, 100, 32, 12, 12, 64, 5, 5, 1, 0),
    "resnet 64, 20 x 64": ConvShape(20, 64, 64, 32, 32, 64, 3, 3, 1, 1),
    "resnet 512, 20 x 64": ConvShape(20, 64, 512, 4, 4, 512, 3, 3, 1, 1),
    "shuffle 58, 5 x 64": ConvShape(5, 64, 58, 16, 16, 58, 3, 3, 1, 1, depthwise=True),
    "shuffle 58, 5 x 64, stride 2": ConvShape(5, 64, 58, 16, 16, 58, 3, 3, 2, 1, depthwise=True),
}


def pfl_cnn() -> nn.Module:
    """pfl-research's CIFAR-10 network: 1,626,442 parameters."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(64 * 14 * 14, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip


def values(result):
    return result[0] if isinstance(result, tuple) else result


def layer(shape: ConvShape) -> dict[str, dict[str, str]]:
    s = shape
    x = torch.randn(s.groups, s.images, s.channels, s.height, s.width, device="cuda")
    w = torch.randn(
        s.groups, s.out_channels, s.inputs, s.kernel_height, s.kernel_width, device="cuda"
    )
    bias = torch.randn(s.groups, s.out_channels, device="cuda")
    gradient = torch.randn_like(PLAIN["convolve"](x, w, s))
    table: dict[str, dict[str, str]] = {}
    for task, inputs in (
        ("conv_relu_pool", (x, w, bias)),
        ("convolve", (x, w)),
        ("input_gradient", (gradient, w)),
        ("weight_gradient", (gradient, x)),
    ):  # fmt: skip
        if s.depthwise and task == "conv_relu_pool":
            continue
        few = s._replace(groups=2)
        exact = values(PLAIN[task](*(t[:2].double() for t in inputs), few))
        table[task] = {}
        for name, form in forms(task, s).items():
            try:
                got = values(form(*(t[:2].contiguous() for t in inputs), few))
                error = float((got - exact).norm() / exact.norm())
                took = autotune.milliseconds(form, *inputs, s)
                table[task][name] = (took, f"{took:.3f} ms, error {error:.0e}")
            except Exception as problem:
                table[task][name] = (9e9, f"{type(problem).__name__}: {str(problem)[:120]}")
        best = sorted(table[task].items(), key=lambda row: row[1][0])
        shown = [*best[:4], best[-1], ("plain", table[task]["plain"])]
        table[task] = {name: text for name, (_, text) in shown}
    return table


def none(task: str, shape: ConvShape, most: int = 4) -> tuple[()]:
    return ()


def rounds(build, shape, clients, size, batch) -> float:
    fed = federation([size] * clients, shape, held_out=10)
    method = METHODS["fedavg"](batch=batch, lr=0.01)
    sim = Simulation(
        method,
        [SeededRun(0, fed.train_data)],
        {"a": Architecture(build)},
        backend=Backend(device="cuda", kernels="first"),
    )
    for _ in range(3):
        sim.advance()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(10):
        sim.advance()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / 10


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    out: dict[str, object] = {}
    torch.backends.cudnn.allow_tf32 = False
    for name, shape in SHAPES.items():
        out[name] = layer(shape)
        print(name, json.dumps(out[name], indent=1), flush=True)
    colour, tiles = (3, 32, 32), convolution_cuda.tiles
    for name, build, clients, size, batch in (
        ("lenet5 20 x 600, batch 20", lambda: MODELS["lenet5"](colour, CLASSES), 20, 600, 20),
        ("lenet5 50 x 3000, batch 128", lambda: MODELS["lenet5"](colour, CLASSES), 50, 3000, 128),
        ("pfl cnn 50 x 50, batch 10", pfl_cnn, 50, 50, 10),
    ):
        for how in ("plain", "fastest"):
            autotune.forget()
            with mock.patch.object(convolution_cuda, "tiles", none if how == "plain" else tiles):
                took = rounds(build, colour, clients, size, batch)
            row = {"ms": 1e3 * took, "samples_per_s": clients * size / took}
            out[f"{name}, {how}"] = row
            print(name, how, row, flush=True)
    if options.json:
        about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
        options.json.write_text(json.dumps({"about": about, "rows": out}, indent=1))


if __name__ == "__main__":
    main()
