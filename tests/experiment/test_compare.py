"""Comparisons: stopped, resumed, added to; nothing that is finished is done again."""

import json
import random
import signal
import time

import numpy as np
import pytest
import small
from small import accuracies, compared

import idiolect
import tiny
from idiolect.errors import CheckpointError, ConfigError, Diverged
from idiolect.experiment.load import parse_experiment


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("IDIOLECT_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished")
    return folder, *compared(folder)


def test_methods_are_trained_once_and_compared(finished):
    folder, content, results, rounds = finished
    assert rounds == {"Local": 4, "FedAvg": 4, "FedAvg + FT": 0}  # FT shares FedAvg's rounds
    (split,) = content["splits"]
    assert (split["name"], split["folder"], content["complete"]) == ("", ".", True)
    told = split["comparison"]
    assert set(told["methods"]) == {"Local", "FedAvg", "FedAvg + FT"} and len(told["pairs"]) == 3
    assert told["methods"]["Local"]["below_local"] == 0.0
    own = [np.mean(row) for row in accuracies(results[""], "FedAvg").values()]
    assert told["methods"]["FedAvg"]["mean"] == pytest.approx(np.mean(own))
    assert json.loads((folder / "comparison.json").read_text()) == content
    assert idiolect.compare(folder)["splits"][0]["comparison"] == told


def test_what_is_finished_is_not_done_again(finished):
    folder, content, _, _ = finished
    again, _, rounds = compared(folder)
    assert set(rounds.values()) == {0} and again == content


def test_it_finds_what_run_finds(finished, tmp_path):
    _, _, results, _ = finished
    plain = idiolect.run(tiny.write(tmp_path, small.TOML), out=tmp_path / "run")
    for method in plain["methods"].values():
        del method["speed"]
    assert results[""] == json.loads(json.dumps(plain))


def test_what_run_has_done_is_taken_over(tmp_path):
    path = tiny.write(tmp_path, small.TOML)
    ran = idiolect.run(path, ["seeds=[1]", "rounds=3"], out=tmp_path / "run")
    assert ran["complete"]
    _, results, rounds = compared(tmp_path / "run")
    assert rounds["FedAvg"] == 1 + 4  # seed 1 goes on after round 3, seed 0 starts
    fresh = compared(tmp_path / "fresh")[1]
    for label in results[""]["methods"]:
        for seed, row in accuracies(fresh[""], label).items():
            assert accuracies(results[""], label)[seed] == pytest.approx(row)


def test_seeds_and_methods_that_come_later_are_added(finished, tmp_path):
    _, _, whole, _ = finished
    short = small.TOML.replace("seeds = [0, 1]", "seeds = [1]").rpartition("[[methods]]")[0]
    _, before, _ = compared(tmp_path, text=short)
    content, after, rounds = compared(tmp_path)
    assert rounds == {"Local": 4, "FedAvg": 4, "FedAvg + FT": 0}  # seed 0 alone
    assert content["splits"][0]["comparison"]["seeds"] == [0, 1]
    for label in whole[""]["methods"]:
        for seed, row in accuracies(whole[""], label).items():
            assert accuracies(after[""], label)[seed] == pytest.approx(row)
    assert accuracies(after[""], "Local")[1] == accuracies(before[""], "Local")[1]
    fewer, _, none = compared(tmp_path, "seeds=[1]")
    assert set(none.values()) == {0} and fewer["splits"][0]["comparison"]["seeds"] == [1]


def test_more_rounds_go_on_and_other_settings_are_refused(finished, tmp_path):
    compared(tmp_path, "rounds=2")
    _, results, rounds = compared(tmp_path)
    assert rounds["Local"] == 2
    assert accuracies(results[""], "Local") == accuracies(finished[2][""], "Local")
    with pytest.raises(CheckpointError, match=r"settings.lr was 0.05 and is now 0.5"):
        compared(tmp_path, "training.lr=0.5")


