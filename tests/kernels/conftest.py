"""What tests of several kernels share."""

from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make one folder of compiled kernels: most shapes share them."""
    return tmp_path_factory.mktemp("kernels")
