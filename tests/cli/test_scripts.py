"""What scripts rely on: JSON in one form, exit codes, and shells that complete."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import tiny
from idiolect import errors
from idiolect.cli import app
from idiolect.version import VERSION

invoke = CliRunner().invoke
PAGE = Path(__file__).parent.parent.parent / "docs" / "cli.md"

OTHER_LAYER = """
from torch import nn

def net(shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Unflatten(1, (1, 28, 28)), nn.InstanceNorm2d(1,
        track_running_stats=True), nn.Flatten(), nn.Linear(784, classes))
"""


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("IDIOLECT_CACHE", str(tmp_path / "cache"))
    tiny.write(tmp_path)


def printed(*arguments):
    done = invoke(app, arguments)
    assert done.exit_code == 0, done.output
    whole = json.loads(done.stdout)  # and nothing else: progress went elsewhere
    assert whole.keys() == {"idiolect", "result"} and whole["idiolect"] == VERSION
    return whole["result"], done.stderr


def test_a_run_prints_its_result_and_tells_its_progress_elsewhere(tmp_path):
    fewer = ["--set", "rounds=2", "--set", "seeds=[0]", "--method", "FedAvg", "--out", "out"]
    result, told = printed("run", "tiny.toml", *fewer, "--json")
    assert result == json.loads((tmp_path / "out" / "result.json").read_text())
    assert "FedAvg: round 2/2" in told


def test_a_comparison_prints_itself_and_its_tables(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    arguments = ["compare", "tiny.toml", "--set", "rounds=2", "--out", "out"]
    shown = invoke(app, arguments)
    assert shown.exit_code == 0, shown.output
    assert "Verdict: " in shown.stdout and "critical difference" in shown.stdout
    assert "below local" in shown.stdout and "won-lost-level" in shown.stdout
    result, _ = printed(*arguments, "--json")
    assert result == json.loads((tmp_path / "out" / "comparison.json").read_text())
    sentence = result["splits"][0]["comparison"]["verdict"]["sentence"]
    assert sentence in " ".join(shown.stdout.split())
    folder, _ = printed("compare", "out", "--target", "0.1", "--json")
    told = folder["splits"][0]["comparison"]
    assert told["target"] == 0.1 and told["verdict"]["sentence"] == sentence


def test_data_and_methods_print_themselves():
    prepared, _ = printed("data", "prepare", "embedded", "--json")
    assert prepared["embedded"]["examples"] == 6000 and prepared["embedded"]["shape"] == [1, 28, 28]
    method, _ = printed("methods", "fedprox", "--json")
    assert "pull" in {one["name"] for one in method["settings"]}


def test_every_command_that_prints_a_table_takes_json():
    listed = {command.name or command.callback.__name__ for command in app.registered_commands}
    for name in sorted(listed):
        help = invoke(app, [name, "--help"]).stdout
        assert "--json" in help or name in NO_TABLE, name
    for name in ("list", "inspect", "prepare"):
        assert "--json" in invoke(app, ["data", name, "--help"]).stdout


# Those of a real federation tell in lines; `predict`, `export` and `new` write files.
NO_TABLE = {"server", "node", "status", "stop", "pin", "predict", "export", "new"}


CASES = {
    0: ["methods"],
    1: ["run", "tiny.toml", "--out", "tiny.toml/sub"],
    2: ["compare", "tiny.toml", "--alpha", "2"],
    3: ["compare", "."],
    4: ["run", "tiny.toml", "--set", "model.name=other:net", "--out", "a"],
    5: [
        "run",
        "tiny.toml",
        "--set",
        "methods.fedavg.name=fedbn",
        "--method",
        "FedBN",
        "--out",
        "b",
    ],
    6: ["run", "tiny.toml", "--set", "training.lr=1e38", "--out", "c"],
    7: ["run", "tiny.toml", "--out", "used"],
}


@pytest.mark.parametrize("code", CASES)
def test_exit_codes_are_those_of_the_page(code, tmp_path):
    (tmp_path / "other.py").write_text(OTHER_LAYER)
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "result.json").write_text("{}")
    done = invoke(app, CASES[code])
    assert done.exit_code == code, done.output
    assert (done.stderr.startswith("error: ") and done.stderr.count("\n") == 1) or not code
    assert f"\n| {code} |" in PAGE.read_text()


def test_a_missing_library_is_9_and_told_before_anything_is_trained(tmp_path):
    code = "import sys; sys.modules['scipy'] = sys.modules['scipy.stats'] = None\n"
    code += "from idiolect.cli import app; app(['compare', 'tiny.toml'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 9 and "pip install 'idiolect[stats]'" in done.stderr
    assert done.stderr.count("\n") == 1 and not (tmp_path / "runs").exists()


def test_every_error_has_a_code_of_its_own_that_the_page_lists():
    kinds = [kind for kind in vars(errors).values() if getattr(kind, "code", None) is not None]
    codes = [kind.code for kind in kinds]
    assert len(set(codes)) == len(codes)
    for code in codes:
        assert f"\n| {code} |" in PAGE.read_text()


# Completion, by the very protocol that shells use.

PROGRAM = shutil.which("idiolect", path=str(Path(sys.executable).parent))


def asked(words):
    """Return the variables by which bash asks for the rest of a word."""
    own = {"COMP_WORDS": words, "COMP_CWORD": str(len(words.split(" ")) - 1)}
    return {**own, "_IDIOLECT_COMPLETE": "complete_bash"}


@pytest.mark.skipif(PROGRAM is None, reason="the command is not installed beside Python")
def test_the_installed_command_completes():
    environment = {**os.environ, **asked("idiolect com")}
    done = subprocess.run([PROGRAM], env=environment, capture_output=True, text=True, check=False)
    assert "compare" in done.stdout.split("\n")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("idiolect methods fedp", "fedprox"),
        ("idiolect data prepare emb", "embedded"),
        ("idiolect data inspect embedded --partition dir", "dirichlet"),
        ("idiolect run x.toml --device cu", "cuda"),
        ("idiolect adapt out --method Fed", "FedAvg"),
    ],
)
def test_shells_complete_commands_and_names(tmp_path, words, expected):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "result.json").write_text('{"methods": {"FedAvg": {}, "Local": {}}}')
    # In this process: another would spend two seconds on imports.
    found = CliRunner().invoke(app, env=asked(words), prog_name="idiolect").stdout.split("\n")
    assert expected in found and not any(one.startswith("Local") for one in found)


@pytest.mark.skipif(PROGRAM is None, reason="the command is not installed beside Python")
def test_completion_can_be_installed_and_bash_takes_it(tmp_path):
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("there is no bash here")
    environment = {**os.environ, "HOME": str(tmp_path), "SHELL": bash}
    install = f"{PROGRAM} --install-completion; true"
    done = subprocess.run([bash, "-c", install], env=environment, capture_output=True, text=True)
    assert "installed" in done.stdout, done.stderr
    (script,) = (tmp_path / ".bash_completions").glob("idiolect*")
    wanted = f"source {script}; complete -p idiolect"
    told = subprocess.run([bash, "-c", wanted], env=environment, capture_output=True, text=True)
    assert told.returncode == 0 and "idiolect" in told.stdout
