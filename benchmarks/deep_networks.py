"""Check and time deep networks and their layers, and rounds of unequal clients, on CUDA.

    PYTHONPATH=src python benchmarks/deep_networks.py [PART ...] [--json FILE] [--seconds S]

Parts: `norm` (group normalisation against double precision), `halo` (a convolution by Hopper's
matrix units), rounds such as `resnet18-10:bf16` or `shufflenet-20:fp32` (milliseconds; the
difference of a step's gradient from double precision; what share of the device's time each kind of
kernel took; of every form how often it won, and what it saved; and every form that was tried with
its relative difference from double precision and its milliseconds), `beside` (ResNet-10 with and
without a second stream, in turn: milliseconds, and whether its weights are the same), `unequal`.
A part that fails is reported, and the next begins.
"""

import argparse
import copy
import json
import math
import time
import traceback
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from idiolect.bench.workloads import CIFAR, CLASSES, WORKLOADS, Workload, federation, simulation
from idiolect.core import tree
from idiolect.core.network import replace_layers
from idiolect.engine import local_group
from idiolect.engine.backend import Backend, multiplying
from idiolect.kernels import (
    autotune,
    compiled,
    convolution_halo,
    group_norm,
    residual,
    second_stream,
)
from idiolect.kernels.autotune import apart, few, milliseconds
from idiolect.kernels.convolution import PLAIN
from idiolect.kernels.convolution_cuda import ConvShape
from idiolect.kernels.group_norm import GroupNormSizes
from idiolect.methods import FedAvg
from idiolect.models import MODELS

PARTS = ("resnet10-20:bf16", "resnet18-10:bf16", "shufflenet-20:fp32", "resnet18-10:tf32")
HALO = (
    ConvShape(20, 32, 64, 32, 32, 64, 3, 3, 1, 1),
    ConvShape(20, 32, 128, 16, 16, 256, 3, 3, 2, 1),
)
TOP = 6  # kernels that are printed
TURNS = 15  # of each way; a round that starts early is timed with the one before
PROFILED = 3  # rounds
KINDS = {  # of kernels, by words in their names; the first that fits
    "weights' order": ("by_taps", "turned", "put_back"),
    "group normalisation": ("normalise", "gradients", "totals", "masked_sum"),
    "our convolutions": ("convolve", "weight_gradient", "input_gradient", "_rows"),
    "library's": ("xmma", "cutlass", "cudnn", "nhwc", "nchw", "conv", "gemm", "gemv", "splitK"),
    "halves": ("join",),
    "copies": ("copy", "Copy", "Cat", "memcpy", "Memcpy"),
    "sums of residuals": ("CUDAFunctor_add",),
    "the step": ("mix", "add_leaves", "add_parts"),
}
NORMS = (
    GroupNormSizes(10, 64, 64, 1024, 8, 1e-5, True),
    GroupNormSizes(20, 32, 512, 16, 8, 1e-5, False),
    GroupNormSizes(20, 32, 58, 256, 2, 1e-5, True),
)
SIZES = (9528, 6400, 5200, 4200, 3500, 2900, 2500, 2100, 1800, 1500, 1300, 1100, 900, 700, 500, 350,
         250, 150, 100, 59)  # fmt: skip
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ACTIVITY = {"cuda": ProfilerActivity.CUDA, "cpu": ProfilerActivity.CPU}
SHUFFLENET = Workload(
    "", partial(MODELS["shufflenet"], CIFAR, CLASSES), CIFAR, (320,) * 20, FedAvg(batch=32, lr=0.01)
)


