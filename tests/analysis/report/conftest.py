"""A real run for the reports."""

from pathlib import Path

import pytest

TOML = """
name = "six & friends"
seeds = [0, 1]
rounds = 4

[data]
partition = { name = "iid", clients = 6, per_client = 30 }
public = { source = "embedded", size = 40 }

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

[[methods]]
name = "ktpfl"
label = "KT-pFL"
sample = 20
"""


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
