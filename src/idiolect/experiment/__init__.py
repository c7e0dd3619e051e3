"""Experiments: TOML files checked key by key, and the objects made of them."""

from idiolect.experiment.build import federations, jobs
from idiolect.experiment.execute import execute, run, written
from idiolect.experiment.resolve import load_experiment, parse_experiment
from idiolect.experiment.schema import Experiment

__all__ = [
    "Experiment",
    "execute",
    "federations",
    "jobs",
    "load_experiment",
    "parse_experiment",
    "run",
    "written",
]
