"""Measure on one GPU what bounds a round: workloads, their kernels, and forms of single layers.

    PYTHONPATH=src python benchmarks/gpu_speed.py [--json FILE] [--only NAME ...]

Every part goes on where another fails. Forms are checked against float64 first.
"""

import argparse
import cProfile
import io
import json
import pstats
import time
import traceback
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from gpu_check import difference, network, simulation
from idiolect.bench.workloads import CLASSES, PflCNN, federation
from idiolect.core import tree
from idiolect.engine.architecture import Architecture
from idiolect.engine.backend import Backend
from idiolect.engine.rounds import SeededRun, Simulation
from idiolect.kernels import autotune, convolution, linear
from idiolect.kernels.convolution_cuda import ConvShape
from idiolect.methods import METHODS
from idiolect.models import MODELS

SECONDS = 3.0  # for the forms of one task, compilation included
GREY, COLOUR = (1, 28, 28), (3, 32, 32)


def dnn():
    return MODELS["dnn"](GREY, CLASSES)


def mlr():
    return MODELS["mlr"](GREY, CLASSES)


def lenet5():
    return MODELS["lenet5"](COLOUR, CLASSES)


def steady():
    return PflCNN(dropout=False)


WORKLOADS = {
    "mlr": ("fedavg", mlr, GREY, 20, 600, 20),
    "dnn": ("fedavg", dnn, GREY, 20, 600, 20),
    "dnn with group norm": ("fedavg", network, GREY, 20, 600, 20),
    "pfedme": ("pfedme", dnn, GREY, 20, 600, 20),
    "pfl": ("fedavg", PflCNN, COLOUR, 50, 50, 10),
    "pfl, no dropout": ("fedavg", steady, COLOUR, 50, 50, 10),
    "lenet5": ("fedavg", lenet5, COLOUR, 20, 600, 20),
    "dnn1000": ("fedavg", dnn, GREY, 1000, 600, 20),
}
EXACT = ("fedavg", "fedprox", "pfedme", "pfml", "per-fedavg")
SINGLE = {
    "fedavg, dnn": ("fedavg", dnn, GREY),
    "pfedme, dnn": ("pfedme", dnn, GREY),
    "fedavg, lenet5": ("fedavg", lenet5, COLOUR),
    "fedavg, pfl": ("fedavg", steady, COLOUR),
}
SHAPES = {
    "pfl conv2": (ConvShape(50, 10, 32, 30, 30, 64, 3, 3, 1, 0), 2),
    "pfl conv1": (ConvShape(50, 10, 3, 32, 32, 32, 3, 3, 1, 0), 2),
}
DENSE = {
    "pfl fc1": (50, 10, 12544, 128),
    "dnn fc1": (20, 20, 784, 100),
}


def agreement(method, build, shape):
    """Largest relative difference of any tree after 2 rounds, single precision: kernels and all."""
    fed = federation([20, 20, 13], shape, held_out=10)
    sides = []
    for backend in (Backend("sequential", "cpu"), Backend(device="cuda")):
        sim = simulation(METHODS[method](batch=10, lr=0.01), fed, build, backend)
        for _ in range(4):
            sim.advance()
        sides.append([leaf.cpu().double() for leaf in tree.leaves(sim.tree)])
    return max(
        float((a - b).norm() / (1e-9 + a.norm())) for a, b in zip(*sides, strict=True) if a.numel()
    )