def norm() -> dict[str, object]:
    """Compare both kernels' results with the plain form in double precision, and time them."""
    found: dict[str, object] = {}
    for sizes in NORMS:
        for kind in (torch.float32, torch.bfloat16):
            images = (sizes.groups, sizes.images, sizes.channels, sizes.pixels)
            x, g = (torch.randn(images, device=DEVICE).to(kind) for _ in range(2))
            w, b = torch.randn(2, sizes.groups, sizes.channels, device=DEVICE)
            for order in ("channels first", "channels last"):
                if order == "channels last":
                    x, g = map(group_norm._ordered_last, (x, g))
                y, mean, scale = group_norm.cuda_normalise(x, w, b, sizes)
                own = (g, x, w, mean, scale, y, b)
                made = (y, mean, scale, *group_norm.cuda_gradient(*own, sizes))
                exact = (
                    *group_norm.plain_normalise(x.double(), w.double(), b.double(), sizes),
                    *group_norm.plain_gradient(*(one.double() for one in own), sizes),
                )
                far = [apart(*pair) for pair in zip(made, exact, strict=True)]
                ms = [
                    milliseconds(group_norm.cuda_normalise, x, w, b, sizes),
                    milliseconds(group_norm.cuda_gradient, *own, sizes),
                ]
                gb = [many * x.numel() * x.element_size() / 1e6 / one
                      for many, one in zip((2, 4), ms, strict=True)]  # fmt: skip
                if order == "channels last":
                    found[f"merged, {kind} {sizes}"] = _merged(own, sizes)
                found[f"{kind} {order} {sizes}"] = {
                    "difference of y, mean, scale, dx, dw, db": [f"{one:.1e}" for one in far],
                    "ms": ms,
                    "GB/s if all is read or written once": [round(one) for one in gb],
                }
    return found


def _merged(given: tuple[Tensor, ...], sizes: GroupNormSizes) -> dict[str, str]:
    """Compare and time every form of the tasks that do more than normalise."""
    g, x, w, _, _, _, b = given
    other, seen = (torch.empty_like(g).normal_() for _ in range(2))
    tasks = {
        "normalise and add": (x, w, b, other),
        "gradient of a sum": (*given, other),
        "cut gradient": (*given, seen),
        "cut gradient of a sum": (*given, other, seen),
    }
    found: dict[str, str] = {}
    for task, inputs in tasks.items():
        known = group_norm.forms(task, sizes, x, last=True)
        exact = known["plain"](*(one.double() for one in inputs), sizes)
        for name, form in known.items():
            far = [apart(*pair) for pair in zip(form(*inputs, sizes), exact, strict=True)]
            found[f"{task}, {name}"] = (
                f"{max(far):.1e}, {milliseconds(form, *inputs, sizes):.4f} ms"
            )
    return found


def rounds_of(name: str, precision: str) -> dict[str, object]:
    """Time rounds of a workload, then look at the kernels of one."""
    work = SHUFFLENET if name == "shufflenet-20" else WORKLOADS[name]
    autotune.trials.clear()
    autotune.forget()
    backend = Backend("vectorised", DEVICE, precision=precision, kernels="first")
    sim = simulation(work, federation(work.sizes, work.shape), backend)
    with mock.patch.object(autotune, "_shipped", dict):  # so that all forms are tried
        first = [round(_seconds(sim.advance), 3) for _ in range(3)]
    ms = sorted(1e3 * _seconds(sim.advance) for _ in range(5))[2]
    with profile(activities=[ACTIVITY[DEVICE]]) as seen:  # one may launch the next
        for _ in range(PROFILED):
            _seconds(sim.advance)
    rows = sorted(seen.key_averages(), key=lambda row: -row.self_device_time_total)
    every = sum(row.self_device_time_total for row in rows) / PROFILED
    far = gradient_difference(work, precision)
    rate = round(work.examples / ms * 1e3)
    print(
        f"== {name} {precision}: {ms:.1f} ms ({rate} samples/s), first rounds {first} s", flush=True
    )
    print(
        f"   gradient against float64: {far:.1e}; device {every / 1e3:.1f} ms, of which", flush=True
    )
    shares = dict.fromkeys([*KINDS, "rest"], 0.0)
    for row in rows:
        shares[_kind(row.key)] += row.self_device_time_total / 1e3 / PROFILED
    print("   " + ", ".join(f"{kind} {took:.1f}" for kind, took in shares.items()), flush=True)
    print("   forms, how often they won and ms they saved: " + _wins(), flush=True)
    for row in rows[:TOP]:
        took = row.self_device_time_total / PROFILED
        print(
            f"   {took / max(every, 1):6.1%} {took / 1e3:7.2f} ms {row.count:5d}  {row.key[:100]}"
        )
    return {
        "ms": ms,
        "samples/s": rate,
        "difference of a gradient": far,
        "device ms": every / 1e3,
        "first rounds, s": first,
        "ms by kind": shares,
        "kernels": [
            f"{row.self_device_time_total:9.0f} us {row.count:6d}  {row.key[:170]}"
            for row in rows[:60]
            if row.self_device_time_total > 0
        ],
        "forms": {**autotune.trials},
    }


