"""[data] task and class_weights: from an experiment file to the task of a federation."""

import numpy as np
import pytest

from idiolect.core.survival import Discrete
from idiolect.core.task import Classes, Number
from idiolect.errors import ConfigError
from idiolect.experiment.build import build_federations
from idiolect.experiment.load import load_experiment

ROWS = "\n".join(
    f"{n},{n % 3},{100 + n},{n + 1},{n % 2},{'no' if n % 5 else 'yes'}" for n in range(60)
)


def federation(tmp_path, data):
    table = tmp_path / "rows.csv"
    table.write_text(f"age,site,price,days,event,ill\n{ROWS}\n")
    path = tmp_path / "experiment.toml"
    path.write_text(
        f'name = "t"\nmethods = [{{name = "fedavg"}}]\n[data]\nsource = "{table}"\n'
        f'partition = "iid"\n{data}\n'
    )
    return build_federations(load_experiment(path))[0]


def test_a_number_is_fitted_on_training_rows_of_all_clients(tmp_path):
    world = federation(
        tmp_path, 'options = {label = "price"}\ntask = {name = "number", loss = "huber"}'
    )
    task, labels = world.dataset.task, world.dataset.y[np.concatenate(world.train)]
    assert isinstance(task, Number) and task.huber
    assert (task.shift, task.scale) == pytest.approx((labels.mean(), labels.std()), rel=1e-5)


def test_survival_by_intervals(tmp_path):
    options = 'options = {label = ["days", "event"]}\n'
    world = federation(
        tmp_path, options + 'task = {name = "survival", form = "discrete", cuts = [5, 20]}'
    )
    assert isinstance(world.dataset.task, Discrete) and world.dataset.task.cuts == (5.0, 20.0)
    assert len(world.dataset.classes) == 3


def test_class_weights_are_those_of_training_rows(tmp_path):
    world = federation(tmp_path, 'options = {label = "ill"}\nclass_weights = "balanced"')
    counts = np.bincount(world.dataset.y[np.concatenate(world.train)], minlength=2)
    assert isinstance(world.dataset.task, Classes)
    assert world.dataset.task.weights == pytest.approx(tuple(counts.sum() / (2 * counts)))


@pytest.mark.parametrize("given", ['task = "regression"', 'task = {name = "number", lose = 1}'])
def test_unknown_tasks_are_one_line(tmp_path, given):
    with pytest.raises(ConfigError, match="task"):
        federation(tmp_path, f'options = {{label = "price"}}\n{given}')
