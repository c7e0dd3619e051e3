"""Makes the helpers in this folder importable from every test."""

import gc
import os
import shutil
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import settings

# How long an example takes says more about the machine than about the code. CI tries the same
# examples each time, so that a change is judged by itself; elsewhere each run tries new ones.
settings.register_profile("unhurried", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("unhurried")

# A shell starts what runs in its background deaf to Ctrl-C, which children inherit: tests send it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection() -> None:
    """Look for no garbage among thousands of tests that are being collected, and all are kept."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Look for garbage from here on."""
    gc.freeze()
    gc.enable()


def pytest_terminal_summary(terminalreporter: Any, config: Any) -> None:
    """Say what is left out unless asked for."""
    if config.option.markexpr == "not faults":
        terminalreporter.write_line("left out: kills and intruders' jobs; `make test-faults`")


@pytest.fixture
def float64() -> Iterator[None]:
    """Compute in double precision, where equal formulas agree to twelve digits."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


# Chromium as root needs no sandbox; the rest keeps it from talking to its maker.
_FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@pytest.fixture(scope="module")  # no longer: while it lives, asyncio.run is refused
def browser() -> Iterator[Any]:
    """Debian's Chromium; where there is none, the tests that need it say so and are left out."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    if path is None:
        pytest.skip("no Chromium here: `apt-get install chromium` as root brings these tests back")
    with sync_api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=path, args=list(_FLAGS))
        yield opened
        opened.close()
