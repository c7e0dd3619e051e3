"""Loggers, written with the real libraries and read back with them."""

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import idiolect
import tiny
from idiolect.analysis.loggers import LOGGERS, Logger, library, logger
from idiolect.cli import app
from idiolect.errors import ConfigError, MissingExtra

LABELS = ["Local", "FedAvg", "FedAvg + FT"]


def expected(content, label):
    """Redo the figures from result.json: means over seeds of means over clients."""
    method = content["methods"][label]
    seeds = [seed["models"]["personal"]["mean"] for seed in method["seeds"]]
    return float(np.mean(seeds)), float(np.std(seeds, ddof=1))


def test_tensorboard_keeps_every_figure(tmp_path):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    content = idiolect.run(tiny.write(tmp_path), out=tmp_path / "out", log=["tensorboard"])
    for label, folder in zip(LABELS, ("Local", "FedAvg", "FedAvg___FT"), strict=True):
        read = events.EventAccumulator(str(tmp_path / "out" / "tensorboard" / folder))
        read.Reload()
        mean, spread = expected(content, label)
        (last,) = read.Scalars("test/personal/accuracy")
        assert last.step == 6 and last.value == pytest.approx(mean, abs=1e-6)
        (wide,) = read.Scalars("test/personal/accuracy/std_seeds")
        assert wide.value == pytest.approx(spread, abs=1e-6)
        assert read.Scalars("traffic/bytes")
    curve = content["methods"]["FedAvg"]["curves"]
    read = events.EventAccumulator(str(tmp_path / "out" / "tensorboard" / "FedAvg"))
    read.Reload()
    told = [(point.step, point.value) for point in read.Scalars("val/global/accuracy")]
    rows = curve["val"]["global"]["accuracy"]
    assert [step for step, _ in told] == curve["rounds"] == [1, 2, 3, 4, 5, 6]
    assert [v for _, v in told] == pytest.approx([np.mean(row) for row in rows], abs=1e-6)
    assert [p.step for p in read.Scalars("speed/examples_per_second")] == [1, 2, 3, 4, 5, 6]
    assert b"momentum | 0.9" in read.Tensors("settings/text_summary")[0].tensor_proto.string_val[0]


# MLflow's own store calls what SQLAlchemy calls outdated.
@pytest.mark.filterwarnings("ignore")
def test_mlflow_keeps_every_figure(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    tracking = pytest.importorskip("mlflow.tracking")
    pytest.importorskip("sqlalchemy")
    toml = tiny.write(tmp_path, tiny.TOML + "\n[logging]\nmlflow = true\n")
    content = idiolect.run(toml, out=tmp_path / "out")
    client = tracking.MlflowClient(f"sqlite:///{tmp_path}/out/mlflow.db")
    home = client.get_experiment_by_name("tiny").experiment_id
    runs = {run.info.run_name: run for run in client.search_runs([home])}
    assert set(runs) == set(LABELS)
    for label, run in runs.items():
        assert run.info.status == "FINISHED"
        assert run.data.metrics["test/personal/accuracy"] == pytest.approx(
            expected(content, label)[0]
        )
        worst = min(
            np.mean([seed["clients"][n]["personal"]["accuracy"] for seed in method["seeds"]])
            for method in [content["methods"][label]]
            for n in range(6)
        )
        assert run.data.metrics["test/personal/worst_client"] == pytest.approx(worst)
    assert runs["FedAvg"].data.params["momentum"] == "0.9"
    history = client.get_metric_history(runs["FedAvg"].info.run_id, "val/global/accuracy")
    assert sorted(point.step for point in history) == [1, 2, 3, 4, 5, 6]


class Failing:
    """A writer whose server goes away after the first figures."""

    def __init__(self):
        self.kept = []

    def begin(self, label):
        pass

    def settings(self, values):
        pass

    def scalars(self, values, round):
        if self.kept:
            raise ConnectionError("the server is gone")
        self.kept.append(values)

    def end(self):
        raise AssertionError("not asked again")


def test_a_logger_that_fails_does_not_cost_the_run():
    held = idiolect.federation("embedded", "iid", clients=3, per_client=20)
    writer = Failing()
    watch = Logger("somewhere", writer)
    result = idiolect.fit("fedavg", held, model="mlr", rounds=3, watch=watch)
    alone = idiolect.fit("fedavg", held, model="mlr", rounds=3)
    assert (result.accuracy == alone.accuracy).all()
    assert watch.trouble == "logging to somewhere stopped: the server is gone"
    assert len(writer.kept) == 1


def test_a_misspelt_or_missing_logger_is_told_before_anything_is_trained(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny.write(tmp_path)
    done = CliRunner().invoke(app, ["run", "tiny.toml", "--log", "tensorbord"])
    assert done.exit_code == 2 and "did you mean 'tensorboard'" in done.stderr
    assert not Path("runs").exists()
    done = CliRunner().invoke(app, ["run", "tiny.toml", "--set", "logging.mlflw=true"])
    assert done.exit_code == 2 and "did you mean 'mlflow'" in done.stderr
    with pytest.raises(MissingExtra, match=r"pip install 'idiolect\[wandb\]'"):
        library("no_such_library.at_all", "wandb")
    with pytest.raises(ConfigError, match="unknown logger"):
        logger("nothing", "", tmp_path, "x")
    assert list(LOGGERS) == ["tensorboard", "mlflow", "wandb"]


def test_the_table_of_the_file_is_written_out(tmp_path):
    toml = tiny.write(tmp_path, tiny.TOML + '\n[logging]\ntensorboard = "boards"\n')
    loaded = idiolect.load_experiment(toml)
    assert loaded.logging.tensorboard == "boards" and loaded.logging.wandb is False
    assert json.loads(loaded.model_dump_json())["logging"]["mlflow"] is False
