"""Runs: killed, resumed, extended, poisoned; the result is the same or the refusal is clear."""

import dataclasses
import random
import signal
import time

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

import tiny
from idiolect.core import checkpoint, tree
from idiolect.engine.outcome import Silent
from idiolect.engine.rounds import Simulation
from idiolect.errors import CheckpointError, Diverged
from idiolect.experiment import run_state
from idiolect.experiment import train as training
from idiolect.experiment.build import build_jobs
from idiolect.experiment.load import parse_experiment
from idiolect.experiment.run import open_run_folder, run_jobs
from idiolect.experiment.run_state import first_difference
from idiolect.experiment.train import Interrupts, train
from idiolect.results.run_files import load_model


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("IDIOLECT_CACHE", str(tmp_path / "cache"))


def made(*overrides, only=()):
    return build_jobs(parse_experiment(tiny.TOML, overrides), only=only)


class Stopping(Silent):
    """Interrupts a run in the middle of a round: while it reports the one before."""

    def __init__(self, at):
        self.at = at

    def tick(self, tick):
        if tick.round == self.at:
            raise KeyboardInterrupt


@pytest.mark.parametrize(
    "width",
    [
        pytest.param(4, id="given width", marks=pytest.mark.faults),
        pytest.param(0, id="measured width"),
    ],
)
def test_kill_9_at_random_moments_then_resume_is_the_uninterrupted_run(tmp_path, width):
    """A run too short to be hit, as on a machine under load, is made longer until it is.

    A measured width is kept on disk, so that both runs round alike.
    """
    tiny.write(tmp_path)
    for rounds in (20, 100, 500, 2500):
        cut, whole = tmp_path / f"cut-{rounds}", tmp_path / f"whole-{rounds}"
        changes = ("--set", f"rounds={rounds}", "--set", f"backend.width={width}")
        arguments = ("run", "tiny.toml", *changes, "--resume", "--out")
        killed = sum(killed_at_random(*arguments, cut, cwd=tmp_path, out=cut) for _ in range(2))
        if killed:
            break
    assert killed
    for folder in (cut, whole):
        done = tiny.here(*arguments, folder, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    assert tiny.findings(cut) == tiny.findings(whole), killed
    tables = [pq.read_table(folder / "metrics.parquet") for folder in (cut, whole)]
    assert tables[0].equals(tables[1])
    assert not list(cut.rglob("*.part"))


def killed_at_random(*arguments, cwd, out):
    """Kill a run a random moment after its first new checkpoint; say whether it was still on."""
    before = tiny.checkpoints(out)
    process = tiny.started(*arguments, cwd=cwd)
    while process.poll() is None and tiny.checkpoints(out) == before:
        time.sleep(0.002)
    time.sleep(random.Random().uniform(0, 0.4))  # new moments each time this test is run
    process.kill()  # does nothing to a process that has ended
    _, errors = process.communicate()
    assert process.returncode in (0, -signal.SIGKILL), errors
    return process.returncode != 0


@pytest.mark.parametrize("at", [1, 4, 6])
def test_an_interrupted_method_goes_on_bit_for_bit(tmp_path, at):
    (job, *_), _ = made("backend.checkpoint_every=0", only=["FedAvg"])
    whole = train(job).outcome
    with pytest.raises(KeyboardInterrupt):
        train(job, tmp_path, watch=Stopping(at))
    again = train(job, tmp_path, resume=True).outcome
    for name in ("curves", "final"):
        left, right = getattr(whole, name), getattr(again, name)
        assert left.keys() == right.keys()
        assert all(np.array_equal(left[key], right[key]) for key in left)
    assert [dataclasses.asdict(w) for w in whole.wire] == [
        dataclasses.asdict(w) for w in again.wire
    ]
    assert whole.evaluated == again.evaluated


def test_a_finished_run_can_be_made_longer(tmp_path):
    overrides = ("evaluate.every=4",)
    (short, *_), _ = made(*overrides, only=["FedAvg"])
    (longer, *_), _ = made(*overrides, "rounds=9", only=["FedAvg"])
    train(short, tmp_path)
    extended = train(longer, tmp_path, resume=True).outcome
    whole = train(longer).outcome
    assert extended.evaluated == whole.evaluated == (4, 8, 9)
    assert all(np.array_equal(extended.final[key], whole.final[key]) for key in whole.final)
    with pytest.raises(CheckpointError, match="round 9, beyond the 6"):
        train(short, tmp_path, resume=True)


def test_resume_is_refused_when_a_setting_changed(tmp_path):
    (job, *_), _ = made(only=["FedAvg"])
    (other, *_), _ = made("training.lr=0.1", only=["FedAvg"])
    train(job, tmp_path)
    with pytest.raises(CheckpointError, match=r"settings.lr was 0.05 and is now 0.1"):
        train(other, tmp_path, resume=True)


def test_a_setting_that_is_newer_than_the_run_is_no_change_while_it_is_empty():
    before = {"settings": {"lr": 0.1}}
    assert not first_difference(before, {"settings": {"lr": 0.1, "decay_at": ()}})
    assert first_difference(before, {"settings": {"lr": 0.1, "decay_at": (3,)}})


def test_divergence_is_told_with_a_remedy(tmp_path):
    (job, *_), _ = made("training.lr=1e38", "backend.checkpoint_every=0", only=["FedAvg"])
    with pytest.raises(Diverged, match="lower lr"):
        train(job, tmp_path)


@pytest.mark.parametrize("error", [RuntimeError, torch.OutOfMemoryError, Diverged])
def test_whatever_ends_a_run_the_last_whole_round_is_kept(tmp_path, monkeypatch, error):
    (job, *_), _ = made("backend.checkpoint_every=5", only=["FedAvg"])
    advance = Simulation.advance

    def failing(self):
        if self.round == 3:
            raise error("on the way")
        return advance(self)

    monkeypatch.setattr(Simulation, "advance", failing)
    with pytest.raises(error, match="on the way"):
        train(job, tmp_path)
    _, meta = checkpoint.read(tmp_path / "checkpoints" / "FedAvg.safetensors")
    assert meta["round"] == 3 and not meta["finished"]
    monkeypatch.setattr(Simulation, "advance", advance)
    resumed, whole = train(job, tmp_path, resume=True).outcome, train(job).outcome
    assert all(np.array_equal(resumed.final[key], whole.final[key]) for key in whole.final)


def test_a_model_that_breaks_after_the_rounds_is_told_and_right_about_nothing(tmp_path):
    """A broken model's logits are NaN: no class is chosen, and its loss is no number."""
    ((job,), about) = made("methods.fedavg-ft.tune_lr=1e38", only=["FedAvg + FT"])
    content = run_jobs([job], tmp_path, about)
    found = content["methods"]["FedAvg + FT"]
    assert any("personal model" in text and "no finite" in text for text in found["notices"])
    assert not any("global model" in text for text in found["notices"])
    for seed in found["seeds"]:
        assert seed["models"]["personal"]["loss"] is None
        assert seed["models"]["personal"]["mean"] == 0
        assert seed["models"]["global"]["loss"] > 0 and seed["models"]["global"]["mean"] > 0


def test_the_result_holds_the_validation_curves_of_every_seed(tmp_path):
    prepared, about = made("evaluate.every=3", only=["FedAvg"])
    content = run_jobs(prepared, tmp_path, about)
    held = content["methods"]["FedAvg"]["curves"]
    outcome = train(prepared[0]).outcome
    assert held["rounds"] == [3, 6] and set(held["val"]) == {"global", "personal"}
    curve = outcome.curves["val/global/accuracy"]
    assert np.allclose(held["val"]["global"]["accuracy"], curve.mean(axis=2))
    assert content["data"]["same_clients"] is False
    fixed, told = made("data.seed=0")
    assert told["data"]["same_clients"] is True and fixed


def test_test_rows_reach_only_the_final_metric(tmp_path):
    """Poison every test label: training, personal state and validation must not notice."""
    made_jobs, _ = made("evaluate.personal=always")
    for job in made_jobs:
        poisoned = dataclasses.replace(
            job, federations=tuple(_poisoned(f) for f in job.federations)
        )
        clean, foul = (
            train(one, tmp_path / name).outcome
            for one, name in ((job, "clean"), (poisoned, "foul"))
        )
        for key, curve in clean.curves.items():
            assert np.array_equal(curve, foul.curves[key])
        states = [
            checkpoint.read(next((tmp_path / name / "checkpoints").glob("*")))[0]
            for name in ("clean", "foul")
        ]
        for name, leaf in states[0].items():
            if not name.startswith("final."):
                assert torch.equal(leaf, states[1][name]), name
        key = "personal/accuracy"
        assert clean.final[key].mean() > foul.final[key].mean() + 0.2
        for name in ("clean", "foul"):
            next((tmp_path / name / "checkpoints").glob("*")).unlink()


def _poisoned(federation):
    labels = federation.dataset.y.copy()
    rows = np.concatenate(federation.test)
    labels[rows] = (labels[rows] + 1) % len(federation.dataset.classes)
    return dataclasses.replace(
        federation, dataset=dataclasses.replace(federation.dataset, y=labels)
    )


def test_globals_and_models_are_kept_and_can_be_loaded(tmp_path):
    (job, *_), about = made("evaluate.keep_globals=true", only=["FedAvg"])
    content = run_jobs([job], tmp_path, about)
    assert content["complete"]
    kept = sorted((tmp_path / "globals" / "FedAvg").iterdir())
    assert [path.name for path in kept] == [f"round-{n:04d}.safetensors" for n in range(1, 7)]
    simulation = job.simulation()
    last = checkpoint.fitted(tuple(simulation.states), checkpoint.read(kept[-1])[0], kept[-1])
    model = load_model(tmp_path, "FedAvg", 1, "client 3")
    for name, leaf in tree.named(last[1]).items():
        assert torch.equal(model[name], leaf)
    assert torch.equal(load_model(tmp_path, "FedAvg", 1, 3)["fc.weight"], model["fc.weight"])


def test_a_test_curve_changes_nothing_but_the_metrics(tmp_path):
    (plain, *_), _ = made(only=["FedAvg"])
    (watched, *_), _ = made("evaluate.test_curve=true", only=["FedAvg"])
    left, right = train(plain).outcome, train(watched).outcome
    assert all(np.array_equal(left.final[key], right.final[key]) for key in left.final)
    last = right.curves["test_curve/global/accuracy"][-1]
    assert np.array_equal(last, right.final["global/accuracy"])


@pytest.mark.parametrize("metric", ["accuracy", "balanced_accuracy"])
def test_rows_scored_together_have_the_scores_of_rows_scored_apart(monkeypatch, metric):
    """Four rounds, scored after two and four, with clients who come as newcomers; tuned once each.

    Apart that is validation and test rows twice, and the end: five times.
    """
    asked = ("evaluate.test_curve=true", "evaluate.personal=always", "evaluate.every=2")
    more = (f"evaluate.metric={metric}", "cohort=2", "rounds=4")
    (job, *_), _ = made(*asked, *more, only=["FedAvg + FT"])
    scored, evaluate = [], training._evaluate

    def counted(*given, **options):
        scored.append(given[1])
        return evaluate(*given, **options)

    monkeypatch.setattr(training, "_evaluate", counted)
    together = train(job).outcome
    assert len(scored) == 2
    assert together.evaluated == (2, 4)

    def apart(job, simulation, final):
        how = {"choice": job.choice}
        val, test = (counted(simulation, rows, None, **how) for rows in (None, job.test_data))
        return {**training._scores(val, "val/"), **training._scores(test, "test_curve/")}

    monkeypatch.setattr(training, "_curves", apart)
    before = train(job).outcome
    assert len(scored) == 7
    assert before.curves.keys() == together.curves.keys()
    for key, own in before.curves.items():
        assert np.array_equal(own, together.curves[key], equal_nan=True), key
    for key, own in before.final.items():
        assert np.array_equal(own, together.final[key], equal_nan=True), key


def test_with_a_threshold_curves_are_taken_apart(monkeypatch):
    """The one that test rows have is no other's."""
    asked = ("evaluate.test_curve=true", "evaluate.threshold=0.4", "rounds=1")
    (job, *_), _ = made(*asked, only=["FedAvg"])
    scored, evaluate = [], training._evaluate
    monkeypatch.setattr(
        training, "_evaluate", lambda *given, **how: scored.append(1) or evaluate(*given, **how)
    )
    train(job)
    assert len(scored) == 3


def test_a_train_curve_is_of_the_rows_that_a_client_trains_on(tmp_path):
    (plain, *_), _ = made(only=["Local"])
    (watched, *_), about = made("evaluate.train_curve=true", only=["Local"])
    run_jobs([watched], tmp_path, about)
    curves = train(watched).outcome.curves
    last = curves["train_curve/personal/accuracy"][-1]
    for place, (seed, held) in enumerate(zip(watched.seeds, watched.federations, strict=True)):
        for client, rows in enumerate(held.train):
            model = load_model(tmp_path, "Local", seed, client)
            x = torch.from_numpy(held.dataset.decoded(rows)).flatten(1)
            said = (x @ model["fc.weight"].T + model["fc.bias"]).argmax(1).numpy()
            assert last[place][client] == pytest.approx((said == held.dataset.y[rows]).mean())
    same = train(plain).outcome.final
    assert all(
        np.array_equal(same[key], value) for key, value in train(watched).outcome.final.items()
    )


def test_clients_that_never_took_part_are_told(tmp_path):
    """One client a round for two rounds: four of six or more; Local trains all without a server."""
    prepared, about = made("cohort=1", "rounds=2", only=["Local", "FedAvg"])
    found = run_jobs(prepared, tmp_path, about)["methods"]
    for label, seeds in (("Local", 0), ("FedAvg", 2)):
        told = [text for text in found[label]["notices"] if "took part in no round" in text]
        assert len(told) == seeds


def test_one_method_again_leaves_the_others_in_the_result(tmp_path):
    tiny.write(tmp_path)
    first = tiny.here("run", "tiny.toml", "--out", "run", cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    before = tiny.findings(tmp_path / "run")
    again = tiny.here(
        "run", "tiny.toml", "--out", "run", "--resume", "--method", "FedAvg", cwd=tmp_path
    )
    assert again.returncode == 0, again.stderr
    assert tiny.findings(tmp_path / "run") == before


def test_a_refused_resume_leaves_the_folder_as_it_was(tmp_path):
    """Fewer rounds than were done cannot be; the experiment written there must not say so."""
    tiny.write(tmp_path)
    assert tiny.here("run", "tiny.toml", "--out", "run", cwd=tmp_path).returncode == 0
    written = (tmp_path / "run" / "experiment.toml").read_bytes()
    refused = tiny.here(
        "run", "tiny.toml", "--out", "run", "--resume", "--set", "rounds=1", cwd=tmp_path
    )
    assert refused.returncode == 7 and "beyond the 1 asked for" in refused.stderr
    assert (tmp_path / "run" / "experiment.toml").read_bytes() == written


def test_two_processes_cannot_run_in_one_folder(tmp_path):
    with open_run_folder(tmp_path / "run", resume=False):
        tiny.write(tmp_path)
        second = tiny.idiolect("run", "tiny.toml", "--out", "run", cwd=tmp_path)
    assert second.returncode == 1
    assert second.stderr.startswith("error: another process is running in run;")
    assert len(second.stderr.splitlines()) == 1


def test_other_features_under_the_same_labels_are_another_experiment():
    (job, *_), _ = made()
    data = job.federations[0].dataset
    moved = dataclasses.replace(data, x=data.x[::-1])
    other = dataclasses.replace(
        job, federations=tuple(dataclasses.replace(f, dataset=moved) for f in job.federations)
    )
    assert job.identity != other.identity


def test_other_labels_of_the_same_rows_are_another_experiment():
    (job, *_), _ = made()
    data = job.federations[0].dataset
    moved = dataclasses.replace(data, y=(data.y + 1) % len(data.classes))
    other = dataclasses.replace(
        job, federations=tuple(dataclasses.replace(f, dataset=moved) for f in job.federations)
    )
    assert job.identity != other.identity


def test_personal_state_is_on_disk_before_the_checkpoint_that_points_to_it(tmp_path, monkeypatch):
    (job, *_), _ = made()
    done = []
    flush, save = Simulation.flush, run_state.save
    monkeypatch.setattr(Simulation, "flush", lambda self: (done.append("flush"), flush(self))[1])
    monkeypatch.setattr(
        run_state, "save", lambda *own, **named: (done.append("save"), save(*own, **named))[1]
    )
    train(job, tmp_path)
    assert done and done == ["flush", "save"] * (len(done) // 2)


def test_models_and_personal_state_are_for_their_owners_eyes_alone(tmp_path):
    """Whatever the umask: they tell of the data they were trained on."""
    jobs, about = made()
    run_jobs(jobs[:1], tmp_path, about)
    secret = [p for p in tmp_path.rglob("*") if p.suffix in (".safetensors", ".rows")]
    assert {p.relative_to(tmp_path).parts[0] for p in secret} >= {"checkpoints", "models"}
    assert {p.name: oct(p.stat().st_mode & 0o777) for p in secret} == {
        p.name: "0o600" for p in secret
    }


def test_an_interrupt_waits_for_the_end_of_a_round(monkeypatch):
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), Interrupts():
        signal.raise_signal(signal.SIGINT)
        done = True  # not interrupted here
    assert done and signal.getsignal(signal.SIGINT) is before
    with pytest.raises(KeyboardInterrupt), Interrupts():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        pytest.fail("the second is heard at once")
    with pytest.raises(ZeroDivisionError), Interrupts():  # what failed is told
        signal.raise_signal(signal.SIGINT)
        raise ZeroDivisionError
    monkeypatch.setattr(training, "_PATIENCE", 0.05)
    with pytest.raises(KeyboardInterrupt), Interrupts():
        signal.raise_signal(signal.SIGINT)
        time.sleep(30)
        pytest.fail("a long round is interrupted")
    with Interrupts(able=False):
        assert signal.getsignal(signal.SIGINT) is before