def workload(method, build, shape, clients, size, batch, rounds=10):
    """Time whole rounds, and say which kernels and which host code they are made of."""
    fed = federation([size] * clients, shape, held_out=10)
    sim = Simulation(
        METHODS[method](batch=batch, lr=0.01),
        [SeededRun(0, fed.train_data)],
        {"a": Architecture(build)},
        backend=Backend(device="cuda"),
    )
    began = time.perf_counter()
    for _ in range(3):
        sim.advance()
    torch.cuda.synchronize()
    first = time.perf_counter() - began
    times = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(rounds):
            sim.advance()
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start) / rounds)
    middle = sorted(times)[len(times) // 2]
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        sim.advance()
        torch.cuda.synchronize()
    rows = sorted(seen.key_averages(), key=lambda row: -row.self_device_time_total)
    rows = [row for row in rows if row.self_device_time_total > 0]
    host = cProfile.Profile()
    host.enable()
    sim.advance()
    torch.cuda.synchronize()
    host.disable()
    text = io.StringIO()
    pstats.Stats(host, stream=text).sort_stats("tottime").print_stats(14)
    return {
        "ms": middle,
        "every ms": [round(own, 2) for own in times],
        "samples/s": clients * size / middle * 1e3,
        "first three rounds, s": first,
        "device ms": sum(row.self_device_time_total for row in rows) / 1e3,
        "kernels": sum(row.count for row in rows),
        "GiB": torch.cuda.max_memory_allocated() / 2**30,
        "top": [
            f"{row.self_device_time_total:9.0f} us {row.count:5d}  {row.key[:90]}"
            for row in rows[:16]
        ],
        "host": [line[:110] for line in text.getvalue().splitlines() if line.strip()],
    }


def layer(shape, most):
    """Time every form of a stacked convolution, as far as its seconds go."""
    s, until = shape, time.perf_counter()
    x = torch.randn(s.groups, s.images, s.channels, s.height, s.width, device="cuda")
    w = torch.randn(
        s.groups, s.out_channels, s.channels, s.kernel_height, s.kernel_width, device="cuda"
    )
    bias = torch.randn(s.groups, s.out_channels, device="cuda")
    gradient = torch.randn_like(convolution.PLAIN["convolve"](x, w, s))
    table = {}
    for task, inputs in (
        ("conv_relu_pool", (x, w, bias)), ("conv_relu", (x, w, bias)),
        ("input_gradient", (gradient, w)), ("weight_gradient", (gradient, x)),
    ):  # fmt: skip
        few = s._replace(groups=2)
        exact = _values(convolution.PLAIN[task](*(t[:2].double() for t in inputs), few))
        found, until = {}, until + SECONDS
        for name, form in convolution.forms(task, s, most).items():
            if time.perf_counter() > until:
                break
            try:
                got = _values(form(*(t[:2].contiguous() for t in inputs), few))
                error = float((got - exact).norm() / exact.norm())
                found[name] = (autotune.milliseconds(form, *inputs, s), f"{error:.0e}")
            except Exception as problem:
                found[name] = (9e9, f"{type(problem).__name__}: {str(problem)[:300]}")
        table[task] = {
            name: f"{took:.4f} ms, error {error}"
            for name, (took, error) in sorted(found.items(), key=lambda row: row[1][0])
        }
    return table


def dense_layer(groups, batch, inside, outside):
    """Time the products of a stacked dense layer: forward, and both gradients."""
    x = torch.randn(groups, batch, inside, device="cuda")
    w = torch.randn(groups, outside, inside, device="cuda")
    gradient = torch.randn(groups, batch, outside, device="cuda")
    bytes_of_w = w.numel() * 4
    found = {"floor ms, kernels read once": bytes_of_w / 4.3e9}
    found["step"] = autotune.milliseconds(lambda: torch.add(w, w, alpha=-0.1))
    sizes = linear.LinearSizes(groups, batch, inside, outside)
    bias = torch.randn_like(gradient[:, 0])
    for task, inputs in {
        "forward": (x, w, bias), "input_gradient": (gradient, w), "weight_gradient": (gradient, x)
    }.items():  # fmt: skip
        ways = linear.forms(task, sizes)
        exact = _values(ways["plain"](*(t.double() for t in inputs), sizes))
        for name, form in ways.items():
            error = float((_values(form(*inputs, sizes)) - exact).norm() / exact.norm())
            took = autotune.milliseconds(form, *inputs, sizes)
            found[f"{task}, {name}"] = f"{took:.4f} ms, error {error:.0e}"
    return found


def _values(result):
    return result[0] if isinstance(result, tuple) else result


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", nargs="*")
    options = parser.parse_args()
    torch.backends.cudnn.allow_tf32 = False
    out: dict[str, object] = {
        "about": {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    }
    parts = {
        **{
            f"{name}, double": lambda name=name: difference(METHODS[name](batch=16, lr=0.05))
            for name in EXACT
        },
        **{f"{name}, single": lambda own=own: agreement(*own) for name, own in SINGLE.items()},
        **{name: lambda own=own: workload(*own) for name, own in WORKLOADS.items()},
        **{name: lambda own=own: layer(*own) for name, own in SHAPES.items()},
        **{name: lambda own=own: dense_layer(*own) for name, own in DENSE.items()},
    }
    for name, part in parts.items():
        if options.only and name not in options.only:
            continue
        start = time.perf_counter()
        try:
            out[name] = part()
        except Exception:
            torch.set_default_dtype(torch.float32)
            out[name] = {"error": traceback.format_exc()[-1500:]}
        torch.cuda.empty_cache()
        print(f"== {name}, {time.perf_counter() - start:.1f} s", flush=True)
        print(json.dumps(out[name], indent=1), flush=True)
        if options.json:
            options.json.write_text(json.dumps(out, indent=1))


if __name__ == "__main__":
    main()
