"""The benchmark: every chosen workload, first checked, then timed; told as it goes."""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from idiolect.bench import agreement, complete, growth, padding, peers, precision, text_report
from idiolect.bench.about import machine
from idiolect.bench.clock import Measured, interleaved, on_cuda
from idiolect.bench.random_images import federation
from idiolect.bench.sides import Turn, backends, plain_loop, simulation
from idiolect.bench.workloads import WORKLOADS, Workload
from idiolect.engine.backend import Backend
from idiolect.engine.rounds import Simulation
from idiolect.errors import ConfigError

WHOLE, PADDING = "persfl", "padding"
Told = Callable[[str], object]
Lines = Callable[[Any], Iterable[str]]
_IN_TURN = 5  # clients that the loops take on CUDA, where they are slow and their time is linear


@dataclass(frozen=True)
class Options:
    """What to measure, and where."""

    device: str = "auto"
    only: tuple[str, ...] = ()  # names of workloads; none: those meant for the device
    grow: bool = False  # also how time grows with clients, batch, network, cohort, population
    precision: bool = False  # also what TF32 and bfloat16 do to accuracy and speed
    peers: bool = True  # where they are installed
    check: bool = True  # first against the sequential backend in float64
    seconds: float = 6.0  # timed turns of a workload, all sides together
    data_dir: Path | None = None  # for CIFAR-10; random images where it is not found

    def __post_init__(self) -> None:
        known = [*WORKLOADS, WHOLE, PADDING]
        for name in self.only:
            if name not in known:
                raise ConfigError(
                    f"workload {name!r} is unknown, expected one of {', '.join(known)}"
                )
        if self.seconds <= 0:
            raise ConfigError(f"seconds is {self.seconds:g}, expected more than 0")

    @property
    def place(self) -> str:
        """The device that is meant."""
        return Backend(device=self.device).place.type

    @property
    def chosen(self) -> list[str]:
        """The names of what is measured."""
        if self.only:
            return list(self.only)
        here = [name for name, work in WORKLOADS.items() if self.place in work.devices]
        return [*here, *([WHOLE] if self.place == "cuda" else []), PADDING]


def bench(options: Options, tell: Told = print, out: Path | None = None) -> dict[str, Any]:
    """Measure, and return everything as plain values; `faults` lists what went wrong.

    Every part is told, and written to `out`, as soon as it is done: what follows may take long.
    """
    if out is not None and not out.parent.is_dir():
        raise ConfigError(f"{out.parent} is no folder to write {out.name} to; make it first")
    device, seconds = options.place, options.seconds
    about = machine(device)
    found: dict[str, Any] = {"about": about, "workloads": [], "faults": []}

    def part(name: str, work: Callable[[], Any], lines: Lines, into: list[Any] | None) -> None:
        try:
            row = work()
        except ConfigError:
            raise
        except Exception as error:  # it leaves the others their turn
            said = str(error).strip().splitlines() or [""]
            wrong = [f"{name}: {type(error).__name__}: {said[0]}"]
        else:
            if into is None:
                found[name] = row
            else:
                into.append(row)
            wrong = _wrong(row) if into is found["workloads"] else []
            for line in lines(row):
                tell(line)
        for fault in wrong:
            tell(f"FAULT {fault}")
        found["faults"] += wrong
        if out is not None:
            out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")

    for line in text_report.heading(about):
        tell(line)
    for name in options.chosen:
        if name in WORKLOADS:
            part(
                name,
                partial(_workload, name, device, options),
                text_report.workload,
                found["workloads"],
            )
    if WHOLE in options.chosen:
        part(
            WHOLE,
            lambda: complete.persfl(device, data_dir=options.data_dir),
            text_report.whole,
            None,
        )
    if PADDING in options.chosen:
        part(PADDING, padding.shares, text_report.padding, None)
    if options.precision:
        part("precision", lambda: precision.compared(device, seconds), text_report.precision, None)
    if options.grow:
        found["growth"] = []
        for name, curve in growth.curves(device).items():
            grow = partial(growth.grown, name, curve, device, seconds)
            part(f"growth, {name}", grow, text_report.curve, found["growth"])
    return found


def _workload(name: str, device: str, options: Options) -> dict[str, Any]:
    work = WORKLOADS[name]
    row: dict[str, Any] = {"name": name, "about": work.about}
    fast = list(backends(device).values())[-1]
    if options.check:
        exact, single = agreement.differences(work, fast)
        row["difference"] = {"float64": exact, "float32": single}
    in_turn = _fewer(work, _IN_TURN if device == "cuda" else work.few)
    measured, sim = _timed(work, in_turn, device, options.seconds)
    row["width"], row["padding"] = sim.widths.get("0 step"), sim.padding()
    base = next(side for side in measured if side in ("plain loop", "sequential"))
    pace = {
        side: (in_turn if side in ("plain loop", "sequential") else work).examples / own.seconds
        for side, own in measured.items()
    }
    row["base"] = base
    row["sides"] = {
        side: {
            "samples_per_second": pace[side],
            "ms": 1e3 * work.examples / pace[side],
            "ratio": pace[side] / pace[base],
            "peak_mib": own.peak_mib,
            "turns": own.turns,
        }
        for side, own in measured.items()
    }
    row["clients_of_loops"] = in_turn.cohort or len(in_turn.sizes)
    row["peers"] = peers.beside(work, device) if options.peers else {}
    row["published_ms"] = work.published
    return row


def _fewer(work: Workload, most: int) -> Workload:
    """Cut a workload for sides that do one client after the other."""
    clients = min(work.cohort or len(work.sizes), most)
    return replace(work, sizes=work.sizes[:clients], cohort=None)


def _timed(
    work: Workload, in_turn: Workload, device: str, budget: float
) -> tuple[dict[str, Measured], Simulation]:
    """Time all sides of a workload; return the fastest kind's simulation too."""
    whole = federation(work.sizes, work.shape)
    part = whole if in_turn.sizes == work.sizes else federation(in_turn.sizes, work.shape)
    last: list[Simulation] = []

    def loop() -> Turn:
        return plain_loop(in_turn, part, torch.device(device))

    def engine(name: str, backend: Backend) -> Callable[[], object]:
        alone = name == "sequential"
        last[:] = [simulation(in_turn if alone else work, part if alone else whole, backend)]
        return last[0].advance

    makes: dict[str, Callable[[], Callable[[], object]]] = {
        **({"plain loop": loop} if work.in_turn else {}),
        **{name: partial(engine, name, backend) for name, backend in backends(device).items()},
    }
    if device == "cuda":
        took = {}
        for name, make in makes.items():
            last.clear()  # else the memory of the side before would count
            warm = 3 if name == "graph" else 1  # an eager turn, the captured one, a replay
            took[name] = on_cuda(make, budget / 6, warm)
    else:
        took = interleaved({name: make() for name, make in makes.items()}, budget)
    return took, last[0]


def _wrong(row: dict[str, Any]) -> list[str]:
    """Say where a workload is not what the sequential backend makes of it."""
    far = row.get("difference", {}).get("float64", 0.0)
    if far < agreement.LARGEST:
        return []
    return [f"{row['name']}: differs from the sequential backend by {far:.1e} in float64"]
