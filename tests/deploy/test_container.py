"""The container image: nothing secret enters its build, and what it installs is checked."""

import fnmatch
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def allowed(path: str) -> bool:
    """Apply .dockerignore: the last line that matches a path or a folder above it decides."""
    entered = True
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        pattern = line.strip().removeprefix("!")
        if not pattern or pattern.startswith("#"):
            continue
        parts = path.split("/")
        above = ["/".join(parts[: end + 1]) for end in range(len(parts))]
        if any(fnmatch.fnmatch(one, pattern.replace("**/", "*")) for one in above):
            entered = line.startswith("!")
    return entered


def test_kits_data_and_runs_do_not_enter_the_build():
    for secret in (
        "deploy/kits/server/startup/server.key",
        "deploy/data/patients.csv",
        "demo-kits/hospital/startup/client.key",
        "runs/visits/result.json",
        "patients.csv",
        ".git/config",
        ".venv/bin/python",
        ".env",
    ):
        assert not allowed(secret), secret


def test_what_the_image_copies_is_there_and_enters_the_build():
    text = (ROOT / "deploy/Dockerfile").read_text()
    for line in re.findall(r"^COPY (.+)$", text, re.MULTILINE):
        for source in line.split()[:-1]:
            assert (ROOT / source).exists() and allowed(source), source
    assert allowed("src/idiolect/cli/__init__.py")


def test_every_package_of_the_image_has_a_version_and_digests():
    text = (ROOT / "deploy/Dockerfile").read_text()
    assert "--require-hashes -r /src/deploy/requirements.txt" in text
    for line in re.findall(r"pip install .+", text):
        assert "--require-hashes" in line or ("--no-deps" in line and "--no-build-isol" in line)
    assert re.search(r"^ARG BASE=python:3\.\d+\.\d+-slim-\w+$", text, re.MULTILINE)
    wanted = (ROOT / "deploy/requirements.txt").read_text().replace("\\\n", "")
    lines = [line for line in wanted.splitlines() if line and not line.startswith("#")]
    assert lines and all("==" in line and "--hash=sha256:" in line for line in lines)
    found = dict(line.split()[0].split("==") for line in lines)
    # Differential privacy and the federation's engine are in it.
    assert {"nvflare", "dp-accounting", "torch", "scipy", "hatchling"} <= found.keys()
    tested = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.M))
    tested = {name.lower().replace("_", "-"): version for name, version in tested.items()}
    assert {n: v for n, v in found.items() if tested.get(n, v) != v} == {}
