"""Measure on one GPU what bounds a round: workloads, their kernels, and forms of single layers.

    PYTHONPATH=src python benchmarks/gpu_speed.py [--json FILE] [--only NAME ...] [--seconds S]

`--only small` is for small convolutional networks: ms a round and the kernels of `pfl-cifar10` and
of `long_rounds.py`, and every form that was tried on the way, with its microseconds and its
distance to float64. `--only forms rounds` checks and times the kernels of attention, normalisation,
dense layers and small convolutions, then whole rounds in every precision. Every part goes on where
another fails. Forms are checked against float64 first.
"""

import argparse
import cProfile
import io
import json
import pstats
import re
import time
import traceback
from pathlib import Path
from unittest import mock

import torch
from torch.profiler import ProfilerActivity, profile

import long_rounds
from gpu_check import difference, network, simulation
from idiolect.bench import workloads
from idiolect.bench.workloads import CLASSES, PflCNN, federation
from idiolect.core import tree
from idiolect.engine import block_runner
from idiolect.engine.architecture import Architecture
from idiolect.engine.backend import PRECISIONS, Backend, multiplying
from idiolect.engine.rounds import SeededRun, Simulation
from idiolect.kernels import attention, autotune, convolution, layer_norm, linear
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


BENCHED = ("vit-20", "pfl-cifar10", "lenet5-20")  # of `idiolect bench`
HEADS = attention.AttentionSizes(640, 4, 65, 65, 16, False, 0.25)
ROWS = layer_norm.LayerNormSizes(20, 2080, 64, 1e-5)
PRODUCTS = {
    "enter": linear.LinearSizes(20, 2080, 64, 192),
    "leave": linear.LinearSizes(20, 2080, 64, 64),
    "widen": linear.LinearSizes(20, 2080, 64, 128),
    "narrow": linear.LinearSizes(20, 2080, 128, 64),
}
PATCHES = ConvShape(20, 32, 3, 32, 32, 64, 4, 4, 4, 0)
PFL2 = ConvShape(50, 10, 32, 30, 30, 64, 3, 3, 1, 0, fused=True)
MCMAHAN2 = ConvShape(20, 10, 32, 12, 12, 64, 5, 5, 1, 2, fused=True)
MCMAHAN = ConvShape(20, 10, 32, 12, 12, 64, 5, 5, 1, 0, fused=True)  # that of `long_rounds.py`


def drawn(*shape, dtype=torch.float32):
    return torch.randn(shape, device="cuda").to(dtype)


def tasks_of_attention(dtype):
    s = HEADS
    q, k, v, g = (drawn(s.groups, s.heads, s.places, s.width, dtype=dtype) for _ in range(4))
    out, logs = attention.forms("attend", s)["plain"](q, k, v, s)
    exact = attention._gradient(*(one.double() for one in (g, q, k, v)), None, s.causal, s.scale)
    logits = attention._logits(q.double(), k.double(), None, s.causal, s.scale)
    yield "attend", attention, s, (q, k, v), (logits.softmax(-1) @ v.double(),)
    logs = logits.logsumexp(-1).float()
    yield "attend_gradient", attention, s, (g, q, k, v, out, logs), exact


def tasks_of_rows(dtype):
    s = ROWS
    x, w, b = drawn(s.groups, s.rows, s.width), drawn(s.groups, s.width), drawn(s.groups, s.width)
    exact = layer_norm._plain_normalise(x.double(), w.double(), b.double(), s)
    yield "layer_norm", layer_norm, s, (x, w, b), exact
    given = (drawn(s.groups, s.rows, s.width), x, w, exact[1].float(), exact[2].float())
    exact = layer_norm._plain_gradient(*(one.double() for one in given), s)
    yield "layer_norm_gradient", layer_norm, s, given, exact


def tasks_of_products(s, dtype):
    x, w = drawn(s.groups, s.examples, s.inputs), drawn(s.groups, s.outputs, s.inputs)
    b, g = drawn(s.groups, s.outputs), drawn(s.groups, s.examples, s.outputs)
    x, w, b, g = (one.to(dtype) for one in (x, w, b, g))
    for task, given in (
        ("forward", (x, w, b)), ("input_gradient", (g, w)), ("weight_gradient", (g, x))
    ):  # fmt: skip
        yield task, linear, s, given, linear._FORMS[task][0](*(one.double() for one in given), s)


def tasks_of_images(s, names, dtype):
    x = drawn(s.groups, s.images, s.channels, s.height, s.width, dtype=dtype)
    taps = (s.kernel_height, s.kernel_width)
    w = drawn(s.groups, s.out_channels, s.channels, *taps, dtype=dtype)
    b = drawn(s.groups, s.out_channels, dtype=dtype)
    g = drawn(s.groups, s.images, s.out_channels, s.out_height, s.out_width, dtype=dtype)
    inputs = {"convolve": (x, w), "input_gradient": (g, w), "weight_gradient": (g, x)}
    for task in names:
        given = inputs.get(task, (x, w, b))
        few = s._replace(groups=2)
        exact = convolution.PLAIN[task](*(one[:2].double() for one in given), few)
        yield task, convolution, s, given, exact if isinstance(exact, tuple) else (exact,)


