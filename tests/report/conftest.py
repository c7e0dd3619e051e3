"""A real run for the reports, and a real browser to open them."""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

TOML = """
name = "six & friends"
seeds = [0, 1]
rounds = 4

[data]
partition = { name = "iid", clients = 6, per_client = 30 }

[model]
name = "mlr"

[training]
batch = 10
lr = 0.05

[backend]
width = 6

[[methods]]
name = "local"

[[methods]]
name = "fedavg"

[[methods]]
name = "fedper"

[[methods]]
name = "persfl"
label = "PersFL <b>"
distil_epochs = 1
temperatures = [1.0, 5.0]
keep_grid = true
"""

# Chromium as root needs no sandbox; the rest keeps it from talking to its maker.
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@pytest.fixture(scope="session")
def toml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("experiment") / "six.toml"
    path.write_text(TOML)
    return path


@pytest.fixture(scope="session")
def finished(toml: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run, trained here."""
    import idiolect

    folder = tmp_path_factory.mktemp("runs") / "six"
    idiolect.run(toml, out=folder)
    return folder


def chromium() -> str | None:
    return shutil.which("chromium") or shutil.which("chromium-browser")


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Debian's Chromium; where there is none, the tests that need it say so and are left out."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = chromium()
    if path is None:
        pytest.skip("no Chromium here: `apt-get install chromium` as root brings these tests back")
    subprocess.run([path, "--version"], check=True, capture_output=True)
    with sync_api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=path, args=list(FLAGS))
        yield opened
        opened.close()