def test_kill_9_at_random_moments_then_the_same_command_is_the_uninterrupted_comparison(tmp_path):
    """Real processes, killed for good, while they tune or train; finished parts are not touched."""
    text = small.TOML.rpartition("[[methods]]")[0] + small.TUNE.rpartition("[tune.m")[0]
    tiny.write(tmp_path, text)
    for rounds in (20, 100, 500):
        cut, whole = tmp_path / f"cut-{rounds}", tmp_path / f"whole-{rounds}"
        changes = ("--set", f"rounds={rounds}", "--set", f"tune.rounds={rounds // 2}")
        arguments = ("compare", "tiny.toml", *changes, "--out")
        killed = [killed_at_random(*arguments, cut, cwd=tmp_path, out=cut) for _ in range(2)]
        if any(killed):
            break
    assert any(killed)
    before = checkpoints(cut)
    for folder in (cut, whole):
        done = tiny.here(*arguments, folder, "--json", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    assert small.findings(cut) == small.findings(whole)
    left, right = (
        small.untimed(json.loads((folder / "comparison.json").read_text()))
        for folder in (cut, whole)
    )
    assert left == right
    assert small.untimed(json.loads(done.stdout)["result"]) == right
    kept = [path for path, (finished, _) in before.items() if finished]
    assert kept, "this test says nothing unless some part was finished when the process died"
    after = checkpoints(cut)
    assert all(after[path] == before[path] for path in kept)
    assert not list(cut.rglob("*.part"))


def killed_at_random(*arguments, cwd, out):
    """Kill a comparison a random moment after its first new checkpoint; say if it was on."""
    before = set(checkpoints(out))
    process = tiny.started(*arguments, cwd=cwd)
    while process.poll() is None and set(checkpoints(out)) <= before:
        time.sleep(0.01)
    time.sleep(random.Random().uniform(0, 0.6))  # new moments each time this test is run
    process.kill()  # does nothing to a process that has ended
    _, errors = process.communicate()
    assert process.returncode in (0, -signal.SIGKILL), errors
    return process.returncode != 0


def checkpoints(folder):
    """Say of each checkpoint whether it is finished, and when it was written."""
    from idiolect.core import checkpoint

    found = {}
    for path in sorted(folder.rglob("checkpoints/[!.]*.safetensors")):
        found[path] = (checkpoint.read(path)[1]["finished"], path.stat().st_mtime_ns)
    return found


def test_after_a_divergence_other_settings_start_afresh(tmp_path):
    text = small.TOML.rpartition("[[methods]]")[0]
    with pytest.raises(Diverged, match="NaN or infinity"):
        compared(tmp_path, "methods.fedavg.lr=1e38", text=text)
    _, _, rounds = compared(tmp_path, text=text)
    assert rounds == {"Local": 0, "FedAvg": 4}


SPLITS = """
[[splits]]
name = "even"

[[splits]]
name = "skewed 0.1"
partition = { name = "dirichlet", alpha = 0.1, clients = 5 }
min_size = 5
"""


def test_splits_stand_side_by_side(tmp_path):
    text = small.TOML.rpartition("[[methods]]")[0] + SPLITS
    content, results, rounds = compared(tmp_path, text=text)
    assert [one["folder"] for one in content["splits"]] == ["even", "skewed_0.1"]
    assert rounds["even: Local"] == rounds["skewed 0.1: FedAvg"] == 4
    assert results["even"]["data"]["clients"] == 6 and results["skewed 0.1"]["data"]["clients"] == 5
    whole = content["overall"]
    assert set(whole["means"]["Local"]) == {"even", "skewed 0.1"}
    assert whole["ranks"]["blocks"] == 2 and "splits" in whole["sentence"]
    assert idiolect.compare(tmp_path)["overall"] == whole
    _, _, again = compared(tmp_path, text=text)
    assert set(again.values()) == {0}
    assert parse_experiment((tmp_path / "experiment.toml").read_text()) == parse_experiment(text)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("skewed 0.1", "even"), r"splits\[1\].name: 'even' is too like 'even'"),
        (("min_size", "min_sizes"), r"splits\[1\].min_sizes: .*did you mean 'min_size'"),
        (("alpha", "alfa"), r"splits\[1\].partition.alfa: .*did you mean 'alpha'"),
        (("dirichlet", "dirichlett"), r"splits\[1\].partition: unknown partition"),
    ],
)
def test_a_wrong_split_is_one_clear_line(change, words):
    with pytest.raises(ConfigError, match=words):
        parse_experiment(small.TOML + SPLITS.replace(*change))


def test_run_does_not_pass_over_what_only_compare_does(tmp_path):
    with pytest.raises(ConfigError, match=r"has splits, .* use `idiolect compare`"):
        idiolect.run(tiny.write(tmp_path, small.TOML + SPLITS))
    with pytest.raises(ConfigError, match=r"has tune, .* use `idiolect compare`"):
        idiolect.run(tiny.write(tmp_path, small.TOML + small.TUNE))


def test_models_and_newcomers_come_from_a_comparison_too(finished, tmp_path):
    folder, *_ = finished
    assert set(idiolect.load_model(folder, "Local", 1, 3)) == {"fc.weight", "fc.bias"}
    found = idiolect.adapt(folder, "embedded", "FedAvg + FT", 1, out=tmp_path)
    assert found["seed"] == 1 and found["settings"]["tune_epochs"] == 2
