"""NVIDIA FLARE as the engine: everything that knows it is in this folder, and no method is."""

import importlib.util

from idiolect.errors import DeployError


def require() -> None:
    """Say what to install where the engine is missing."""
    if importlib.util.find_spec("nvflare") is None:
        raise DeployError(
            "a federation of nodes needs NVIDIA FLARE, which is not installed here; install it "
            "with `pip install 'idiolect[flare]'`"
        )
