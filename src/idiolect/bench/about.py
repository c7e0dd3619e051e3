"""On what a figure was measured: versions, hardware, time."""

import datetime
import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch

from idiolect.version import VERSION


def machine(device: str) -> dict[str, Any]:
    """Describe the machine and the versions."""
    told: dict[str, Any] = {
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
        told["load_before"] = round(os.getloadavg()[0], 2)  # other work makes figures doubtful
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        told["gpu"] = properties.name
        told["gpu_gib"] = round(properties.total_memory / 2**30, 1)
        told["cuda"] = torch.version.cuda
    for peer in ("pfl", "flwr"):
        told[peer] = version(peer)
    return told


def version(package: str) -> str | None:
    """Return the version of an installed package."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
