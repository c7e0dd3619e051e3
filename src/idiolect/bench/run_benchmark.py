"""The benchmark: every chosen workload, first checked, then timed; each part reported when done."""

import datetime
import json
import os
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from idiolect.bench import measurements
from idiolect.bench.adapter_loops import AdapterWorkload, adapters, adapters_text
from idiolect.bench.measurements import Make, Side
from idiolect.bench.peers import PEERS, time_peers, version
from idiolect.bench.workloads import (
    WORKLOADS,
    Workload,
    backends,
    fastest,
    federation,
    plain_loop,
    simulation,
)
from idiolect.engine.backend import Backend
from idiolect.engine.rounds import Simulation
from idiolect.errors import ConfigError
from idiolect.version import VERSION

WHOLE, PADDING, ADAPTERS = "persfl", "padding", "lora-100"
_SEQUENTIAL = ("plain loop", "sequential")  # sides that train one client after the other
_FEW = 5  # clients of sequential sides on CUDA, where they are slow and their time is linear

Row = Mapping[str, Any]


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
        known = [*WORKLOADS, WHOLE, PADDING, ADAPTERS]
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
        return [*here, *([WHOLE, ADAPTERS] if self.place == "cuda" else []), PADDING]


def bench(
    options: Options, report: Callable[[str], object] = print, out: Path | None = None
) -> dict[str, Any]:
    """Measure, and return everything as plain values; `faults` lists what went wrong.

    Every part is reported, and written to `out`, as soon as it is done: the rest may take long.
    """
    if out is not None and not out.parent.is_dir():
        raise ConfigError(f"{out.parent} is no folder to write {out.name} to; make it first")
    device, seconds, chosen = options.place, options.seconds, options.chosen
    found: dict[str, Any] = {"about": _machine(device), "workloads": [], "faults": []}

    def part(
        name: str, work: Callable[[], Any], text: Callable[[Any], Iterable[str]], into: str = ""
    ) -> None:
        faults = []
        try:
            row = work()
        except ConfigError:
            raise
        except Exception as error:  # the other parts still run
            lines = str(error).strip().splitlines() or [""]
            faults = [f"{name}: {type(error).__name__}: {lines[0]}"]
        else:
            if into:
                found[into].append(row)
            else:
                found[name] = row
            faults = _disagreement(row) if into == "workloads" else []
            for line in text(row):
                report(line)
        for fault in faults:
            report(f"FAULT {fault}")
        found["faults"] += faults
        if out is not None:
            out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")

    for line in _heading_text(found["about"]):
        report(line)
    for name in chosen:
        if name in WORKLOADS:
            part(name, partial(_workload, name, device, options), _workload_text, "workloads")
    if WHOLE in chosen:
        part(WHOLE, partial(measurements.persfl, device, options.data_dir), _whole_text)
    if ADAPTERS in chosen:
        known = ("fp32", "tf32", "bf16") if device == "cuda" else ("fp32", "bf16")
        measured = known if options.precision else known[:1]
        part(
            ADAPTERS, partial(adapters, AdapterWorkload(), device, measured, seconds), adapters_text
        )
    if PADDING in chosen:
        part(PADDING, measurements.padding, _padding_text)
    if options.precision and chosen != [ADAPTERS]:
        part("precision", partial(measurements.precisions, device, seconds), _precision_text)
    if options.grow:
        found["growth"] = []
        for name, (axis, points) in measurements.curves(device).items():
            grow = partial(measurements.growth, name, axis, points, device, seconds)
            part(f"growth, {name}", grow, _growth_text, "growth")
    return found


def _workload(name: str, device: str, options: Options) -> dict[str, Any]:
    work = WORKLOADS[name]
    row: dict[str, Any] = {"name": name, "about": work.about}
    if options.check:
        exact, single = measurements.differences(work, fastest(device))
        row["difference"] = {"float64": exact, "float32": single}
    fewer = _fewer(work, _FEW if device == "cuda" else work.few)
    last: list[Simulation] = []
    makes = _sides(work, fewer, device, last)
    measured = measurements.timed(makes, device, options.seconds, share=6)
    row["width"], row["padding"] = last[0].widths.get("0 step"), last[0].padding()
    row["base"] = base = next(side for side in measured if side in _SEQUENTIAL)
    pace = {
        side: (fewer if side in _SEQUENTIAL else work).examples / own.seconds
        for side, own in measured.items()
    }
    row["sides"] = {
        side: {
            "samples_per_second": pace[side],
            "ms": 1e3 * work.examples / pace[side],
            "ratio": pace[side] / pace[base],
            "peak_mib": own.peak_mib,
            "turns": own.turns,
            "first_seconds": own.first,
        }
        for side, own in measured.items()
    }
    row["clients_of_loops"] = fewer.cohort or len(fewer.sizes)
    row["peers"] = time_peers(work, device) if options.peers else {}
    row["published_ms"] = work.published
    return row


def _fewer(work: Workload, most: int) -> Workload:
    """Cut a workload for sides that train one client after the other."""
    clients = min(work.cohort or len(work.sizes), most)
    return replace(work, sizes=work.sizes[:clients], cohort=None)


