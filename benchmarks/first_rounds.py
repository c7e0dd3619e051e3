"""Time the first rounds on CUDA, in which kernels are compiled and chosen.

    PYTHONPATH=src python benchmarks/first_rounds.py [NAME ...] [--json FILE] [--total 85] [--cpu]

Seconds from nothing to the end of round 1 (data, plans, kernels): in torch's own forms alone, with
kernels chosen meanwhile, and with kernels chosen first; when the switch came, and the best round
after it. Nothing is compiled before, and choices that come with the package count only with
`--shipped`. Torch's forms run twice and the second counts, since libraries load their own kernels
in the first. Meanwhile ends two rounds after the switch, or after `--seconds`. Choosing first gets
what is left of `--total`: when its share is over, the plain form is taken for the rest, and the
figure says "more than". `--again` adds a run that finds on disk what meanwhile has left there.

`apart` is how far the server's state is from that of torch's forms after as many rounds. A workload
is one of `idiolect bench`, with a precision after a colon; `pathological`: PFLlib's clients of
`long_rounds.py`; or `four`: the architectures of `heterogeneous.py`.
"""

import argparse
import gc
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import heterogeneous
from idiolect.bench.workloads import WORKLOADS, federation, simulation
from idiolect.core import tree
from idiolect.engine.backend import Backend
from idiolect.kernels import autotune, compiled
from long_rounds import SIZES, workload

ALL = ("lenet5-20", "resnet18-10", "four", "pathological", "vit-20")
FEW, MOST = 4, 100  # rounds: those of torch's forms, and of others at most
AFTER = 2  # rounds after the switch: one kernel by kernel, one recorded; the next is replayed


class Everything(set[Any]):
    """What failed before: all operations, so that torch does them."""

    def __contains__(self, what: object) -> bool:
        return True


def forget() -> None:
    """Begin as a new process does."""
    autotune.forget()
    autotune._shipped.cache_clear()
    autotune._Choosing.turn = -1
    for known in (compiled._binaries, compiled._tried, compiled._pending):
        known.clear()  # type: ignore[attr-defined]
    compiled.kernel.cache_clear()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@contextmanager
def torch_alone() -> Iterator[None]:
    with (
        mock.patch.object(autotune, "_waits", lambda *given: True),
        mock.patch.object(autotune, "settle", lambda turn: None),
        mock.patch.object(compiled, "_failed", Everything()),
    ):
        yield


@contextmanager
def until(end: float, left_out: list[str]) -> Iterator[None]:
    """Choose until a moment; after it take the plain form."""
    choose = autotune.choose

    def in_time(what: str, known: Any, inputs: Any) -> Any:
        if time.perf_counter() < end:
            return choose(what, known, inputs)
        left_out.append(what)
        return known["plain"]

    with mock.patch.object(autotune, "choose", in_time):
        yield


def rounds(make: Callable[[], Any], seconds: float, count: int) -> tuple[dict[str, Any], list[Any]]:
    """Run rounds; return their seconds and when the switch was, and the server's state after each.

    They end some rounds after the switch, after so many seconds, or when there are as many.
    """
    forget()
    switches, began, start = autotune._Choosing.switches, time.perf_counter(), time.perf_counter()
    sim = make()
    took, states, switch = list[float](), list[Any](), None
    while len(took) < count:
        sim.advance()
        if sim.device.type == "cuda":
            torch.cuda.synchronize()
        now = time.perf_counter()
        took.append(round(now - start, 4))
        states.append([leaf.cpu() for leaf in tree.leaves(sim.tree["server"])])
        if switch is None and autotune._Choosing.switches > switches:
            switch = {"seconds": round(now - took[-1] - began, 2), "round": len(took)}
        start = time.perf_counter()
        if switch is not None and len(took) > switch["round"] + AFTER:
            break
        if len(took) >= 2 and start - began > seconds:
            break
    told = {"round_1": took[0], "rounds": took[:20], "count": len(took), "switch": switch,
            "best": min(took), "waiting": len(autotune._waiting) + len(autotune._ahead),
            "in_all": round(time.perf_counter() - began, 2)}  # fmt: skip
    return told, states


def apart(one: list[Any], other: list[Any]) -> float:
    pairs = zip(one, other, strict=True)
    return max((float((a - b).norm() / b.norm().clamp(min=1e-30)) for a, b in pairs), default=0.0)


