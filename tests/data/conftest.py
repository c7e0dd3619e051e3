import os
from pathlib import Path

import numpy as np
import pytest

from idiolect.data import Dataset
from idiolect.data.dataset import default_decoding


@pytest.fixture(scope="session")
def shared_data() -> Path:
    repository = Path(__file__).parents[2]
    folder = Path(os.environ.get("IDIOLECT_DATA") or repository.parent / "shared" / "data")
    if not (folder / "mnist").is_dir():
        pytest.skip(f"no real datasets in {folder}: what is left out is reading the real files")
    return folder


@pytest.fixture(scope="session")
def shared_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def toy():
    """Make a small dataset of features with 4 classes, 3 natural clients and a test file."""

    def make(rows: int = 60, **changes: object) -> Dataset:
        rng = np.random.default_rng(0)
        x = rng.normal(size=(rows, 5)).astype(np.float32)
        shift, scale = default_decoding(x)
        fields = {
            "name": "toy",
            "x": x,
            "y": np.arange(rows) % 4,
            "classes": ("a", "b", "c", "d"),
            "shift": shift,
            "scale": scale,
            "clients": np.arange(rows) % 3,
            "client_names": ("ann", "bob", "cy"),
            "origin": (np.arange(rows) % 5 == 0).astype(np.int64),
        }
        return Dataset(**(fields | changes))

    return make
