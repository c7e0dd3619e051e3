"""Where and how clients are run: the backend, the precision of products, lists on the device.

`tf32` lets a GPU's matrix units round the factors of fp32 products to 10 bits; `bf16` runs the
networks in bfloat16 (autocast: see `Network`). Parameters, losses, sums over clients and all state
stay in single precision.

A copy to a GPU waits for all that was started before. Most rounds need the same short lists of
numbers again (clients, their rows), so the last ones stay there, and new ones are sent without
waiting.
"""

import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from idiolect.errors import ConfigError

KINDS = ("vectorised", "sequential", "ray")
STORES = ("auto", "memory", "disk")
DEVICES = ("auto", "cpu", "cuda", "mps")
CHOICES = ("first", "meanwhile")


@dataclass(frozen=True)
class Ray:
    """Which Ray cluster, and how many workers of it, of what size."""

    address: str = ""  # of the cluster's head; empty: RAY_ADDRESS, or a cluster on this machine
    workers: int = 0  # 0: as many as fit
    cpus: float = 1  # of each; whole ones are its threads
    gpus: float = 0  # of each; 0.5: two workers share one

    def __post_init__(self) -> None:
        for name in ("workers", "cpus", "gpus"):
            if getattr(self, name) < 0:
                raise ConfigError(f"ray.{name} is {getattr(self, name)}, expected 0 or more")
        if not self.cpus and not self.gpus:
            raise ConfigError("ray.cpus and ray.gpus are both 0; a worker needs some of either")


@dataclass(frozen=True)
class Backend:
    """The kind of backend, the device, and how many clients make a block."""

    kind: str = "vectorised"
    device: str = "auto"
    width: int | None = None  # clients in a block; None: measured
    cache: Path | None = None  # where measured widths are kept between runs
    personal: str = "auto"  # where personal state is: in memory, on disk, or by its weight
    personal_mb: int = 256  # of personal state on disk, so much is kept in memory
    precision: str = "fp32"  # of products; tf32 (CUDA only) and bf16 are faster and coarser
    graph: bool = True  # on CUDA: capture a block's round once and replay it every round
    ray: Ray = Ray()  # for the kind of that name
    kernels: str = "meanwhile"  # on CUDA: between rounds the fastest are chosen; or first

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"backend is {self.kind!r}, expected one of {', '.join(KINDS)}")
        if self.device not in DEVICES:
            raise ConfigError(f"device is {self.device!r}, expected one of {', '.join(DEVICES)}")
        if self.kind == "ray":
            if self.device == "mps":
                raise ConfigError("device is 'mps', which Ray's workers cannot share; use 'cpu'")
            if self.device == "cuda" and not self.ray.gpus:
                raise ConfigError("device is 'cuda', but Ray's workers get no GPU; set ray.gpus")
        elif self.device == "cuda" and not torch.cuda.is_available():
            raise ConfigError("device is 'cuda', but torch sees no CUDA device; use device='cpu'")
        elif self.device == "mps" and not torch.backends.mps.is_available():
            raise ConfigError("device is 'mps', but torch sees no Apple GPU; use device='cpu'")
        if self.personal not in STORES:
            raise ConfigError(f"personal is {self.personal!r}, expected one of {', '.join(STORES)}")
        if self.kernels not in CHOICES:
            raise ConfigError(f"kernels is {self.kernels!r}, expected one of {', '.join(CHOICES)}")
        if self.personal_mb < 0:
            raise ConfigError(f"personal_mb is {self.personal_mb}, expected 0 or more")
        if self.precision not in PRECISIONS:
            raise ConfigError(
                f"precision is {self.precision!r}, expected one of {', '.join(PRECISIONS)}"
            )
        if self.precision == "tf32" and self.workplace != "cuda":
            raise ConfigError("precision is 'tf32', which only CUDA devices have; use fp32 or bf16")
        if self.width is not None and self.width < 1:
            raise ConfigError(f"width is {self.width}, expected at least 1")

    @property
    def place(self) -> torch.device:
        """The torch device meant; `auto` is CUDA where there is one, never Apple's mps.

        With Ray it is where the servers are; workers have devices of their own.
        """
        if self.kind == "ray":
            return torch.device("cpu")
        if self.device == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        return torch.device(self.device)

    @property
    def workplace(self) -> str:
        """The type of device that clients work on: with Ray the workers', which may lack here."""
        if self.kind != "ray":
            return self.place.type
        return "cuda" if self.ray.gpus and self.device != "cpu" else "cpu"

    @property
    def whereabouts(self) -> str:
        """A key for machines on which other widths of blocks may be right."""
        crowd = [str(self.ray.workers)] if self.kind == "ray" else []
        return " ".join([self.kind, *crowd, self.workplace])


PRECISIONS = ("fp32", "tf32", "bf16")

TRAINING_ROOM = 3  # times a network's weights that training holds at least: and gradients, batch


def machine_memory() -> float:
    """Return the bytes of this machine's memory; infinite where the system does not say."""
    try:
        return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    except (AttributeError, ValueError, OSError):  # Windows, say
        return math.inf


@contextmanager
def multiplying(precision: str, device: torch.device) -> Iterator[None]:
    """Set torch's switches for the time of some work; it may follow work of another precision."""
    if device.type != "cuda":
        yield
        return
    products, convolutions = torch.backends.cuda.matmul, torch.backends.cudnn
    before = products.allow_tf32, convolutions.allow_tf32
    rounded = precision != "fp32"  # in bfloat16, what torch leaves in single precision
    products.allow_tf32, convolutions.allow_tf32 = rounded, rounded
    try:
        yield
    finally:
        products.allow_tf32, convolutions.allow_tf32 = before


_KEPT = 256


def device_ints(values: Sequence[int] | np.ndarray, device: torch.device) -> Tensor:
    """Return whole numbers on a device; read-only."""
    return _sent(np.asarray(values, np.int64), device)


def device_floats(values: Sequence[float], device: torch.device) -> Tensor:
    """Return real numbers of the default type on a device; read-only."""
    kind = torch.empty(0, dtype=torch.get_default_dtype()).numpy().dtype
    return _sent(np.asarray(values, kind), device)


def fetch_async(parts: Sequence[Tensor]) -> Callable[[], np.ndarray]:
    """Start to copy numbers from the device; calling what is returned waits for them alone."""
    whole = torch.cat(list(parts))
    if whole.device.type != "cuda":
        return whole.cpu().numpy
    here = torch.empty(whole.shape, dtype=whole.dtype, pin_memory=True)
    here.copy_(whole, non_blocking=True)
    there = torch.cuda.Event()  # type: ignore[no-untyped-call]
    there.record()

    def read() -> np.ndarray:
        there.synchronize()
        return here.numpy()

    return read


def _sent(array: np.ndarray, device: torch.device) -> Tensor:
    if device.type == "cpu":
        return torch.from_numpy(array.copy())
    # On another stream a copy may not have arrived yet.
    stream = torch.cuda.current_stream().stream_id if device.type == "cuda" else 0
    return _kept(array.tobytes(), array.dtype.str, device, stream)


@lru_cache(maxsize=_KEPT)
def _kept(content: bytes, kind: str, device: torch.device, stream: int) -> Tensor:
    here = torch.from_numpy(np.frombuffer(content, kind).copy())
    if device.type == "cuda":
        here = here.pin_memory()
    return here.to(device, non_blocking=True)
