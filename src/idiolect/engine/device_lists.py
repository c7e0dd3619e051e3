"""Short lists of numbers to and from the device: who takes part, which rows are theirs.

A copy to a GPU waits for all that was started before. Most rounds ask for the same lists again, so
the last ones stay there, and new ones are sent without waiting.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

_KEPT = 256


def whole(values: Sequence[int] | np.ndarray, device: torch.device) -> Tensor:
    """Return whole numbers on a device; nobody may write to them."""
    return _sent(np.asarray(values, np.int64), device)


def real(values: Sequence[float], device: torch.device) -> Tensor:
    """Return real numbers of the default type on a device; nobody may write to them."""
    kind = torch.empty(0, dtype=torch.get_default_dtype()).numpy().dtype
    return _sent(np.asarray(values, kind), device)


def fetched(parts: Sequence[Tensor]) -> Callable[[], np.ndarray]:
    """Ask for numbers of the device; who calls what is returned waits for them, and no longer."""
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
    return _kept(array.tobytes(), array.dtype.str, device)


@lru_cache(maxsize=_KEPT)
def _kept(content: bytes, kind: str, device: torch.device) -> Tensor:
    here = torch.from_numpy(np.frombuffer(content, kind).copy())
    if device.type == "cuda":
        here = here.pin_memory()
    return here.to(device, non_blocking=True)