def forms_of(tasks, precision, only=("",)):
    """Time forms of some tasks: microseconds, and the largest error against float64."""
    found = {}
    with multiplying(precision, torch.device("cuda")):
        for task, module, sizes, given, exact in tasks:
            exact = exact if isinstance(exact, tuple) else (exact,)
            ways = module.forms(task, sizes)
            if module in (linear, convolution):
                more = {} if module is linear else {"rounded": precision != "fp32"}
                ways = module.forms(task, sizes, own=given[0].dtype == torch.float32, **more)
            ways = {name: form for name, form in ways.items() if name.startswith(only)}
            autotune.compile_all(ways, (*given, sizes))
            rows = {}
            for name, form in ways.items():
                try:
                    made = form(*given, sizes)
                    made = made if isinstance(made, tuple) else (made,)
                    errors = [
                        float((a[: len(b)].double() - b).abs().max() / b.abs().max())
                        for a, b in zip(made, exact, strict=False)
                        if a.dtype != torch.uint8
                    ]
                    took = autotune.milliseconds(form, *given, sizes)
                    rows[name] = f"{took * 1e3:.1f} us, error {max(errors):.1e}"
                except Exception as problem:
                    rows[name] = f"{type(problem).__name__}: {str(problem)[:200]}"
            found[task] = rows
    return found


def halved(precision):
    return torch.bfloat16 if precision == "bf16" else torch.float32


FORMS = {
    **{
        f"forms: attention {p}": lambda p=p: forms_of(tasks_of_attention(halved(p)), p)
        for p in ("fp32", "bf16")
    },
    "forms: layer norm": lambda: forms_of(tasks_of_rows(torch.float32), "fp32"),
    **{
        f"forms: {name} {p}": lambda s=s, p=p: forms_of(tasks_of_products(s, halved(p)), p)
        for p in PRECISIONS
        for name, s in PRODUCTS.items()
    },
    **{
        f"forms: patches {p}": lambda p=p: forms_of(
            tasks_of_images(PATCHES, ("convolve", "weight_gradient"), halved(p)), p
        )
        for p in PRECISIONS
    },
    **{
        f"forms: {name} {p}": lambda s=s, p=p: forms_of(
            tasks_of_images(
                s, ("conv_relu_pool", "input_gradient", "weight_gradient"), torch.float32
            ),
            p,
        )
        for p in ("tf32", "fp32")
        for name, s in (("pfl conv2", PFL2), ("mcmahan conv2", MCMAHAN2))
    },
}


def rounds_of(name, precision):
    """Time whole rounds of a workload of `idiolect bench`, and its kernels."""
    work = workloads.WORKLOADS[name]
    fed = federation(work.sizes, work.shape)
    return timed_rounds(
        lambda: workloads.simulation(work, fed, workloads.fastest("cuda", precision))
    )


def long_rounds_of(precision):
    """Time rounds of PFLlib's clients of Fashion-MNIST, and their kernels."""
    sizes = long_rounds.SIZES["dirichlet"]
    work, fed = long_rounds.workload(sizes), federation(sizes, long_rounds.MNIST)
    backend = Backend("vectorised", "cuda", precision=precision)
    return timed_rounds(lambda: workloads.simulation(work, fed, backend), repeats=3, together=2)


def blocks_of(precision, most):
    """Time the same rounds with clients cut into fewer blocks, so with more padding."""
    sizes, times = long_rounds.SIZES["dirichlet"], {}
    work, fed = long_rounds.workload(sizes), federation(sizes, long_rounds.MNIST)
    for blocks in most:
        block_runner._pieces.cache_clear()
        with mock.patch.object(block_runner, "MOST_BLOCKS", blocks):
            sim = workloads.simulation(
                work, fed, Backend("vectorised", "cuda", precision=precision)
            )
            took = []
            for _ in range(5):
                start = time.perf_counter()
                sim.advance()
                torch.cuda.synchronize()
                took.append(round(1e3 * (time.perf_counter() - start), 1))
        times[blocks] = took
    block_runner._pieces.cache_clear()
    return {"ms of each round, by the most blocks": times}


def deferred_agrees():
    """Compare rounds in which gradients of dense layers are deferred with others."""
    fed, ends, deferred = federation([20] * 12, COLOUR, held_out=10), [], []
    added = linear._WeightGradient.added

    def counted(self, *given):
        deferred.append(given[0])
        return added(self, *given)

    for put_off in (linear._put_off, lambda gradient, x: False):
        with (
            mock.patch.object(linear, "_put_off", put_off),
            mock.patch.object(linear._WeightGradient, "added", counted),
        ):
            sim = simulation(
                METHODS["fedavg"](batch=10, lr=0.01), fed, steady, Backend(device="cuda")
            )
            for _ in range(4):
                sim.advance()
        ends.append([leaf.cpu().double() for leaf in tree.leaves(sim.tree)])
    far = [
        float((a - b).norm() / (1e-9 + b.norm())) for a, b in zip(*ends, strict=True) if a.numel()
    ]
    return {"deferred": len(deferred), "largest difference": max(far)}


