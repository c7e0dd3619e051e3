"""The benchmark: every chosen workload, first checked, then timed; told as it goes."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from idiolect.bench import agreement, complete, growth, padding, peers, precision, told
from idiolect.bench.about import machine
from idiolect.bench.clock import Measured, interleaved, on_cuda
from idiolect.bench.material import federation
from idiolect.bench.sides import Turn, backends, plain_loop, simulation
from idiolect.bench.workloads import WORKLOADS, Workload
from idiolect.errors import ConfigError
from idiolect.simulate.backend import Backend
from idiolect.simulate.rounds import Simulation

WHOLE, PADDING = "persfl", "padding"
Told = Callable[[str], None]
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


def bench(options: Options, tell: Told = print) -> dict[str, Any]:
    """Measure, and return everything as plain values; `faults` lists what went wrong."""
    device = options.place
    found: dict[str, Any] = {"about": machine(device), "workloads": [], "faults": []}
    for line in told.heading(found["about"]):
        tell(line)
    for name in options.chosen:
        if name in WORKLOADS:
            row = _attempt(found, name, partial(_workload, name, device, options))
            if row:
                found["workloads"].append(row)
                found["faults"] += _wrong(row)
                for line in told.workload(row):
                    tell(line)
    if WHOLE in options.chosen:
        found["persfl"] = _attempt(
            found, WHOLE, lambda: complete.persfl(device, data_dir=options.data_dir)
        )
        tell(told.whole(found["persfl"]))
    if PADDING in options.chosen:
        found["padding"] = padding.shares()
        for line in told.padding(found["padding"]):
            tell(line)
    if options.precision:
        found["precision"] = _attempt(
            found, "precision", lambda: precision.compared(device, options.seconds)
        )
        for line in told.precision(found["precision"]):
            tell(line)
    if options.grow:
        found["growth"] = []
        for curve in growth.grow(device, options.seconds):
            found["growth"].append(curve)
            for line in told.curve(curve):
                tell(line)
    for fault in found["faults"]:
        tell(f"FAULT {fault}")
    return found


def _attempt(found: dict[str, Any], name: str, work: Callable[[], dict[str, Any]]) -> Any:
    """Do one part; what goes wrong is told at the end and leaves the others their turn."""
    try:
        return work()
    except Exception as error:
        if isinstance(error, ConfigError):
            raise
        lines = str(error).strip().splitlines() or [""]
        found["faults"].append(f"{name}: {type(error).__name__}: {lines[0]}")
        return None


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
            took[name] = on_cuda(make, budget / 6)
    else:
        took = interleaved({name: make() for name, make in makes.items()}, budget)
    return took, last[0]


def _wrong(row: dict[str, Any]) -> list[str]:
    """Say where a workload is not what the sequential backend makes of it."""
    far = row.get("difference", {}).get("float64", 0.0)
    if far < agreement.LARGEST:
        return []
    return [f"{row['name']}: differs from the sequential backend by {far:.1e} in float64"]