def made(name: str, cpu: bool) -> Callable[[Backend], Callable[[], Any]]:
    """Return what makes a workload's simulation on a backend."""
    name = name.partition(":")[0]
    if name == "four":
        sizes, public, settings = (
            ([4] * 8, 8, {"batch": 4, "sample": 8, "public_batch": 4, "lr": 0.02})
            if cpu
            else ([325] * 20, 1000, {"batch": 128, "sample": 1000, "public_batch": 256, "lr": 0.02})
        )
        fed = heterogeneous.with_public(sizes, public, 2)
        known = heterogeneous.NETWORKS
        return lambda backend: partial(
            heterogeneous.simulation, fed, known, backend, tuple(known), **settings
        )
    work = workload(SIZES[name]) if name in SIZES else WORKLOADS[name]
    if cpu:
        work = replace(work, sizes=tuple(-(-size // 200) for size in work.sizes))
    fed = federation(work.sizes, work.shape)
    return lambda backend: partial(simulation, work, fed, backend)


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__)
    ask.add_argument("workloads", nargs="*", default=ALL)
    ask.add_argument("--json", type=Path, help="also write the figures here")
    ask.add_argument("--seconds", type=float, default=12.0, help="of meanwhile, at most")
    ask.add_argument("--total", type=float, default=85.0, help="seconds of everything")
    ask.add_argument("--shipped", action="store_true", help="with the package's choices")
    ask.add_argument("--again", action="store_true")
    ask.add_argument("--keep", type=Path, help="a file for all choices: scripts/ship_choices.py")
    ask.add_argument("--cpu", action="store_true", help="all of it in small")
    given = ask.parse_args()
    began = time.perf_counter()
    found: dict[str, dict[str, Any]] = {name: {} for name in given.workloads}
    ends: dict[str, list[Any]] = {}
    device = "cpu" if given.cpu else "cuda"

    def backend(name: str, folder: str, kernels: str) -> Backend:
        precision = "fp32" if given.cpu else name.partition(":")[2] or "fp32"
        cache = Path(folder) / "widths.json"
        return Backend("vectorised", device, cache=cache, precision=precision, kernels=kernels)

    def tell(name: str, mode: str, own: dict[str, Any], states: list[Any]) -> None:
        plain = ends.setdefault(name, states)
        last = min(len(plain), len(states))
        own |= {"apart": apart(states[last - 1], plain[last - 1]), "after": last}
        found[name][mode] = own
        print(name, mode, json.dumps(own), flush=True)
        if given.json:
            given.json.write_text(json.dumps(found, indent=1) + "\n")
        autotune.add_to_cache(given.keep, autotune.read_cache(autotune._file))

    with ExitStack() as stack:
        if not given.shipped:
            absent = mock.Mock(return_value={})
            stack.enter_context(mock.patch.object(autotune, "_shipped", absent))
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        makes = {name: made(name, given.cpu) for name in given.workloads}
        for name, make in makes.items():
            own = f"{folder}/{name}"
            with torch_alone():
                rounds(make(backend(name, own, "meanwhile")), 0, 1)
                tell(name, "plain", *rounds(make(backend(name, own, "meanwhile")), 4.0, FEW))
            tell(
                name,
                "meanwhile",
                *rounds(make(backend(name, own, "meanwhile")), given.seconds, MOST),
            )
            if given.again:
                once_more = make(backend(name, own, "meanwhile"))
                tell(name, "again", *rounds(once_more, given.seconds, FEW))
        for place, (name, make) in enumerate(makes.items()):
            now = time.perf_counter()
            share = (given.total - (now - began)) / (len(makes) - place)
            left_out: list[str] = []
            own = f"{folder}/{name} first"
            with until(now + share, left_out):
                figures, states = rounds(make(backend(name, own, "first")), 0, 2)
            tell(name, "first", figures | {"not chosen": len(left_out)}, states)
    forget()
    print("| workload | torch's forms | meanwhile | first | switch | best round, meanwhile |")
    for name, modes in found.items():
        switch, first = modes["meanwhile"]["switch"], modes["first"]
        told = f"{switch['seconds']:.1f} s, before round {switch['round']}" if switch else "not yet"
        more = "more than " if first["not chosen"] else ""
        plain, own = modes["plain"]["round_1"], modes["meanwhile"]
        print(f"| {name} | {plain:.2f} | {own['round_1']:.2f} | {more}{first['round_1']:.2f} "
              f"| {told} | {own['best']:.4f} |")  # fmt: skip
    print(f"{time.perf_counter() - began:.0f} s in all")


if __name__ == "__main__":
    main()
