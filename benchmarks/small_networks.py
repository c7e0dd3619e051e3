"""Time small convolutional networks on one GPU: ms a round, of which on the device, and launches.

    PYTHONPATH=src python benchmarks/small_networks.py [PART ...] [--json FILE] [--seconds 75]
        [--top 16] [--cpu]

`pfl-cifar10` and `lenet5-20` of `idiolect bench` in every precision, and PFLlib's clients of
Fashion-MNIST (`long_rounds.py`) in TF32: one partition, both side by side, and Ditto on one. Before
that the kernels that are no matter of choice are compared with float64. "Weights computed" is
without weights that stay factors (`linear._FactoredWeights`). "Start ms" is the host's time to
launch a round. No part begins after `--seconds`; one that fails does not stop the others. `--cpu`
does all of it in small.
"""

import argparse
import json
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import long_rounds
from idiolect.bench import workloads
from idiolect.bench.workloads import federation
from idiolect.core.method import Method
from idiolect.engine.architecture import Architecture
from idiolect.engine.backend import Backend
from idiolect.engine.rounds import SeededRun, Simulation
from idiolect.kernels import autotune, convolution_cuda, fused_tree_ops, linear, row_average
from idiolect.kernels.deferred import DeferredTensor
from idiolect.methods import METHODS


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def timed(sim: Simulation, device: str, repeats: int, together: int) -> dict[str, Any]:
    """Return the median time of a round, and what the device did in one."""
    autotune.trials.clear()
    began = time.perf_counter()
    for _ in range(3):
        sim.advance()
    synchronize(device)
    first, times, starts, start_round = time.perf_counter() - began, [], [], sim._start

    def started(*given: Any) -> Any:
        start = time.perf_counter()
        pending = start_round(*given)
        starts.append(1e3 * (time.perf_counter() - start))
        return pending

    sim._start = started  # type: ignore[method-assign]
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(together):
            sim.advance()
        synchronize(device)
        times.append(1e3 * (time.perf_counter() - start) / together)
    found: dict[str, Any] = {
        "ms": round(sorted(times)[len(times) // 2], 3),
        "every ms": [round(one, 2) for one in times],
        "start ms": round(sorted(starts)[len(starts) // 2], 3),
        "first three rounds, s": round(first, 2),
    }
    if device == "cuda":
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            sim.advance()
            torch.cuda.synchronize()
        # The host's calls are among the rows too, without time on the device.
        rows = [row for row in seen.key_averages() if row.self_device_time_total > 0]
        rows.sort(key=lambda row: -row.self_device_time_total)
        found["device ms"] = round(sum(row.self_device_time_total for row in rows) / 1e3, 3)
        found["launches"] = sum(row.count for row in rows)
        found["top"] = [
            f"{row.self_device_time_total:9.0f} us {row.count:6d}  {row.key[:90]}" for row in rows
        ]
        found["forms"] = {
            problem: {
                name: round(1e3 * tried[1], 1)
                for name, tried in forms.items()
                if isinstance(tried, tuple) and tried[1] is not None
            }
            for problem, forms in autotune.trials.items()
        }
    return found


def benched(name: str, precision: str, device: str) -> dict[str, Any]:
    work = workloads.WORKLOADS[name]
    if device == "cpu":
        precision = "fp32" if precision == "tf32" else precision
        work = replace(work, sizes=work.sizes[:3], cohort=None if work.cohort is None else 2)
    sim = workloads.simulation(
        work, federation(work.sizes, work.shape), workloads.fastest(device, precision)
    )
    return timed(sim, device, 7, 6) if device == "cuda" else timed(sim, device, 1, 1)


def computed(precision: str, device: str) -> dict[str, Any]:
    """Time pfl's benchmark with weights that are computed in every step."""
    before, linear._RANK = linear._RANK, 0.0
    try:
        return benched("pfl-cifar10", precision, device)
    finally:
        linear._RANK = before


def unequal(partitions: list[str], method: Method, device: str) -> dict[str, Any]:
    """Time PFLlib's clients, of some partitions side by side."""
    by = 1 if device == "cuda" else 200
    runs = [
        SeededRun(
            n,
            federation(
                tuple(-(-size // by) for size in long_rounds.SIZES[one]), long_rounds.MNIST
            ).train_data,
        )
        for n, one in enumerate(partitions)
    ]
    precision = "tf32" if device == "cuda" else "fp32"
    backend = Backend("vectorised", device, precision=precision, kernels="first")
    sim = Simulation(method, runs, {"all": Architecture(long_rounds.network)}, backend=backend)
    return timed(sim, device, 3, 2) if device == "cuda" else timed(sim, device, 1, 1)


def apart(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


def _way(scales: Tensor, here: Tensor, there: Tensor) -> Tensor:
    """Return twice the scaled way from there to here, in double precision."""
    return 2 * scales.double().reshape(-1, *[1] * (here.dim() - 1)) * (here - there).double()


def checks(device: str) -> dict[str, float]:
    """Return how far kernels are from float64: a step, a mean and the search for broken rows."""
    torch.manual_seed(0)
    far: dict[str, float] = {}
    for name, clients, examples, inside, outside, parts in (
        ("mcmahan-cnn, one client", 1, 10, 1024, 512, 10),
        ("mcmahan-cnn, 20 clients", 20, 10, 1024, 512, 3),
        ("lenet5", 20, 20, 400, 120, 4),
        ("odd", 3, 7, 37, 11, 2),
    ):

        def drawn(*shape: int) -> Tensor:
            return torch.randn(shape, device=device)

        g, x = drawn(clients, examples, outside), drawn(clients, examples, inside)
        some, plain = drawn(parts, clients, 64, 32, 5, 5), drawn(clients, 64)
        shapes = ((outside, inside), (outside,), (64, 32, 5, 5), (64,))
        ys = [drawn(clients, *shape) for shape in shapes]
        both = linear._Gradients(g, x)
        late = (
            linear._WeightGradient(both),
            linear._BiasGradient(both),
            convolution_cuda._PartsSum(some),
        )
        exact = [g.double().mT @ x.double(), g.double().sum(1), some.double().sum(0), plain]
        scales, there = drawn(clients), [drawn(clients, *shape) for shape in shapes]
        gaps = fused_tree_ops._Gaps(scales, (*ys, *there))
        pulls = [DeferredTensor(fused_tree_ops._LateGap(gaps, n)) for n in range(len(ys))]
        for kind, pulled in (("step", False), ("step with a pull", True)):
            xs = [*map(DeferredTensor, late), plain]
            if pulled:
                xs = [x + pull for x, pull in zip(xs, pulls, strict=True)]
            made = fused_tree_ops._Step.forward(-0.1, *xs, *ys)
            far[f"{kind}, {name}"] = max(
                apart(one, y.double() - 0.1 * (gradient.double() + pulled * way))
                for one, y, gradient, way in zip(
                    made, ys, exact, [_way(scales, *pair) for pair in zip(ys, there, strict=True)],
                    strict=True,
                )
            )  # fmt: skip
    leaves = [torch.randn(50, 12544, 128, device=device)[:, : 12544 if device == "cuda" else 9]]
    leaves += [torch.randn(50, 64, 32, 3, 3, device=device), torch.randn(50, 10, device=device)]
    gone = torch.zeros(50, dtype=torch.bool, device=device)
    gone[7], leaves[0][7, 5, 3] = True, float("nan")
    share = torch.rand(50, device=device)
    means = row_average.averages(share, [row_average.without(gone, leaf) for leaf in leaves])
    kept = share.double() * ~gone
    far["mean"] = max(
        apart(one, torch.tensordot(kept, leaf.double().nan_to_num(0.0), dims=1))
        for one, leaf in zip(means, leaves, strict=True)
    )
    right = torch.equal(row_average.unsound(leaves, finite=True), gone)
    far["broken rows"] = 0.0 if right else float("inf")
    return far | factors(device)


def factors(device: str) -> dict[str, float]:
    """Return how far weights that are factors are from float64, in all that is done with them."""
    clients, inside, outside = (50, 12544, 128) if device == "cuda" else (3, 36, 40)
    base = torch.randn(1, outside, inside, device=device)
    weights, exact = linear._FactoredWeights.at(base, clients), base.double()
    for _ in range(4):
        g, x = (torch.randn(clients, 5, size, device=device) for size in (outside, inside))
        weights = weights.plus(-0.1, g, x) or weights
        exact = exact - 0.1 * g.double().mT @ x.double()
    x, b = (
        torch.randn(clients, 10, inside, device=device),
        torch.randn(clients, outside, device=device),
    )
    g, share = torch.randn(clients, 10, outside, device=device), torch.rand(clients, device=device)
    gone = torch.arange(clients, device=device) == 1
    kept = share.double() * ~gone
    return {
        "factors, forward": apart(
            weights.forward(x, b), x.double() @ exact.mT + b.double()[:, None]
        ),
        "factors, inputs' gradient": apart(weights.input_gradient(g), g.double() @ exact),
        "factors, weights": apart(weights.again().make(), exact),
        "factors, mean": apart(weights.mean(share, gone), torch.tensordot(kept, exact, dims=1)),
    }


def parts(device: str) -> dict[str, Callable[[], dict[str, Any]]]:
    fedavg = long_rounds.workload((1,)).method
    ditto = METHODS["ditto"](batch=10, lr=0.005)
    return {
        "checks": lambda: checks(device),
        "pfl-cifar10 tf32": lambda: benched("pfl-cifar10", "tf32", device),
        "PFLlib's Dirichlet tf32": lambda: unequal(["dirichlet"], fedavg, device),
        "lenet5-20 tf32": lambda: benched("lenet5-20", "tf32", device),
        "lenet5-20 bf16": lambda: benched("lenet5-20", "bf16", device),
        "lenet5-20 fp32": lambda: benched("lenet5-20", "fp32", device),
        "pfl-cifar10 bf16": lambda: benched("pfl-cifar10", "bf16", device),
        "PFLlib's pathological tf32": lambda: unequal(["pathological"], fedavg, device),
        "PFLlib's both tf32": lambda: unequal(["dirichlet", "pathological"], fedavg, device),
        "pfl-cifar10 fp32": lambda: benched("pfl-cifar10", "fp32", device),
        "pfl-cifar10 bf16, weights computed": lambda: computed("bf16", device),
        "PFLlib's Dirichlet tf32, Ditto": lambda: unequal(["dirichlet"], ditto, device),
    }


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__)
    ask.add_argument("parts", nargs="*", help="only these, in this order")
    ask.add_argument("--top", type=int, default=16, help="kernels that are told")
    ask.add_argument("--json", type=Path, help="also write the figures here")
    ask.add_argument("--seconds", type=float, default=75, help="begin no part after these")
    ask.add_argument("--cpu", action="store_true", help="all of it in small")
    given, began = ask.parse_args(), time.perf_counter()
    device = "cpu" if given.cpu else "cuda"
    chip = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    found: dict[str, Any] = {"about": {"device": chip, "torch": torch.__version__}}
    known = parts(device)
    for name in given.parts or known:
        part, start = known[name], time.perf_counter()
        if start - began > given.seconds:
            print(f"{name}: not begun")
            continue
        try:
            own = found[name] = part()
        except Exception:
            own = found[name] = {"error": traceback.format_exc()[-1500:]}
        if device == "cuda":
            torch.cuda.empty_cache()
        top, forms = own.pop("top", [])[: given.top], own.pop("forms", {})
        print(f"{name}, {time.perf_counter() - start:.1f} s: {json.dumps(own)}", flush=True)
        print(*(f"  {line}" for line in top), sep="\n", flush=True)
        own |= {"top": top} | ({"forms": forms} if forms else {})
        if given.json:
            given.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