def timed_rounds(make, repeats=7, together=3):
    began, known = time.perf_counter(), {*autotune.trials}
    sim = make()
    for _ in range(3):
        sim.advance()
    torch.cuda.synchronize()
    first, times = time.perf_counter() - began, []
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(together):
            sim.advance()
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start) / together)
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        sim.advance()
        torch.cuda.synchronize()
    rows = sorted(seen.key_averages(), key=lambda row: -row.self_device_time_total)
    return {
        "ms": sorted(times)[len(times) // 2],
        "first three rounds, s": first,
        "device ms": sum(row.self_device_time_total for row in rows) / 1e3,
        "kernels": sum(row.count for row in rows),
        "top": [
            f"{row.self_device_time_total:9.0f} us {row.count:5d}  {row.key[:150]}"
            for row in rows[:40]
        ],
        "forms: us, distance": {
            what: {name: one if isinstance(one, str) else _us(*one) for name, one in own.items()}
            for what, own in autotune.trials.items()
            if what not in known
        },
    }


def _us(far, took):
    return f"{'other results' if took is None else round(1e3 * took, 1)}, {far:.0e}"


ROUNDS = {
    f"rounds: {name} {p}": lambda name=name, p=p: rounds_of(name, p)
    for name in BENCHED
    for p in PRECISIONS
}
SMALL = {
    "small: long rounds fp32": lambda: long_rounds_of("fp32"),
    "small: pfl-cifar10 tf32": lambda: rounds_of("pfl-cifar10", "tf32"),
    "small: pfl-cifar10 fp32": lambda: rounds_of("pfl-cifar10", "fp32"),
    "small: deferred fp32": deferred_agrees,
    "small: fewer blocks fp32": lambda: blocks_of("fp32", (1, 2, 3, 5, 12)),
    "small: long rounds tf32": lambda: long_rounds_of("tf32"),
    **{
        f"small: 20 clients {p}": lambda p=p: forms_of(
            tasks_of_images(
                MCMAHAN, ("conv_relu_pool", "input_gradient", "weight_gradient"), torch.float32
            ),
            p,
            ("plain", "runs", "thin", "tensor"),
        )
        for p in ("fp32", "tf32")
    },
}


def agreement(method, build, shape):
    """Largest relative difference of any tree after 2 rounds, single precision: kernels and all."""
    fed = federation([20, 20, 13], shape, held_out=10)
    sides = []
    for backend in (Backend("sequential", "cpu"), Backend(device="cuda", kernels="first")):
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
        backend=Backend(device="cuda", kernels="first"),
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


def brief(out):
    """Tell small networks' rounds in a few lines: times, kernels, the best form of each kind."""
    for name, own in out.items():
        if not name.startswith("small") or "error" in own:
            continue
        if "ms" in own:
            times = (own["ms"], own["device ms"], own["first three rounds, s"])
            print(
                f"{name}: {{:.2f}} ms, {{:.2f}} on the device, first three {{:.1f}} s".format(
                    *times
                )
            )
            print(*(f"  {line[:110]}" for line in own["top"][:12]), sep="\n")
        for what, forms in own.get("forms: us, distance", own).items():
            if isinstance(forms, dict) and what != "ms of each round, by the most blocks":
                print(f"  {_short(what)}: {_best(forms)}")
        if "deferred" in own:
            print(name, own)
        if "ms of each round, by the most blocks" in own:
            print(name, own["ms of each round, by the most blocks"])


def _short(what):
    return re.sub(r"[a-z_]+=|ConvShape|LinearSizes|torch\.", "", what)


def _best(forms):
    """Return the fastest form of each kind, with what was measured."""
    found = {}
    for name, told in forms.items():
        start = re.match(r"[0-9.]+", told)
        if start:
            kind = name.split()[0]
            found[kind] = min(found.get(kind, (9e9, "", "")), (float(start[0]), name, told))
    bad = [name for name, told in forms.items() if not re.match(r"[0-9.]+", told)]
    rows = [f"{name} {told}" for _, name, told in sorted(found.values())]
    return "; ".join(rows) + (f"; failed: {', '.join(bad)}" if bad else "")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", nargs="*", help="parts, or what their names begin with")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no part after these")
    options, began = parser.parse_args(), time.perf_counter()
    torch.backends.cudnn.allow_tf32 = False
    out: dict[str, object] = {
        "about": {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    }
    parts = {
        **SMALL,
        **FORMS,
        **ROUNDS,
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
        if options.only and not any(name.startswith(own) for own in options.only):
            continue
        if time.perf_counter() - began > options.seconds:
            break
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
    brief(out)


if __name__ == "__main__":
    main()