def _sides(
    work: Workload, fewer: Workload, device: str, last: list[Simulation]
) -> Iterator[tuple[str, Make]]:
    """Yield each side's name and how to make it; `last` holds the simulation made last."""
    whole = federation(work.sizes, work.shape)
    part = whole if fewer.sizes == work.sizes else federation(fewer.sizes, work.shape)

    def engine(name: str, backend: Backend) -> Side:
        given = (fewer, part) if name in _SEQUENTIAL else (work, whole)
        last[:] = [simulation(*given, backend)]
        return last[0].advance

    if work.has_loop:
        yield "plain loop", partial(plain_loop, fewer, part, device)
    for name, backend in backends(device).items():
        last.clear()  # else the memory of the side before would count
        yield name, partial(engine, name, backend)


def _disagreement(row: Row) -> list[str]:
    """Return where a workload differs from the sequential backend by more than rounding."""
    far = row.get("difference", {}).get("float64", 0.0)
    if far < measurements.LARGEST:
        return []
    return [f"{row['name']}: differs from the sequential backend by {far:.1e} in float64"]


def _machine(device: str) -> dict[str, Any]:
    """Return the versions and the hardware that a figure was measured on."""
    about: dict[str, Any] = {
        "idiolect": VERSION,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": device,
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }
    if hasattr(os, "getloadavg"):
        about["load_before"] = round(os.getloadavg()[0], 2)  # other work makes figures doubtful
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        about["gpu"] = properties.name
        about["gpu_gib"] = round(properties.total_memory / 2**30, 1)
        about["cuda"] = torch.version.cuda
    return about | {peer: version(peer) for peer in PEERS}


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


# The parts as lines of text.

_ROW = "  {:<22}{:>12}{:>14}{:>9}{:>11}{:>9}{:>11}"


def _heading_text(about: Row) -> Iterator[str]:
    where = about.get("gpu") or f"{about['processor']}, {about['threads']} threads"
    yield f"idiolect {about['idiolect']}, torch {about['torch']}, {where}"
    yield _ROW.format("", "ms a round", "samples/s", "ratio", "peak MiB", "padding", "round 1, s")


def _workload_text(row: Row) -> Iterator[str]:
    off = row.get("difference")
    yield f"{row['name']}: {row['about']}" + (
        f"  [off by {off['float64']:.0e} in float64, {off['float32']:.0e} in float32]"
        if off
        else ""
    )
    for side, own in row["sides"].items():
        stacked = side not in _SEQUENTIAL
        wide = f" (width {row['width']})" if stacked and row["width"] else ""
        yield _ROW.format(
            side + wide,
            _ms(own["ms"]),
            f"{own['samples_per_second']:,.0f}",
            f"{own['ratio']:.2f}×",
            "" if own["peak_mib"] is None else f"{own['peak_mib']:,.0f}",
            f"{row['padding']:.1%}" if stacked else "",
            f"{own['first_seconds']:.1f}",
        )
    for peer, found in row["peers"].items():
        if "ms" in found:
            pace = f"{found['samples_per_second']:,.0f}"
            yield _ROW.format(f"{peer} {found['version']}", _ms(found["ms"]), pace, "", "", "", "")
        else:
            yield f"  {peer:<22}{found['why']}"
    for peer, ms in row["published_ms"].items():
        yield _ROW.format(f"{peer}, on an H200", _ms(ms), "", "", "", "", "")


def _ms(value: float) -> str:
    return f"{value:,.2f}" if value < 100 else f"{value:,.0f}"


def _whole_text(found: Row) -> Iterator[str]:
    peak = f", {found['peak_mib']:,.0f} MiB" if found["peak_mib"] else ""
    yield (
        f"persfl: {found['about']}; {found['data']}: {found['seconds']:.1f} s "
        f"({found['rounds_seconds']:.1f} rounds, {found['distillation_seconds']:.1f} "
        f"distillation{peak})"
    )


def _padding_text(rows: list[dict[str, Any]]) -> Iterator[str]:
    yield "padding, share of the examples in an epoch"
    form = "  {:<18}{:>9}{:>9}{:>14}{:>12}{:>12}"
    yield form.format("", "smallest", "largest", "as one block", "cut", "5 runs, cut")
    for row in rows:
        shares = [f"{row[key]:.1%}" for key in ("one_block", "one_run", "five_runs")]
        yield form.format(row["name"], row["smallest"], row["largest"], *shares)


def _precision_text(found: Row) -> Iterator[str]:
    yield f"precision: {found['about']}"
    for name, scores in found["accuracy"].items():
        mean, change = sum(scores) / len(scores), found["change"][name]
        times = "  ".join(f"{work} {own[name]:.2f} ms" for work, own in found["ms"].items())
        yield f"  {name:<6} accuracy {mean:.2f} % ({change:+.2f})  {times}"


def _growth_text(found: Row) -> Iterator[str]:
    yield f"growth, {found['axis']}"
    for point in found["points"]:
        yield (
            f"  {point['at']:>9,.0f}{_ms(point['ms']):>12} ms"
            f"{point['samples_per_second']:>14,.0f} samples/s"
        )