def _kind(kernel: str) -> str:
    fits = (kind for kind, words in KINDS.items() if any(word in kernel for word in words))
    return next(fits, "rest")


def _wins() -> str:
    """Say how often each form was the fastest, and what the others took longer, in all."""
    won: dict[str, list[float]] = {}
    for tried in autotune.trials.values():
        took = {name: own[1] for name, own in tried.items() if isinstance(own, tuple) and own[1]}
        if len(took) > 1:
            best, second = sorted(took, key=took.__getitem__)[:2]
            won.setdefault(best, []).append(took[second] - took[best])
    return ", ".join(f"{name} {len(saved)} ({sum(saved):.3f})" for name, saved in won.items())


def gradient_difference(work: Workload, precision: str) -> float:
    """Return how far the gradient of a step, of two clients, is from that in double precision."""
    torch.manual_seed(0)
    network, clients, batch = work.build().to(DEVICE), len(work.sizes), work.method.batch
    x = torch.randn(clients, batch, *work.shape, device=DEVICE)
    y = torch.randint(0, CLASSES, (clients, batch), device=DEVICE)

    def gradients(model: nn.Module, many: int, kind: torch.dtype) -> dict[str, Tensor]:
        def loss(own: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
            half = precision == "bf16" and kind == torch.float32
            cast = torch.autocast(DEVICE, torch.bfloat16, enabled=half, cache_enabled=False)
            merging = kind == torch.float32 and residual.merges_on(x)
            with cast, residual.Residuals() if merging else nullcontext():
                logits = functional_call(model, own, (x,))
            return F.cross_entropy(logits.to(kind), y)

        own = {
            name: value.detach().to(kind).expand(many, *value.shape).contiguous()
            for name, value in network.named_parameters()
        }
        return vmap(grad(loss))(own, x[:many].to(kind), y[:many])

    exact = gradients(copy.deepcopy(network).double(), 2, torch.float64)
    with multiplying(precision, torch.device(DEVICE)):
        made = gradients(replace_layers(copy.deepcopy(network)), clients, torch.float32)
    pairs = [(made[name][:2].double(), value) for name, value in exact.items()]
    off = sum(float((one - other).square().sum()) for one, other in pairs)
    return math.sqrt(off / sum(float(other.square().sum()) for _, other in pairs))


def halo() -> dict[str, object]:
    """Compare and time every form of some convolutions for Hopper.

    Where results are wrong, once more with the row that a matrix begins in told to the unit.
    """
    found = {"as it is": _halo_forms()}
    if any(float(own.split(",")[0]) > 0.02 for own in found["as it is"].values()):
        own = compiled._text

        def told(file: str) -> str:
            return own(file).replace(
                "1ull << 62 |", "1ull << 62 | (Matrix)(start >> 7 & 7) << 49 |"
            )

        compiled.kernel.cache_clear()
        with mock.patch.object(compiled, "_text", told):
            found["with the first row told"] = _halo_forms()
        compiled.kernel.cache_clear()
    return {**found}


def _halo_forms() -> dict[str, str]:
    found: dict[str, str] = {}
    for s, kind in ((s, kind) for s in HALO for kind in (torch.bfloat16, torch.float32)):
        x = torch.randn(s.groups, s.images, s.channels, s.height, s.width, device=DEVICE).to(kind)
        g = torch.randn(s.groups, s.images, s.out_channels, s.out_height, s.out_width)
        g = g.to(DEVICE, kind)
        w = torch.randn(s.groups, s.out_channels, s.channels, 3, 3, device=DEVICE)
        tasks = {"convolve": (x, w), "input_gradient": (g, w), "weight_gradient": (g, x)}
        for task, given in tasks.items():
            exact = PLAIN[task](*few((*given, s)))
            forms = convolution_halo.forms(task, s, kind)
            autotune.compile_all(forms, (*given, s))
            for name, form in forms.items():
                inputs = form.arrange((*given, s))
                far = apart(form(*inputs)[:2], exact)
                ms = milliseconds(form, *inputs)
                rate = 2 * g.numel() * s.channels * s.taps / ms / 1e9
                what = f"{kind} {task} {s.channels} {s.height} stride {s.stride} {name}"
                found[what] = f"{far:.1e}, {ms:.4f} ms, {rate:.0f} TFLOP/s"
    return found


def beside() -> dict[str, object]:
    """Train the same network in three ways, and compare its weights after as many rounds."""
    work = WORKLOADS["resnet10-20"]
    sims, took = {}, dict[str, list[float]]()
    ways = {"gradients and steps beside": (True, True), "gradients beside": (True, False),
            "one stream": (False, False)}  # fmt: skip
    backend = Backend("vectorised", DEVICE, precision="bf16", kernels="first")
    for name, (on, steps) in ways.items():
        torch.manual_seed(0)
        sims[name], took[name] = simulation(work, federation(work.sizes, work.shape), backend), []
        with mock.patch.multiple(second_stream, _ON=on, _STEPS=steps):
            for _ in range(4):  # chosen, recorded and replayed
                sims[name].advance()
    for _ in range(TURNS):
        for name, sim in sims.items():
            took[name].append(1e3 * _seconds(sim.advance))
    plain = tree.leaves(sims["one stream"].tree["server"])
    return {
        name: {
            f"ms, median of {TURNS}": sorted(took[name])[TURNS // 2],
            "weights as on one stream": all(
                map(torch.equal, tree.leaves(sim.tree["server"]), plain)
            ),
        }
        for name, sim in sims.items()
    }


def _seconds(run) -> float:  # type: ignore[no-untyped-def]
    start = time.perf_counter()
    run()
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def unequal() -> dict[str, float]:
    """Return milliseconds of a round of mcmahan-cnn, five epochs in batches of 100."""

    def in_turn(works: list, streams: list) -> list:  # type: ignore[type-arg]
        return [own() for own in works]

    def run(sizes: tuple[int, ...], beside: bool = True) -> float:
        network = partial(MODELS["mcmahan-cnn"], CIFAR, CLASSES)
        work = Workload("", network, CIFAR, sizes, FedAvg(batch=100, lr=0.01, epochs=5))
        how = local_group.side_by_side if beside else in_turn
        with mock.patch.object(local_group, "side_by_side", how):
            sim = simulation(
                work, federation(sizes, CIFAR), Backend("vectorised", DEVICE, kernels="first")
            )
            for _ in range(3):
                sim.advance()
            return 1e3 * min(_seconds(sim.advance) for _ in range(3))

    return {
        "equal clients": run((2252,) * 20),
        "longest client alone": run(SIZES[:1]),
        "blocks in turn": run(SIZES, beside=False),
        "blocks side by side": run(SIZES),
    }


def main() -> None:
    """Run the parts that are asked for, or most of them."""
    ask = argparse.ArgumentParser(description=__doc__)
    ask.add_argument("parts", nargs="*", default=PARTS)
    ask.add_argument("--json", type=Path, help="also write the figures here")
    ask.add_argument("--seconds", type=float, default=math.inf, help="begin no part after these")
    asked, began = ask.parse_args(), time.perf_counter()
    found: dict[str, object] = {}
    for part in asked.parts:
        name, _, precision = part.partition(":")
        start = time.perf_counter()
        if start - began > asked.seconds:
            print(f"{part}: no time left", flush=True)
            continue
        try:
            run = (
                partial(rounds_of, name, precision)
                if precision
                else {"norm": norm, "halo": halo, "beside": beside, "unequal": unequal}[name]
            )
            found[part] = run()
        except Exception:  # the next part may still tell something
            found[part] = {"failed": traceback.format_exc()}
            print(part, traceback.format_exc()[-600:], flush=True)
        if not precision:
            print(json.dumps(found[part], indent=1), flush=True)
        print(f"{part} took {time.perf_counter() - start:.1f} s", flush=True)
        if asked.json:
            asked.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
