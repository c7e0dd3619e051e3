"""How exactly products are taken: full single precision unless the user asks for speed.

`tf32` lets a GPU's matrix units round the factors of fp32 products to 10 bits; `bf16` runs the
networks in bfloat16 (autocast: see `Network`). Parameters, losses, sums over clients and all state
stay in single precision.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

PRECISIONS = ("fp32", "tf32", "bf16")


@contextmanager
def multiplying(precision: str, device: torch.device) -> Iterator[None]:
    """Set torch's switches for the time of some work; it may follow work of another precision."""
    if device.type != "cuda":
        yield
        return
    products, convolutions = torch.backends.cuda.matmul, torch.backends.cudnn
    before = products.allow_tf32, convolutions.allow_tf32
    rounded = precision == "tf32"
    products.allow_tf32, convolutions.allow_tf32 = rounded, rounded
    try:
        yield
    finally:
        products.allow_tf32, convolutions.allow_tf32 = before
