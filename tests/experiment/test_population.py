"""Runs over many clients: personal state on disk, through interrupts, and scores of a sample."""

import json
import signal
import time

import numpy as np
import pyarrow.parquet as pq
import pytest

import tiny
from idiolect.data import federate, load
from idiolect.errors import CheckpointError, ConfigError
from idiolect.experiment.build import build_jobs
from idiolect.experiment.job import Evaluate
from idiolect.experiment.load import load_experiment
from idiolect.experiment.run import run

TOML = """
name = "many"
seeds = [0, 1]
rounds = 4
cohort = 3

[data]
source = "generated_text"
options = { users = 12, words = 30, length = 4, rows = 4 }
split = [0.4, 0.3, 0.3]
ordered = true

[model]
name = "next-word-lstm"
units = 4
layers = 1
dropout = 0.0

[training]
batch = 4
lr = 0.5

[backend]
width = 4
checkpoint_every = 1

[evaluate]
every = 2

[[methods]]
name = "fedper"

"""
DISK = ["backend.personal=disk"]


def write(folder, text=TOML):
    (folder / "many.toml").write_text(text)
    return folder / "many.toml"


def figures(folder):
    content = json.loads((folder / "result.json").read_text())
    return [
        (label, seed["clients"], seed["models"])
        for label, method in content["methods"].items()
        for seed in method["seeds"]
    ]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The run in memory, without a pause."""
    folder = tmp_path_factory.mktemp("whole")
    run(write(folder), out=folder / "out")
    return folder / "out"


def test_on_disk_is_as_in_memory(whole, tmp_path):
    run(write(tmp_path), DISK, out=tmp_path / "out")
    assert figures(tmp_path / "out") == figures(whole)
    files = [p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*.rows")]
    assert files == ["out/personal/FedPer/architecture-0.rows"]
    assert not list(whole.rglob("*.rows"))


@pytest.mark.parametrize("again", [DISK, ["backend.personal=memory"]])
def test_rounds_can_be_added_whatever_the_store(whole, tmp_path, again):
    """Three rounds on disk, then five, as the file or as memory is told; the checkpoint decides."""
    run(write(tmp_path), [*DISK, "rounds=2"], out=tmp_path / "out")
    run(write(tmp_path), again, out=tmp_path / "out", resume=True)
    assert figures(tmp_path / "out") == figures(whole)


def test_a_lost_file_is_told(tmp_path):
    run(write(tmp_path), [*DISK, "rounds=2"], out=tmp_path / "out")
    (tmp_path / "out" / "personal" / "FedPer" / "architecture-0.rows").unlink()
    with pytest.raises(CheckpointError, match="personal state that the checkpoint speaks of"):
        run(write(tmp_path), DISK, out=tmp_path / "out", resume=True)


def test_a_run_that_is_killed_goes_on(whole, tmp_path):
    """SIGKILL amid rounds: what was written to the file after the checkpoint counts for nothing."""
    write(tmp_path, TOML.replace("rounds = 4", "rounds = 5000"))
    arguments = ("run", "many.toml", "--out", "out", "--set", DISK[0])
    process = tiny.started(*arguments, cwd=tmp_path)
    path = tmp_path / "out" / "checkpoints" / "FedPer.safetensors"
    deadline = time.monotonic() + 90
    while not path.exists() and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    said = process.communicate()
    assert path.exists(), said
    from idiolect.core.checkpoint import read

    reached = read(path)[1]["round"]
    rounds = [f"rounds={reached + 3}"]
    write(tmp_path)
    run(tmp_path / "many.toml", [*DISK, *rounds], out=tmp_path / "out", resume=True)
    other = tmp_path / "other"
    run(tmp_path / "many.toml", rounds, out=other)
    assert figures(tmp_path / "out") == figures(other)


def test_methods_with_the_same_rounds_share_a_file(tmp_path):
    text = TOML.split("[[methods]]")[0]
    text += '[[methods]]\nname = "persfl"\ndistil_epochs = 1\n'
    text += '[[methods]]\nname = "persfl"\nlabel = "again"\ndistil_epochs = 2\n'
    ends = []
    for personal in ("memory", "disk"):
        folder = tmp_path / personal
        folder.mkdir()
        content = run(
            write(folder, text), [f"backend.personal={personal}", "seeds=[0]"], out=folder / "out"
        )
        assert any("shares the rounds" in note for note in content["methods"]["again"]["notices"])
        ends.append(figures(folder / "out"))
    assert ends[0] == ends[1]


def test_a_sample_is_scored(whole, tmp_path):
    """The same four clients at every round, six at the end; their figures are those of all."""
    some = ["evaluate.clients=4", "evaluate.final_clients=6"]
    content = run(write(tmp_path), some, out=tmp_path / "out")
    every = {(label, n): c for n, (label, c, _) in enumerate(figures(whole))}
    for n, (label, clients, models) in enumerate(figures(tmp_path / "out")):
        scored = [c for c in clients if c["personal"]["accuracy"] is not None]
        assert len(scored) == 6
        for client in scored:
            (wanted,) = [c for c in every[label, n] if c["client"] == client["client"]]
            assert client == wanted
        losses = [c["personal"]["loss"] for c in scored if c["test"]]
        assert np.isclose(models["personal"]["loss"], np.mean(losses))
    assert not [n for m in content["methods"].values() for n in m["notices"] if "no finite" in n]
    table = pq.read_table(tmp_path / "out" / "metrics.parquet").to_pandas()
    rounds = table[(table["split"] == "val") & (table["round"] < 4) & (table["seed"] == 0)]
    assert rounds["client"].nunique() == 4
    assert _unscored(table) == _not_yet_called(tmp_path / "many.toml", table)
    assert table[table["split"] == "test"].groupby("seed")["client"].nunique().tolist() == [6, 6]


def _unscored(table):
    missing = table[table["value"].isna()]
    return set(zip(missing["seed"], missing["round"], missing["client"], strict=True))


def _not_yet_called(path, table):
    """Of those on the curve, who had taken part in no round yet: only these have no score then."""
    (job,), _ = build_jobs(load_experiment(path))
    simulation, found = job.simulation(), set()
    for place, members in enumerate(job.members):
        strangers = set(table[(table["seed"] == members.seed) & (table["round"] == 2)]["client"])
        for simulation.round in range(4):
            strangers -= {members.names[client] for client in simulation.cohort(place)}
            if simulation.round % 2:  # a point of the curve comes after it
                found |= {(members.seed, simulation.round + 1, client) for client in strangers}
    return found


def test_nonsense_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"evaluate\.clients is 0, expected at least 1"):
        Evaluate(clients=0)
    with pytest.raises(ConfigError, match=r"backend\.personal is 'tape'"):
        load_experiment(write(tmp_path), ["backend.personal=tape"])
    with pytest.raises(ConfigError, match=r"evaluate\.clients is 0"):
        load_experiment(write(tmp_path), ["evaluate.clients=0"])


def test_users_do_not_depend_on_their_number_and_have_habits():
    """Of a user's words after one and the same word, the share `dialect` is one word at least."""
    few, many = (load("generated_text", users=n, words=50, length=9) for n in (5, 40))
    rows = len(few)
    assert (few.x == many.x[:rows]).all() and (few.y == many.y[:rows]).all()
    other = load("generated_text", users=5, words=50, length=9, seed=1)
    assert (other.x[0, 1:] != few.x[0, 1:]).any()
    fond = load("generated_text", users=3, words=50, length=400, rows=20, dialect=1.0)
    for user in range(3):
        own = fond.clients == user
        x, y = fond.x[own, 1:], fond.y[own, 1:]
        pairs = zip(x.reshape(-1).tolist(), y.reshape(-1).tolist(), strict=True)
        follows = set(pairs)
        assert len({b for _, b in follows}) <= 16 and len(follows) == len({a for a, _ in follows})
    held = federate(few, "natural", 0, (0.6, 0.2, 0.2), ordered=True)
    assert held.clients == 5 and min(map(len, held.train)) >= 1
    for options in ({"dialect": 2.0}, {"words": 3}, {"rows": 1}):
        with pytest.raises(ConfigError):
            load("generated_text", **options)
