"""Units of systemd and the compose file: as good as their own tools find them, and our commands."""

import configparser
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from idiolect.cli import app

FOLDER = Path(__file__).parents[2] / "deploy"
UNITS = sorted(FOLDER.glob("*.service"))


def known(words):
    """Check that a command line is one of ours: its verb and every option."""
    verb, options = words[0], [word for word in words[1:] if word.startswith("--")]
    asked = ["node", "start"] if verb == "node" else [verb]  # `node KIT` is `node start KIT`
    told = CliRunner(env={"COLUMNS": "200"}).invoke(app, [*asked, "--help"]).output
    assert all(option in told for option in options), (words, told)


def sections(path):
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str
    parser.read(path)
    return parser


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.stem)
def test_units_start_our_commands_and_end_them_politely(path):
    service = sections(path)["Service"]
    program, *words = shlex.split(service["ExecStart"])
    assert Path(program).name == "idiolect"
    known(words)
    # What watches the engine ends it on SIGTERM; only then does systemd kill what is left.
    assert (service["KillMode"], service["Restart"]) == ("mixed", "always")
    assert int(service["TimeoutStopSec"]) > 10
    assert service["ProtectSystem"] == "strict" and words[1] in service["ReadWritePaths"]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is missing")
@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.stem)
def test_systemd_finds_nothing_wrong_with_units(path, tmp_path):
    """The program, its user and its folders are of the operator's machine: put others there."""
    copy = tmp_path / path.name
    text = path.read_text().replace("/opt/idiolect/bin/idiolect", shutil.which("true"))
    copy.write_text(text.replace("User=idiolect", "User=root"))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(copy)],
        capture_output=True,
        text=True,
        check=False,
    )
    own = [line for line in done.stderr.splitlines() if path.name in line]
    assert not own, own


def test_the_compose_file_starts_our_commands_with_health_and_bounded_logs():
    services = yaml.safe_load((FOLDER / "compose.yaml").read_text())["services"]
    assert set(services) == {"server", "node"}
    for name, service in services.items():
        words = [str(word) for word in service["command"]]
        assert words[0] == name
        known(words)
        port = words[words.index("--metrics") + 1]
        assert f"127.0.0.1:{port}/health" in service["healthcheck"]["test"][-1]
        assert service["logging"]["options"]["max-file"] == "3"
        assert service["read_only"] and service["cap_drop"] == ["ALL"]


def composes():
    """Say whether docker can read compose files here."""
    if shutil.which("docker") is None:
        return False
    words = ["docker", "compose", "version"]
    return subprocess.run(words, capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(not composes(), reason="docker compose is missing")
@pytest.mark.parametrize("profile", ["server", "node"])
def test_compose_reads_its_file(profile):
    words = ["docker", "compose", "-f", str(FOLDER / "compose.yaml"), "--profile", profile]
    subprocess.run([*words, "config", "--quiet"], check=True)
