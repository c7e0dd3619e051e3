"""Every experiment file in the repository loads, and a small variant of each kind really runs."""

import os
import re
import shlex
from pathlib import Path

import pytest

import idiolect
from idiolect.experiment.build import build_jobs, refuse_unknown_labels
from idiolect.experiment.load import load_experiment

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "experiments").rglob("*.toml"))
QUEUES = sorted((ROOT / "experiments").rglob("[gc]pu*.txt"))
SHARED = Path(os.environ.get("IDIOLECT_DATA", ROOT.parent / "shared" / "data"))

real = [
    pytest.mark.shared,
    pytest.mark.skipif(
        not SHARED.is_dir(), reason=f"experiments on real data are left out: no {SHARED}"
    ),
]
small = ["seeds=[0]", "rounds=1", "evaluate.every=1", "backend.width=10"]


def name(path: Path) -> str:
    return str(path.relative_to(ROOT / "experiments"))


def test_there_are_experiments() -> None:
    assert {"demo.toml", "persfl/mnist-ds1.toml", "persfl/cifar10-ds3.toml"} <= set(
        map(name, FILES)
    )


@pytest.mark.parametrize("path", FILES, ids=name)
def test_a_file_loads(path: Path) -> None:
    assert load_experiment(path).methods


# What a run before it chose is put into a line when it is its turn.
_CHOICE = re.compile(r"\$\(python3 scripts/chosen\.py .*?\)")
_DEFAULT = re.compile(r"\$\{\w+:-(.*?)\}")  # a variable of the shell that may be set


@pytest.mark.parametrize("path", QUEUES, ids=name)
def test_a_queue_names_runs_that_load(path: Path) -> None:
    """A line is a folder and arguments of `idiolect run`; a bad one would cost a long run."""
    written = [line for line in path.read_text().splitlines() if line[:1] not in ("#", "")]
    lines = [shlex.split(_DEFAULT.sub(r"\1", _CHOICE.sub("", line))) for line in written]
    assert len({folder for folder, *_ in lines}) == len(lines)
    for _, file, *options in lines:
        given: dict[str, list[str]] = {"--method": [], "--set": []}
        for flag, value in zip(options[::2], options[1::2], strict=True):
            given[flag].append(value)
        experiment = load_experiment(ROOT / file, given["--set"])
        refuse_unknown_labels(experiment, given["--method"])


def test_all_methods_of_a_table_run_on_the_embedded_data(tmp_path: Path) -> None:
    """The file of Table 3, DS-1, at one round: ten columns, every client scored in each."""
    path = ROOT / "experiments" / "persfl" / "mnist-ds1.toml"
    labels = [table.label for table in load_experiment(path).methods]
    overrides = [
        *small,
        "data.source=embedded",
        "data.partition=persfl-ds1",
        "model.hidden=8",  # a tenth of the time
        *(f"methods.{label}.rounds=1" for label in labels if "," not in label),
        *(f"methods.{label}.distil_epochs=1" for label in ("PersFL", "PersFL-GD")),
        "methods.FedAvg + FT.tune_epochs=1",
    ]
    result = idiolect.run(path, overrides, out=tmp_path)
    assert list(result["methods"]) == labels
    for method in result["methods"].values():
        clients = method["seeds"][0]["clients"]
        assert [client["test"] for client in clients] == [120] * 10
        assert all(0 <= client["personal"]["accuracy"] <= 1 for client in clients)
    chosen = result["methods"]["PersFL"]["seeds"][0]["clients"][0]["facts"]
    assert chosen["share"] in (0, 0.25, 0.5, 0.75, 1)
    assert chosen["temperature"] in (1, 5, 25)
    assert chosen["teacher_round"] in (0, 1)


class TestOnRealData:
    """The other files need the datasets; one step of FedAvg shows that they fit together."""

    pytestmark = real

    @pytest.mark.parametrize("file", ["cifar10-ds3", "mnist-ds2", "mnist-ds3"])
    def test_a_step_of_fedavg(self, file: str, tmp_path: Path) -> None:
        path = ROOT / "experiments" / "persfl" / f"{file}.toml"
        overrides = [*small, "training.steps=1", "methods.FedAvg.rounds=1"]
        overrides += ["backend.kind=sequential"]  # on a CPU the quicker one for convolutions
        experiment = load_experiment(path, overrides)
        made, _ = build_jobs(experiment, SHARED, ["FedAvg"])
        assert made[0].federations[0].clients == 10
        simulation = made[0].simulation()
        assert simulation.advance().traffic[0].clients == 10
        verdict = simulation.evaluate([made[0].federations[0].test_data])[0]
        assert verdict.scores["global"]["accuracy"].shape == (10,)
