"""Makes the helpers in this folder importable from every test."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

# How long an example takes says more about the machine than about the code.
settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")


@pytest.fixture
def float64() -> Iterator[None]:
    """Compute in double precision, where equal formulas agree to twelve digits."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)
