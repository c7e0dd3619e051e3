"""The command line, as a user meets it: run, interrupt, resume, and get it wrong."""

import json
import resource
import shutil
import signal
import subprocess
import time

import pytest
import torch
import typer
from typer.testing import CliRunner

import tiny
from idiolect.cli import app
from idiolect.cli.command_base import guarded
from idiolect.version import VERSION

invoke = CliRunner().invoke


def printed(*arguments):
    """Read what a command prints with --json: one form for all."""
    done = invoke(app, arguments)
    assert done.exit_code == 0, done.output
    whole = json.loads(done.stdout)
    assert whole.keys() == {"idiolect", "result"} and whole["idiolect"] == VERSION
    return whole["result"]


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("IDIOLECT_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished")
    tiny.write(folder)
    done = tiny.here("run", "tiny.toml", "--out", "out", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder, done.stdout


def test_a_run_tells_its_progress_and_leaves_everything(finished):
    folder, said = finished
    assert "FedAvg: round 6/6, loss " in said and "examples/s" in said
    assert "client 5" in said and "mean" in said
    left = {path.name for path in (folder / "out").iterdir()}
    files = {"experiment.toml", "scaling.safetensors", "result.json", "metrics.parquet"}
    files |= {"holdings.safetensors"}
    assert left == files | {"checkpoints", "models", ".lock"}
    content = json.loads((folder / "out" / "result.json").read_text())
    seed = content["methods"]["FedAvg"]["seeds"][0]
    assert seed["traffic"]["participations"] == 24
    assert seed["clients"][0].keys() == {
        "client",
        "train",
        "test",
        "took_part",
        "personal",
        "global",
        "facts",
    }
    # 4 clients a round, each 7,850 floats down; up, one more for the number of examples.
    assert seed["traffic"]["bytes_down"] == 6 * 4 * 7850 * 4
    assert seed["traffic"]["bytes_up"] == 6 * 4 * 7851 * 4


def test_a_finished_run_resumed_prints_its_result(finished):
    folder, _ = finished
    before = (folder / "out" / "result.json").read_bytes()
    done = tiny.here("run", "tiny.toml", "--out", "out", "--resume", cwd=folder)
    assert done.returncode == 0 and "FedAvg + FT" in done.stdout
    assert (folder / "out" / "result.json").read_bytes() == before


def test_a_folder_in_use_is_refused(finished):
    folder, _ = finished
    out = str(folder / "out")
    path = str(folder / "tiny.toml")
    again = invoke(app, ["run", path, "--out", out])
    assert (again.exit_code, again.stderr.count("\n")) == (7, 1)
    assert "--resume" in again.stderr
    other = invoke(app, ["run", path, "--out", out, "--resume", "--set", "data.seed=5"])
    assert other.exit_code == 7
    assert "data.seed was None and is now 5" in other.stderr


def test_show_prints_a_run_again(finished):
    folder, _ = finished
    shown = invoke(app, ["show", str(folder / "out")])
    assert shown.exit_code == 0 and "FedAvg + FT" in shown.stdout
    assert "from round" in shown.stdout and "MB down" in shown.stdout
    as_json = printed("show", str(folder / "out"), "--json")
    assert list(as_json["methods"]) == ["Local", "FedAvg", "FedAvg + FT"]
    assert as_json["methods"]["FedAvg"]["reached"]["model"] == "personal"
    assert as_json["methods"]["FedAvg + FT"]["reached"]["model"] == "global"


def test_show_tells_who_is_fairer_than_whom(finished):
    folder, _ = finished
    shown = invoke(app, ["show", str(folder / "out"), "--fairness"])
    assert shown.exit_code == 0 and "fairer" in shown.stdout and "less fair" in shown.stdout
    found = printed("show", str(folder / "out"), "--fairness", "--json")
    assert list(found["pairs"]["FedAvg"]) == ["Local", "FedAvg + FT"]
    spread = found["methods"]["Local"]
    content = json.loads((folder / "out" / "result.json").read_text())
    assert found == content["fairness"]
    headline = content["methods"]["Local"]["headline"]["personal"]
    assert spread["std"] == pytest.approx(headline["clients"]["std"])


def test_a_stop_saves_says_how_to_go_on_and_goes_on(tmp_path):
    """By Ctrl-C, and again by a scheduler's SIGTERM."""
    tiny.write(tmp_path)
    arguments = ["run", "tiny.toml", "--out", "out", "--method", "FedAvg"]
    arguments += ["--set", "rounds=1000", "--set", "backend.checkpoint_every=0"]
    for stop, status in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
        process = tiny.started(*arguments, cwd=tmp_path)
        line = process.stdout.readline()  # the first report: training is under way
        if stop == signal.SIGTERM:
            assert line.startswith("FedAvg: going on after round ")
            line = process.stdout.readline()
        assert "/1000, loss " in line
        process.send_signal(stop)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == status
        assert errors.count("\n") == 1 and "--resume" in errors
        arguments += ["--resume"] * (stop == signal.SIGINT)
    done = tiny.here(*arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "FedAvg: going on after round" in done.stdout


def test_a_full_disk_is_one_line_and_the_run_can_go_on(tmp_path):
    """A real full disk where a small one can be mounted; else files that may not grow."""
    tiny.write(tmp_path)
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = (
        shutil.which("mount")
        and not subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", str(disk)],
            capture_output=True,
            check=False,
        ).returncode
    )
    try:
        options = {} if mounted else {"preexec_fn": _small_files}
        unsaved = ("--set", "evaluate.save_models=false")  # or it would be refused beforehand
        command = ("run", "tiny.toml", "--out", "disk/out", *unsaved)
        full = tiny.idiolect(*command, cwd=tmp_path, **options)
        if mounted:
            subprocess.run(["mount", "-o", "remount,size=20m", str(disk)], check=True)
        done = tiny.here(*command, "--resume", cwd=tmp_path)
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(disk)], check=True)
    assert full.returncode == 1
    assert full.stderr.startswith("error: cannot write ") and full.stderr.count("\n") == 1
    assert "No space left" in full.stderr or "File too large" in full.stderr
    assert done.returncode == 0, done.stderr


def _small_files() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["run", "absent.toml"], 2, "absent.toml does not exist"),
        (["run", "tiny.toml", "--set", "training.lrr=1"], 2, "did you mean 'lr'"),
        (["run", "tiny.toml", "--set", "training.lr=1e38"], 6, "produced NaN or infinity"),
        (["run", "tiny.toml", "--set", "data.source=./gone.npz"], 3, "does not exist"),
        (["run", "tiny.toml", "--method", "FedAvgg"], 2, "did you mean 'FedAvg'"),
        (["run", "tiny.toml", "--device", "tpu"], 2, "backend.device is 'tpu'"),
        (["run", "tiny.toml", "--out", "tiny.toml/sub"], 1, "cannot write to"),
        (["show", "."], 3, "holds no result.json"),
        (["methods", "fedavgg"], 2, "did you mean 'fedavg'"),
        (["data", "prepare", "mnits"], 2, "mnits"),
        (["data", "inspect", "embedded", "--partition", "persfl-ds9"], 2, "persfl-ds"),
    ],
)
def test_a_users_mistake_is_one_line_and_a_status(tmp_path, arguments, code, words):
    tiny.write(tmp_path)
    done = invoke(app, arguments)
    assert done.exit_code == code, done.output
    assert words in done.stderr
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1


def test_methods_and_data_are_listed():
    shown = invoke(app, ["methods", "fedprox"])
    assert "strength of the pull" in shown.stdout and "≥ 0" in shown.stdout
    assert "preset gd: soft_loss = cross-entropy" in invoke(app, ["methods", "persfl"]).stdout
    listed = printed("methods", "--json")
    assert {"local", "fedavg", "fedprox"} <= listed.keys()
    data = printed("data", "list", "--json")
    assert "embedded" in data["sources"] and "dirichlet" in data["partitions"]


def test_inspect_draws_clients_and_classes(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "140")
    drawn = invoke(
        app, ["data", "inspect", "embedded", "--partition", "persfl-ds1", "--svg", "a.svg"]
    )
    assert drawn.exit_code == 0, drawn.output
    assert drawn.stdout.count("█ 276") == 10 and "client 9" in drawn.stdout
    assert (tmp_path / "a.svg").read_text().count("<rect") == 40
    counted = printed("data", "inspect", "embedded", "--json")
    assert sum(sum(client["counts"]) for client in counted["clients"]) == 6000


def test_version_and_help_answer_at_once():
    start = time.monotonic()
    done = subprocess.run(tiny.command("--version"), capture_output=True, text=True, check=True)
    assert done.stdout.startswith("idiolect 0.")
    assert time.monotonic() - start < 2
    assert invoke(app, ["--help"]).exit_code == 0


@pytest.mark.parametrize(
    "error, words",
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 32.00 MiB"), "the GPU has"),
        (MemoryError(), "out of memory"),
        (OSError(28, "No space left on device", "/there"), "/there: No space left on device"),
    ],
)
def test_what_the_machine_lacks_is_one_line(error, words, capsys):
    @guarded
    def command():
        raise error

    with pytest.raises(typer.Exit) as ended:
        command()
    said = capsys.readouterr().err
    assert ended.value.exit_code == 1
    assert said.startswith(f"error: {words}") and said.count("\n") == 1


def test_an_error_of_our_own_is_not_hidden():
    @guarded
    def command():
        raise RuntimeError("a mistake of ours")

    with pytest.raises(RuntimeError, match="a mistake of ours"):
        command()


def test_names_from_a_file_neither_crash_nor_colour_the_terminal(tmp_path):
    names = ["[/bold]", "[red]x", "\x1b[31mred", "\x07bell", "a\x9bb"]
    rows = [f'{k % 7},{k % 2},"{name}"' for name in names for k in range(12)]
    (tmp_path / "own.csv").write_text("age,label,client\n" + "\n".join(rows))
    (tmp_path / "own.toml").write_text(
        'name = "own"\n[data]\nsource = "own.csv"\n'
        '[model]\nname = "mlr"\n[[methods]]\nname = "local"\n'
        'label = "[/b]\\u001b[1m"\n'
    )
    for command in (["data", "inspect", "own.toml"], ["run", "own.toml", "--set", "rounds=1"]):
        done = invoke(app, command)
        assert done.exit_code == 0, done.output
        assert "[/bold]" in done.output and "[red]x" in done.output
        assert not {"\x1b", "\x07", "\x9b"} & set(done.output)
    done = invoke(app, ["run", "own.toml", "--set", 'methods[0].name="\x1b[31mno"'])
    assert done.exit_code == 2 and "\x1b" not in done.output
